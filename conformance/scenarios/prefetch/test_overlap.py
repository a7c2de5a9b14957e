"""Rollouts beside learning, for real: the digits model learns, a copy of it in other threads writes."""

import dataclasses
import threading
import time
from itertools import chain

import pytest

from conformance.doubles.digits import scenes, unseen
from conformance.doubles.overlapped import (
    forget_between_steps,
    ids_learnt,
    in_order_of_time,
    note_what_is_learnt,
    overlapped,
)
from conformance.doubles.small_run import events
from rollmatch.errors import RolloutError
from rollmatch.ranks import Ranks

SHORT = (
    *("training.per_device_train_batch_size=1", "training.packing=false"),
    "custom.extra.rollout_matching.max_new_tokens=4",
)
KEPT = ("training.max_steps=4", "training.save_steps=2", "training.save_total_limit=9")
BLIND = {"is_shallow": True, "samples": unseen(scenes("train")[:8]), "eval_samples": scenes()[:1]}


@pytest.mark.scenario(
    "prefetch/ahead-mode-with-drops",
    clauses=[
        "prefetch/prefetch-does-not-change-the-order-of-the-data#1,2",
        "prefetch/overlap-is-off-or-ahead#2,3",
        "prefetch/staleness-is-known-and-bounded#1,4",
    ],
)
def test_ten_steps_ahead_with_drops_consume_what_ten_steps_without_do(tmp_path):
    runs = {}
    for mode in ("off", "ahead"):
        overrides = (*SHORT, "training.max_steps=10", "training.eval_steps=1")
        trainer, servers = overlapped(  # requests more than may be learnt from
            *(tmp_path / mode, mode, *overrides), lead=2, **BLIND
        )
        note_what_is_learnt(trainer)
        if mode == "ahead":
            forget_between_steps(trainer, servers)
        trainer.train()
        runs[mode] = trainer
    off, ahead = runs["off"], runs["ahead"]
    assert len(ids_learnt(ahead)) == 10
    assert ids_learnt(ahead) == ids_learnt(off)
    again = events(ahead, "asked_again")
    assert again, "some rollouts became too old"
    assert all(age <= 1 for age in ahead.ages)
    ages = [{k: v for k, v in line.items() if k.startswith("staleness/")} for line in ahead.state.log_history]
    assert sum(map(bool, ages)) == 10
    assert all(sum(line.values()) == 1 for line in ages if line)
    assert all({f"staleness/{age}": 1.0} in ages for age in (0, 1))
    order = in_order_of_time(off, "requested", "generated", "packed")
    assert order == [(event, step) for step in range(10) for event in ("requested", "generated", "packed")]
    order = in_order_of_time(ahead, "requested", "packed")
    assert order.index(("requested", 1)) < order.index(("packed", 0)), "requested before step 0 is learnt"


@pytest.mark.scenario(
    "prefetch/the-first-request-comes-after-the-first-sync",
    clauses=["prefetch/nothing-is-requested-before-the-weights-are-right#1"],
)
def test_the_first_call_comes_after_the_first_committed_update(tmp_path):
    trainer, servers = overlapped(tmp_path, "ahead", *SHORT, "training.max_steps=2", **BLIND)
    trainer.train()
    kinds = [event[:2] for event in servers.events]
    assert kinds[0] == ("sync", 1)
    assert all(version >= 1 for kind, version in kinds if kind == "call")
    assert kinds.count(("sync", 2)) == 1
    syncs = [place for place, (kind, _) in enumerate(kinds) if kind == "sync"]
    for place in syncs:
        begun = [event[2] for event in servers.events[:place] if event[0] == "call"]
        ended = [event[2] for event in servers.events[:place] if event[0] == "answer"]
        assert sorted(begun) == sorted(ended), "no call is under way when weights move"


@pytest.mark.timeout(60)  # a learner that no error reaches would wait for ever
@pytest.mark.scenario("prefetch/an-error-in-the-background", clauses=["prefetch/a-stuck-prefetcher-is-an-error#1"])
def test_an_error_at_the_third_request_stops_the_run_within_ten_seconds(tmp_path):
    trainer, servers = overlapped(tmp_path, "ahead", *SHORT, "training.max_steps=4", **BLIND)
    raised, calls = [], []

    def fail_third(server, ids):
        calls.append(ids)
        if len(calls) == 3:
            raised.append(time.monotonic())
            raise RolloutError("the server is on fire", key="third")

    servers.before_call = fail_third
    prefetch = trainer.overlap.prefetch
    prefetch.rules = dataclasses.replace(prefetch.rules, stuck_after_s=3.0)
    slow_step(trainer)
    with pytest.raises(RolloutError) as caught:
        trainer.train()
    assert caught.value.key == "third"
    assert time.monotonic() - raised[0] < 10
    assert trainer.slow.num_waits < 50, "a learner that does not wait for rollouts looks between two micro-batches"


