"""Syncs of a policy that two ranks share (FSDP2) beside syncs of one that a rank holds: seconds, and memory beside it.

    NCCL_NVLS_ENABLE=0 VLLM_USE_FLASHINFER_SAMPLER=0 python -m benchmarks.gpu.sharded_sync --dtype bfloat16 float32

Shape of Qwen3-8B. The first GPU has a server of ours, the next ones the learner's ranks, which are started once with
one rank and once with two, for each type that the learner holds its weights in; the server's is bfloat16. ``gather``
is what ranks do for a sync, without a server. ``--rehearse`` takes a tiny model and gloo, without GPUs.
"""

import json
import statistics
import sys
import tempfile
import time
from pathlib import Path

import torch
import torch.distributed as dist

from benchmarks.gpu.eight_billion import make_directory
from benchmarks.gpu.random_qwen3 import SMALL_MODEL
from benchmarks.gpu.report import Report, folder_of, parser_of
from benchmarks.gpu.ways import ENGINE
from conformance.doubles.instance import free_port, running
from conformance.doubles.learner_side import native_backend
from conformance.doubles.started import finish_ranks
from rollmatch.model.checkpoint import merged_weights
from rollmatch.ranks import Ranks
from rollmatch.weights.digest import mixed_digest_of
from rollmatch.weights.named_weights import named_weights

BARS = {"time": 1.2, "extra_gb": 3}
"""At most; time of two ranks over that of one."""
NUM_ROUNDS = 5
DTYPES = {"bfloat16": torch.bfloat16, "float32": torch.float32}


def main():
    options = parse()
    report = Report(folder_of(options.results, is_rehearsal=options.rehearse) / "sharded_sync.json")
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        served = {"model": str(SMALL_MODEL)}
        if not options.rehearse:
            make_directory(folder / "model", options.layers)
            served = {"model": str(folder / "model"), "dtype": "bfloat16", "load_format": "dummy", "gpus": ("0",)}
            served |= {"engine_arguments": ENGINE, "drain_s": 0.0}
        with running(folder / "server.log", max_model_len=256, **served) as instance:
            for dtype in options.dtype:
                runs = {ranks: learner(folder, ranks, dtype, served["model"], instance.url) for ranks in (1, 2)}
                report.write(**{dtype: {"runs": runs, **figures(runs)}}, bars=BARS)
                report.say(json.dumps({dtype: figures(runs)}))
    report.end()


def learner(folder, num_ranks, dtype, model, url):
    """What each of its ranks measured."""
    gpus = ",".join(str(1 + rank) for rank in range(num_ranks))
    variables = {"CUDA_VISIBLE_DEVICES": gpus} if torch.cuda.is_available() else {}
    words = (str(folder), dtype, model, url, str(free_port()))
    finish_ranks(folder, num_ranks, sys.executable, "-m", "benchmarks.gpu.sharded_sync", "--rank", *words, **variables)
    return [json.loads((folder / f"rank{rank}.json").read_text()) for rank in range(num_ranks)]


def figures(runs):
    """Medians without the first sync, which opens the group; memory of the rank that has most beside its weights."""
    middle = {ranks: statistics.median(run[0]["sync_s"][1:]) for ranks, run in runs.items()}
    gather = {ranks: statistics.median(run[0]["gather_s"]) for ranks, run in runs.items()}
    extra = max(max(rank["extra_bytes"]) for rank in runs[2]) / 1e9
    return {"sync_s": middle, "gather_s": gather, "ratio": middle[2] / middle[1], "extra_gb": extra}


def be_rank(folder, dtype, directory, url, port):
    """One rank of a learner: writes its figures below ``folder``."""
    from transformers import AutoConfig, AutoModelForCausalLM

    ranks, is_gpu = Ranks.from_environment(), torch.cuda.is_available()
    if is_gpu:
        torch.cuda.set_device(ranks.rank)
    device = torch.device("cuda", ranks.rank) if is_gpu else torch.device("cpu")
    if ranks.learner_world_size > 1:
        dist.init_process_group("nccl" if is_gpu else "gloo", device_id=device if is_gpu else None)
    torch.manual_seed(0)  # every rank begins with the same weights
    with torch.device(device):
        model = AutoModelForCausalLM.from_config(AutoConfig.from_pretrained(directory), dtype=DTYPES[dtype])
    whole = digests_of_all(model)
    model = split(model) if ranks.learner_world_size > 1 else model
    assert digests_of_all(model) == whole
    backend = native_backend(url, ranks=ranks, port=int(port), join_timeout_s=120, timeout_s=60)
    types = {name: torch.bfloat16 for name, _ in merged_weights(model)} if ranks.learner_world_size > 1 else None
    found = {"gather_s": [], "sync_s": [], "extra_bytes": []}
    for _ in range(NUM_ROUNDS + 1):
        found["gather_s"].append(timed(ranks, lambda: [None for _ in merged_weights(model, types)]))
        before = forget_peak(device)
        version = backend.policy_version + 1
        found["sync_s"].append(timed(ranks, lambda: backend.push(named_weights(model), version=version)))  # noqa: B023
        found["extra_bytes"].append(torch.cuda.max_memory_allocated(device) - before if is_gpu else 0)
    backend.close()
    Path(folder, f"rank{ranks.rank}.json").write_text(json.dumps(found))
    if ranks.learner_world_size > 1:
        dist.destroy_process_group()


def digests_of_all(model):
    return [mixed_digest_of(weight) for _, weight in merged_weights(model)]


def split(model):
    """As accelerate's FSDP2 does by default: each decoder layer, then the rest."""
    from torch.distributed.fsdp import fully_shard

    for layer in model.model.layers:
        fully_shard(layer)
    model = fully_shard(model)
    if torch.cuda.is_available():
        torch.cuda.empty_cache()
    return model


def timed(ranks, call):
    """Seconds from the moment at which all ranks are here."""
    ranks.barrier()
    began = time.perf_counter()
    call()
    if torch.cuda.is_available():
        torch.cuda.synchronize()
    return time.perf_counter() - began


def forget_peak(device):
    if device.type != "cuda":
        return 0
    torch.cuda.reset_peak_memory_stats(device)
    return torch.cuda.memory_allocated(device)


def parse():
    parser = parser_of(__doc__)
    parser.add_argument("--dtype", nargs="+", choices=tuple(DTYPES), default=["bfloat16"])
    parser.add_argument("--layers", type=int, default=36)
    parser.add_argument("--rehearse", action="store_true", help="a tiny model, without GPUs")
    options = parser.parse_args()
    if not options.rehearse and torch.cuda.device_count() < 3:
        parser.error(f"not testable: needs 3 GPUs, has {torch.cuda.device_count()}")
    return options


if __name__ == "__main__":
    if sys.argv[1:2] == ["--rank"]:
        be_rank(*sys.argv[2:])
    else:
        main()
