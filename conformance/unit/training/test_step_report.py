"""A step's figures: counted once, divided at the end, plain numbers all."""

import time

import pytest

from conformance.doubles.ranks import together
from conformance.doubles.records import make_rollout, make_sample
from rollmatch.learn.batch import MicroBatch
from rollmatch.objectives.rollout_matching.objective import RolloutMatchingObjective
from rollmatch.objectives.rollout_matching.supervision import MaskRules
from rollmatch.objectives.rollout_matching.target import RolloutReport
from rollmatch.records import Segment, Supervision
from rollmatch.training.report import StepReport, measure

MATCHING = RolloutMatchingObjective(
    target=None, eval_target=None, mask_rules=MaskRules(), loss_rules=None, bin_of=lambda token_id: None
)
SAMPLE = make_sample()
NOTHING = Supervision(labels=(), weights=(), coord_positions=(), coord_bins=())


def report(*, predicted, truth, matched, appended):
    return RolloutReport(
        num_predicted=predicted,
        num_truth=truth,
        num_matched=matched,
        num_desc_correct=matched,
        iou_sum=0.5 * matched,
        drops={"order_invalid": 1},
        invalid=False,
        truncated=False,
        response_len=9,
        prefix_len=9,
        appended=appended,
        gating_rejections=0,
    )


def batch(num_segments, *, num_tokens, fill):
    segment = Segment(sample=SAMPLE, policy_version=1, token_ids=(1, 2), prompt_len=1, prefix_len=0)
    return MicroBatch(
        inputs={},
        supervision=NOTHING,
        segments=(segment,) * num_segments,
        num_tokens=num_tokens,
        fill=fill,
        is_packed=True,
    )


REPORTS = [
    report(predicted=4, truth=2, matched=1, appended=1),
    report(predicted=0, truth=6, matched=0, appended=6),
]


@pytest.fixture
def full():
    step = StepReport(step=3, objective=MATCHING)
    step.rollouts = [make_rollout((7,) * 10), make_rollout((7,) * 30)]
    step.summary = MATCHING.summarize(REPORTS)
    step.batches = [batch(3, num_tokens=90, fill=0.9), batch(1, num_tokens=30, fill=0.3)]
    step.num_carried = 2
    step.phase_s["rollout"] = 0.5
    step.phase_s["learn"] = 0.25
    return step


@pytest.mark.scenario(clauses=["observability/time-is-measured-by-phase#5"])
def test_figures_count_rollouts_rows_and_what_is_carried(full):
    figures = full.figures()
    wanted = {
        "rollout_tokens": 40,
        "rollout_tok_s": 80,
        "learn_tokens": 120,
        "learn_tok_s": 480,
        "forwards_s": 8,
        "segments": 4,
        "carried": 2,
        "appended": 7,
    }
    assert {name: figures[name] for name in wanted} == wanted
    assert figures["fill"] == pytest.approx(0.6)
    full.num_rollout_tokens = 400  # with later turns, or groups in place of flat ones
    assert full.figures() == figures | {"rollout_tokens": 400}, "the speed is that of what was waited for"


def test_the_figures_of_two_ranks_are_those_of_one_that_learns_from_all(full):
    """A step's batches, rollouts and carried segments are unevenly shared, and one rank's seconds are the other's."""
    parts = [(0, 1, 2, 1), (1, 2, 0, 3)]

    def figures_of(member):
        own = StepReport(step=3, objective=MATCHING)
        first, last, own.num_carried, more = parts[member.rank]
        own.batches = full.batches[first:last] * more
        own.rollouts = full.rollouts[first:last]
        own.summary, own.phase_s = full.summary, full.phase_s
        return own.figures(member.sum)

    full.batches = [*full.batches[:1], *full.batches[1:] * 3]
    assert together(2, figures_of) == [pytest.approx(full.figures())] * 2


