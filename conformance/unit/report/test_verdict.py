"""The verdict, the facts and the drops of a run in words; runs that learn from rewards."""

import pytest
from hypothesis import given
from hypothesis import strategies as st

from conformance.doubles.runs import evaluated_event, run_event, step_events
from rollmatch.report.console import step_line
from rollmatch.report.curves import make_charts
from rollmatch.report.facts import make_completion_groups, make_drop_rows, make_facts, run_facts
from rollmatch.report.history import make_history
from rollmatch.report.verdict import MEASURES, compare, make_verdict

FINISHED = {"event": "finished", "rank": 0, "step": 60}


def verdict(*events):
    return make_verdict(make_history([run_event(), *events]))


@pytest.mark.parametrize(
    ("before", "after", "headline"),
    [
        ((0.1, 0.4), (0.8, 0.0), "F1 rose from 0.100 to 0.800 in 60 steps. Invalid responses fell from 40.0% to 0.0%."),
        ((0.8, 0.0), (0.1, 0.4), "F1 fell from 0.800 to 0.100 in 60 steps. Invalid responses rose from 0.0% to 40.0%."),
        ((0.5, 0.1), (0.5, 0.1), "F1 stayed at 0.500 in 60 steps."),
        ((0.5, 0.1), (float("nan"), 0.1), "F1 went from 0.500 to - in 60 steps."),
    ],
)
def test_before_and_after_in_words(before, after, headline):
    evaluations = [
        evaluated_event(step, f1=f1, invalid_rate=invalid) for step, (f1, invalid) in ((0, before), (60, after))
    ]
    assert verdict(*evaluations).headline == headline


def test_missing_evaluations_and_a_single_step():
    assert " in 1 step." in verdict(evaluated_event(0), evaluated_event(1)).headline
    assert " in 1,050 steps." in verdict(evaluated_event(50), evaluated_event(60), evaluated_event(1100)).headline
    assert verdict().headline == "No step and no evaluation yet."
    assert verdict(*step_events(1)).headline == "Not evaluated yet."
    only = verdict(evaluated_event(0, f1=0.25))
    assert only.headline == "F1 was 0.250 at step 0; the evaluation to compare with is still to come."
    assert (only.before_step, only.after_step) == (0, None)


@pytest.mark.parametrize(
    ("ending", "status", "text"),
    [
        ([FINISHED], "finished", "finished: 2 of 60 steps"),
        ([{"event": "interrupted", "signal": "SIGTERM"}], "interrupted", "interrupted by SIGTERM: 2 of 60 steps"),
        ([{"event": "interrupted", "signal": 15}], "interrupted", "interrupted by SIGTERM: 2 of 60 steps"),
        ([], "unfinished", "unfinished: 2 of 60 steps so far"),
    ],
)
def test_the_status_says_how_far_the_run_came(ending, status, text):
    one = verdict(*step_events(1), *step_events(2), *ending)
    assert (one.status, one.status_text) == (status, text)


def test_a_headline_about_invalid_responses_counts_malformed_objects():
    before, after = ({"invalid_rate": 0.4, "malformed_rate": 0.1}, {"invalid_rate": 0.0, "malformed_rate": 0.12})
    headline = verdict(evaluated_event(0, **before), evaluated_event(60, **after)).headline
    assert headline.endswith(" Invalid responses fell from 40.0% to 0.0%, 12.0% of the objects are malformed.")


def test_restarts_and_lost_steps_are_noted():
    one = verdict(*step_events(1), *step_events(2), run_event(resumed_from=1))
    assert one.notices == ("Started 2 times, last from step 1.", "1 step undone by a restart, not counted here.")
    assert verdict(*step_events(1)).notices == ()


def change(key, before, after):
    return next(one for one in compare({key: before}, {key: after}) if one.measure.key == key)


@pytest.mark.parametrize(
    ("key", "before", "after", "verdict", "direction", "delta"),
    [
        ("f1", 0.2, 0.7, "better", 1, "+0.500"),
        ("f1", 0.7, 0.2, "worse", -1, "-0.500"),
        ("invalid_rate", 0.4, 0.1, "better", -1, "-30.0 pp"),
        ("invalid_rate", 0.1, 0.4, "worse", 1, "+30.0 pp"),
        ("f1", 0.5, 0.5004, "same", 0, "+0.000"),
        ("f1", 0.5, 0.4996, "same", 0, "+0.000"),
        ("f1", 0.5, float("nan"), "", 0, "-"),
        ("f1", None, 0.5, "", 0, "-"),
    ],
)
def test_a_change_is_judged_in_its_own_sense(key, before, after, verdict, direction, delta):
    one = change(key, before, after)
    assert (one.verdict, one.direction, one.delta_text) == (verdict, direction, delta)
    wide = change("f1", -0.5, 1.5)
    assert (wide.before_percent, wide.after_percent) == (0.0, 100.0), "places on the track stay on it"


