"""Signals to a server process: while its engine starts, before it listens, while it serves, and twice.

No process here is forked from the forkserver: Python's exit functions run in another order there.
"""

import os
import signal
import sys

import pytest

from conformance.doubles.instance import ENVIRONMENT, Instance, settings_for
from conformance.doubles.processes import START_TIMEOUT_S, Running, start

HELD = """
import signal, sys, subprocess, threading, time
from rollmatch.serve import shutdown
shutdown.LONGEST_S = float(sys.argv[1])
signal.signal(signal.SIGHUP, getattr(signal, sys.argv[3]))
child = subprocess.Popen(["sleep", "1000"])
ending = shutdown.Shutdown(lambda: print("cleaned", flush=True))
ending.__enter__()
if sys.argv[2] == "serving":
    ending.begin_serving()
print("begun", child.pid, flush=True)
while not ending.is_requested():
    time.sleep(0.01)
print("requested", flush=True)
threading.Event().wait()
"""
"""A server that does not end in order: its main thread waits for ever."""
IN_ORDER = """
import os, signal, sys, time
signal.signal(signal.SIGHUP, signal.SIG_DFL)  # whoever runs the tests may ignore it (nohup)
from rollmatch.serve import shutdown
shutdown.LONGEST_S = 1000.0
with shutdown.Shutdown(lambda: print("cleaned", flush=True)) as ending:
    ending.begin_serving()
    os.kill(os.getpid(), int(sys.argv[1]))
    while not ending.is_requested():
        time.sleep(0.01)
sys.exit(ending.exit_code)
"""
"""A server that ends in order."""
FORKED = """
import os, signal
from rollmatch.serve.shutdown import Shutdown
with Shutdown(print) as ending:
    os.register_at_fork(after_in_child=ending.forget_in_child)
    child = os.fork()
    if not child:
        os.kill(os.getpid(), signal.SIGTERM)
        os._exit(0)
    assert os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == -signal.SIGTERM
    ending.exit_code = 7
    child = os.fork()
    if not child:
        os._exit(0)
    assert os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == 7
    ending.exit_code = None
assert signal.getsignal(signal.SIGTERM) is signal.SIG_DFL
print("distinguished", flush=True)
"""
BEFORE_IT_LISTENS = """
import builtins, os, runpy, signal
say = print
def say_and_end(*words, **options):
    say(*words, **options)
    if "ready" in words[0]:
        os.kill(os.getpid(), signal.SIGTERM)
builtins.print = say_and_end
runpy.run_module("rollmatch.serve.process", run_name="__main__", alter_sys=True)
"""
"""Nothing is imported before: Python's exit functions run in the opposite order of the imports that register them."""


def held(tmp_path, *words, hangup="SIG_DFL"):
    """A process of ``HELD`` that has begun, with that handler of SIGHUP."""
    log = tmp_path / "log"
    running = Running(start([sys.executable, "-c", HELD, *words, hangup], log, fork=False), log)
    running.wait_until(lambda: "begun" in running.output())
    return running


def check_ended(running, number):
    """By the signal, with all its processes."""
    assert running.process.wait(timeout=START_TIMEOUT_S) == 128 + number, running.output()
    running.wait_alone()


@pytest.fixture
def ended():
    """Processes that are ended after the test."""
    left = []
    yield lambda running: (left.append(running), running)[1]
    for running in left:
        running.end(grace_s=0)


@pytest.mark.scenario(clauses=["rollout-server/a-signal-ends-the-server-at-any-moment#1"])
@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM, signal.SIGHUP])
def test_a_signal_before_it_serves_ends_it_at_once(number, tmp_path, ended):
    running = ended(held(tmp_path, "1000", "starting"))
    running.process.send_signal(number)
    check_ended(running, number)
    assert "cleaned" in running.output()


def test_a_server_under_nohup_outlives_its_terminal(tmp_path, ended):
    running = ended(held(tmp_path, "1000", "serving", hangup="SIG_IGN"))
    running.process.send_signal(signal.SIGHUP)
    running.process.send_signal(signal.SIGTERM)
    running.wait_until(lambda: "requested" in running.output())
    running.process.send_signal(signal.SIGTERM)
    check_ended(running, signal.SIGTERM)


@pytest.mark.scenario(clauses=["rollout-server/a-signal-ends-the-server-at-any-moment#2"])
def test_a_second_signal_ends_at_once_what_does_not_end_in_order(tmp_path, ended):
    running = ended(held(tmp_path, "1000", "serving"))
    running.process.send_signal(signal.SIGINT)
    running.wait_until(lambda: "requested" in running.output())
    running.process.send_signal(signal.SIGTERM)
    check_ended(running, signal.SIGINT)


@pytest.mark.scenario(clauses=["rollout-server/a-signal-ends-the-server-at-any-moment#3"])
def test_what_does_not_end_in_order_is_killed_in_the_end(tmp_path, ended):
    running = ended(held(tmp_path, "0.1", "serving"))
    running.process.send_signal(signal.SIGTERM)
    check_ended(running, signal.SIGTERM)


@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGHUP])
def test_what_ends_in_order_is_not_kept_by_who_watches_it(number, tmp_path, ended):
    log = tmp_path / "log"
    running = ended(Running(start([sys.executable, "-c", IN_ORDER, str(int(number))], log, fork=False), log))
    check_ended(running, number)
    assert "cleaned" not in running.output()


def test_a_forked_child_has_signals_of_its_own(tmp_path):
    log = tmp_path / "log"
    assert start([sys.executable, "-c", FORKED], log, fork=False).wait(timeout=START_TIMEOUT_S) == 0, log.read_text()
    assert "distinguished" in log.read_text()


@pytest.mark.wide
@pytest.mark.engine
@pytest.mark.scenario(
    "rollout-server/a-signal-while-the-engine-starts",
    clauses=["rollout-server/a-signal-ends-the-server-at-any-moment#1"],
)
def test_a_signal_while_the_engine_starts(tmp_path, ended):
    server = ended(Instance(settings_for(load_format="dummy"), tmp_path / "log", fork=False))
    server.wait_until(server.workers)
    server.process.send_signal(signal.SIGTERM)
    check_ended(server, signal.SIGTERM)


@pytest.mark.wide
@pytest.mark.engine
@pytest.mark.scenario("rollout-server/a-signal-between-start-and-first-call")
def test_a_signal_between_start_and_first_call(tmp_path, ended):
    log, settings = tmp_path / "log", settings_for(load_format="dummy")
    command = [sys.executable, "-c", BEFORE_IT_LISTENS, settings.to_json()]
    running = ended(Running(start(command, log, environment=os.environ | ENVIRONMENT, fork=False), log))
    check_ended(running, signal.SIGTERM)
