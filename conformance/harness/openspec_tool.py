"""The pinned OpenSpec tool, installed once into a cache folder and called offline from then on.

``python -m conformance.harness.openspec_tool`` installs it (npm, Node 20.19 or newer, about ten seconds). Version and
dependencies are pinned by ``openspec/package.json`` and its lock file. ``ROLLMATCH_CACHE`` names another cache folder.
"""

import contextlib
import json
import os
import shutil
import subprocess
import sys
from collections.abc import Sequence
from pathlib import Path

from rollmatch.errors import LaunchError

PINS = Path(__file__).parent / "openspec"
VERSION: str = json.loads((PINS / "package.json").read_text(encoding="utf-8"))["dependencies"]["@fission-ai/openspec"]
CALL_TIMEOUT_S = 60
INSTALL_TIMEOUT_S = 300


class OpenspecMissing(LaunchError):
    """The pinned tool is not installed in the cache folder."""

    code = "openspec-missing"


def cache_folder() -> Path:
    """Where the tool is installed; another version has another folder."""
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
    """Install the pinned tool unless it is there. Errors: ``subprocess.CalledProcessError`` of npm."""
    with contextlib.suppress(OpenspecMissing):
        return package_folder()
    folder = cache_folder()
    folder.mkdir(parents=True, exist_ok=True)
    for name in ("package.json", "package-lock.json"):
        shutil.copyfile(PINS / name, folder / name)
    command = ["npm", "ci", "--ignore-scripts", "--no-audit", "--no-fund"]
    subprocess.run(command, cwd=folder, check=True, timeout=INSTALL_TIMEOUT_S)
    return package_folder()


def call(arguments: Sequence[str], *, cwd: Path) -> subprocess.CompletedProcess[str]:
    """One call of the tool, without telemetry and with ``cwd`` as its home. Errors: ``OpenspecMissing``."""
    quiet = {"OPENSPEC_TELEMETRY": "0", "DO_NOT_TRACK": "1", "NO_COLOR": "1"}
    return subprocess.run(
        ["node", str(package_folder() / "bin" / "openspec.js"), *arguments],
        cwd=cwd,
        env={**os.environ, **quiet, "HOME": str(cwd), "XDG_CONFIG_HOME": str(cwd / ".config")},
        timeout=CALL_TIMEOUT_S,
        capture_output=True,
        encoding="utf-8",
        check=False,
    )


if __name__ == "__main__":
    sys.stdout.write(f"{install()}\n")
