"""The pinned OpenSpec tool, installed once into a cache folder and called offline from then on.

``python -m conformance.tools.openspec_tool`` installs it (npm, Node 20.19 or newer, about ten seconds). Version and
dependencies are pinned by ``openspec/package.json`` and its lock file. ``ROLLMATCH_CACHE`` names another cache folder.
"""

import json
import os
import shutil
import subprocess
import sys
from collections.abc import Sequence
from pathlib import Path

PINS = Path(__file__).parent / "openspec"
VERSION: str = json.loads((PINS / "package.json").read_text(encoding="utf-8"))["dependencies"]["@fission-ai/openspec"]
CALL_TIMEOUT_S, INSTALL_TIMEOUT_S = 60, 300


def cache_folder() -> Path:
    """Where the tool is installed; another version has another folder."""
    cache = os.environ.get("ROLLMATCH_CACHE") or Path(os.environ.get("XDG_CACHE_HOME") or "~/.cache") / "rollmatch"
    return Path(cache).expanduser() / f"openspec-{VERSION}"


def installed() -> Path | None:
    """The installed package; None where there is none, or another version."""
    folder = cache_folder() / "node_modules" / "@fission-ai" / "openspec"
    description = folder / "package.json"
    is_pinned = description.is_file() and json.loads(description.read_text(encoding="utf-8"))["version"] == VERSION
    return folder if is_pinned else None


def install() -> None:
    """Install the pinned tool unless it is there. Errors: ``subprocess.CalledProcessError`` of npm."""
    if installed() is None:
        shutil.copytree(PINS, cache_folder(), dirs_exist_ok=True)
        command = ["npm", "ci", "--ignore-scripts", "--no-audit", "--no-fund"]
        subprocess.run(command, cwd=cache_folder(), check=True, timeout=INSTALL_TIMEOUT_S)


def call(arguments: Sequence[str], *, cwd: Path) -> subprocess.CompletedProcess[str]:
    """One call of the tool, without telemetry and with ``cwd`` as its home."""
    quiet = {"OPENSPEC_TELEMETRY": "0", "DO_NOT_TRACK": "1", "NO_COLOR": "1"}
    return subprocess.run(
        ["node", f"{installed()}/bin/openspec.js", *arguments],
        cwd=cwd,
        env={**os.environ, **quiet, "HOME": str(cwd), "XDG_CONFIG_HOME": str(cwd / ".config")},
        timeout=CALL_TIMEOUT_S,
        capture_output=True,
        encoding="utf-8",
        check=False,
    )


if __name__ == "__main__":
    install()
    sys.stdout.write(f"{installed()}\n")
