"""What a measurement was made on."""

import os
import platform
import subprocess
from importlib.metadata import PackageNotFoundError, version

import torch


def describe():
    """Hardware and versions."""
    gpus = [torch.cuda.get_device_name(index) for index in range(torch.cuda.device_count())]
    return {
        "gpus": gpus,
        "cores": os.cpu_count(),
        "python": platform.python_version(),
        "torch": torch.__version__,
        "cuda": torch.version.cuda,
        "nccl": ".".join(map(str, torch.cuda.nccl.version())) if gpus else None,
        "driver": _driver(),
        **{name: _version(name) for name in ("vllm", "transformers", "triton", "numpy")},
    }


def _version(name):
    try:
        return version(name)
    except PackageNotFoundError:
        return None


def _driver():
    command = ["nvidia-smi", "--query-gpu=driver_version", "--format=csv,noheader"]
    try:
        return subprocess.run(command, capture_output=True, text=True, timeout=20).stdout.split("\n")[0]
    except OSError:
        return None
