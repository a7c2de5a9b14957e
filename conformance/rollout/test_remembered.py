"""What a remembered answer depends on."""

from types import SimpleNamespace

import pytest
import torch
from transformers import GenerationConfig

from conformance.rollout.remembered import Remembered, forget


class Counting(torch.nn.Linear):
    num_computed = 0

    def generate(self, **asked):
        self.num_computed += 1
        return SimpleNamespace(sequences=asked["input_ids"] * 2, get=lambda name: None)


def settings(num_tokens):
    return {"generation_config": GenerationConfig(max_new_tokens=num_tokens, do_sample=True)}


QUESTION = {"input_ids": torch.tensor([[1, 2]])} | settings(4)


@pytest.fixture
def model():
    forget()
    return Counting(2, 2).eval()


def ask(model, **other):
    torch.manual_seed(other.pop("seed", 1))
    return Remembered(model).generate(**(QUESTION | other)).sequences.tolist()


def change(model):
    with torch.no_grad():
        model.bias[1] += 1e-3
    return {}


def test_the_same_question_is_computed_once(model):
    assert ask(model) == ask(model) == [[2, 4]]
    assert model.num_computed == 1
    forget()
    assert ask(model) == [[2, 4]]
    assert model.num_computed == 2


@pytest.mark.parametrize(
    "differ",
    [
        change,
        lambda model: {"seed": 2},
        lambda model: {"input_ids": torch.tensor([[1, 3]])},
        lambda model: settings(5),
        lambda model: {"attention_mask": torch.tensor([[0, 1]])},
        lambda model: model.train() and {},
        lambda model: setattr(model, "config", SimpleNamespace(_attn_implementation="eager")) or {},
        lambda model: model.double() and {},
    ],
)
def test_another_question_is_computed(differ, model):
    ask(model)
    ask(model, **differ(model))
    assert model.num_computed == 2
