"""A real, unmodified ``vllm serve``: our weights reach it, and a transfer that fails leaves it as it was."""

import json
import os
import sys
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
from PIL import Image

from conformance.doubles.digits import (
    BRIEF,
    CONFIG,
    MODEL,
    ROOT,
    load_model,
    requests_for,
    template_of,
    tokens_of,
    unseen,
)
from conformance.doubles.instance import ENVIRONMENT, free_port
from conformance.doubles.learner_side import connected, rendezvous
from conformance.doubles.logprobs import TOLERANCE, farthest_apart
from conformance.doubles.one_step import take_steps
from conformance.doubles.processes import Running, start
from conformance.doubles.refusals import refused
from rollmatch.dialects.logprobs import QUESTION, check_logprobs
from rollmatch.dialects.vllm import transports
from rollmatch.errors import RollmatchError
from rollmatch.ranks import Ranks
from rollmatch.rollout.backend import Decoding
from rollmatch.rollout.servers import VllmServerBackend
from rollmatch.rollout.weight_sender import make_sender
from rollmatch.weights import digest
from rollmatch.weights.gloo import CHAIN_PROTOCOL
from rollmatch.weights.worker.plugin import NAME

PLUGGED = ROOT / "conformance/judge/servers/plugged"
ENTRY_POINT = f"[vllm.general_plugins]\n{NAME} = rollmatch.weights.worker.plugin:register\n"


def plugin_path(directory):
    """A folder with the entry point, for an installation that is older than it."""
    about = Path(directory) / "rollmatch_plugin-0.dist-info"
    about.mkdir(exist_ok=True)
    (about / "METADATA").write_text("Metadata-Version: 2.1\nName: rollmatch-plugin\nVersion: 0\n")
    (about / "entry_points.txt").write_text(ENTRY_POINT)
    return str(directory)


@contextmanager
def stock_server(directory, *flags):
    """URL of a running one."""
    port = free_port()
    command = [sys.executable, "-m", "vllm.entrypoints.openai.api_server"]
    options = {
        "model": MODEL, "served-model-name": "digits", "host": "127.0.0.1", "port": port, "dtype": "float32",
        "max-model-len": 512, "max-num-seqs": 16, "kv-cache-memory-bytes": 128 << 20,
        "limit-mm-per-prompt": json.dumps({"image": 1, "video": 0}),
        "weight-transfer-config": json.dumps({"backend": NAME}),
    }  # fmt: skip
    command += [word for name, value in options.items() for word in (f"--{name}", str(value))]
    plugins = {"VLLM_PLUGINS": f"{NAME},fork_engines"}  # as vLLM does by itself on GPUs
    plugins["PYTHONPATH"] = os.pathsep.join([plugin_path(directory), str(PLUGGED), os.environ.get("PYTHONPATH", "")])
    environment = os.environ | ENVIRONMENT | {"VLLM_SERVER_DEV_MODE": "1"} | plugins
    log = Path(directory) / "log"
    process = start([*command, "--enforce-eager", *flags], log, environment=environment)
    server = Running(process, log)
    try:
        server.wait_healthy(f"http://127.0.0.1:{port}")
        yield f"http://127.0.0.1:{port}"
    finally:
        server.end()


pytestmark = pytest.mark.engine

AS_SAMPLED = ("--logprobs-mode", "processed_logprobs")
SHAPES = {"min_p": 0.3, "presence_penalty": 0.5, "frequency_penalty": 0.5, "top_k": 3, "repetition_penalty": 1.3}
"""What a model's generation_config.json may hold, and a server then does unless a request says otherwise."""
LONGEST = 50
"""Tokens of a response: what a request asks for beyond them the server leaves out, and says so nowhere."""


@pytest.fixture(scope="module")
def stock(tmp_path_factory):
    flags = (*AS_SAMPLED, "--override-generation-config", json.dumps(SHAPES | {"max_new_tokens": LONGEST}))
    with stock_server(tmp_path_factory.mktemp("stock"), *flags) as url:
        yield url


@pytest.fixture(scope="module")
def backend(stock):
    server = connected(stock)
    assert server.dialect.name == "vllm"
    made = VllmServerBackend(
        [server], template_of(), Ranks(), sender=make_sender([server], [rendezvous()], stage=False)
    )
    yield made
    made.close()


@pytest.mark.wide
def test_a_learner_takes_a_step_on_pictures_and_leaves_room_for_the_next(stock, tmp_path):
    """First: the server takes one learner at a time."""
    take_steps(CONFIG, stock, tmp_path, limits=("custom.extra.rollout_matching.max_new_tokens=48",))


@pytest.mark.scenario(clauses=["server-dialects/the-vllm-dialect-drives-a-stock-vllm-server#1,2"])
def test_greedy_rollouts_follow_every_sync(backend, policies, scene_requests):
    for version, policy in ((1, policies[1]), (2, policies[2])):
        backend.push(policy.weights.items(), version=version)
        assert tokens_of(backend.generate(scene_requests, BRIEF)) == policy.responses
        assert backend.is_current()


