"""Large files that the launcher has found to be right: the ranks that it starts need not look at all lines again."""

import hashlib
import json
import os
from collections.abc import Sequence
from pathlib import Path

from rollmatch.data.lazy import LazySamples
from rollmatch.records import Sample

CHECKED_FILES = "ROLLMATCH_CHECKED_FILES"
"""Environment variable of the ranks: JSON, fingerprint -> number of objects."""


def fingerprint_of(path: str | Path, rules: object) -> str:
    """Hexadecimal digest of where a file is, when and how long it was last written, and by which rules it is read."""
    about = os.stat(path)
    what = (os.path.abspath(path), about.st_ino, about.st_size, about.st_mtime_ns, rules)
    return hashlib.sha256(repr(what).encode()).hexdigest()


def num_objects_checked(fingerprint: str) -> int | None:
    """Objects in a file without a bad line; None unless the launcher has said so."""
    found: int | None = json.loads(os.environ.get(CHECKED_FILES, "{}")).get(fingerprint)
    return found


def as_variables(splits: Sequence[Sequence[Sample]]) -> dict[str, str]:
    """The environment that passes on what has been checked; empty where no split is lazy."""
    lazy = [split for split in splits if isinstance(split, LazySamples) and split.fingerprint]
    return {CHECKED_FILES: json.dumps({split.fingerprint: split.num_objects for split in lazy})} if lazy else {}
