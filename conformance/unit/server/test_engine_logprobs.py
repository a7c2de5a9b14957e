"""Log-probabilities that servers return of what they sampled, against the learner's own, in float32."""

import dataclasses

import pytest

from conformance.doubles.digits import load_model, template_of
from conformance.doubles.logprobs import TOLERANCE, farthest_apart, figures_of
from rollmatch.dialects.logprobs import QUESTION, check_logprobs
from rollmatch.dialects.native.client import NativeDialect
from rollmatch.dialects.swift.client import SwiftDialect
from rollmatch.dialects.trl.client import TrlDialect
from rollmatch.rollout.backend import Decoding

pytestmark = pytest.mark.engine

SAMPLED = Decoding(max_new_tokens=48, temperature=1.0, logprobs=True)


@pytest.fixture(scope="module")
def model():
    return load_model()


@pytest.fixture
def backend(backend, policies):
    """One whose server holds the model directory's weights."""
    backend.push(policies[0].weights.items(), version=backend.policy_version + 1)
    return backend


@pytest.mark.parametrize(
    ("kind", "temperature"),
    [(NativeDialect, 1.0), (SwiftDialect, 0.7), pytest.param(TrlDialect, 0.7, marks=pytest.mark.wide)],
    ids=["native", "swift", "trl"],
)
def test_they_are_those_of_the_sampled_distribution(kind, temperature, backend, scene_requests, model):
    server = backend.servers[0]
    server.dialect = kind(server.base_url)
    check_logprobs(server, prompt_token_ids=template_of().vocabulary.encode(QUESTION))
    decoding = dataclasses.replace(SAMPLED, temperature=temperature)
    rollouts = backend.generate(scene_requests, decoding)
    server.dialect = NativeDialect(server.base_url)
    assert farthest_apart(model, scene_requests, rollouts, temperature=temperature) < TOLERANCE
    assert farthest_apart(model, scene_requests, rollouts, temperature=temperature + 0.3) > TOLERANCE
    figures = figures_of(model, scene_requests, rollouts, temperature=temperature)
    assert figures["correction_mean"] == pytest.approx(1, abs=TOLERANCE)
    assert figures["drift"] < TOLERANCE
