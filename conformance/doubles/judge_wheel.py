"""The judge as people install it: its wheel, without pytest, torch, transformers and rollmatch."""

import os
import shutil
import subprocess
import sys
import zipfile

import pytest

from conformance.doubles.digits import ROOT

BLOCKER = """
import sys
class Blocker:
    def find_spec(self, name, path=None, target=None):
        if name.partition(".")[0] in ("torch", "transformers", "rollmatch", "psutil", "pytest", "vllm"):
            raise ModuleNotFoundError(f"{name} is not here", name=name)
sys.meta_path.insert(0, Blocker())
"""


@pytest.fixture(scope="module")
def installed(tmp_path_factory):
    """The wheel, unpacked; built from a copy, because a build leaves folders behind."""
    folder = tmp_path_factory.mktemp("wheel")
    shutil.copytree(
        ROOT / "conformance/judge", folder / "source", ignore=shutil.ignore_patterns("__pycache__", "build")
    )
    command = [sys.executable, "-m", "pip", "wheel", "--quiet", "--no-deps", "--no-build-isolation", "./source"]
    subprocess.run([*command, "--wheel-dir", "."], cwd=folder, check=True, capture_output=True)
    [wheel] = folder.glob("*.whl")
    zipfile.ZipFile(wheel).extractall(folder / "site")
    (folder / "site" / "sitecustomize.py").write_text(BLOCKER)
    return folder / "site"


def start_judge(site, folder, *words):
    environment = {name: value for name, value in os.environ.items() if not name.startswith("PYTEST")}
    code = "from conformance.judge.servers.command import run; run()"
    return subprocess.Popen(
        [sys.executable, "-c", code, *words], cwd=folder, env=environment | {"PYTHONPATH": str(site)},
        stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True,
    )  # fmt: skip


def judge(site, folder, *words):
    process = start_judge(site, folder, *words)
    output, _ = process.communicate(timeout=240)
    return process.returncode, output