def test_an_evaluation_that_has_not_happened_leaves_all_changes_open():
    changes = compare({"f1": 0.5}, None)
    assert len(changes) == len(MEASURES)
    assert {one.verdict for one in changes} == {""}
    assert changes[0].before_text == "0.500"
    assert changes[0].after_text == "-"


STEP = {"event": "step", "loss": 0.01, "reward": 0.5, "kl": 0.002, "clip_share": 0.01, "drift": 1e-4, "fill": 0.9}


def rewarded_event(step, reward):
    metrics = {"reward": reward, "reward/form": reward, "truncated_rate": 0.1, "reward_failed_rate": 0.0}
    return {"event": "evaluated", "step": step, "metrics": metrics}


def rewarded_history():
    steps = [STEP | {"step": number, "reward": 0.1 * number} for number in (1, 2, 3)]
    return make_history([{"event": "run"}, rewarded_event(0, 0.25), *steps, rewarded_event(3, 0.5)])


def test_rewards_are_in_the_line_of_a_step_the_changes_the_headline_and_the_charts():
    line = step_line(STEP | {"step": 3, "rollout_tok_s": 100.0}, total_steps=9, with_phases=False).plain
    assert all(part in line for part in ("reward  0.500", "kl 0.0020", "clip   1.0%", "drift 0.0001"))
    assert "f1" not in line
    changes = compare(rewarded_event(0, 0.25)["metrics"], rewarded_event(3, 0.5)["metrics"])
    assert [change.measure.label for change in changes] == ["Reward", "Reward: form", "Truncated", "Not judged"]
    assert [change.verdict for change in changes] == ["better", "better", "same", "same"]
    assert make_verdict(rewarded_history()).headline == "Mean reward rose from 0.250 to 0.500 in 3 steps."
    assert [chart.title for chart in make_charts(rewarded_history())] == [
        "Loss",
        "Reward",
        "Distance to the policy before training (k3)",
        "Clipped tokens, and groups that teach nothing",
        "Engine and learner apart, mean |log-probability|",
        "Packing fill",
    ]


def test_the_facts_are_the_journals():
    facts = dict(make_facts(make_history([run_event(), *step_events(1), *step_events(2)])))
    expected = {
        "Model": "models/tiny-qwen3-vl",
        "Parameters": "4.21M, 1.05M trained (25.0%)",
        "Device": "cpu x 2",
        "Samples": "1,200 training, 64 validation (16 evaluated)",
        "Rollouts": "32 with 5.08k tokens",
        "Packing": "32 segments in 8 rows, 93% full (median)",
        "Weight sync": "full 2 times, 16.9MB in 0.12 s (median)",
        "Decoding": "temperature 0.7, top_p 1.0",
        "Started": "2025-06-15 15:06 UTC",
        "Time under way": "7.5 s",
        "Versions": "torch 2.13.0, vllm 0.32.0",
    }
    assert {name: facts[name] for name in expected} == expected
    assert "Resumed from" not in facts
    evaluated = {"event": "requested", "step": 2, "purpose": "eval", "decoding": {"temperature": 0.0}}
    further = {"event": "generated", "step": 2, "purpose": "further", "num_rollouts": 4, "num_tokens": 20}
    later = [evaluated, evaluated | {"event": "generated", "num_rollouts": 64, "num_tokens": 900}, further]
    facts = dict(make_facts(make_history([run_event(), *step_events(1), *step_events(2), *later])))
    assert (facts["Decoding"], facts["Rollouts"]) == ("temperature 0.7, top_p 1.0", "36 with 5.1k tokens")
    facts = dict(run_facts(run_event(resumed_from=1200) | {"num_trainable": 4_213_760}))
    assert (facts["Parameters"], facts["Resumed from"]) == ("4.21M, 4.21M trained (all)", "step 1,200")


@pytest.mark.parametrize(
    ("fields", "label", "text"),
    [
        ({"num_trainable": None}, "Parameters", "4.21M"),
        ({"num_parameters": 0}, "Parameters", "0"),
        ({"learner_world_size": 1}, "Device", "cpu"),
        ({"num_eval_samples": 64}, "Samples", "1,200 training, 64 validation"),
        ({"num_eval_samples": None, "num_val_samples": None}, "Samples", "1,200 training"),
        ({"max_steps": 1200}, "Steps", "1,200"),
    ],
)
def test_facts_of_the_beginning(fields, label, text):
    assert dict(run_facts(run_event() | fields))[label] == text


