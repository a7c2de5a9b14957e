"""What the judge expects of models whose checkpoints have other tensors than memory: mixtures of experts."""

import pytest
import torch
from safetensors.torch import save_file
from transformers import AutoModelForCausalLM, AutoModelForImageTextToText

from conformance.doubles.checkpoints import make_checkpoint
from conformance.judge.servers.policy import Policies
from conformance.judge.servers.question import Question

IDS = [5, 6, 7, 8, 9, 10]


@pytest.mark.parametrize(
    ("name", "kind"), [("qwen3_moe", AutoModelForCausalLM), ("qwen3_vl_moe", AutoModelForImageTextToText)]
)
def test_numbers_of_a_changed_policy_are_those_of_a_checkpoint_with_its_weights(tmp_path, name, kind):
    make_checkpoint(name, tmp_path)
    policies, question = Policies(tmp_path), Question(text="", ids=IDS)
    changed = policies.weights(1)
    by_expert = [one for one in changed if "experts" in one]
    assert by_expert
    found = [policies.scorer.logits(number, question) for number in (0, 1)]
    written = policies.writes(1, IDS, max_tokens=8)
    save_file(changed, tmp_path / "model.safetensors", metadata={"format": "pt"})
    model = kind.from_pretrained(tmp_path, dtype=torch.float32).eval()
    with torch.no_grad():
        expected = model(input_ids=torch.tensor([IDS])).logits[0, -1]
    assert torch.allclose(found[1], expected, atol=1e-4)
    assert not torch.allclose(found[0], expected, atol=1e-2)
    assert written == Policies(tmp_path).writes(0, IDS, max_tokens=8)
