"""Failures of the disk that a run writes to, by a name. Imports no torch."""

import errno
import os

from rollmatch.errors import LaunchError

STORAGE_FAULTS = (errno.ENOSPC, errno.EDQUOT, errno.EROFS)
TORCH_WRITES = ("PytorchStreamWriter", "unexpected pos", "iostream error")
"""Parts of torch's messages about a file that it could not write."""


def storage_error(error: BaseException) -> LaunchError | None:
    """A full or read-only disk as an error with a remedy; torch and safetensors quote the system, or not even that."""
    text = str(error)
    reasons = [os.strerror(n) for n in STORAGE_FAULTS if getattr(error, "errno", None) == n or os.strerror(n) in text]
    if isinstance(error, RuntimeError) and any(part in text for part in TORCH_WRITES):
        reasons.append("torch could not write a file to its end, as on a full disk")
    if not reasons:
        return None
    where = str(getattr(error, "filename", None) or "the output directory")
    remedy = "Free space or name another disk; a run continues from its last checkpoint with --resume."
    return LaunchError(f"cannot be written: {reasons[0]}", code="storage-failed", key=where, remedy=remedy)
