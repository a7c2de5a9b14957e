"""Capability ``rollout-backends``, scenario by scenario; what needs a server is pending."""

import copy

import pytest
import torch

from conformance.doubles.configs import config_with, refusal_of
from conformance.doubles.digits import LONG_QUESTION, cut, load_model, requests_for, scenes, template_of
from rollmatch.rollout.backend import Decoding
from rollmatch.rollout.hf import HfBackend

SHORT = Decoding(max_new_tokens=6)


@pytest.fixture(scope="module")
def model():
    return load_model()


@pytest.fixture(scope="module")
def shallow(model):
    """For what does not ask for a sensible answer."""
    return cut(copy.deepcopy(model))


@pytest.mark.scenario(
    "rollout-backends/the-true-answer-does-not-travel",
    clauses=["rollout-backends/a-request-holds-the-prompt-and-nothing-of-the-answer#1,2,3"],
)
def test_the_true_answer_does_not_travel():
    template, sample = template_of(), scenes()[0]
    messages = template.messages(sample)
    assert [message["role"] for message in messages] == ["system", "user"]
    assert [part["type"] for part in messages[1]["content"]] == ["image", "text"]
    (request,) = requests_for([sample])
    found = f"{messages} {template.vocabulary.text(request.prompt_token_ids)}"
    assert not any(each.desc in found for each in sample.objects)


class CountingModel:
    """A model that notes the batches it generates for, and may fail."""

    def __init__(self, model, *, fails=False):
        self.model, self.batches, self.fails = model, [], fails

    def __getattr__(self, name):
        return getattr(self.model, name)

    def generate(self, **inputs):
        self.batches.append(inputs)
        if self.fails:
            raise RuntimeError("out of memory")
        return self.model.generate(**inputs)


@pytest.mark.scenario(
    "rollout-backends/five-prompts-in-batches-of-two",
    clauses=[
        "rollout-backends/the-hf-backend-generates-in-left-padded-batches#1,2,3,4",
        "rollout-backends/a-rollout-carries-exact-token-ids#3,5",
    ],
)
def test_five_prompts_in_batches_of_two(shallow):
    counting, template = CountingModel(shallow), template_of()
    mixed = [*requests_for(scenes()[:1]), *requests_for(scenes()[1:2], template=template_of(LONG_QUESTION))]
    requests = [*mixed, *requests_for(scenes()[2:5])]
    requests = [
        type(r)(**{f: getattr(r, f) for f in r.__slots__} | {"request_id": str(i)}) for i, r in enumerate(requests)
    ]
    rollouts = None
    try:
        rollouts = HfBackend(counting, template, batch_size=2).generate(requests, SHORT)
    except RuntimeError as error:
        pytest.fail(str(error))
    assert [len(inputs["input_ids"]) for inputs in counting.batches] == [2, 2, 1]
    mask = counting.batches[0]["attention_mask"]
    assert (mask[0, 0], mask[0, -1]) == (0, 1)
    assert [rollout.request_id for rollout in rollouts] == ["0", "1", "2", "3", "4"]
    for request, rollout in zip(requests, rollouts, strict=True):
        features = template.image_features(request.sample)
        assert rollout.prompt_token_ids == template.expand(request.prompt_token_ids, features)
    assert config_with().custom.extra.rollout_matching.rollout_generate_batch_size == 1
    assert refusal_of("~.rollout_generate_batch_size=0")[0] == "out-of-range"


@pytest.mark.scenario(
    "rollout-backends/a-failing-generation-leaves-the-model-in-training-mode",
    clauses=[
        "rollout-backends/the-hf-backend-generates-in-left-padded-batches#5",
        "rollout-backends/the-rollout-backend-is-chosen-in-yaml#3,4",
    ],
)
def test_a_failing_generation_leaves_the_model_in_training_mode(model):
    model.train()
    backend = HfBackend(CountingModel(model, fails=True), template_of(), batch_size=2)
    with pytest.raises(RuntimeError, match="out of memory"):
        backend.generate(requests_for(scenes()[:1]), SHORT)
    still_training = model.training
    model.eval()
    assert still_training
    assert torch.is_grad_enabled()
