"""The faults still fit the code, and a trial distinguishes a fault that is found from one that is not."""

import json
import subprocess
import sys

import psutil
import pytest

from conformance.tools.binding import map_tests, read_claims
from conformance.tools.faults import read_faults, trial_of
from conformance.tools.trial import ROOT

TRIALS = """
import json, sys
from dataclasses import replace
from conformance.tools.binding import map_tests, read_claims
from conformance.tools.faults import read_faults, trial_of
from conformance.tools.trial import IMPL, run_trials
fault = next(fault for fault in read_faults() if fault.fault_id == sys.argv[1])
found, source = trial_of(fault, map_tests(read_claims())), (IMPL / fault.path).read_text()
broken = replace(found, name="broken", source=f"{source}\\nimport no_such_module\\n")
late = replace(found, name="late", source=source, tests=(sys.argv[2],))
trials = (found, replace(found, name="not found", source=f"{source}\\nUNUSED = 1\\n"), broken, late)
print(json.dumps({each.trial.name: each.outcome for each in run_trials(trials, num_workers=2)}))
"""
QUICK = "description-corrected-at-full-weight"
TIMES_OUT = """
import os, signal, subprocess, sys

def test_that_starts_a_server_and_times_out():
    server = subprocess.Popen(["sleep", "1000"], start_new_session=True)
    open(os.environ["SERVERS_ID"], "w").write(str(server.pid))
    signal.raise_signal(signal.SIGALRM)
"""


def test_every_fault_fits_the_code_and_has_tests():
    tests = map_tests(read_claims())
    faults = read_faults()
    assert len(faults) <= 60
    for fault in faults:
        trial = trial_of(fault, tests)
        compile(trial.source, fault.fault_id, "exec")
        assert trial.tests
        assert fault.what.endswith(".")


@pytest.mark.wide
def test_a_trial_is_found_not_found_or_broken_and_one_that_times_out_leaves_no_process(tmp_path):
    """Its servers lead sessions of their own."""
    late, servers_id = tmp_path / "test_late.py", tmp_path / "id"
    late.write_text(TIMES_OUT)
    command = [sys.executable, "-c", TRIALS, QUICK, str(late)]
    environment = {"PYTHONPATH": str(ROOT), "PATH": "/usr/bin:/bin", "OMP_NUM_THREADS": "1"}
    environment["SERVERS_ID"] = str(servers_id)
    done = subprocess.run(command, cwd=ROOT, env=environment, capture_output=True, text=True, timeout=300)
    assert done.returncode == 0, done.stderr
    outcomes = json.loads(done.stdout.splitlines()[-1])
    assert outcomes == {QUICK: "failed", "not found": "passed", "broken": "broken", "late": "timeout"}
    assert not psutil.pid_exists(int(servers_id.read_text()))


def test_a_fault_whose_text_is_gone_is_refused():
    fault = read_faults()[0]
    with pytest.raises(ValueError, match="occurs 0 times"):
        type(fault)(**{name: getattr(fault, name) for name in fault.__slots__} | {"old": "no such text"}).apply()
