"""A real rollout server that is killed, twice, under a real run: between two steps, and in the middle of a sync."""

import re
import signal
import time
from contextlib import ExitStack
from types import SimpleNamespace

import psutil
import pytest

from conformance.doubles.division import MATCHING, typed
from conformance.doubles.killed_server import BATCH, STEPS, in_session, make_run, parts_of, server_of, wait_for_sync
from conformance.doubles.processes import stopped
from conformance.doubles.started import journal_of, started
from conformance.tools.judge import judge
from rollmatch.data import LearnerOrder, load_samples

pytestmark = [pytest.mark.engine, pytest.mark.wide]
KILLED_BETWEEN, KILLED_IN_SYNC = 2, 4
"""Optimizer steps that have ended when the server is killed: the second time the sync after it is under way."""


def kill_between(run, learner):
    """While the learner learns, without requests; it continues when another server stands there."""
    learner.wait_until(lambda: len(journal_of(run.out, "packed")) > KILLED_BETWEEN)
    with stopped(psutil.Process(learner.process.pid)):
        run.first.end()
        run.second = run.stack.enter_context(server_of(run))


def kill_in_sync(run, learner):
    """SIGKILL to the front alone. The engines stand still, so that the sync that was begun cannot end before."""
    learner.wait_until(lambda: len(journal_of(run.out, "packed")) >= KILLED_IN_SYNC)
    front, engines = parts_of(run.second)
    with stopped(*engines):
        wait_for_sync(run, learner, KILLED_IN_SYNC)
        assert [event["step"] for event in journal_of(run.out, "synced")][-1] == KILLED_IN_SYNC - 1
        assert learner.process.poll() is None
        front.kill()
    run.second.end()


@pytest.fixture(scope="module")
def run(tmp_path_factory):
    """The whole story; the third server has ended by Ctrl-C."""
    with ExitStack() as stack:
        run = make_run(tmp_path_factory.mktemp("killed"), stack)
        run.first = stack.enter_context(server_of(run))
        with started(typed("train", MATCHING, "2", run.overrides), run.folder / "learner.txt") as learner:
            kill_between(run, learner)
            kill_in_sync(run, learner)
            began = time.monotonic()
            run.code, run.output = learner.wait(), learner.output()
            run.ended_s = time.monotonic() - began
        run.before_resume = journal_of(run.out, None)
        third = stack.enter_context(server_of(run, "0,1"))
        again = typed("train", MATCHING, "2", run.overrides, "--resume")
        with started(again, run.folder / "again.txt") as learner:
            run.code_again, run.output_again = learner.wait(), learner.output()
        run.left = leave(third)
        yield run


def leave(server):
    """Who is left of the session 15 s after a SIGINT to the launcher, if not none at once."""
    family = psutil.Process(server.process.pid).children(recursive=True)
    server.process.send_signal(signal.SIGINT)
    deadline = time.monotonic() + 15
    while (left := in_session(server.process.pid)) and time.monotonic() < deadline:
        server.process.poll()
        time.sleep(0.1)
    return SimpleNamespace(num_workers=len(family), session=left)


@pytest.mark.scenario("weight-sync/a-restarted-server-is-synced-before-it-is-trusted")
def test_a_server_started_again_between_two_steps_is_synced_before_it_is_trusted(run):
    events = run.before_resume
    assert judge(events) == []
    synced = [(event["step"], event["version"]) for event in events if event["event"] == "synced"]
    assert synced == [(step, step + 1) for step in range(KILLED_IN_SYNC)]
    assert [event["step"] for event in events if event["event"] == "step"] == list(range(1, KILLED_IN_SYNC + 1))


def test_a_server_killed_in_a_sync_is_an_error_that_names_it(run):
    assert run.code == 1, run.output[-3000:]
    assert run.ended_s < 30
    assert run.url in run.output
    assert re.search(r"\[(transport-failed|transfer-failed|server-unreachable|server-died)\]", run.output)
    assert "Traceback" not in run.output


def test_a_resumed_run_begins_after_the_last_whole_step_and_asks_for_every_sample_once(run):
    """The run that lost its server has left a checkpoint, newer than the one of ``save_steps``."""
    assert run.code_again == 0, run.output_again[-3000:]
    order = list(LearnerOrder(len(load_samples(str(MATCHING.parent / "train.jsonl"))), seed=42))
    asked = [event for event in journal_of(run.out, "requested") if event["purpose"] == "train"]
    assert [event["step"] for event in asked] == list(range(STEPS))
    for event in asked:
        assert event["sample_ids"] == order[event["step"] * BATCH :][:BATCH]
    assert judge(journal_of(run.out, None)) == []
    learnt = {event["step"]: event["sample_ids"] for event in journal_of(run.out, "packed")}
    assert list(learnt) == list(range(STEPS))
    assert [event["resumed_from"] for event in journal_of(run.out, "run")] == [None, KILLED_IN_SYNC]


@pytest.mark.scenario("launchers/an-interrupt-leaves-no-orphans")
def test_an_interrupt_leaves_no_orphans(run):
    assert run.left.num_workers >= 2
    assert run.left.session == []
