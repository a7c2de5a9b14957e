"""Facts about a run."""

from hypothesis import given, settings
from hypothesis import strategies as st

from conformance.report.runs import run_event, step_events
from rollmatch.report.facts import make_facts, run_facts
from rollmatch.report.history import make_history


def test_the_facts_are_the_journals():
    facts = dict(make_facts(make_history([run_event(), *step_events(1), *step_events(2)])))
    assert facts["Model"] == "models/tiny-qwen3-vl"
    assert facts["Parameters"] == "4.21M, 1.05M trained (25.0%)"
    assert facts["Device"] == "cpu x 2"
    assert facts["Samples"] == "1,200 training, 64 validation"
    assert facts["Rollouts"] == "32 with 5.08k tokens"
    assert facts["Packing"] == "32 segments in 8 rows, 93% full (median)"
    assert facts["Weight sync"] == "full 2 times, 16.9MB in 0.12 s (median)"
    assert facts["Decoding"] == "temperature 0.7, top_p 1.0"
    assert facts["Started"] == "2025-06-15 15:06 UTC"
    assert facts["Time under way"] == "7.5 s"
    assert facts["Versions"] == "torch 2.13.0, vllm 0.32.0"
    assert "Resumed from" not in facts


def test_a_full_model_and_a_resume_are_told():
    facts = dict(run_facts(run_event(resumed_from=1200) | {"num_trainable": 4_213_760}))
    assert facts["Parameters"] == "4.21M, 4.21M trained (all)"
    assert facts["Resumed from"] == "step 1,200"


@settings(deadline=None)
@given(
    st.dictionaries(st.sampled_from(sorted(run_event())), st.one_of(st.none(), st.floats(), st.text(), st.booleans()))
)
def test_odd_or_missing_fields_do_no_harm(fields):
    assert all(label and text for label, text in run_facts(fields))
