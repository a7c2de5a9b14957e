"""The servers that the judge installs and starts itself, and how."""

import json
import os
import sys
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from pathlib import Path

from conformance.rollout.digits import MODEL
from conformance.server import instance
from conformance.servers.declared import outside_declared
from conformance.servers.install import interpreter_of

PLUGGED = Path(__file__).parent / "plugged"
MAX_MODEL_LEN, NUM_SEQUENCES = 512, 64
IN_ONE_PROCESS = "VLLM_ENABLE_V1_MULTIPROCESSING"
ENVIRONMENT = {name: value for name, value in instance.ENVIRONMENT.items() if name != IN_ONE_PROCESS} | {
    "VLLM_LOGGING_LEVEL": "WARNING",
    "VLLM_CPU_KVCACHE_SPACE": "1",
    "VLLM_CPU_OMP_THREADS_BIND": "nobind",
}
IMAGES = {"image": 1, "video": 0}


@dataclass(frozen=True, slots=True, kw_only=True)
class Known:
    """A server of a version, as it is judged."""

    name: str
    version: str
    dialect: str
    command: Callable[[Path, int], list[str]]
    """(its interpreter, port) -> command line."""
    packages: tuple[str, ...] = ()
    """Pinned; none for what stands in this environment."""
    environment: Mapping[str, str] = field(default_factory=dict)
    plugins: str = ""
    """Of ``plugged``, joined by commas, for what cannot take weights on a CPU by itself."""
    title: str = ""

    @property
    def server(self) -> str:
        return f"{self.name}-{self.version}"

    def words(self, port: int) -> list[str]:
        return self.command(interpreter_of(self.name, self.version, self.packages), port)

    def outside(self) -> list[str]:
        """Packages outside the ranges that it declares, where it has an environment of its own."""
        python = interpreter_of(self.name, self.version, self.packages)
        return outside_declared(python, self.name) if self.packages else []

    def variables(self) -> dict[str, str]:
        """Ours, its own, and the plugins that are to be loaded."""
        paths = [str(PLUGGED), *filter(None, [os.environ.get("PYTHONPATH")])]
        plugged = {"VLLM_PLUGINS": self.plugins, "PYTHONPATH": os.pathsep.join(paths)}
        return ENVIRONMENT | (plugged if self.plugins else {}) | dict(self.environment)


HERE = {"model": str(MODEL), "host": "127.0.0.1"}


def _swift(python: Path, port: int) -> list[str]:
    options = HERE | {
        "model_type": "qwen3_vl",
        "template": "qwen3_vl",
        "torch_dtype": "float32",
        "port": str(port),
        "vllm_max_model_len": str(MAX_MODEL_LEN),
        "vllm_max_num_seqs": str(NUM_SEQUENCES),
        "vllm_enforce_eager": "true",
        "vllm_limit_mm_per_prompt": json.dumps(IMAGES),
    }
    return [str(python), str(PLUGGED / "swift_on_a_cpu.py"), "rollout", *_flags(options)]


def _trl(python: Path, port: int) -> list[str]:
    options = {"dtype": "float32", "port": str(port), "max_model_len": str(MAX_MODEL_LEN), "enforce_eager": "true"}
    return [str(python.with_name("trl")), "vllm-serve", *_flags(HERE | options)]


def _vllm(python: Path, port: int) -> list[str]:
    options = HERE | {
        "served-model-name": "policy",
        "dtype": "float32",
        "port": str(port),
        "max-model-len": str(MAX_MODEL_LEN),
        "max-num-seqs": str(NUM_SEQUENCES),
        "limit-mm-per-prompt": json.dumps(IMAGES),
        "weight-transfer-config": json.dumps({"backend": "gloo"}),
    }
    return [str(python), "-m", "vllm.entrypoints.openai.api_server", "--enforce-eager", *_flags(options)]


def _own(_: Path, port: int) -> list[str]:
    settings = instance.settings_for(port=port, drain_s=0.5, image_roots=())
    return [sys.executable, "-m", "rollmatch.cli.server_process", settings.to_json()]


def _flags(options: Mapping[str, str]) -> list[str]:
    return [word for name, value in options.items() for word in (f"--{name}", value)]


KNOWN = (
    *(
        Known(
            name=f"rollmatch-{dialect}",
            version="0.1.0",
            dialect=dialect,
            command=_own,
            environment={IN_ONE_PROCESS: "0"},
            title=f"rollmatch serve, {dialect} dialect",
        )
        for dialect in ("native", "swift", "trl")
    ),
    Known(
        name="ms-swift",
        version="4.6.0",
        dialect="swift",
        packages=("ms-swift==4.6.0", "qwen_vl_utils==0.0.14"),
        command=_swift,
        plugins="gloo_for_nccl",
        title="swift rollout (ms-swift)",
    ),
    Known(
        name="trl",
        version="1.10.0",
        dialect="trl",
        packages=("trl==1.10.0",),
        command=_trl,
        plugins="gloo_for_nccl,fork_engines",
        title="trl vllm-serve (the newest TRL that has a server of its own)",
    ),
    Known(
        name="vllm",
        version="0.32.0",
        dialect="vllm",
        command=_vllm,
        plugins="gloo_transfer,fork_engines",
        environment={"VLLM_SERVER_DEV_MODE": "1"},
        title="vllm serve with its routes for training",
    ),
)
BY_NAME = {known.name: known for known in KNOWN}
