"""The run's directory: may it be used, and where does a resumed run go on. Needs no torch."""

import json
import re
import shutil
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import yaml

from rollmatch.errors import LaunchError

JOURNAL = "journal.jsonl"
RESOLVED = "resolved.yaml"
OURS = ("evaluations", JOURNAL, "journal-rank*.jsonl", RESOLVED, "run.html", "events.out.tfevents.*", "tensorboard")
"""What a run writes beside its numbered checkpoints; ``--overwrite`` removes only these."""


class RunDirectoryTaken(LaunchError):
    """A directory that holds a run is not written over by accident."""

    code = "run-directory-taken"


def open_run_directory(directory: Path, *, resume: bool, overwrite: bool) -> Path | None:
    """Make the directory ready; returns the checkpoint to go on from, or None to start at the beginning.

    Errors: ``RunDirectoryTaken``.
    """
    if overwrite and not resume:
        _empty(directory)
    elif (directory / JOURNAL).exists() and not resume:
        raise RunDirectoryTaken(
            f"{directory} already holds a run",
            key="training.output_dir",
            remedy="Add --resume to go on with it, --overwrite to start anew, or name another directory.",
        )
    directory.mkdir(parents=True, exist_ok=True)
    return last_checkpoint(directory) if resume else None


def last_checkpoint(directory: Path) -> Path | None:
    """The newest checkpoint that was written to its end, or None."""
    whole = [path for path in _checkpoints(directory) if _is_whole(path)]
    return max(whole, key=lambda path: int(path.name.rpartition("-")[2]), default=None)


def changed_keys(before: str, after: str) -> list[str]:
    """What differs between two resolved configurations, a line each.

    >>> changed_keys("training: {seed: 1, max_steps: 60}", "training: {seed: 1, max_steps: 80}")
    ['training.max_steps: 60 -> 80']
    """
    old, new = (dict(_leaves(yaml.safe_load(text))) for text in (before, after))
    return [f"{key}: {old.get(key)} -> {new.get(key)}" for key in {**old, **new} if old.get(key) != new.get(key)]


def _leaves(tree: Any, path: str = "") -> Iterator[tuple[str, Any]]:
    if isinstance(tree, dict) and tree:
        for name, branch in tree.items():
            yield from _leaves(branch, f"{path}.{name}" if path else str(name))
    else:
        yield path, tree


def _checkpoints(directory: Path) -> list[Path]:
    """Those a run writes, ``checkpoint-<step>``; a copy named otherwise is somebody else's."""
    return [path for path in directory.glob("checkpoint-*") if re.fullmatch(r"checkpoint-[0-9]+", path.name)]


def _is_whole(checkpoint: Path) -> bool:
    """transformers writes ``trainer_state.json`` last: if it parses, the rest is there."""
    try:
        json.loads((checkpoint / "trainer_state.json").read_text(encoding="utf-8"))
    except (OSError, ValueError):
        return False
    return True


def _empty(directory: Path) -> None:
    for path in [*_checkpoints(directory), *(path for pattern in OURS for path in directory.glob(pattern))]:
        if path.is_dir() and not path.is_symlink():
            shutil.rmtree(path)
        else:
            path.unlink()
