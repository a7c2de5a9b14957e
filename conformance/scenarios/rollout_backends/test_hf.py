import dataclasses
from contextlib import contextmanager

import pytest
import torch
from transformers import GenerationConfig

from conformance.doubles.checkpoints import make_checkpoint
from conformance.doubles.digits import GREEDY, load_model, requests_for, scenes
from conformance.doubles.digits import tokens_of as tokens
from conformance.doubles.logprobs import TOLERANCE, farthest_apart
from conformance.doubles.records import make_request, make_sample
from conformance.doubles.refusals import refused
from rollmatch.model.template import Template
from rollmatch.rollout.backend import Decoding, check_answers
from rollmatch.rollout.hf import HfBackend

SAMPLED = Decoding(max_new_tokens=8, temperature=1.0)
HOT = Decoding(max_new_tokens=4, temperature=4.0)
BRIEF = Decoding(max_new_tokens=13)
"""Up to a coordinate: what one row does to another shows from the first token on."""


def two_layers_of(whole):
    text = whole.model.language_model
    text.layers = text.layers[:2]
    text.config.num_hidden_layers = len(text.layers)
    return whole


@pytest.fixture(scope="module")
def model():
    """It writes nothing sensible, which nothing here needs, but sees all that the whole one does: scenes differ."""
    return two_layers_of(load_model())


@pytest.fixture(scope="module")
def backend_of(model, template):
    return lambda batch_size: HfBackend(model, template, batch_size=batch_size)


@pytest.fixture(scope="module")
def requests_8(requests_16):
    return requests_16[:8]


@pytest.fixture(scope="module")
def brief_8(backend_of, requests_8):
    return backend_of(8).generate(requests_8, BRIEF)


@pytest.mark.scenario(
    "rollout-backends/greedy-output-does-not-depend-on-the-batch",
    clauses=["rollout-backends/the-hf-backend-generates-in-left-padded-batches#3"],
)
@pytest.mark.parametrize("batch_size", [1, 3, 4])
def test_the_microbatch_size_changes_no_greedy_rollout(batch_size, backend_of, brief_8, requests_8):
    assert backend_of(batch_size).generate(requests_8[:4], BRIEF) == brief_8[:4]


@contextmanager
def stopping_after(model, lengths, *, stop_id):
    """Row ``i`` of the next microbatch stops after ``lengths[i]`` tokens, whatever the model knows."""
    num_calls = 0

    def decide(head, inputs, logits):
        nonlocal num_calls
        due = torch.tensor([num_calls >= length for length in lengths])
        logits[:, -1, stop_id] = torch.where(due, 1e4, -1e4)
        num_calls += 1
        return logits

    hook = model.get_output_embeddings().register_forward_hook(decide)
    try:
        yield
    finally:
        hook.remove()


@pytest.mark.scenario(
    "rollout-backends/the-stop-token-is-trimmed",
    "rollout-backends/a-response-at-its-limit-keeps-all-its-ids",
    clauses=[
        "rollout-backends/a-rollout-carries-exact-token-ids#1,2,4,5",
        "decoding/a-response-leaves-room-for-its-prompt#1",
    ],
)
def test_a_stop_is_trimmed_and_a_length_finish_is_named(requests_8, backend_of, model, template):
    lengths, stop_id, eight = (5, 3, 0, 8, 1, 7, 6, 2), template.vocabulary.stop_id, Decoding(max_new_tokens=8)
    with stopping_after(model, (9,) * 8, stop_id=stop_id):
        endless = backend_of(8).generate(requests_8, eight)
    assert [(r.finish_reason, len(r.response_token_ids)) for r in endless] == [("length", 8)] * 8
    with stopping_after(model, lengths, stop_id=stop_id):
        stopped = backend_of(8).generate(requests_8, eight)
    assert [rollout.finish_reason for rollout in stopped] == ["length" if length == 8 else "stop" for length in lengths]
    assert tokens(stopped) == [rollout.response_token_ids[:n] for n, rollout in zip(lengths, endless, strict=True)]


