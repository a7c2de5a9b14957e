"""The run directory: one run at a time, and the checkpoint that a resumed run continues from. Imports no torch."""

import fcntl
import os
import shutil
import socket
import sys
import tempfile
import time
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from pathlib import Path
from typing import IO, cast

import yaml

from rollmatch.errors import ErrorList, LaunchError, RollmatchError
from rollmatch.journal import read_journal
from rollmatch.model.source import checkpoints_in
from rollmatch.training.checkpoint import find_damage

JOURNAL = "journal.jsonl"
RESOLVED = "resolved.yaml"
LOCK = "run.lock"
OURS = ("evaluations", JOURNAL, "journal-rank*.jsonl", RESOLVED, "run.html", "events.out.tfevents.*", "tensorboard")
"""What a run writes beside its numbered checkpoints; ``--overwrite`` removes only these."""
KEY = "training.output_dir"
STARTED = frozenset({"evaluated", "step", "saved"})
"""Journal events after which a directory holds a run that somebody may want to keep."""


@dataclass(frozen=True, slots=True, kw_only=True)
class RunDirectory:
    """A run directory that this process has locked."""

    path: Path
    checkpoint: Path | None
    """The newest whole checkpoint of a resumed run; None starts at the beginning."""


@contextmanager
def open_run_directory(path: Path, *, resume: bool, overwrite: bool) -> Iterator[RunDirectory]:
    """Lock the directory as long as the run lasts. A start that failed leaves nothing that it wrote.

    Errors: ``run-directory-taken``, ``output-dir-not-writable``, ``checkpoint-damaged``.
    """
    made = _make(path)
    lock, is_checked = None, False
    try:
        lock = _lock(path)
        if overwrite and not resume:
            _empty(path)
        else:
            _check_content(path, resume=resume)
        is_checked = True
        yield RunDirectory(path=path, checkpoint=last_checkpoint(path) if resume else None)
    except BaseException:
        if is_checked and not holds_run(path):
            _empty(path)
        raise
    finally:
        if lock is not None:
            (path / LOCK).unlink(missing_ok=True)
            lock.close()
        for directory in made:
            with suppress(OSError):  # not empty
                directory.rmdir()


def last_checkpoint(directory: Path) -> Path | None:
    """The newest whole checkpoint, or None where there is no checkpoint. Damaged ones are reported and passed over.

    Errors: ``checkpoint-damaged`` where none is whole.
    """
    damaged: list[str] = []
    for checkpoint in checkpoints_in(directory):
        damage = find_damage(checkpoint)
        if not damage:
            for line in damaged:
                print(f"rollmatch: passed over {line}", file=sys.stderr)
            return checkpoint
        damaged.append(f"{checkpoint.name}: {damage}")
    if damaged:
        problem = f"no checkpoint is whole: {'; '.join(damaged)}"
        remedy = "Restore one of them from a copy, or start over with --overwrite."
        raise LaunchError(problem, code="checkpoint-damaged", key=str(directory), remedy=remedy)
    return None


def holds_run(directory: Path) -> bool:
    """Whether a run got as far as its first evaluation, or saved a checkpoint."""
    journal = directory / JOURNAL
    events = read_journal(journal) if journal.is_file() else []
    return bool(checkpoints_in(directory)) or any(event.get("event") in STARTED for event in events)


def probe_output_dir(path: Path) -> LaunchError | None:
    """The problem with writing there, found without creating the directory; None if there is none."""
    try:
        above = next(place for place in (path, *path.absolute().parents) if _exists(place))
        with tempfile.TemporaryFile(dir=above) as probe:
            probe.write(bytes(4096))
    except (OSError, ValueError) as error:
        return _not_writable(path, error)
    return None


_OF_THE_OPTIMIZER = "the optimizer's state in the checkpoint keeps the old value"
_OF_THE_WINDOW = "what is under way between two steps was made with the old value"
FIXED = {
    "tuner": "the checkpoint holds the parameters that these keys choose",
    "custom.trainer_variant": "the checkpoint belongs to that objective",
    "training.seed": "samples would come in another order",
    "training.packing": _OF_THE_WINDOW,
    **dict.fromkeys(
        (f"custom.extra.grpo.{name}" for name in ("num_generations", "steps_per_generation", "num_iterations")),
        _OF_THE_WINDOW,
    ),
    **dict.fromkeys(
        (f"training.{name}" for name in ("optim", "learning_rate", "weight_decay")),
        _OF_THE_OPTIMIZER,
    ),
    **dict.fromkeys((f"training.adam_{name}" for name in ("beta1", "beta2", "epsilon")), _OF_THE_OPTIMIZER),
}
"""Key or section that a resumed run keeps -> why. All other changes are shown, and take effect."""


