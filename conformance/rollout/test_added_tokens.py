"""Added tokens belong to the policy, all but the placeholders of images and videos."""

import pytest
import torch

from conformance.doubles.checkpoints import make_checkpoint
from rollmatch.model.template import Template
from rollmatch.records import RolloutRequest, Sample
from rollmatch.rollout.backend import Decoding
from rollmatch.rollout.hf import HfBackend


def test_a_thinking_model_writes_what_ends_its_thoughts(tmp_path):
    model = make_checkpoint("qwen3", tmp_path, words=("<think>", "</think>", "<tool_call>"))
    template = Template(tmp_path, system="", user="Think.", any_chat=True)
    (likely,) = template.vocabulary.encode("</think>")
    model.lm_head.register_forward_hook(
        lambda head, inputs, logits: logits.index_fill(-1, torch.tensor([likely]), 50.0)
    )
    sample = Sample(sample_id=0, origin="x:1", images=())
    request = RolloutRequest(
        request_id="0.0.0", sample=sample, prompt_token_ids=template.prompt_token_ids(sample), seed=1
    )
    decoding = Decoding(max_new_tokens=2, temperature=1.0, logprobs=True)
    (rollout,) = HfBackend(model, template, batch_size=1).generate([request], decoding)
    assert rollout.response_token_ids == (likely, likely)
    assert rollout.response_logprobs == pytest.approx((0.0, 0.0), abs=1e-3)
