"""Capability ``rollout-backends``: the engine in the learner's process, as a double that answers for real."""

from dataclasses import replace

import pytest
import torch

from conformance.doubles.configs import config_with
from conformance.doubles.digits import load_model, requests_for, scenes, template_of, tokens_of
from conformance.doubles.engine import make_remembering_backend
from conformance.doubles.small_run import make_trainer
from rollmatch.ranks import Ranks
from rollmatch.rollout import vllm_colocate
from rollmatch.rollout.backend import Decoding
from rollmatch.rollout.hf import HfBackend

SHORT = Decoding(max_new_tokens=2)


@pytest.fixture(scope="module")
def model():
    return load_model()


class OneGroup:
    """torch.distributed for two ranks whose requests are known."""

    def __init__(self, parts):
        self.parts, self.rank = parts, 0

    def all_gather_object(self, into, item, group):
        into[:] = self.parts

    def get_rank(self, group):
        return self.rank


@pytest.mark.scenario(
    "rollout-backends/ranks-of-one-group-get-their-own-rollouts",
    clauses=["rollout-backends/a-colocated-engine-leaves-room-for-training#4"],
)
def test_ranks_of_one_group_get_their_own_rollouts(model, monkeypatch):
    backend = make_remembering_backend(model, template_of(), Ranks(), monkeypatch)
    backend.policy_version, backend._tensor_group = 1, "group"
    backend.settings = type(backend.settings)(
        model="digits", dtype="float32", max_model_len=768, tensor_parallel_size=2
    )
    requests = requests_for(scenes()[:4])
    group = OneGroup([requests[:3], requests[3:]])
    monkeypatch.setattr(vllm_colocate, "dist", group)
    taken = []
    for rank, mine in ((0, requests[:3]), (1, requests[3:])):
        group.rank = rank
        try:
            taken.append([rollout.request_id for rollout in backend.generate(mine, SHORT)])
        except Exception as error:  # noqa: BLE001 - whatever it is, the slice was wrong
            pytest.fail(repr(error))
    assert taken == [["0.0.0", "0.0.1", "0.0.2"], ["0.0.3"]]
    assert backend._engine.runs == [4, 4]


@pytest.mark.scenario(
    "rollout-backends/eight-scenes-decoded-by-both-backends",
    clauses=[
        "rollout-backends/both-backends-agree-under-greedy-decoding#1",
        "decoding/decoding-is-greedy-by-default#5",
    ],
)
def test_eight_scenes_through_the_engines_interface(model, monkeypatch):
    """The engine is a double; the real one answers in conformance/scenarios/rollout_backends/test_vllm_colocate.py."""
    backend = make_remembering_backend(model, template_of(), Ranks(), monkeypatch)
    backend.push(model.named_parameters(), version=1)
    few = sorted(scenes(), key=lambda sample: len(sample.objects))[:8]
    whole, decoding = requests_for(few), Decoding(max_new_tokens=96)
    requests = [*whole[:2], *(replace(request, max_new_tokens=8) for request in whole[2:])]
    ours = backend.generate(requests, decoding)
    assert tokens_of(ours) == tokens_of(HfBackend(model, template_of(), batch_size=8).generate(requests, decoding))
    assert [rollout.finish_reason for rollout in ours] == ["stop"] * 2 + ["length"] * 6
    sampling = backend._make_sampling(requests[0], decoding)
    assert sampling.stop_token_ids == [template_of().vocabulary.stop_id]
    assert (sampling.temperature, sampling.max_tokens) == (0, 96)


@pytest.mark.scenario(
    "rollout-backends/an-unset-mode-means-colocate",
    clauses=[
        "rollout-backends/the-vllm-backend-offers-colocate-and-server-mode#1,2,3,4",
        "rollout-backends/the-rollout-backend-is-chosen-in-yaml#5",
    ],
)
def test_an_unset_mode_means_colocate(model, monkeypatch, tmp_path):
    """The engine is a double; a real one trains in conformance/unit/run/test_colocate_run.py."""
    assert config_with().custom.extra.rollout_matching.vllm.mode == "colocate"
    overrides = "training.per_device_train_batch_size=2", "custom.extra.rollout_matching.max_new_tokens=4"
    trainer = make_trainer(tmp_path, *overrides, is_shallow=True)
    fence = trainer.source.fence
    fence.backend = make_remembering_backend(trainer.model, trainer.source.template, Ranks(), monkeypatch)
    compared, before = [], {name: weight.clone() for name, weight in trainer.model.named_parameters()}
    check_alignment = trainer.source.template.check_alignment
    monkeypatch.setattr(
        trainer.source.template, "check_alignment", lambda *call: compared.append(call[0]) or check_alignment(*call)
    )
    trainer.train()
    assert fence.backend._engine.runs == [2]
    assert len(compared) == 2
    assert any(not torch.equal(weight, before[name]) for name, weight in trainer.model.named_parameters())
