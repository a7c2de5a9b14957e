"""The tests of a server's doors with the oldest and the newest versions of the web packages that are allowed.

    python -m conformance.tools.doors [lowest] [highest]

Packages are installed into ``build/doors/``, before those of the environment; which ones is printed.
"""

import os
import re
import subprocess
import sys
import tomllib
from importlib.metadata import PathDistribution, distributions
from pathlib import Path

from packaging.requirements import Requirement

from conformance.doubles.digits import ROOT

PACKAGES = ("fastapi", "starlette", "uvicorn", "pydantic")
DOORS = (
    "access", "limits", "connections", "openapi", "payloads", "reading", "server_requests", "openai_bodies", "images",
    "wrong_fields", "chunks", "in_place", "tool_calls", "fuzz", "field_effects", "openai_field_effects",
    "announced_fields",
)  # fmt: skip
FOLDERS = ("unit/server", "scenarios/rollout_server", "scenarios/server_dialects")
TESTS = [
    str(path)
    for name in DOORS
    for folder in FOLDERS
    if (ROOT / (path := Path("conformance", folder, f"test_{name}.py"))).exists()
]


def lowest():
    """Requirements: what ``pyproject.toml`` names; starlette is FastAPI's."""
    wanted = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]["dependencies"]
    bounds = (re.match(r"([a-z]+)>=([0-9.]+)", each) for each in wanted)
    return [f"{found[1]}=={found[2]}" for found in bounds if found and found[1] in PACKAGES]


def install(folder, *requirements):
    command = [sys.executable, "-m", "pip", "install", "-q", "--upgrade", "--target", str(folder), *requirements]
    subprocess.run(command, check=True, stderr=subprocess.DEVNULL)


def pin_lowest_starlette(folder):
    """Of those that the installed FastAPI allows."""
    (fastapi,) = distributions(path=[str(folder)], name="fastapi")
    needed = next(each for each in map(Requirement, fastapi.requires) if each.name == "starlette")
    bound = next(each.version for each in needed.specifier if each.operator == ">=")
    install(folder, "--no-deps", f"starlette=={bound}")


def run(end, show=print):
    """Exit code of pytest with the versions of one end."""
    folder = ROOT / "build" / "doors" / end
    install(folder, *(lowest() if end == "lowest" else PACKAGES))
    if end == "lowest":
        pin_lowest_starlette(folder)
    found = {each.name: each.version for each in map(PathDistribution, Path(folder).glob("*.dist-info"))}
    show(f"{end}: {', '.join(f'{name} {found[name]}' for name in PACKAGES)}", flush=True)
    path = os.pathsep.join((str(folder), str(ROOT / "impl"), str(ROOT)))
    command = [sys.executable, "-m", "pytest", "-q", "-p", "no:cacheprovider", "-m", "not engine", *TESTS]
    return subprocess.run(command, cwd=ROOT, env=os.environ | {"PYTHONPATH": path}, check=False).returncode


if __name__ == "__main__":
    sys.exit(max(run(end) for end in sys.argv[1:] or ("lowest", "highest")))
