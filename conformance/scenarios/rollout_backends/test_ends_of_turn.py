"""Which tokens end a response: those of real tokenizers, and that every backend and dialect stops at each of them."""

import json
import shutil
from contextlib import contextmanager

import openai
import pytest
from transformers import AutoModelForCausalLM

from conformance.doubles.instance import running
from conformance.doubles.refusals import refused
from conformance.doubles.talker import CALL, END_OF_TURN, EOS, asked, make_talker, talker_template
from rollmatch.dialects.session import DIALECTS, ClientSettings, RolloutServer
from rollmatch.model.stops import find_stops
from rollmatch.model.vocabulary import load_tokenizer
from rollmatch.objectives.grpo.segments import policy_segment, sampled_logprobs
from rollmatch.ranks import Ranks
from rollmatch.records import PolicyTarget
from rollmatch.rollout.backend import Decoding, make_requests
from rollmatch.rollout.hf import HfBackend
from rollmatch.rollout.servers import VllmServerBackend
from rollmatch.rollout.vllm_colocate import EngineSettings, VllmColocateBackend

CHAINS = (("1", "2", END_OF_TURN), ("3", "4", EOS), ("5", "6", CALL), ("7", "8"))
WANTED = [("2", END_OF_TURN), ("4", EOS), ("6", CALL), ("89999", None)]
"""What each of them says, and the token that ends it; the last one has no end but its limit."""
DECODING = Decoding(max_new_tokens=5, temperature=1.0, logprobs=True)
SMALL = {"enforce_eager": True, "kv_cache_memory_bytes": 64 << 20, "max_num_seqs": 8}


@pytest.fixture(scope="module")
def talker(tmp_path_factory):
    """Three ends, each named in one place: chat template (as of Qwen's base models), tokenizer, generation_config."""
    folder = tmp_path_factory.mktemp("talker") / "model"
    return make_talker(folder, chains=CHAINS, generated=[CALL])


def check(backend, template):
    """All agree on text, end, labels and log-probabilities."""
    samples = [asked(chain[0], number) for number, chain in enumerate(CHAINS)]
    requests = make_requests(samples, prompt_of=template.prompt_token_ids, run_seed=1, step=0, rank=0)
    rollouts = backend.generate(requests, DECODING)
    vocabulary = template.vocabulary
    ends = [None if one.stop_id is None else vocabulary.tokenizer.id_to_token(one.stop_id) for one in rollouts]
    assert list(zip([vocabulary.text(one.response_token_ids) for one in rollouts], ends, strict=True)) == WANTED
    assert [one.finish_reason for one in rollouts] == ["stop", "stop", "stop", "length"]
    for sample, rollout in zip(samples, rollouts, strict=True):
        segment = policy_segment(sample, rollout, PolicyTarget(advantages=()))
        assert segment.token_ids == (*rollout.prompt_token_ids, *rollout.sampled_ids)
        assert sampled_logprobs(sample, rollout) == pytest.approx((0.0,) * segment.train_len, abs=0.01)


@pytest.mark.scenario(
    "rollout-backends/an-end-of-turn-that-is-in-no-configuration",
    clauses=["rollout-backends/the-model-says-what-ends-a-response#1,5"],
)
def test_generation_of_transformers_stops_at_every_end(talker):
    template = talker_template(talker)
    check(HfBackend(AutoModelForCausalLM.from_pretrained(talker).float(), template, batch_size=4), template)


@pytest.mark.wide
@pytest.mark.engine
def test_a_colocated_engine_stops_at_every_end(talker):
    template = talker_template(talker)
    settings = EngineSettings(model=str(talker), dtype="float32", max_model_len=64, engine_arguments=SMALL)
    backend = VllmColocateBackend(settings, template, Ranks())
    backend.push((), version=1)
    check(backend, template)
    backend.close()


@contextmanager
def speaking(server, dialect, template):
    """The learner's side of one dialect."""
    made = RolloutServer(server.url, ClientSettings(timeout_s=60))
    made.connect()
    made.dialect = DIALECTS[dialect](made.base_url)
    backend = VllmServerBackend([made], template, Ranks(), sender=None)
    backend.push((), version=0)
    yield backend
    backend.close()


def check_openai(client, model):
    """The official client, which names no stop tokens."""
    for chain, (text, end) in zip(CHAINS, WANTED, strict=True):
        asked = [{"role": "user", "content": chain[0]}]
        reply = client.chat.completions.create(model=model, messages=asked, max_tokens=5, logprobs=True)
        (choice,) = reply.choices
        assert (choice.message.content, choice.finish_reason) == (text, "length" if end is None else "stop")
        labelled = [each.logprob for each in choice.logprobs.content]
        assert labelled == pytest.approx([0.0] * (len(text) + (end is not None)), abs=0.01)


@pytest.mark.engine
@pytest.mark.scenario(clauses=["rollout-backends/the-model-says-what-ends-a-response#4"])
def test_servers_of_every_dialect_stop_at_every_end(talker, tmp_path):
    template = talker_template(talker)
    with running(tmp_path / "log", model=str(talker), max_model_len=64, engine_arguments=SMALL) as server:
        for dialect in DIALECTS:
            with speaking(server, dialect, template) as backend:
                check(backend, template)
        check_openai(openai.OpenAI(base_url=f"{server.url}/v1", api_key="none", max_retries=0), str(talker))


@pytest.mark.scenario(clauses=["rollout-backends/the-model-says-what-ends-a-response#2,3"])
def test_a_token_can_be_named_instead_and_a_wrong_one_is_refused(talker, tmp_path):
    folder = shutil.copytree(talker, tmp_path / "model")
    tokenizer = load_tokenizer(folder)
    with pytest.warns(UserWarning, match=r"generation_config.json .* does not name <\|eot_id\|>"):
        talker_template(folder)
    found, named = find_stops(tokenizer, folder), find_stops(tokenizer, folder, stop_token=CALL)
    assert (found.token, found.is_generated, named.token, named.is_generated) == (END_OF_TURN, False, CALL, True)
    with refused("stop-token-missing", "model.stop_token"):
        find_stops(tokenizer, folder, stop_token="<|no_such|>")
    (folder / "chat_template.jinja").unlink()
    assert find_stops(load_tokenizer(folder), folder).token == EOS, "without a chat template"
    (folder / "tokenizer_config.json").write_text(json.dumps({"tokenizer_class": "PreTrainedTokenizerFast"}))
    (folder / "generation_config.json").unlink()
    (folder / "config.json").write_text(json.dumps({"model_type": "qwen3"}))
    with refused("stop-token-missing", "model.stop_token"):
        find_stops(load_tokenizer(folder), folder)
