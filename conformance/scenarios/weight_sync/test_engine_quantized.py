"""Engines that hold weights in 8 bits: they are sent in full, and quantized again at each sync."""

import shutil
from itertools import count

import numpy as np
import pytest
from safetensors.torch import save_file

from conformance.doubles.adapted_policy import adapted
from conformance.doubles.digits import MODEL, ROOT
from conformance.doubles.division import VLLM
from conformance.doubles.instance import ENGINE, running
from conformance.doubles.learner_side import connected, rendezvous
from conformance.doubles.refusals import refused
from conformance.doubles.started import cli_command, finish, journal_of
from rollmatch.dialects.native.sender import NativeSender
from rollmatch.weights.named_weights import adapter_of

pytestmark = [pytest.mark.engine, pytest.mark.wide, pytest.mark.fp8]
QUANTIZED = ENGINE | {"quantization": "fp8_per_channel"}
ARITHMETIC = ROOT / "fixtures/arithmetic/grpo.yaml"
WAYS = (
    {"transport": "gloo", "stage": False},
    {"transport": "direct", "stage": False},
    {"transport": "direct", "stage": True},
)
SAMPLED = {"max_tokens": 24, "temperature": 1.0, "ignore_eos": True, "logprobs": True}


def written_by(server, batch):
    """Sampled responses with their log-probabilities, and the version that wrote them."""
    status, body = server.post_packed("/native/infer/", {"requests": batch, "sampling": SAMPLED})
    assert status == 200, body
    answers = body["responses"]
    values = [np.frombuffer(answer["logprobs"], "<f4") for answer in answers]
    return [answer["response_token_ids"] for answer in answers], np.stack(values), answers[0]["policy_version"]


def saved(policy, folder):
    """A model directory with these weights."""
    shutil.copytree(MODEL, folder)
    save_file(policy.weights, folder / "model.safetensors", metadata={"format": "pt"})
    return folder


@pytest.mark.scenario(
    "weight-sync/a-quantized-server-answers-as-one-started-with-the-weights",
    "weight-sync/a-quantized-server-merges-no-adapter",
    clauses=["weight-sync/an-engine-may-quantize-what-it-is-sent#1,2,3,4,6"],
)
def test_a_quantized_server_answers_as_one_started_with_the_weights(tmp_path, policies, scene_batch):
    changed, fields = policies[1], {"dtype": "bfloat16", "engine_arguments": QUANTIZED}
    with running(tmp_path / "started", model=str(saved(changed, tmp_path / "model")), **fields) as instance:
        expected = written_by(instance.server, scene_batch)
    with running(tmp_path / "synced", load_format="dummy", **fields) as instance:
        versions = count(1)
        for way in WAYS:
            sender = NativeSender([connected(instance.server.url)], rendezvous(), **way)
            for policy in (changed, policies[2], changed):
                version = next(versions)
                sender.send(policy.weights.items(), version=version)
                ids, values, by = written_by(instance.server, scene_batch)
                assert by == version
                assert (ids == expected[0]) is (policy is changed)
            assert np.array_equal(values, expected[1])
            with refused("merge-quantized", "adapter"):
                sender.send_adapter(adapter_of(adapted(use_dora=False)), version=next(versions))
            assert written_by(instance.server, scene_batch)[0] == expected[0]
            sender.send(policies[2].weights.items(), version=next(versions))
            assert written_by(instance.server, scene_batch)[0] != expected[0]
            sender.close()


@pytest.mark.scenario("weight-sync/a-quantized-engine-writes-what-a-learner-learns-from")
def test_a_quantized_engine_writes_what_a_learner_learns_from(tmp_path):
    """In the learner's process; an engine that kept the first weights would be further apart with each step."""
    out = tmp_path / "run"
    sums = (f"custom.train_jsonl={ARITHMETIC.parent}/train.jsonl", f"custom.val_jsonl={ARITHMETIC.parent}/val.jsonl")
    moving = ("training.max_steps=3", "training.learning_rate=2e-3", "training.warmup_steps=0")
    small = ("training.per_device_train_batch_size=8", "training.eval_scenes=2", f"training.output_dir={out}")
    own = (f"model.model={ROOT}/fixtures/models/arithmetic", f"{VLLM}.quantization=fp8", f"{VLLM}.dtype=bfloat16")
    code, text = finish(cli_command("train", ARITHMETIC, *sums, *moving, *small, *own), tmp_path / "out.txt")
    assert code == 0, text[-3000:]
    apart = [event["drift"] for event in journal_of(out, "step")]
    assert len(apart) == 3
    assert all(0.001 < each < 0.05 for each in apart), apart
