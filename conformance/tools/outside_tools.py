"""Tests that need a browser, network namespaces, openspec, DeepSpeed, ...: left out, and named, where these lack.

So are ``wide`` tests, unless ``-m`` names them. With ``ROLLMATCH_STRICT=1``, as in CI, they run, and so do those that
need a tool: those not in ``OPTIONAL`` fail where it is missing. ``ROLLMATCH_WIDE=1/3`` runs a part of the wide ones:
those of the files whose digest modulo 3 is 1.
ms-swift is large: what it says about itself is recorded, and ``swift`` tests compare with the installed one.
"""

import hashlib
import os
import shutil
import socket
import sys
import time
from collections.abc import Callable
from functools import partial
from importlib.metadata import PackageNotFoundError, version
from typing import Any

import pytest
import torch
from packaging.specifiers import SpecifierSet

from conformance.doubles.hosts import can_make_hosts
from conformance.doubles.memory_limit import NEEDS, can_limit_memory
from conformance.judge.servers.install import folder_of_servers
from conformance.tools.openspec_tool import installed

PYTHONS = {
    "deepspeed": ("deepspeed", "", "pip install deepspeed (DS_BUILD_OPS=0 without a GPU)"),
    "openenv": ("openenv-core", "", "pip install openenv-core==0.3.0"),
    "swift": ("ms-swift", "", "pip install ms-swift==4.6.0 qwen_vl_utils"),
    "verifiers": ("verifiers", "==0.1.*", "pip install verifiers==0.1.9 datasets"),
    "verifiers_rl": ("liger-kernel", "", "pip install verifiers==0.1.9 deepspeed wandb liger-kernel (DS_BUILD_OPS=0)"),
    "verifiers_v1": ("verifiers", ">0.3", "pip install verifiers==0.4.0"),
}
"""Tool -> package, versions, and how to get it."""


def python_of(tool: str) -> str | None:
    """A Python that has a package: the one that a variable names (``SWIFT_PYTHON`` for ``swift``), or this one."""
    package, versions, _ = PYTHONS[tool]
    try:
        own = sys.executable if version(package) in SpecifierSet(versions) else None
    except PackageNotFoundError:
        own = None
    return os.environ.get(f"{tool.upper()}_PYTHON") or own


def trl_command() -> str | None:
    """The ``trl`` of a TRL that has a server of its own: ``TRL_COMMAND``, or the one that the judge installed."""
    command = folder_of_servers() / "trl-1.10.0/bin/trl"
    return os.environ.get("TRL_COMMAND") or (str(command) if command.exists() else None)


def trl_python() -> str | None:
    """The Python of a TRL whose trainers speak to stock servers: ``TRL_PYTHON``, or the one of the judge."""
    python = folder_of_servers() / "trl-1.16.0/bin/python"
    return os.environ.get("TRL_PYTHON") or (str(python) if python.exists() else None)


def multiplies_fp8() -> bool:
    """Whether torch has a kernel for products of 8-bit floats on this CPU; elsewhere oneDNN's reference takes 0.2 s."""
    left, right, one = (torch.ones(shape).to(torch.float8_e4m3fn) for shape in ((64, 256), (256, 256), ()))
    scales = {"scale_a": one.float(), "scale_b": one.float()}

    def seconds() -> float:
        began = time.perf_counter()
        torch._scaled_mm(left, right.t(), **scales, out_dtype=torch.float32)
        return time.perf_counter() - began

    return min(seconds() for _ in range(3)) < 0.05


def has_ipv6() -> bool:
    """Whether this machine has a loopback address of IPv6."""
    try:
        with socket.socket(socket.AF_INET6) as probe:
            probe.bind(("::1", 0))
    except OSError:
        return False
    return True


TOOLS: dict[str, tuple[Callable[[], object], str]] = {
    "browser": (lambda: shutil.which(os.environ.get("CHROMIUM", "chromium")), "install Chromium or set CHROMIUM"),
    "fp8": (multiplies_fp8, "run them on a CPU that multiplies 8-bit floats: an Emerald Rapids does not"),
    "ipv6": (has_ipv6, "switch IPv6 on for the loopback interface"),
    "netns": (can_make_hosts, "run them on Linux as root, with ip (iproute2) and /dev/net/tun"),
    "memcg": (can_limit_memory, f"run them with {NEEDS}"),
    "openspec": (
        lambda: installed() and shutil.which("node"),
        "run python -m conformance.tools.openspec_tool (needs Node and npm)",
    ),
    "trl": (
        trl_command,
        "run python -m conformance.judge.servers.judge trl, or set TRL_COMMAND to the trl of TRL 1.10",
    ),
    "trl_new": (
        trl_python,
        "run python -m conformance.judge.trainers.known trl==1.16.0, or set TRL_PYTHON to a Python with TRL 1.16",
    ),
    **{
        name: (partial(python_of, name), f"{remedy}, or set {name.upper()}_PYTHON to a Python that has it")
        for name, (_, _, remedy) in PYTHONS.items()
    },
}
OPTIONAL = ("fp8", "memcg", "trl", "trl_new", *PYTHONS)
"""Tools that CI goes without."""
WIDE, PART = "wide", "ROLLMATCH_WIDE"
LEFT_OUT = pytest.StashKey[dict[str, int]]()


@pytest.hookimpl(trylast=True)
def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    """Deselect what cannot run here, and ``wide`` tests that nobody asked for; what ``-m`` left out is not counted."""
    left_out = config.stash.setdefault(LEFT_OUT, {})
    strict = os.environ.get("ROLLMATCH_STRICT") == "1"
    wanted = OPTIONAL if strict else tuple(TOOLS)
    marked = {mark.name for item in items for mark in item.iter_markers()}
    missing = [name for name in wanted if name in marked and not TOOLS[name][0]()]
    if not strict and WIDE not in config.option.markexpr:
        missing.append(WIDE)
    gone = {item: name for item in items for name in missing if item.get_closest_marker(name)}
    gone |= {item: WIDE for item in items if item.get_closest_marker(WIDE) and not _is_of_part(item)}
    for name in gone.values():
        left_out[name] = left_out.get(name, 0) + 1
    config.hook.pytest_deselected(items=list(gone))
    items[:] = [item for item in items if item not in gone]


def _is_of_part(item: pytest.Item) -> bool:
    """Files stay whole: their tests share what takes long."""
    part, _, num_parts = os.environ.get(PART, "0/1").partition("/")
    name = item.nodeid.partition("::")[0]
    return int(hashlib.sha1(name.encode()).hexdigest(), 16) % int(num_parts) == int(part)


def pytest_sessionfinish(session: pytest.Session) -> None:
    """With xdist, workers collect, and the process that started them has the terminal."""
    if hasattr(session.config, "workeroutput"):
        session.config.workeroutput["left_out"] = session.config.stash.get(LEFT_OUT, {})


@pytest.hookimpl(optionalhook=True)
def pytest_testnodedown(node: Any) -> None:
    """All workers leave the same out; one that crashed has no output."""
    left_out = getattr(node, "workeroutput", {}).get("left_out", {})
    node.config.stash.setdefault(LEFT_OUT, {}).update(left_out)


def pytest_terminal_summary(terminalreporter: pytest.TerminalReporter, config: pytest.Config) -> None:
    """Say what was left out, and what would let it run."""
    for name, count in config.stash.get(LEFT_OUT, {}).items():
        remedy = f"-m wide runs them, ROLLMATCH_STRICT=1 without {PART} runs all" if name == WIDE else TOOLS[name][1]
        terminalreporter.write_line(f"NOT RUN: {count} {name} tests; {remedy}", yellow=True)
