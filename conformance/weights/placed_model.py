"""vLLM's model class alone, without an engine: what learnt places write beside what vLLM's own loader writes.

Run as a script, once per tensor parallel rank: RANK SIZE MEETING DIRECTORY... Prints what was found as JSON, a line
per directory.
"""

import json
import os
import sys
import zlib
from collections import Counter
from pathlib import Path

from rollmatch.startup import leave, loading

with loading():
    import torch
    from safetensors.torch import load_file
    from vllm.config import set_current_vllm_config
    from vllm.distributed import init_distributed_environment, initialize_model_parallel, model_parallel_is_initialized
    from vllm.engine.arg_utils import EngineArgs
    from vllm.model_executor.model_loader.utils import initialize_model

    from rollmatch.weights.plan import spec_of
    from rollmatch.weights.worker.weight_layout import learn_layout, write_tensors


def configured(directory, size):
    """vLLM's settings for a small model on a CPU."""
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
    """Not post-processed; ranks meet with the first one."""
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