def check_unchanged(checkpoint: Path, after: str) -> None:
    """Compare the configuration beside a checkpoint with the one that continues, ``after``, as YAML.

    Errors: ``ErrorList`` of ``resume-changed``, one for each key of ``FIXED``, and for a model of another name.
    """
    described = checkpoint.with_name(RESOLVED)
    if not described.is_file():
        return
    old, new = (_settings(yaml.safe_load(text)) for text in (described.read_text(encoding="utf-8"), after))
    errors: list[RollmatchError] = []
    for key in old.keys() & new.keys():
        names = (key, key.partition(".")[0])
        reason = next((FIXED[name] for name in names if name in FIXED), None)
        if key == "model.model" and Path(str(old[key])).name != Path(str(new[key])).name:
            reason = "the checkpoint belongs to that model"
        if reason is not None and old[key] != new[key]:
            problem = f"was {old[key]} when the run began and is {new[key]}: {reason}"
            remedy = f"Continue with {old[key]}, or start a new run with model.model: {checkpoint}."
            errors.append(LaunchError(problem, code="resume-changed", key=key, remedy=remedy))
    if errors:
        raise ErrorList(sorted(errors, key=lambda error: error.key))


def changed_keys(before: str, after: str) -> list[str]:
    """What differs between two resolved configurations, a line each.

    >>> changed_keys("training: {seed: 1, max_steps: 60}", "training: {seed: 1, max_steps: 80}")
    ['training.max_steps: 60 -> 80']
    """
    old, new = (dict(_leaves(yaml.safe_load(text))) for text in (before, after))
    return [f"{key}: {old.get(key)} -> {new.get(key)}" for key in {**old, **new} if old.get(key) != new.get(key)]


def _settings(tree: dict[str, object]) -> dict[str, object]:
    """Values by their keys; those of ``tuner`` may be mappings, whose keys are names of modules.

    >>> _settings({"training": {"seed": 1}, "tuner": {"rank_pattern": {"q_proj": 4}}})
    {'training.seed': 1, 'tuner.rank_pattern': {'q_proj': 4}}
    """
    tuner = cast(dict[str, object], tree.get("tuner", {}))
    others = {name: branch for name, branch in tree.items() if name != "tuner"}
    return dict(_leaves(others)) | {f"tuner.{name}": value for name, value in tuner.items()}


def _leaves(tree: object, path: str = "") -> Iterator[tuple[str, object]]:
    if isinstance(tree, dict) and tree:
        for name, branch in tree.items():
            yield from _leaves(branch, f"{path}.{name}" if path else str(name))
    else:
        yield path, tree


def _exists(path: Path) -> bool:
    try:
        path.lstat()
    except FileNotFoundError:
        return False
    return True


def _make(path: Path) -> list[Path]:
    """Create a directory; returns those that were missing, deepest first. Errors: ``output-dir-not-writable``."""
    try:
        missing = [place for place in (path, *path.parents) if not _exists(place)]
        path.mkdir(parents=True, exist_ok=True)
    except (OSError, ValueError) as error:
        raise _not_writable(path, error) from error
    return missing


def _not_writable(path: Path, error: OSError | ValueError) -> LaunchError:
    reason = (error.strerror if isinstance(error, OSError) else None) or str(error)
    remedy = "Name a directory that can be created and written, on a disk with free space."
    return LaunchError(f"{path} cannot be written: {reason}", code="output-dir-not-writable", key=KEY, remedy=remedy)


def _lock(path: Path) -> IO[str]:
    """An exclusive lock, held until the file is closed or the process ends. Errors: ``run-directory-taken``."""
    try:
        file = (path / LOCK).open("a+", encoding="utf-8")
    except OSError as error:
        raise _not_writable(path, error) from error
    try:
        fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError:
        file.seek(0)
        owner = file.read().strip() or "another process"
        file.close()
        problem, remedy = f"{owner} is running in {path}", "Wait for it, stop it, or name another directory."
        raise LaunchError(problem, code="run-directory-taken", key=KEY, remedy=remedy) from None
    except OSError as error:  # Lustre without the mount option flock, some NFS
        reason = error.strerror or error
        print(f"rollmatch: {path} cannot be locked ({reason}): start no second run there", file=sys.stderr)
    if not os.path.exists(file.name) or os.fstat(file.fileno()).st_ino != os.stat(file.name).st_ino:
        file.close()  # its owner has ended and removed it in between
        return _lock(path)
    file.truncate(0)
    file.write(f"process {os.getpid()} on {socket.gethostname()}, since {time.strftime('%Y-%m-%d %H:%M:%S')}\n")
    file.flush()
    return file


def _check_content(path: Path, *, resume: bool) -> None:
    """Remove what a start left that was killed before its first evaluation.

    Errors: ``run-directory-taken`` for a run that is not resumed, and for files of others that have names of ours.
    """
    if holds_run(path):
        if not resume:
            remedy = "Add --resume to continue it, --overwrite to delete it and start over, or name another directory."
            raise LaunchError(f"{path} already holds a run", code="run-directory-taken", key=KEY, remedy=remedy)
        return
    theirs = sorted(one.name for one in _named_as_ours(path))
    if theirs and not (path / JOURNAL).exists():  # which a run writes first
        problem = f"{path} holds {', '.join(theirs)} and no {JOURNAL}: something else than a run wrote that"
        raise LaunchError(
            problem, code="run-directory-taken", key=KEY, remedy="Name another directory; --overwrite would delete it."
        )
    if not resume:
        _empty(path)


def _named_as_ours(directory: Path) -> Iterator[Path]:
    return (path for pattern in OURS for path in directory.glob(pattern))


def _empty(directory: Path) -> None:
    for path in [*checkpoints_in(directory), *_named_as_ours(directory)]:
        if path.is_dir() and not path.is_symlink():
            shutil.rmtree(path)
        else:
            path.unlink()
