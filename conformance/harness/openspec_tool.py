"""The real OpenSpec, installed once into a cache folder and called offline from then on.

``python -m conformance.harness.openspec_tool`` installs it (npm, Node 20.19 or newer, about ten seconds). Version and
dependencies are pinned by ``openspec/package.json`` and its lock file. ``ROLLMATCH_CACHE`` names another cache folder.
"""

import contextlib
import json
import os
import shutil
import subprocess
import sys
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from rollmatch.errors import LaunchError

PINS = Path(__file__).parent / "openspec"
VERSION: str = json.loads((PINS / "package.json").read_text(encoding="utf-8"))["dependencies"]["@fission-ai/openspec"]
BRIDGE, CALLS = PINS / "merge_bridge.mjs", PINS / "calls.mjs"
CALL_TIMEOUT_S = 60
INSTALL_TIMEOUT_S = 300


class OpenspecMissing(LaunchError):
    """The pinned tool is installed in the cache folder."""

    code = "openspec-missing"


class OpenspecInstallFailed(LaunchError):
    """npm can install the pinned tool."""

    code = "openspec-install-failed"


def cache_folder() -> Path:
    """Where the tool lives; another version has another folder."""
    cache = os.environ.get("ROLLMATCH_CACHE") or Path(os.environ.get("XDG_CACHE_HOME") or "~/.cache") / "rollmatch"
    return Path(cache).expanduser() / f"openspec-{VERSION}"


def package_folder() -> Path:
    """The installed package. Errors: ``OpenspecMissing``."""
    folder = cache_folder() / "node_modules" / "@fission-ai" / "openspec"
    description = folder / "package.json"
    installed = json.loads(description.read_text(encoding="utf-8"))["version"] if description.is_file() else "nothing"
    if installed != VERSION:
        problem = f"OpenSpec {VERSION} is not installed, there is {installed}"
        remedy = "Run python -m conformance.harness.openspec_tool once, with npm and a package registry in reach."
        raise OpenspecMissing(problem, key=str(cache_folder()), remedy=remedy)
    return folder


def install() -> Path:
    """Install the pinned tool unless it is there. Errors: ``OpenspecInstallFailed``."""
    with contextlib.suppress(OpenspecMissing):
        return package_folder()
    folder = cache_folder()
    folder.mkdir(parents=True, exist_ok=True)
    for name in ("package.json", "package-lock.json"):
        shutil.copyfile(PINS / name, folder / name)
    command = ["npm", "ci", "--ignore-scripts", "--no-audit", "--no-fund"]
    try:
        subprocess.run(command, cwd=folder, check=True, timeout=INSTALL_TIMEOUT_S, capture_output=True, text=True)
    except (OSError, subprocess.SubprocessError) as error:
        problem = f"{' '.join(command)} failed: {getattr(error, 'stderr', None) or error}"
        remedy = "Install Node 20.19 or newer with npm, and see that a package registry is in reach."
        raise OpenspecInstallFailed(problem, key=str(folder), remedy=remedy) from error
    return package_folder()


def call(arguments: Sequence[str], *, cwd: Path) -> subprocess.CompletedProcess[str]:
    """One call of the tool, without telemetry and with a home folder of its own. Errors: ``OpenspecMissing``."""
    return _run(["node", str(package_folder() / "bin" / "openspec.js"), *arguments], cwd)


def call_all(calls: Sequence[Sequence[str]], *, cwd: Path) -> list[tuple[int, str]]:
    """Exit code and output of calls one after the other, by one Node process; stops where one ends the process.

    Errors: ``OpenspecMissing``.
    """
    done = _run(["node", str(CALLS), str(package_folder()), json.dumps(calls)], cwd)
    told = [json.loads(line) for line in done.stdout.splitlines()]
    return [(each["code"], each["stdout"]) for each in told]


def _run(command: Sequence[str], cwd: Path) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        command,
        cwd=cwd,
        env=_environment(cwd),
        timeout=CALL_TIMEOUT_S,
        capture_output=True,
        encoding="utf-8",
        check=False,
    )


def _environment(home: Path) -> Mapping[str, str]:
    quiet = {"OPENSPEC_TELEMETRY": "0", "DO_NOT_TRACK": "1", "NO_COLOR": "1", "HOME": str(home)}
    return {**os.environ, **quiet, "XDG_CONFIG_HOME": str(home / ".config")}


class MergeBridge:
    """One Node process that merges as the tool does, a few milliseconds a case; a context manager."""

    def __init__(self, *, capability: str, change: str) -> None:
        command = ["node", str(BRIDGE), str(package_folder()), capability, change]
        self._process = subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, encoding="utf-8")

    def merge(self, base: str | None, delta: str) -> Mapping[str, Any]:
        """``{"text": ...}``, or ``{"refused": ...}`` with the tool's own words."""
        assert self._process.stdin is not None
        assert self._process.stdout is not None
        self._process.stdin.write(json.dumps({"base": base, "delta": delta}) + "\n")
        self._process.stdin.flush()
        answer: Mapping[str, Any] = json.loads(self._process.stdout.readline())
        return answer

    def __enter__(self) -> "MergeBridge":
        return self

    def __exit__(self, *_: object) -> None:
        self._process.communicate(timeout=CALL_TIMEOUT_S)


if __name__ == "__main__":
    sys.stdout.write(f"{install()}\n")