def test_sampling_is_repeatable_from_its_seed_and_leaves_the_learners_random_state_alone(backend_of):
    requests = requests_for(scenes()[:2])
    torch.manual_seed(3)
    before = torch.random.get_rng_state()
    first = backend_of(2).generate(requests, HOT)
    assert torch.equal(torch.random.get_rng_state(), before)
    torch.manual_seed(4)
    assert backend_of(2).generate(requests, HOT) == first
    other = backend_of(2).generate(requests_for(scenes()[:2], run_seed=8), HOT)
    assert tokens(other) != tokens(first)


def test_what_a_model_recommends_for_generation_plays_no_part(backend_of, model, monkeypatch):
    """Not even where the decoding says nothing about it: the learner's distribution knows nothing of it either."""
    requests = requests_for(scenes()[:2])
    plain = tokens(backend_of(2).generate(requests, HOT))
    recommended = GenerationConfig(min_p=0.9, no_repeat_ngram_size=1, bad_words_ids=[[plain[0][0]]])
    monkeypatch.setattr(model, "generation_config", recommended)
    assert tokens(backend_of(2).generate(requests, HOT)) == plain
    assert model.generation_config is recommended


@pytest.fixture
def favour(model, template):
    """Makes placeholders of images likelier by so many nats."""
    boost, hooks = torch.zeros(model.get_output_embeddings().out_features), []
    boost[list(template.banned_ids)] = 1.0

    def register(nats):
        head = model.get_output_embeddings()
        hooks.append(head.register_forward_hook(lambda head, inputs, logits: logits + nats * boost))

    yield register
    for hook in hooks:
        hook.remove()


def test_placeholders_of_images_are_never_sampled(favour, backend_of, requests_16, template, monkeypatch):
    banned = {*template.banned_ids}

    def some_banned(decoding):
        rollouts = backend_of(2).generate(requests_16[:2], decoding)
        return {token for response in tokens(rollouts) for token in response} & banned

    favour(30.0)
    assert not some_banned(Decoding(max_new_tokens=8))
    assert not some_banned(SAMPLED)
    monkeypatch.setattr(template, "banned_ids", ())
    assert some_banned(SAMPLED), "nothing favours the placeholders: the ban was not tried"


def test_learner_and_engine_agree_where_placeholders_are_likely(favour, model, backend_of, requests_16):
    """The learner's distribution excludes the ids that rollouts may not contain."""
    favour(12.0)
    rollouts = backend_of(2).generate(requests_16[:2], dataclasses.replace(SAMPLED, logprobs=True))
    assert farthest_apart(model, requests_16[:2], rollouts, temperature=1.0) < TOLERANCE


GOOD_START, LATE_REWARD, REWARD = 300, 301, 302
"""Tokens of a garden path: the likelier first one leads nowhere."""


@contextmanager
def garden_path(model):
    """Its next token depends on the last one alone."""
    last = []

    def decide(head, inputs, logits):
        logits = torch.zeros_like(logits)
        for row, token in enumerate(last[-1].tolist()):
            favoured = {GOOD_START: {}, LATE_REWARD: {REWARD: 90.0}}.get(token, {GOOD_START: 91.0, LATE_REWARD: 90.0})
            for favourite, logit in favoured.items():
                logits[row, -1, favourite] = logit
        return logits

    hooks = [
        model.get_input_embeddings().register_forward_pre_hook(lambda table, inputs: last.append(inputs[0][:, -1])),
        model.get_output_embeddings().register_forward_hook(decide),
    ]
    try:
        yield
    finally:
        for hook in hooks:
            hook.remove()


def test_beams_find_what_greedy_passes_by(model, backend_of, requests_16):
    requests = requests_16[:2]
    with garden_path(model):
        greedy, beams = (
            backend_of(2).generate(requests, Decoding(max_new_tokens=2, num_beams=number)) for number in (1, 2)
        )
    assert {start for start, _ in tokens(greedy)} == {GOOD_START}
    assert tokens(beams) == [(LATE_REWARD, REWARD)] * 2
    assert [r.request_id for r in beams] == [request.request_id for request in requests]