def test_a_completion_is_shown_with_its_first_4000_characters(full):
    rollouts, reports = [make_rollout((7,) * 10, finish_reason="length")], REPORTS[:1]
    (shown,) = full.completions([SAMPLE], rollouts, reports, lambda ids: "x" * 500 * len(ids))
    assert shown["text"] == "x" * 4000
    fields = {"sample_id": 0, "num_tokens": 10, "finish_reason": "length", "worth": {"f1": 2 / 6}}
    assert shown == fields | {"text": "x" * 4000, "question": "", "expected": "", "columns": {}}


def test_a_step_without_calls_beside_it_wrote_while_the_learner_waited(full, monkeypatch):
    full.began = 100.0
    full.phase_s |= {"sync": 1.0, "rollout": 4.0, "target": 0.5, "pack": 0.5, "learn": 2.0}
    full.spans = [("learn", 106.0, 108.00004), ("rollout", 101.0, 105.0)]
    monkeypatch.setattr(time, "time", lambda: 110.0)
    figures, timeline = full.times(None)
    assert figures == {
        "overlap/rollout_s": 4.0, "overlap/learn_s": 3.0, "overlap/sync_s": 1.0, "overlap/servers_idle": 0.6,
        "overlap/learner_idle": 0.7, "overlap/efficiency": 0.4, "staleness/0": 2.0,
    }  # fmt: skip
    assert timeline == {
        "step": 3, "began": 100.0, "ended": 110.0, "calls": [[0, 101.0, 105.0, 3]],
        "learner": [["learn", 106.0, 108.0], ["rollout", 101.0, 105.0]],
    }  # fmt: skip
    full.staleness = {1: 3, 2: 1}
    ages = {name: value for name, value in full.times(None)[0].items() if name.startswith("staleness/")}
    assert ages == {"staleness/1": 3.0, "staleness/2": 1.0}


@pytest.mark.parametrize(("name", "is_finite"), [("loss_ce", False), ("kl", True)])
def test_a_step_is_finite_where_its_losses_are_numbers(name, is_finite):
    step = StepReport(step=0, objective=MATCHING)
    step.add_terms({"loss_coord": 1.0, name: float("nan")})
    assert step.is_finite is is_finite


def test_what_was_too_long_is_counted():
    step = StepReport(step=0, objective=MATCHING, num_cut_prompts=3, num_cut=2, num_skipped=4)
    figures = step.figures()
    names = [f"overlong/{name}" for name in ("prompts_truncated", "segments_truncated", "segments_skipped")]
    assert [figures[name] for name in names] == [3.0, 2.0, 4.0]


@pytest.mark.scenario(clauses=["observability/time-is-measured-by-phase#4"])
def test_a_step_without_anything_has_the_same_figures_all_zero(full):
    step = StepReport(step=0, objective=MATCHING)
    step.summary = MATCHING.summarize([])
    empty = step.figures()
    assert empty.keys() == full.figures().keys()
    assert set(empty.values()) == {0.0}
    times = measure((1.0, 1.0), StepReport(step=0, objective=MATCHING).phase_s, [])
    assert times.figures() == dict.fromkeys(times.figures(), 0.0) | {"overlap/servers_idle": 1.0}


def test_the_time_inside_a_phase_adds_up_also_when_it_fails():
    step = StepReport(step=0, objective=MATCHING)
    with step.phase("pack"):
        time.sleep(0.01)
    once = step.phase_s["pack"]
    assert 0.01 <= once < 1
    with pytest.raises(ZeroDivisionError), step.phase("pack"):
        raise ZeroDivisionError
    assert step.phase_s["pack"] > once
    assert {name for name, seconds in step.phase_s.items() if seconds} == {"pack"}


def test_time_between_other_phases_since_learning_began_was_learning(monkeypatch):
    step = StepReport(step=0, objective=MATCHING)
    step.learn_began = 100.0
    before = [("sync", 90.0, 95.0), ("pack", 100.0, 104.0), ("rollout", 96.0, 108.0)]
    step.spans = [*before, ("wait", 110.0, 120.0), ("pack", 120.0, 125.0)]
    monkeypatch.setattr(time, "time", lambda: 130.0)
    step.end_learning()
    assert step.phase_s["learn"] == 11.0
    assert step.spans[5:] == [("learn", 104.0, 110.0), ("learn", 125.0, 130.0)]
