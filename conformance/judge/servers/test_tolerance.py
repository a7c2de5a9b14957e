"""``--tolerance``: what an engine rounds is no mistake, and a mistake is no rounding."""

import re

import pytest
import torch

from conformance.doubles.broken_bench import MISTAKES, BrokenBench
from conformance.doubles.digits import MODEL
from conformance.judge.servers import scoring
from conformance.judge.servers.broken.app import serving
from conformance.judge.servers.broken.engine import TinyEngine
from conformance.judge.servers.broken.switches import Switches
from conformance.judge.servers.check import MISSED, PASSED
from conformance.judge.servers.checks import BY_ID
from conformance.judge.servers.policy import Policies

WIDE = 0.1
NUMERIC = (
    "greedy-equals-transformers",
    "logprobs-equal-transformers",
    "long-responses-stay-greedy",
    "prompts-of-other-lengths-are-read-whole",
    "every-prompt-of-a-call-is-answered",
    "pictures-are-seen",
    "max-tokens-is-the-limit",
    "a-stop-text-ends-the-response",
    "temperature-is-applied",
    "top-k-is-applied",
    "new-weights-are-served",
    "old-weights-come-back",
    "caches-forget-old-weights",
    "caches-forget-old-pictures",
    "every-tensor-is-updated",
    "same-weights-same-responses",
    "no-half-update-is-served",
)
"""Checks that compare with transformers, or with what it writes."""
IN_BFLOAT16 = 0.3
WIDELY = [mistake for mistake, name in MISTAKES.items() if name in NUMERIC and "never updated" not in mistake]
WIDELY += ["one layernorm is never updated", "the vision tower is never updated"]
OF_TENSORS = ("every-tensor-is-updated", "caches-forget-old-pictures")
"""With the digits model, not every tensor shows by that much."""


@pytest.fixture(scope="module")
def rounding_server():
    """One that computes in bfloat16."""
    with serving(TinyEngine(str(MODEL), Switches(), dtype=torch.bfloat16)) as server:
        yield server


@pytest.fixture(scope="module")
def rounding_bench(rounding_server):
    return BrokenBench(rounding_server, Policies(MODEL, tolerance=IN_BFLOAT16))


@pytest.fixture(scope="module")
def wide_bench():
    with serving(TinyEngine(str(MODEL), Switches())) as server, pytest.MonkeyPatch.context() as patch:
        policies = Policies(MODEL, tolerance=WIDE)
        patch.setattr(scoring, "NUM_ROUNDS", 1)  # enough for the tensors that are left out here
        policies.scorer.weights_that_show()  # takes long; not within a check's time
        yield BrokenBench(server, policies)


@pytest.mark.scenario("judging/a-server-that-computes-in-bfloat16")
def test_a_server_that_rounds_is_missed_with_the_tolerance_that_passes(rounding_server):
    check = BY_ID["logprobs-equal-transformers"]
    verdict = BrokenBench(rounding_server).ask("swift", check)
    assert verdict.state == MISSED
    found = re.search(r"; it is small everywhere: --tolerance ([\d.]+) passes$", verdict.reason)
    assert found, verdict.reason
    assert BrokenBench(rounding_server, Policies(MODEL, tolerance=float(found[1]))).ask("swift", check).state == PASSED


@pytest.mark.wide
@pytest.mark.scenario("judging/a-server-that-computes-in-bfloat16")
@pytest.mark.parametrize("name", [name for name in NUMERIC if name not in OF_TENSORS])
def test_a_server_that_rounds_passes_with_a_wide_tolerance(rounding_bench, name):
    verdict = rounding_bench.ask("swift", BY_ID[name])
    assert verdict.state == PASSED, verdict.reason


@pytest.mark.wide
@pytest.mark.scenario(
    "judging/mistakes-within-a-wide-tolerance", clauses=["judging/numbers-are-compared-with-transformers#2,5,6"]
)
@pytest.mark.parametrize("mistake", WIDELY)
def test_a_wide_tolerance_hides_no_mistake(wide_bench, mistake):
    assert wide_bench.ask("swift", BY_ID[MISTAKES[mistake]], mistake).state == MISSED
