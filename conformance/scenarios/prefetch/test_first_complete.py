"""Steps that learn from the groups that are complete first."""

import json
import random
import signal
import subprocess
import sys
import threading
import time
from itertools import chain

import pytest

from conformance.doubles.late_groups import (
    GROUP,
    LATE,
    LEAD,
    PER_STEP,
    STEPS,
    Slow,
    all_groups,
    checkpoint_in,
    groups_by_step,
    trainer_of,
)
from conformance.doubles.overlapped import ids_learnt
from conformance.doubles.refusals import refused
from conformance.doubles.small_run import events
from rollmatch.rollout.open_groups import GROUPS_FILE, OpenGroups

WAIT_S = 60.0


@pytest.fixture(scope="module")
def slow(tmp_path_factory):
    """Twelve steps; the first group of window 0 gets no reply before step 2 begins."""
    folder = tmp_path_factory.mktemp("slow")
    trainer, may_reply = trainer_of(folder), threading.Event()
    first = trainer.train_dataset[trainer.plan.at(0).sample_indices[0]]

    def before_reply(start):
        if start == first.metadata["start"]:
            assert may_reply.wait(WAIT_S)

    patch = pytest.MonkeyPatch()
    patch.setattr(Slow, "before_reply", before_reply)
    begin = trainer.get_batch_samples

    def at_step(*arguments):
        if trainer.state.global_step == 2:
            may_reply.set()
        return begin(*arguments)

    trainer.get_batch_samples = at_step
    trainer.train()
    trainer.close()
    patch.undo()
    return trainer, folder


@pytest.mark.scenario(
    "prefetch/a-slow-group-is-learnt-from-later",
    clauses=["prefetch/a-step-takes-the-first-complete-groups#1,2,4"],
)
def test_a_slow_group_is_learnt_from_later(slow):
    trainer, folder = slow
    taken = dict(groups_by_step(folder))
    assert [len(taken[step]) for step in range(STEPS)] == [PER_STEP] * STEPS
    assert sorted(chain(*taken.values())) == all_groups()
    (step,) = [step for step, groups in taken.items() if (0, 0) in groups]
    assert 2 <= step <= LEAD + LATE
    assert max(trainer.ages) <= LEAD + LATE
    learnt = [sorted(ids) for ids in ids_learnt(trainer)]
    plan, samples = trainer.plan, trainer.train_dataset
    named = [[samples[plan.at(w).sample_indices[place]].sample_id for w, place in taken[at]] for at in range(STEPS)]
    assert learnt == [sorted(ids * GROUP) for ids in named], "the journal names what was learnt from"
    assert events(trainer, "taken")[step]["num_late"] >= 1


@pytest.mark.scenario(clauses=["prefetch/a-step-takes-the-first-complete-groups#5,6,7"])
def test_a_run_that_continues_takes_what_it_took(slow, tmp_path):
    """With the journal of the whole run: from its end, and from a checkpoint before."""
    _, folder = slow
    whole = dict(groups_by_step(folder))
    (tmp_path / "journal.jsonl").write_bytes((folder / "journal.jsonl").read_bytes())
    again = trainer_of(tmp_path)
    again.train(resume_from_checkpoint=str(checkpoint_in(folder)))  # at its end: nothing is left
    assert groups_by_step(tmp_path) == groups_by_step(folder)
    kept = sorted(folder.glob("checkpoint-*"), key=lambda path: int(path.name[11:]))[0]
    done = int(kept.name[11:])
    again = trainer_of(tmp_path)
    again.train(resume_from_checkpoint=str(kept))
    again.close()
    assert groups_by_step(tmp_path)[STEPS:] == [(step, whole[step]) for step in range(done, STEPS)]
    with refused("groups-unfit", str(kept / "groups-rank0.json"), problem="2 windows were requested"):
        trainer_of(tmp_path, lead=1).train(resume_from_checkpoint=str(kept))


