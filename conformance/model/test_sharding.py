"""Weights that ranks hold in parts: gradients in FSDP2's exchange of the whole model, sizes under ZeRO-3."""

from types import SimpleNamespace

import pytest
import torch
from torch import nn

from conformance.rollout.digits import load_model, requests_for, scenes, template_of
from rollmatch.model.policy import LARGE_VOCABULARY, count_weights, head_worth_avoiding
from rollmatch.model.sharding import EvenGradients
from rollmatch.rollout.backend import Decoding, HfBackend


class Seeing(nn.Module):
    """A tower that only some passes use."""

    def __init__(self):
        super().__init__()
        self.text, self.tower, self.frozen = (nn.Linear(2, 2, bias=False) for _ in range(3))
        self.frozen.requires_grad_(False)

    def forward(self, hidden, image=None):
        return self.text(self.frozen(hidden) + (0 if image is None else self.tower(image))).sum()


def test_weights_that_a_pass_has_not_used_get_zeros_and_the_others_their_own():
    model = Seeing()
    text, image = torch.randn(3, 2), torch.randn(3, 2)
    plain = {name: torch.autograd.grad(model(text, image), weight)[0] for name, weight in model.text.named_parameters()}
    even = EvenGradients(model)
    model(text)  # a pass that nobody learns from
    even.join(loss := model(text, image)).backward()
    assert torch.equal(even.join(loss), loss)  # once per pass
    assert torch.equal(model.text.weight.grad, plain["weight"])
    assert model.tower.weight.grad.any()
    model.zero_grad()
    even.join(model(text)).backward()
    assert torch.equal(model.tower.weight.grad, torch.zeros(2, 2))
    assert model.text.weight.grad.any()
    assert model.frozen.weight.grad is None


def test_weights_of_which_this_rank_holds_nothing_now_have_their_whole_size():
    head = nn.Linear(2, LARGE_VOCABULARY)
    model = nn.Module()
    model.get_output_embeddings = lambda: head
    for weight in head.parameters():
        weight.ds_shape, weight.data = weight.shape, torch.empty(0)
    assert count_weights(head) == (3 * LARGE_VOCABULARY,) * 2
    assert head_worth_avoiding(model) is head


@pytest.mark.parametrize("is_sharded", [True, False])
def test_a_rank_with_less_to_write_takes_part_in_the_passes_of_the_others(monkeypatch, is_sharded):
    model, passes = load_model(), []
    generate = model.generate
    model.generate = lambda *given, synced_gpus, **named: passes.append(synced_gpus) or generate(*given, **named)
    monkeypatch.setattr("rollmatch.rollout.backend.is_sharded", lambda _: is_sharded)
    ranks = SimpleNamespace(learner_world_size=2, gather=lambda num_batches: [num_batches, 3])
    backend = HfBackend(model, template_of(), batch_size=2, ranks=ranks)
    backend.generate(requests_for(scenes()[:2]), Decoding(max_new_tokens=2))
    assert passes == ([True] * 3 if is_sharded else [False])