def test_a_repetition_penalty_shows(backend_of, requests_16, template, model):
    """One so strong that no token is written twice; without it, something is."""
    plain, strong = Decoding(max_new_tokens=18), Decoding(max_new_tokens=18, repetition_penalty=1e4)
    with stopping_after(model, (99,) * 4, stop_id=template.vocabulary.stop_id):
        repeated = tokens(backend_of(4).generate(requests_16[:4], plain))
    with stopping_after(model, (99,) * 4, stop_id=template.vocabulary.stop_id):
        penalised = tokens(backend_of(4).generate(requests_16[:4], strong))
    assert all(len(set(response)) < 18 for response in repeated)
    assert all(len(set(response)) == 18 for response in penalised)


def test_rollouts_carry_the_version_and_the_model_comes_back_in_its_mode(model, backend_of, requests_16, monkeypatch):
    """Dropout changes nothing of what a model writes."""
    backend, brief, written = backend_of(2), Decoding(max_new_tokens=2, logprobs=True), []
    for layer in model.model.language_model.layers:
        monkeypatch.setattr(layer.self_attn, "attention_dropout", 0.5)
    assert backend.generate([], GREEDY) == []
    assert backend.policy_version == 0
    backend.push([], version=5)
    for training in (True, False):
        model.train(training)
        written.append(backend.generate(requests_16[:2], brief))
        assert [r.policy_version for r in written[-1]] == [5, 5]
        assert model.training == training
    assert written[0] == written[1]
    assert torch.is_grad_enabled()


@pytest.mark.scenario(
    "rollout-backends/swapped-rollouts-are-refused", clauses=["rollout-backends/a-rollout-carries-exact-token-ids#6"]
)
@pytest.mark.parametrize("wrong", ["missing", "swapped", "doubled"])
def test_answers_that_do_not_fit_the_requests_are_refused(wrong, requests_16, brief_8):
    requests, answers = requests_16[:3], brief_8[:3]
    check_answers(requests, answers)
    broken, key = {
        "missing": (answers[:2], "0.0.2"),
        "swapped": ([answers[0], answers[2], answers[1]], "0.0.1"),
        "doubled": ([*answers, answers[2]], "0.0.2"),
    }[wrong]
    with refused("rollouts-missing", key):
        check_answers(requests, broken)


def test_a_thinking_model_writes_what_ends_its_thoughts(tmp_path):
    model = make_checkpoint("qwen3", tmp_path, words=("<think>", "</think>", "<tool_call>"))
    template = Template(tmp_path, system="", user="Think.", any_chat=True)
    (likely,) = template.vocabulary.encode("</think>")
    model.lm_head.register_forward_hook(
        lambda head, inputs, logits: logits.index_fill(-1, torch.tensor([likely]), 50.0)
    )
    request = make_request(prompt_token_ids=template.prompt_token_ids(make_sample()))
    decoding = Decoding(max_new_tokens=2, temperature=1.0, logprobs=True)
    (rollout,) = HfBackend(model, template, batch_size=1).generate([request], decoding)
    assert rollout.response_token_ids == (likely, likely)
    assert rollout.response_logprobs == pytest.approx((0.0, 0.0), abs=1e-3)


@pytest.mark.parametrize("penalty", [0.01, 3.0])
def test_a_penalty_does_not_count_padding(backend_of, penalty):
    """transformers counts it as an id of the prompt."""
    rules = Decoding(max_new_tokens=4, repetition_penalty=penalty, logprobs=True)
    requests = [make_request(place, prompt_token_ids=tuple(range(20, 20 + size))) for place, size in enumerate((3, 9))]
    together, alone = backend_of(2).generate(requests, rules), backend_of(1).generate(requests, rules)
    for one, other in zip(together, alone, strict=True):
        assert one.sampled_ids == other.sampled_ids
        assert one.response_logprobs == pytest.approx(other.response_logprobs, abs=1e-5)
