"""Experts behind a real server: it writes what transformers writes, after weights by either kind of name."""

from itertools import pairwise

import pytest
import torch
from PIL import Image

from conformance.doubles.checkpoints import make_checkpoint
from conformance.doubles.instance import free_port, running
from conformance.doubles.learner_side import native_backend
from conformance.doubles.records import make_request
from rollmatch.dialects.trl.vllm_client import VLLMClient
from rollmatch.model.template import Template
from rollmatch.records import Sample
from rollmatch.rollout.backend import Decoding
from rollmatch.rollout.hf import HfBackend
from rollmatch.weights.named_weights import named_weights

pytestmark = [pytest.mark.engine, pytest.mark.wide]
NUM_TOKENS = 8


@torch.no_grad()
def perturb(model, *, seed):
    generator = torch.Generator().manual_seed(seed)
    for weight in model.parameters():
        weight += 0.05 * torch.randn(weight.shape, generator=generator)


@pytest.mark.scenario(clauses=["server-dialects/the-trl-dialect-serves-trl-and-verifiers-trainers#8"])
def test_experts_are_served_as_they_were_sent(tmp_path):
    """Of a model that sees; those of text alone are in the table of models."""
    folder, shown = tmp_path / "model", str(tmp_path / "noise.png")
    model = make_checkpoint("qwen3_vl_moe", folder)
    template = Template(folder, system="Look.", user="What?", any_chat=True)
    Image.effect_noise((90, 50), 40).convert("RGB").save(shown)
    sample = Sample(sample_id=0, origin="x:1", images=(shown,), width=90, height=50)
    prompt, written = list(template.prompt_token_ids(sample)), []
    with running(tmp_path / "log", model=str(folder)) as server:
        client = VLLMClient(server_port=server.settings.port, group_port=free_port(), connection_timeout=30)

        def check():
            request = make_request(0, sample=sample, prompt_token_ids=tuple(prompt))
            decoding = Decoding(max_new_tokens=NUM_TOKENS, logprobs=True)
            (expected,) = HfBackend(model, template, batch_size=1).generate([request], decoding)
            pictures = [[Image.open(shown)]]
            banned = {"logit_bias": dict.fromkeys(template.banned_ids, -100.0)}
            greedy = {"temperature": 0.0, "max_tokens": NUM_TOKENS, "logprobs": 0, "generation_kwargs": banned}
            found = client.generate([prompt], images=pictures, **greedy)
            assert found["prompt_ids"] == [list(expected.prompt_token_ids)]
            assert found["completion_ids"] == [list(expected.response_token_ids)]
            values = [value for (value,) in found["logprobs"][0]]
            assert values == pytest.approx(expected.response_logprobs, abs=1e-4)
            written.append(values)

        check()
        perturb(model, seed=1)
        client.init_communicator()
        for key, weight in model.named_parameters():
            client.update_named_param(key, weight.detach())
        client.reset_prefix_cache()
        check()
        perturb(model, seed=2)
        client.update_model_params(model)
        client.close_communicator()
        check()
        perturb(model, seed=3)
        learner = native_backend(server.url, template)
        learner.push(named_weights(model), version=server.server.version + 1)
        learner.close()
        check()
    assert all(one != pytest.approx(other, abs=1e-2) for one, other in pairwise(written))
