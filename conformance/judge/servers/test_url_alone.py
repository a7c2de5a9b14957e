"""Without a model, numbers are judged by what the server says of itself."""

import pytest

from conformance.doubles.broken_bench import BrokenBench
from conformance.doubles.digits import MODEL
from conformance.judge.servers.broken.app import serving
from conformance.judge.servers.broken.engine import TinyEngine
from conformance.judge.servers.broken.switches import Switches
from conformance.judge.servers.checks import BY_ID

FOUND_BY_URL = (
    ("swift", "log-probabilities are shifted by one", "sampling-is-from-the-whole-distribution"),
    ("vllm", "log-probabilities are shifted by one", "logprobs-equal-transformers"),
    ("swift", "every log-probability is -1", "sampling-is-from-the-whole-distribution"),
    ("swift", "temperature is ignored", "temperature-is-applied"),
    ("swift", "top_p leaves out the last one", "top-p-is-applied"),
    ("swift", "the n responses are the same", "n-responses-differ"),
    ("swift", "wrong greedy id from position 20", "long-responses-stay-greedy"),
    ("vllm", "wrong greedy id from position 20", "long-responses-stay-greedy"),
    ("swift", "prompts beyond eight are dropped", "every-prompt-of-a-call-is-answered"),
    ("swift", "responses are capped", "max-tokens-is-the-limit"),
)
"""Also without a model; in the swift dialect prompts are texts, whose ids nobody knows."""


@pytest.fixture(scope="module")
def bench():
    with serving(TinyEngine(str(MODEL), Switches())) as server:
        made = BrokenBench(server)
        made.policies = None
        yield made


@pytest.mark.wide
@pytest.mark.scenario(
    "judging/temperature-is-ignored-and-there-is-no-model", clauses=["judging/a-server-is-judged-by-its-url-alone#5"]
)
@pytest.mark.parametrize(("dialect", "mistake", "name"), FOUND_BY_URL)
def test_a_mistake_is_found_by_the_url_alone(bench, dialect, mistake, name):
    """By what the server says of itself; a correct one passes."""
    assert [bench.ask(dialect, BY_ID[name], on).state for on in ("", mistake)] == ["passed", "missed"]
