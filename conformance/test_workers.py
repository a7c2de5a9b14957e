"""Which test workers fork, and that what forks in place of a Python does what it would."""

import shlex
import subprocess
from types import SimpleNamespace

import pytest

from conformance import workers
from conformance.cli.forked import this_run


def python_of(*, popen=True, python=None):
    spec = SimpleNamespace(popen=popen, python=python)
    config = SimpleNamespace(option=SimpleNamespace(testrunuid="run"), args=["conformance/spec"])
    workers.pytest_xdist_setupnodes(config, [spec])
    return spec.python


@pytest.mark.parametrize("has_gpu", [False, True])
def test_workers_of_this_machine_fork_but_not_beside_a_gpu_nor_where_a_python_is_named(monkeypatch, has_gpu):
    monkeypatch.setattr(workers, "has_gpu", lambda: has_gpu)
    assert python_of() == (None if has_gpu else shlex.join([*workers.CRADLE, "run", "conformance/spec"]))
    assert python_of(popen=False) is None
    assert python_of(python="python3.14") == "python3.14"


CODE = "import sys; print(sys.stdin.readline().upper(), 'torch' in sys.modules, __name__); sys.exit(3)"


def test_it_reads_and_writes_as_a_python_would_and_ends_as_it_did():
    done = subprocess.run(
        [*workers.CRADLE, this_run(), "-u", "-c", CODE], input="said\n", capture_output=True, text=True, timeout=120
    )
    assert (done.stdout, done.returncode) == ("SAID\n True __main__\n", 3), done.stderr


def test_it_stands_in_the_folder_in_which_pytest_was_started(tmp_path):
    command = [*workers.CRADLE, this_run(), "-u", "-c", "import os; print(os.getcwd())"]
    done = subprocess.run(command, cwd=tmp_path, capture_output=True, text=True, timeout=120)
    assert (done.stdout, done.returncode) == (f"{tmp_path}\n", 0), done.stderr


def test_tests_that_were_named_are_loaded_as_pytest_does():
    code = "import sys; print(sys.modules['conformance.test_workers'].__loader__.__class__.__name__)"
    command = [*workers.CRADLE, this_run(), "conformance/test_workers.py", "-u", "-c", code]
    done = subprocess.run(command, cwd=workers.ROOT, capture_output=True, text=True, timeout=120)
    assert (done.stdout, done.returncode) == ("AssertionRewritingHook\n", 0), done.stderr
