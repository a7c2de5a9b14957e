"""vLLM's own model classes: what learnt places write is, parameter by parameter, what vLLM's loader writes."""

import json
import sys
from pathlib import Path

import pytest
import torch
from transformers import LlamaConfig, LlamaForCausalLM, Qwen3MoeConfig, Qwen3MoeForCausalLM

from conformance.processes import start
from conformance.rollout.digits import ROOT

pytestmark = pytest.mark.engine
SCRIPT = Path(__file__).with_name("placed_model.py")
QWEN, QWEN_VL = ROOT / "fixtures/models/arithmetic", ROOT / "fixtures/models/digits"
SMALL = {
    "vocab_size": 100,  # vLLM fills it up to 128 rows
    "hidden_size": 32,
    "intermediate_size": 48,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 8,
    "max_position_embeddings": 64,
}
EXPERTS = {"num_experts": 4, "num_experts_per_tok": 2, "moe_intermediate_size": 16}
TIMEOUT_S = 200.0


@pytest.fixture(scope="module")
def directories(tmp_path_factory):
    """Name -> a checkpoint with random numbers where it is none of ours."""
    folder = tmp_path_factory.mktemp("models")
    torch.manual_seed(0)
    made = {
        "llama": LlamaForCausalLM(LlamaConfig(**SMALL, tie_word_embeddings=True)),
        "qwen3-moe": Qwen3MoeForCausalLM(Qwen3MoeConfig(**SMALL, **EXPERTS, tie_word_embeddings=False)),
    }
    for name, model in made.items():
        model.save_pretrained(folder / name)
    return {"qwen3": QWEN, "qwen3-vl": QWEN_VL} | {name: folder / name for name in made}


@pytest.fixture(scope="module")
def find(directories, tmp_path_factory):
    """Names, number of ranks -> name -> what each rank found."""

    def run(names, size):
        meeting = tmp_path_factory.mktemp("meeting") / "ranks"
        places = [str(directories[name]) for name in names]
        ranks = [
            start(
                [sys.executable, str(SCRIPT), str(rank), str(size), str(meeting), *places],
                meeting.with_name(f"{rank}.txt"),
            )
            for rank in range(size)
        ]
        try:
            ended = [rank.wait(timeout=TIMEOUT_S) for rank in ranks]
            outputs = [meeting.with_name(f"{rank}.txt").read_text() for rank in range(size)]
            assert ended == [0] * size, outputs
        finally:
            for rank in ranks:
                rank.kill()
        found = [[json.loads(line[6:]) for line in text.splitlines() if line.startswith("FOUND ")] for text in outputs]
        assert [len(some) for some in found] == [len(names)] * size, "\n".join(outputs)[-5000:]
        return dict(zip(names, zip(*found, strict=True), strict=True))

    return run


@pytest.fixture(scope="module")
def alone(find):
    """The experts first: vLLM sets their group up with the first model or not at all."""
    return find(["qwen3-moe", "qwen3", "qwen3-vl", "llama"], 1)


@pytest.fixture(scope="module")
def in_two(find):
    return find(["qwen3", "qwen3-vl"], 2)


def check(ranks):
    """Learning touched nothing; afterwards every parameter was written, and as the loader writes it."""
    for found in ranks:
        assert found["num_parameters"] > 10
        assert (found["untouched"], found["different"], found["unwritten"]) == (True, [], [])


@pytest.mark.parametrize("name", ["qwen3", "qwen3-vl", "llama", "qwen3-moe"])
def test_of_one_rank_every_tensor_is_a_run_of_a_parameter(name, alone):
    check(alone[name])
    assert set(alone[name][0]["kinds"]) == {"whole"}


@pytest.mark.parametrize("name", ["qwen3", "qwen3-vl"])
def test_each_of_two_ranks_writes_its_part(name, in_two):
    check(in_two[name])
    assert all(set(found["kinds"]) == {"whole", "parts"} for found in in_two[name])
