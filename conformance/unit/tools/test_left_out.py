"""Tests that a run leaves out are named in its summary, and their scenarios count as not run."""

import subprocess
import sys

import pytest

from conformance.tools.specification import ROOT, read_specification

FILE = """
import pytest

@pytest.mark.wide
@pytest.mark.scenario("packing/a-gap-is-filled-exactly")
def test_wide():
    pass

@pytest.mark.scenario("packing/a-segment-of-exactly-one-row")
def test_narrow():
    pass
"""
NOT_RUN = "NOT RUN: 1 wide tests; -m wide runs them, ROLLMATCH_STRICT=1 without ROLLMATCH_WIDE runs all"


@pytest.mark.wide
@pytest.mark.parametrize(
    ("options", "variables", "passed"),
    [
        ((), {}, 1),
        ((), {"ROLLMATCH_STRICT": "1"}, 2),
        *(((), {"ROLLMATCH_STRICT": "1", "ROLLMATCH_WIDE": f"{part}/3"}, 1 + (part == 0)) for part in range(2)),
        (("-m", "not wide"), {}, 1),
        (("-m", "wide or not wide", "-p", "xdist", "-n", "2"), {}, 2),
    ],
)
def test_wide_tests_run_where_they_are_asked_for_and_are_named_elsewhere(tmp_path, options, variables, passed):
    (tmp_path / "test_two.py").write_text(FILE)
    (tmp_path / "pytest.ini").write_text("[pytest]\nmarkers = wide\n")
    command = [sys.executable, "-m", "pytest", "test_two.py", *options]
    command += ["-p", "conformance.tools.outside_tools", "-p", "conformance.tools.plugin"]
    environment = {"PYTHONPATH": f"{ROOT / 'impl'}:{ROOT}", "PATH": "/usr/bin:/bin"} | variables
    environment |= {"PYTEST_DISABLE_PLUGIN_AUTOLOAD": "1"}  # they take seconds to load
    done = subprocess.run(command, cwd=tmp_path, env=environment, capture_output=True, text=True, timeout=120)
    assert done.returncode == 0, done.stdout + done.stderr
    not_run = len(read_specification().scenarios) - passed
    assert f"scenarios: {passed} passed, 0 failed, 0 not-shown, {not_run} not run of" in done.stdout
    assert (NOT_RUN in done.stdout) == (passed == 1 and "-m" not in options)
