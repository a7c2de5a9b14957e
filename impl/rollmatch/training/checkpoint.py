"""Manifest of a checkpoint: size and SHA-256 of every file, written last.

A checkpoint without a manifest was cut off while it was being written; one whose files differ from it is damaged.
"""

import hashlib
import json
import os
import shutil
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Protocol

from rollmatch.errors import LaunchError, RollmatchError, first_line
from rollmatch.model.source import MANIFEST, checkpoints_in, step_of

LEARNER = "learner.json"
"""File of a checkpoint: ``SavedLearner``."""
STATES = {"optimizer": "optim", "learning rate schedule": "scheduler", "random number generator": "rng_state"}
"""What a resumed run needs beside the weights -> a part of the file names that transformers, FSDP or DeepSpeed use."""


@dataclass(frozen=True, slots=True, kw_only=True)
class SavedLearner:
    """What has to stay as it is for a run to continue with the same samples in the same order."""

    learner_world_size: int
    samples_per_step: int
    """Of all ranks."""
    strategy: str

    def write(self, checkpoint: Path) -> None:
        """Write it into a checkpoint."""
        (checkpoint / LEARNER).write_text(json.dumps(asdict(self)), encoding="utf-8")

    def check(self, checkpoint: Path) -> None:
        """Compare this learner with the one that wrote a checkpoint. Errors: ``resume-other-learner``.

        Other ranks may continue where samples per step stay, nothing waits on single ranks, and the strategy can split
        its state for another number of ranks (fsdp2) or does not split it (ddp).
        """
        path = checkpoint / LEARNER
        if not path.is_file():  # written by an older version
            return
        with reading(checkpoint):
            saved = SavedLearner(**json.loads(path.read_text(encoding="utf-8")))
        if saved.strategy != self.strategy:
            raise _other(checkpoint, "training.strategy", saved.strategy, self.strategy)
        if saved.samples_per_step != self.samples_per_step:
            key = "training.per_device_train_batch_size"
            raise _other(checkpoint, key, saved.samples_per_step, self.samples_per_step, unit=" samples per step")
        waits = any(file for kept in ("packer", "groups") for file in checkpoint.glob(f"{kept}-rank*.json"))
        if saved.learner_world_size != self.learner_world_size and (waits or self.strategy not in ("ddp", "fsdp2")):
            sizes = saved.learner_world_size, self.learner_world_size
            raise _other(checkpoint, "--gpus", *sizes, unit=" learner ranks")


def _other(checkpoint: Path, key: str, saved: object, now: object, *, unit: str = "") -> LaunchError:
    problem, remedy = f"{checkpoint.name} was saved with {saved}{unit}, this run has {now}", f"Continue with {saved}."
    return LaunchError(problem, code="resume-other-learner", key=key, remedy=remedy)


@contextmanager
def reading(checkpoint: Path, *, key: str = "--resume") -> Iterator[None]:
    """Name whatever a library raises inside, where it reads a file of a checkpoint. Errors: ``checkpoint-unreadable``.

    Digests say that nothing has changed since the manifest was written, not by whom it was.
    """
    try:
        yield
    except (RollmatchError, MemoryError):
        raise
    except Exception as error:  # each format has errors of its own, and a stranger's file raises any
        if type(error).__name__ == "OutOfMemoryError":  # torch's, of a GPU
            raise
        problem = (
            f"a file of {checkpoint.name} is not what this program writes: {type(error).__name__}: {first_line(error)}"
        )
        remedy = "Name a checkpoint that this program wrote."
        raise LaunchError(problem, code="checkpoint-unreadable", key=key, remedy=remedy) from error


class SaveArguments(Protocol):
    """``transformers.TrainingArguments``, as far as saving goes."""

    save_total_limit: int | None


class Writers(Protocol):
    """The learner's ranks: each writes its own files."""

    @property
    def is_primary(self) -> bool:
        """Whether this rank writes the manifest."""

    def barrier(self) -> None:
        """Wait for all ranks."""


@contextmanager
def sealing(checkpoint: Path, arguments: SaveArguments, ranks: Writers) -> Iterator[None]:
    """Let transformers save inside; then write the manifest, and only then remove old checkpoints."""
    limit, arguments.save_total_limit = arguments.save_total_limit, None
    try:
        yield
    finally:
        arguments.save_total_limit = limit
    ranks.barrier()
    if ranks.is_primary:
        write_manifest(checkpoint)
        remove_old_checkpoints(checkpoint.parent, newest=checkpoint, limit=limit)


def write_manifest(checkpoint: Path) -> None:
    """Write ``manifest.json`` beside the files of a complete checkpoint. Reads every file once."""
    paths = [path for path in sorted(checkpoint.rglob("*")) if path.is_file() and path.name != MANIFEST]
    with ThreadPoolExecutor() as pool:  # hashing releases the interpreter lock
        digests = list(pool.map(_digest, paths))
    files = {
        path.relative_to(checkpoint).as_posix(): {"bytes": path.stat().st_size, "sha256": digest}
        for path, digest in zip(paths, digests, strict=True)
    }
    unfinished = checkpoint / f"{MANIFEST}.tmp"
    with unfinished.open("w", encoding="utf-8") as file:
        json.dump({"files": files}, file, indent=1)
        file.flush()
        os.fsync(file.fileno())
    unfinished.replace(checkpoint / MANIFEST)


def find_damage(checkpoint: Path) -> str:
    """What is wrong with a checkpoint, in words; the empty string if it can be resumed from."""
    manifest = checkpoint / MANIFEST
    if manifest.exists() and not manifest.is_file():
        return f"{MANIFEST} is no file"
    try:
        files = json.loads(manifest.read_text(encoding="utf-8"))["files"]
        expected = {str(name): (int(file["bytes"]), str(file["sha256"])) for name, file in files.items()}
    except FileNotFoundError:
        return f"it has no {MANIFEST}: writing it was cut off"
    except (OSError, ValueError, KeyError, TypeError, AttributeError, RecursionError):
        return f"{MANIFEST} is not readable"
    for state, part in STATES.items():
        if not any(part in name for name in expected):
            return f"it was saved without the {state} state"
    for name, (num_bytes, _) in expected.items():
        path = checkpoint / name
        if not path.is_file():
            return f"{name} is missing"
        if path.stat().st_size != num_bytes:
            return f"{name} has {path.stat().st_size} bytes instead of {num_bytes}"
    with ThreadPoolExecutor() as pool:
        digests = pool.map(_digest, [checkpoint / name for name in expected])
    changed = [name for name, digest in zip(expected, digests, strict=True) if digest != expected[name][1]]
    return f"the content of {changed[0]} has changed since it was saved" if changed else ""


def ranks_without_rng_state(checkpoint: Path, *, learner_world_size: int) -> list[int]:
    """Ranks for which transformers finds no random state: the run was saved by fewer ranks, or by another launcher."""
    if learner_world_size == 1:
        return [] if (checkpoint / "rng_state.pth").is_file() else [0]
    return [rank for rank in range(learner_world_size) if not (checkpoint / f"rng_state_{rank}.pth").is_file()]


def remove_old_checkpoints(directory: Path, *, newest: Path, limit: int | None) -> None:
    """Keep ``limit`` checkpoints up to ``newest``; later ones, left by an undone part of the run, do not count."""
    upto = [path for path in checkpoints_in(directory) if step_of(path) <= step_of(newest)]
    for path in upto[limit:] if limit is not None else ():
        shutil.rmtree(path)


def _digest(path: Path) -> str:
    with path.open("rb") as file:
        return hashlib.file_digest(file, "sha256").hexdigest()
