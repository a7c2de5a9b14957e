"""Weights of the whole model's own exchange, which FSDP2 makes of those that have a gradient."""

import torch
from torch import nn

from rollmatch.model.sharding import EvenGradients


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
