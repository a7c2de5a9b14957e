"""The GPUs a command may use, as given on its command line. Needs no torch."""

import glob
import re
from collections.abc import Mapping, Sequence

from rollmatch.errors import LaunchError


class GpuListInvalid(LaunchError):
    """``--gpus`` is a list of different GPUs, by their numbers or by the names the driver gives them."""

    code = "gpu-list-invalid"


def parse_gpus(told: str) -> tuple[str, ...]:
    """The list behind ``--gpus``. Errors: ``GpuListInvalid``.

    >>> parse_gpus("0,1, 2")
    ('0', '1', '2')
    """
    gpus = tuple(part.strip() for part in told.split(","))
    odd = [gpu for gpu in gpus if not re.fullmatch(r"\d+|(GPU|MIG)-[\w-]+", gpu)]
    if odd or len(set(gpus)) < len(gpus):
        problem = f"{odd[0]!r} is no GPU" if odd else f"{told!r} names a GPU twice"
        raise GpuListInvalid(problem, key="--gpus", remedy="Write numbers with commas between them, such as 0,1,2.")
    return gpus


def has_gpu() -> bool:
    """Whether this machine has one; asks the driver's devices, so that no library has to load."""
    return bool(glob.glob("/dev/nvidia[0-9]*"))


def visible(gpus: Sequence[str]) -> Mapping[str, str]:
    """The variable that shows a process these GPUs only; without effect on a machine that has none."""
    return {"CUDA_VISIBLE_DEVICES": ",".join(gpus)}