@pytest.mark.wide
@pytest.mark.scenario(
    "prefetch/a-run-that-is-killed-has-lost-no-group",
    clauses=["prefetch/a-step-takes-the-first-complete-groups#2,5,6"],
)
def test_a_run_that_is_killed_has_lost_no_group(tmp_path):
    command = [sys.executable, "-m", "conformance.doubles.late_groups", str(tmp_path)]
    for _ in range(2):
        with subprocess.Popen(command, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL) as child:
            num_lines, wanted = len(lines(tmp_path)), random.randint(1, 4)
            while not may_be_killed(tmp_path, num_lines + wanted) and child.poll() is None:
                time.sleep(0.02)
            time.sleep(random.random() / 5)
            child.send_signal(signal.SIGKILL)
    subprocess.run(command, check=True, stdout=subprocess.DEVNULL, timeout=120)
    check_that_nothing_was_lost(tmp_path)


def may_be_killed(folder, num_lines):
    """Not before the first checkpoint: without one the next run is a new one, which may take other groups."""
    return len(lines(folder)) >= num_lines and checkpoint_in(folder) is not None


def lines(folder):
    return groups_by_step(folder) if (folder / "journal.jsonl").exists() else []


def check_that_nothing_was_lost(folder):
    taken = {}
    for step, groups in groups_by_step(folder):
        assert taken.setdefault(step, groups) == groups, f"step {step} was done twice with different groups"
    assert sorted(chain(*taken.values())) == all_groups()


def left_in(groups, folder, *, step):
    """What a checkpoint after ``step`` optimizer steps has left."""
    groups.save(folder, step=step, rank=0)
    stored = json.loads((folder / GROUPS_FILE.format(rank=0)).read_text())
    return {(window, place) for window, places in stored["left"] for place in places}


@pytest.mark.scenario(clauses=["prefetch/a-step-takes-the-first-complete-groups#1,2,3"])
@pytest.mark.parametrize("seed", range(60))
def test_whatever_is_slow_every_group_is_taken_once_and_in_time(seed, tmp_path):
    """Windows of unequal sizes, and groups that become complete in any order, as late as the steps can wait.

    A checkpoint that is written in the midst of a step has the step's groups, one of its end has not.
    """
    chance = random.Random(seed)
    lead, late, num = chance.randint(1, 4), chance.randint(1, 4), chance.randint(5, 30)
    sizes = [chance.choice((1, 4, 4, 4)) for _ in range(num)]
    groups, complete, taken = OpenGroups(lead=lead, max_staleness=lead + late), {}, {}
    for step in range(num):
        coming = [(window, sizes[window]) for window in range(step, min(step + lead + 1, num))]
        for window, size in coming:
            if window not in groups.left:
                groups.open(window, size)
                groups.request(window, step=step)
                complete[window] = set()
        while (chosen := groups.choose(complete, coming)) is None:
            waits = [(w, place) for w, places in groups.left.items() for place in places if place not in complete[w]]
            favour = chance.random() < 0.7  # mostly the newest ones
            window, place = max(waits) if favour else chance.choice(waits)
            complete[window].add(place)
        assert len(chosen) == sizes[step]
        left = left_in(groups, tmp_path, step=step)
        groups.take(step, chosen)
        assert left_in(groups, tmp_path, step=step) == left
        assert left_in(groups, tmp_path, step=step + 1) == left - set(chosen)
        taken |= dict.fromkeys(chosen, step)
    assert sorted(taken) == [(window, place) for window, size in enumerate(sizes) for place in range(size)]
    assert all(step <= max(0, window - lead) + lead + late for (window, _), step in taken.items())


def test_a_step_whose_groups_are_complete_takes_these():
    groups = OpenGroups(lead=2, max_staleness=4)
    for window in range(3):
        groups.open(window, 3)
        groups.request(window, step=0)
    everything = dict.fromkeys(range(3), range(3))
    assert groups.choose(everything, [(0, 3), (1, 3), (2, 3)]) == [(0, 0), (0, 1), (0, 2)]