def test_memory_and_times_are_facts_where_they_are_known():
    steps = [
        event | {"gpu_memory": {"peak_gb": 10 * number + 2.345}, "decoding": {"top_p": number / 2}}
        for number in (0, 1)
        for event in step_events(number + 1)
    ]
    saved = [{"event": "saved", "step": number, "path": f"checkpoint-{number}"} for number in (1, 2)]
    synced = {"event": "synced", "step": 3, "mode": "adapter", "seconds": 0.12, "num_bytes": 16_855_040}
    facts = dict(make_facts(make_history([run_event(time=0.0), *steps, *saved, synced])))
    assert facts["Weight sync"] == "adapter 3 times, 16.9MB in 0.12 s (median)"
    assert "Weight sync" not in dict(
        make_facts(make_history([{name: synced[name] for name in ("event", "step", "seconds")}]))
    )
    assert (facts["Decoding"], facts["Last checkpoint"]) == ("top_p 0.5", "checkpoint-2")
    assert (facts["GPU memory"], facts["Started"]) == ("peak 12.3 GB in tensors", "1970-01-01 00:00 UTC")
    assert "Started" not in dict(make_facts(make_history([run_event(time=4e9)])))
    assert "Time under way" not in dict(make_facts(make_history([run_event()])))


def test_completions_are_shown_with_what_they_were_worth():
    worth = {"reward": 0.5, "f1": float("nan")}
    kept = [
        {"sample_id": 4, "text": "abc", "num_tokens": 3, "finish_reason": "stop", "worth": worth},
        {"text": "d"},
        "e",
    ]
    groups = make_completion_groups(make_history([{"event": "completions", "step": 2, "completions": kept}]))
    assert [(each.step, each.sample_id, row.worth, row.ending, row.text) for each in groups for row in each.rows] == [
        (3, "4", "reward 0.500", "3 tokens, stop", "abc"),
        (3, "", "", " tokens, ", "d"),
    ]


def test_completions_of_a_prompt_stand_together_with_question_and_expected_answer():
    kept = [
        {"sample_id": number, "question": f"{number} + 1?", "expected": str(number + 1), "text": text}
        for number, text in ((3, "4"), (3, "5"), (8, "9"))
    ]
    first, second = make_completion_groups(make_history([{"event": "completions", "step": 2, "completions": kept}]))
    assert (first.question, first.expected, [row.text for row in first.rows]) == ("3 + 1?", "4", ["4", "5"])
    assert (second.question, second.expected, [row.text for row in second.rows]) == ("8 + 1?", "9", ["9"])


def test_servers_that_came_and_went_are_named():
    came = {"event": "server_joined", "rank": 0, "server": "http://b:8000", "num_present": 2}
    went = {"event": "server_left", "rank": 0, "server": "http://a:8000", "num_present": 1}
    events = [run_event(), came, *step_events(1), *step_events(2), came | {"rank": 1}, went]
    facts = dict(make_facts(make_history(events)))
    assert facts["Servers"] == "http://b:8000 joined after step 0; http://a:8000 left after step 2"
    assert "Servers" not in dict(make_facts(make_history([run_event()])))


@given(
    st.dictionaries(st.sampled_from(sorted(run_event())), st.one_of(st.none(), st.floats(), st.text(), st.booleans()))
)
def test_odd_or_missing_fields_do_no_harm(fields):
    assert all(label and text for label, text in run_facts(fields))


def drop_rows(*drops):
    return make_drop_rows(
        make_history({"event": "step", "step": number, "drops": one} for number, one in enumerate(drops, start=1))
    )


def test_reasons_are_counted_over_both_halves_most_frequent_first():
    table = drop_rows({"b": 1, "a": 1}, {"a": 3}, {"a": 1, "c": 5}, {})
    assert [(row.reason, row.first_half, row.second_half, row.total) for row in table] == [
        ("a", 4, 1, 5),
        ("c", 0, 5, 5),
        ("b", 1, 0, 1),
    ]
    assert sum(row.share for row in table) == pytest.approx(1.0, abs=1e-3)
    assert table[0].share_text == "45.5%"
    assert [row.reason for row in drop_rows({"b": 2, "c": 1, "a": 2})] == ["a", "b", "c"]


@pytest.mark.parametrize("drops", [None, [], {}, {"a": 0}, {"a": float("nan")}, {"a": "many"}, {"a": -1}])
def test_nothing_dropped_is_no_table(drops):
    assert drop_rows(drops) == ()
    assert len(drop_rows({"a": 1})) == 1
