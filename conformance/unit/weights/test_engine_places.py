"""vLLM's own model classes: what learnt places write is, parameter by parameter, what vLLM's loader writes.

As a script (``RANK SIZE MEETING DIRECTORY...``) it is one tensor parallel rank, with vLLM's model class alone and no
engine. It prints what was found as JSON, a line per directory.
"""

import json
import os
import sys
import zlib
from collections import Counter
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file
from transformers import LlamaConfig, LlamaForCausalLM, Qwen3MoeConfig, Qwen3MoeForCausalLM

from conformance.doubles.digits import ROOT
from conformance.doubles.processes import start
from rollmatch.startup import leave

pytestmark = pytest.mark.engine
WORKER = ("-m", "conformance.unit.weights.test_engine_places")
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
                [sys.executable, *WORKER, str(rank), str(size), str(meeting), *places],
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


def configured(directory, size):
    """vLLM's settings for a small model on a CPU."""
    from vllm.engine.arg_utils import EngineArgs

    arguments = EngineArgs(
        model=directory, dtype="float32", load_format="dummy", skip_tokenizer_init=True, enforce_eager=True,
        max_model_len=64, kv_cache_memory_bytes=1 << 24,
    )  # fmt: skip
    config = arguments.create_engine_config()
    config.parallel_config.tensor_parallel_size = size
    return config


def name_of(meeting):
    """Of the ranks' shared memory, which vLLM would name alike for all."""
    return f"placed-{zlib.crc32(meeting.encode())}"


def build(config, rank, size, meeting):
    """Not post-processed; ranks wait for the first one."""
    from vllm.config import set_current_vllm_config
    from vllm.distributed import init_distributed_environment, initialize_model_parallel, model_parallel_is_initialized
    from vllm.model_executor.model_loader.utils import initialize_model

    with set_current_vllm_config(config):
        if not model_parallel_is_initialized():
            os.environ["VLLM_DIST_IDENT"] = name_of(meeting)
            init_distributed_environment(size, rank, f"file://{meeting}", rank, "gloo")
            initialize_model_parallel(size)
        return initialize_model(vllm_config=config)


def parameters_after(model, write):
    """What all parameters hold, whatever they held before."""
    torch.manual_seed(5)
    with torch.no_grad():
        for _, weight in model.named_parameters():
            weight.data.normal_()
        write()
        return {name: weight.data.clone() for name, weight in model.named_parameters()}


def compare(directory, rank, size, meeting):
    """What learnt places write, beside what vLLM's own loader writes."""
    from rollmatch.weights.plan import spec_of
    from rollmatch.weights.worker.weight_layout import learn_layout, write_tensors

    model = build(configured(directory, size), rank, size, meeting)
    tensors = {name: tensor.float() for name, tensor in load_file(f"{directory}/model.safetensors").items()}
    specs = [spec_of(*pair) for pair in tensors.items()]
    before = parameters_after(model, lambda: None)
    places = learn_layout(model, specs)
    after = {name: weight.data for name, weight in model.named_parameters()}
    untouched = all(torch.equal(before[name], after[name]) for name in before)
    ours = parameters_after(model, lambda: write_tensors(model, places, tensors))
    theirs = parameters_after(model, lambda: model.load_weights(iter(tensors.items())))
    kinds = Counter(
        "whole" if place.whole is not None else "parts" if place.copies else "loader" if place.by_loader else "none"
        for place in places.by_name.values()
    )
    return {
        "kinds": dict(kinds),
        "untouched": untouched,
        "different": sorted(name for name in theirs if not torch.equal(ours[name], theirs[name])),
        "unwritten": sorted(name for name in theirs if torch.equal(theirs[name], before[name])),
        "num_parameters": len(theirs),
    }


if __name__ == "__main__":
    own_rank, num_ranks, file, *directories = sys.argv[1:]
    for where in directories:
        print("FOUND " + json.dumps(compare(where, int(own_rank), int(num_ranks), file)), flush=True)  # noqa: T201
    for memory in Path("/dev/shm").glob(f"{name_of(file)}-*_{own_rank}"):
        memory.unlink()
    leave(0)
