"""Other people's servers in environments of their own, over the packages of this one: the same torch and vLLM for all.

An environment is made once, below ``ROLLMATCH_SERVERS`` (or the user's cache), and then needs no network.
"""

import os
import subprocess
import sys
import sysconfig
import venv
from collections.abc import Sequence
from importlib.metadata import PackageNotFoundError
from importlib.metadata import version as installed_version
from pathlib import Path

from rollmatch.launch.doctor import BROKEN_EXTRAS

VARIABLE = "ROLLMATCH_SERVERS"
_READY, _BELOW = "rollmatch-ready", "packages_below.pth"


class InstallFailed(RuntimeError):
    """pip finds and installs the pinned packages."""


def interpreter_of(name: str, version: str, packages: Sequence[str]) -> Path:
    """The Python of this server's environment, made where it is not there yet. Errors: ``InstallFailed``."""
    if not packages:
        return Path(sys.executable)
    folder = folder_of_servers() / f"{name}-{version}"
    python = folder / "bin" / "python"
    ready, wanted = folder / _READY, "\n".join(packages) + "\n"
    if not ready.exists() or ready.read_text() != wanted:
        venv.create(folder, with_pip=True, clear=True)
        _put_below(folder)
        _install(python, packages)
        ready.write_text(wanted)
    return python


def pins_of(package: str, version: str, beside: Sequence[str] = ()) -> tuple[str, ...]:
    """What an environment of its own needs; nothing for what stands in this one, or is ours (``package`` is "")."""
    try:
        stands_here = not package or installed_version(package) == version
    except PackageNotFoundError:
        stands_here = False
    return () if stands_here else (f"{package}=={version}", *beside)


def folder_of_servers() -> Path:
    """Where environments are kept."""
    wanted = os.environ.get(VARIABLE)
    return (
        Path(wanted) if wanted else Path(os.environ.get("XDG_CACHE_HOME", Path.home() / ".cache")) / "rollmatch/servers"
    )


def _put_below(folder: Path) -> None:
    """A line of a ``.pth`` file that imports is run at start-up: our own packages come after the environment's."""
    places = {"base": str(folder), "platbase": str(folder)}
    target = Path(sysconfig.get_path("purelib", vars=places)) / _BELOW
    target.write_text(f"import site; site.addsitedir({sysconfig.get_path('purelib')!r})\n")


def _install(python: Path, packages: Sequence[str]) -> None:
    """Without what vLLM's CPU wheels bring and what does not load beside them."""
    _pip(python, "install", *packages)
    _pip(python, "uninstall", "--yes", *BROKEN_EXTRAS)


def _pip(python: Path, verb: str, *words: str) -> None:
    command = [str(python), "-m", "pip", verb, "--quiet", "--disable-pip-version-check", *words]
    ended = subprocess.run(command, capture_output=True, text=True, check=False)
    if ended.returncode:
        raise InstallFailed(f"{' '.join(command)}:\n{ended.stderr[-2000:]}")
