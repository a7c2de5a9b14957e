"""Capability ``rollout-backends``, scenario by scenario; what needs a server is pending."""

import copy

import pytest
import torch

from conformance.rollout.digits import GREEDY, LONG_QUESTION, cut, load_model, requests_for, scenes, template_of
from conformance.scenarios.configs import LONG, config_with, not_refused, refusal_of
from rollmatch.model.template import PromptMismatch
from rollmatch.model.vocabulary import trim_stop
from rollmatch.records import Rollout, Sample
from rollmatch.rollout.backend import Decoding, RolloutsMissing, check_answers
from rollmatch.rollout.hf import HfBackend

SHORT = Decoding(max_new_tokens=6)
SAMPLE = Sample(sample_id=0, origin="train.jsonl:7", images=(), objects=(), width=8, height=8)


@pytest.fixture(scope="module")
def model():
    return load_model()


@pytest.fixture(scope="module")
def shallow(model):
    """For what does not ask for a sensible answer."""
    return cut(copy.deepcopy(model))


def ids_of(rollouts):
    return [rollout.response_token_ids for rollout in rollouts]


def check(learner, engine):
    rollout = Rollout(
        request_id="0.0.0", prompt_token_ids=engine, response_token_ids=(), finish_reason="stop", policy_version=1
    )
    template_of().check_alignment(SAMPLE, learner, rollout)


def mismatch(learner, engine):
    with pytest.raises(PromptMismatch) as caught:
        check(learner, engine)
    return caught.value


@pytest.mark.scenario(
    "rollout-backends/the-default-backend-is-vllm",
    clauses=["rollout-backends/the-rollout-backend-is-chosen-in-yaml#1,2"],
)
def test_the_default_backend_is_vllm():
    assert config_with().custom.extra.rollout_matching.rollout_backend == "vllm"
    for backend in ("vllm", "hf"):
        assert config_with(f"~.rollout_backend={backend}").custom.extra.rollout_matching.rollout_backend == backend


@pytest.mark.scenario("rollout-backends/an-unknown-backend-is-refused")
def test_an_unknown_backend_is_refused():
    assert refusal_of("~.rollout_backend=tgi") == ("not-a-choice", f"{LONG}rollout_backend")


@pytest.mark.scenario(
    "rollout-backends/the-stop-token-is-trimmed", clauses=["rollout-backends/a-rollout-carries-exact-token-ids#1,2,4,5"]
)
def test_the_stop_token_is_trimmed(model):
    assert trim_stop([5, 6, 9, 7], {9}) == (5, 6)
    stop_id = template_of().vocabulary.stop_id
    (rollout,) = HfBackend(model, template_of(), batch_size=1).generate(requests_for(scenes()[:1]), GREEDY)
    assert rollout.finish_reason == "stop"
    assert stop_id not in rollout.response_token_ids
    assert template_of().vocabulary.text(rollout.response_token_ids).endswith("]}")


@pytest.mark.scenario(
    "rollout-backends/a-response-at-its-limit-keeps-all-its-ids",
    clauses=[
        "rollout-backends/a-rollout-carries-exact-token-ids#1,4",
        "decoding/a-response-leaves-room-for-its-prompt#1",
    ],
)
def test_a_response_at_its_limit_keeps_all_its_ids(model):
    assert trim_stop([5, 6, 7], {9}) == (5, 6, 7)
    (rollout,) = HfBackend(model, template_of(), batch_size=1).generate(
        requests_for(scenes()[:1]), Decoding(max_new_tokens=3)
    )
    assert len(rollout.response_token_ids) == 3
    assert rollout.finish_reason == "length"


@pytest.mark.scenario(
    "rollout-backends/one-differing-id-stops-the-run",
    clauses=["rollout-backends/learner-and-engine-see-the-same-prompt#1,2,3"],
)
def test_one_differing_id_stops_the_run():
    error = mismatch((1, 2, 3, 4), (1, 2, 8, 4))
    assert (error.code, error.key) == ("prompt-mismatch", "train.jsonl:7")
    assert all(found in error.problem for found in ("position 2", "learner 3", "engine 8"))


@pytest.mark.scenario(
    "rollout-backends/a-shorter-engine-prompt-stops-the-run",
    clauses=["rollout-backends/learner-and-engine-see-the-same-prompt#2,3"],
)
def test_a_shorter_engine_prompt_stops_the_run():
    error = mismatch((1, 2, 3, 4), (2, 3, 4))
    assert error.code == "prompt-mismatch"
    assert "system message is missing on one side" in error.remedy


@pytest.mark.scenario("rollout-backends/equal-prompts-are-accepted")
def test_equal_prompts_are_accepted():
    with not_refused():
        check((1, 2, 3, 4), (1, 2, 3, 4))


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
    "rollout-backends/greedy-output-does-not-depend-on-the-batch",
    clauses=["rollout-backends/the-hf-backend-generates-in-left-padded-batches#3"],
)
def test_greedy_output_does_not_depend_on_the_batch(shallow):
    template = template_of()
    long = [request.prompt_token_ids for request in requests_for(scenes()[:2], template=template_of(LONG_QUESTION))]
    requests = requests_for(scenes()[:5])
    requests = [
        type(r)(
            request_id=r.request_id, sample=r.sample, prompt_token_ids=long[i] if i < 2 else r.prompt_token_ids, seed=1
        )
        for i, r in enumerate(requests)
    ]
    alone, together = (HfBackend(shallow, template, batch_size=size).generate(requests, SHORT) for size in (1, 5))
    assert ids_of(alone) == ids_of(together)


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


@pytest.mark.scenario(
    "rollout-backends/swapped-rollouts-are-refused", clauses=["rollout-backends/a-rollout-carries-exact-token-ids#6"]
)
def test_swapped_rollouts_are_refused(model):
    requests = requests_for(scenes()[:2])
    rollouts = HfBackend(model, template_of(), batch_size=2).generate(requests, Decoding(max_new_tokens=1))
    with pytest.raises(RolloutsMissing) as caught:
        check_answers(requests, rollouts[::-1])
    assert caught.value.code == "rollouts-missing"
    with not_refused():
        check_answers(requests, rollouts)