@pytest.mark.scenario(clauses=["server-dialects/the-vllm-dialect-drives-a-stock-vllm-server#6"])
def test_what_its_chat_template_would_write_otherwise_goes_as_ids(backend, policies, scene_requests):
    """A prompt that is rendered already, and a response to continue."""
    backend.push(policies[0].weights.items(), version=backend.policy_version + 1)
    (plain,) = requests_for(unseen([scene_requests[0].sample]))
    rendered = template_of().vocabulary.decode(plain.prompt_token_ids).decode()
    again = replace(plain.sample, messages=(("user", rendered),), has_text_prompt=True)
    with pytest.warns(UserWarning, match="markers"):
        (taken,) = requests_for([again])
    whole, same = backend.generate([plain, replace(taken, request_id="0.0.1")], BRIEF)
    assert whole.prompt_token_ids == same.prompt_token_ids == plain.prompt_token_ids
    assert whole.response_token_ids == same.response_token_ids
    (rest,) = backend.generate([replace(plain, prefix_token_ids=whole.response_token_ids[:3])], BRIEF)
    assert rest.response_token_ids[:9] == whole.response_token_ids[3:12]


@pytest.mark.scenario("server-dialects/a-stock-server-with-a-lower-limit-is-refused-at-its-first-cut-response")
def test_a_limit_of_the_server_is_found_by_the_first_response_that_it_cuts(backend, policies, scene_requests):
    backend.push(policies[0].weights.items(), version=backend.policy_version + 1)
    rollouts = backend.generate(scene_requests, Decoding(max_new_tokens=LONGEST))
    assert "length" in {rollout.finish_reason for rollout in rollouts}
    with refused("response-cut-short", backend.servers[0].base_url, problem=f"a response of {LONGEST} tokens"):
        backend.generate(scene_requests, Decoding(max_new_tokens=LONGEST + 1))


@pytest.mark.parametrize("temperature", [1.0, 0.7])
def test_log_probabilities_are_those_of_the_sampled_distribution(temperature, backend, policies, scene_requests):
    check_logprobs(backend.servers[0], prompt_token_ids=template_of().vocabulary.encode(QUESTION))
    backend.push(policies[0].weights.items(), version=backend.policy_version + 1)
    decoding = Decoding(max_new_tokens=48, temperature=temperature, logprobs=True)
    rollouts = backend.generate(scene_requests, decoding)
    assert farthest_apart(load_model(), scene_requests, rollouts, temperature=temperature) < TOLERANCE


FILES = {"rgba.png": "RGBA", "palette.png": "P", "grey.png": "LA", "grey16.png": "I;16"}


@pytest.mark.parametrize("name", FILES)
def test_log_probabilities_of_images_that_readers_see_differently(name, backend, policies, scene_requests, tmp_path):
    backend.push(policies[0].weights.items(), version=backend.policy_version + 1)
    requests = [with_image(request, tmp_path / f"{place}-{name}") for place, request in enumerate(scene_requests)]
    rollouts = backend.generate(requests, Decoding(max_new_tokens=48, temperature=1.0, logprobs=True))
    assert farthest_apart(load_model(), requests, rollouts, temperature=1.0) < TOLERANCE


def with_image(request, path):
    """The request with its image in another form, most of which has a transparent half."""
    mode, made = FILES[path.name.partition("-")[2]], Image.open(request.sample.images[0]).convert("RGBA")
    made.putalpha(Image.linear_gradient("L").resize(made.size))
    saved = {}
    if mode == "P":
        made, saved = made.convert("RGB").quantize(16), {"transparency": bytes(range(0, 256, 16))}
    elif mode == "I;16":
        made = Image.fromarray(np.asarray(made.convert("L")).astype(np.uint16) * 257)
    else:
        made = made.convert(mode)
    made.save(path, **saved)
    return replace(request, sample=replace(request.sample, images=(str(path),)))


@pytest.mark.scenario(clauses=["server-dialects/the-vllm-dialect-drives-a-stock-vllm-server#4"])
def test_a_learner_with_another_way_of_sending_is_refused_before_it_joins(stock, policies, monkeypatch):
    monkeypatch.setattr(transports, "CHAIN_PROTOCOL", CHAIN_PROTOCOL + 1)
    sender = make_sender([connected(stock)], [rendezvous()], stage=False)
    with pytest.raises(RollmatchError) as caught:
        sender.send(policies[1].weights.items(), version=1)
    assert caught.value.code == "server-refused"
    assert f"protocol {CHAIN_PROTOCOL + 1}" in caught.value.problem


def test_a_transfer_that_is_not_what_was_announced_changes_nothing(backend, policies, scene_requests, monkeypatch):
    backend.push(policies[1].weights.items(), version=backend.policy_version + 1)
    with monkeypatch.context() as patched:
        patched.setattr(digest, "digest_of_bytes", lambda raw: bytes(16))
        with pytest.raises(RollmatchError) as caught:
            backend.push(policies[2].weights.items(), version=backend.policy_version + 1)
    assert caught.value.code == "server-refused"
    assert "digest" in caught.value.problem
    assert not backend.is_current()
    held = VllmServerBackend(backend.servers, template_of(), Ranks(), sender=None)
    held.members.instances = {}
    assert tokens_of(held.generate(scene_requests, BRIEF)) == policies[1].responses
    backend.push(policies[2].weights.items(), version=backend.policy_version + 1)
    assert tokens_of(backend.generate(scene_requests, BRIEF)) == policies[2].responses
