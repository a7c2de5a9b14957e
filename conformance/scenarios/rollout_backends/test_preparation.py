"""Images are prepared once, by threads, before they are needed."""

import threading
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch

from conformance.doubles.digits import load_model, requests_for, scenes, template_of
from rollmatch.model.images import NO_IMAGES, ImagePreparation, once_per_images
from rollmatch.rollout.backend import Decoding
from rollmatch.rollout.hf import HfBackend
from rollmatch.rollout.overlap import Lockstep, RequestedWindow, WithoutRollouts

LIMIT_S = 60
PAIR = scenes()[:2]


@pytest.fixture
def counted():
    """A preparation over the digits' template, the samples that it has prepared, and a condition notified of them."""
    template, prepared, news = template_of(), [], threading.Condition()

    def prepare(sample):
        features = template.image_features(sample)
        with news:
            prepared.append(sample.sample_id)
            news.notify_all()
        return features

    preparation = ImagePreparation(prepare)
    yield preparation, prepared, news
    preparation.close()


def wait_for(prepared, news, ids):
    with news:
        assert news.wait_for(lambda: set(prepared) >= ids, LIMIT_S), f"{prepared} of {ids}"


@pytest.mark.scenario(
    "rollout-backends/images-are-prepared-while-rollouts-are-generated",
    clauses=["rollout-backends/a-request-holds-the-prompt-and-nothing-of-the-answer#4"],
)
def test_images_are_prepared_while_rollouts_are_generated(counted):
    preparation, prepared, news = counted
    asked = [sample for sample in PAIR for _ in range(4)]

    def roll_out(samples, step, *, purpose):
        wait_for(prepared, news, {sample.sample_id for sample in PAIR})
        return ["generated"] * len(samples)

    source = SimpleNamespace(template=SimpleNamespace(preparation=preparation), roll_out=roll_out)
    window = Lockstep(source).rollout([RequestedWindow(0, asked)])
    assert window.rollouts == ["generated"] * 8
    features = preparation.collect(asked)
    assert sorted(prepared) == [sample.sample_id for sample in PAIR]
    for sample in PAIR:
        expected = template_of().image_features(sample)
        assert features[sample.sample_id].expansions == expected.expansions
        for name, tensor in expected.tensors.items():
            assert torch.equal(features[sample.sample_id].tensors[name], tensor)


def test_stage_1_prepares_the_next_step_while_this_one_is_learnt(counted):
    preparation, prepared, news = counted
    template = SimpleNamespace(
        preparation=preparation,
        expand=lambda ids, f: (1,),
        prompt_token_ids=lambda s: (1,),
        vocabulary=SimpleNamespace(stop_id=2),
    )
    source = SimpleNamespace(template=template, ranks=SimpleNamespace(rank=0), policy_version=0)
    overlap = WithoutRollouts(source)
    first, second = (RequestedWindow(step, [sample]) for step, sample in enumerate(PAIR))
    assert overlap.rollout([first, second]).features.keys() == {PAIR[0].sample_id}
    wait_for(prepared, news, {PAIR[1].sample_id})
    assert overlap.rollout([second]).features.keys() == {PAIR[1].sample_id}
    assert len(prepared) == 2


def test_the_hf_backend_takes_what_is_prepared_already(counted, monkeypatch):
    preparation, prepared, _ = counted
    monkeypatch.setattr(template_of(), "preparation", preparation)
    preparation.begin(PAIR[:1])
    HfBackend(load_model(), template_of(), batch_size=2).generate(requests_for(PAIR), Decoding(max_new_tokens=1))
    preparation.collect(PAIR[:1])
    assert sorted(prepared) == [sample.sample_id for sample in PAIR]


def test_what_was_collected_is_not_kept(counted):
    preparation, prepared, _ = counted
    for _ in range(2):
        preparation.collect(PAIR[:1])
    assert prepared == [PAIR[0].sample_id] * 2


def test_a_sample_without_images_needs_none(counted):
    preparation, _, _ = counted
    bare = replace(PAIR[0], images=())
    assert preparation.collect([bare]) == {bare.sample_id: NO_IMAGES}


def test_an_error_of_preparation_is_the_collectors():
    preparation = ImagePreparation(lambda sample: Path(f"{sample.images[0]}.missing").stat())
    with pytest.raises(FileNotFoundError):
        preparation.collect(PAIR)


def test_threads_of_the_caller_stay():
    before = torch.get_num_threads()
    ImagePreparation(template_of().image_features).collect(PAIR)
    assert torch.get_num_threads() == before


@pytest.mark.parametrize(("kept", "num_calls"), [(None, 2), (1, 3)])
def test_requests_that_share_images_share_what_is_made_of_them(kept, num_calls):
    calls = []
    of = once_per_images(lambda sample: calls.append(sample.sample_id) or sample.images, kept=kept)
    samples = [request.sample for request in requests_for([PAIR[0], PAIR[0], PAIR[1], PAIR[1], PAIR[0]])]
    assert [of(sample) for sample in samples] == [sample.images for sample in samples]
    assert len(calls) == num_calls