class Slow:
    """A learner that still learns when the error comes, in fifty looks, a tenth of a second apart."""

    num_waits = 0


def slow_step(trainer):
    trainer.slow = Slow()
    compute = trainer.compute_loss

    def slowly(model, inputs, *arguments, **named):
        while trainer.state.global_step == 1 and trainer.slow.num_waits < 50:
            trainer.slow.num_waits += 1
            time.sleep(0.1)
            trainer.check()
        return compute(model, inputs, *arguments, **named)

    trainer.compute_loss = slowly


@pytest.mark.scenario(clauses=["prefetch/staleness-is-known-and-bounded#1"])
def test_a_segment_that_waited_for_a_row_until_it_was_too_old_is_requested_again(tmp_path):
    trainer, _ = overlapped(
        *(tmp_path, "ahead", "training.packing=true", "global_max_length=260", "training.max_steps=6"),
        *("training.per_device_train_batch_size=2", "custom.extra.rollout_matching.max_new_tokens=16"),
        max_staleness=1,
        lead=1,
        is_shallow=True,
    )
    note_what_is_learnt(trainer)
    trainer.train()
    assert events(trainer, "asked_again"), "some segments waited a step"
    assert max(trainer.ages) == 1
    windows = [event["sample_ids"] for event in events(trainer, "requested") if event["purpose"] == "train"]
    waiting = [segment.sample.sample_id for segment in trainer.learner.batcher.packer.state()]
    assert sorted([*chain(*ids_learnt(trainer)), *waiting]) == sorted(chain(*windows))


def test_a_run_that_continues_from_a_checkpoint_requests_the_samples_that_follow(tmp_path):
    whole, _ = overlapped(tmp_path / "whole", "ahead", *SHORT, *KEPT, **BLIND)
    note_what_is_learnt(whole)
    whole.train()
    rest, _ = overlapped(tmp_path / "rest", "ahead", *SHORT, *KEPT, **BLIND)
    note_what_is_learnt(rest)
    rest.train(resume_from_checkpoint=str(tmp_path / "whole" / "checkpoint-2"))
    assert ids_learnt(rest) == ids_learnt(whole)[2:]


def test_the_run_closes_with_its_callers(tmp_path):
    before = set(threading.enumerate())
    trainer, _ = overlapped(tmp_path, "ahead", *SHORT, **BLIND)
    trainer.train()
    callers = [each for each in set(threading.enumerate()) - before if each.name.startswith("rollout-caller")]
    assert len(callers) == 8
    trainer.overlap.prefetch.close()
    deadline = time.monotonic() + 10
    while any(thread.is_alive() for thread in callers):
        assert time.monotonic() < deadline
        time.sleep(0.02)


class TwoRanks(Ranks):
    """Rank 0 of two; the other one says what this one says, and of counts always 7."""

    def barrier(self):
        pass

    def gather(self, item):
        is_count = type(getattr(item, "result", None)) is int
        return [item, item._replace(result=7) if is_count else item]

    def sum(self, numbers):
        return list(numbers)


@pytest.mark.scenario(clauses=["prefetch/a-stuck-prefetcher-is-an-error#3"])
def test_what_one_rank_drops_all_ranks_know_in_the_same_step(tmp_path):
    trainer, _ = overlapped(tmp_path, "ahead", *SHORT, "training.max_steps=3", **BLIND)
    ranks = TwoRanks(rank=0, learner_world_size=2)
    trainer.source.fence.ranks = ranks
    trainer.source = trainer.overlap.source = dataclasses.replace(trainer.source, ranks=ranks)
    trainer.train()
    noted = [(event["step"], event["num_rollouts"], event["by_rank"]) for event in events(trainer, "asked_again")]
    assert noted == [(step, 0, [0, 7]) for step in range(3)]
    assert [event["version"] for event in events(trainer, "synced")] == [1, 2, 3]


@pytest.mark.scenario(clauses=["observability/time-is-measured-by-phase#6"])
def test_the_speed_of_rollouts_counts_the_seconds_in_which_servers_wrote(tmp_path):
    trainer, _ = overlapped(tmp_path, "ahead", *SHORT, "training.max_steps=4", lead=2, callers=1, **BLIND)
    trainer.train()
    num_tokens = {event["step"]: event["num_tokens"] for event in events(trainer, "generated")}
    speed_of = {
        line["step"] - 1: line["rollout_tok_s"] for line in trainer.state.log_history if "rollout_tok_s" in line
    }
    seen = []
    for timeline in events(trainer, "timeline"):
        calls = [(began, ended, step) for _, began, ended, step, *_ in timeline["calls"]]
        if all(step in num_tokens for *_, step in calls):  # others are not learnt from
            tokens, wrote_s = sum(num_tokens[step] for *_, step in calls), sum(end - begin for begin, end, _ in calls)
            seen.append(timeline["step"])
            assert speed_of[timeline["step"]] == pytest.approx(tokens / wrote_s if calls else 0, rel=0.02)
    assert len(seen) > 1
