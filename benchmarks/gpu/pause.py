"""How long 256 live requests pause for a full sync: ours and vLLM's packed transfer, kept and begun again.

    NCCL_NVLS_ENABLE=0 VLLM_USE_FLASHINFER_SAMPLER=0 python -m benchmarks.gpu.pause --results benchmarks/results

One engine of 8B shape writes 256 responses; the last GPU's weights are sent to it. *Kept*: requests are frozen (mode
keep; ours without the sleep of vLLM's ``pause_generation``) and continue with new weights and the old attention cache,
so that one response is of two versions. *Staged*: weights arrive beside those in use (``sync.stage``), and requests are
frozen while they are copied. *Again*: requests end and are begun again from their prompts with the new
weights, one version each, as our server does it. A gap is between two tokens of one stream; one that is begun again
stays that stream.

``--tiny`` rehearses all of it on a CPU; there a call per tensor stands for vLLM's transfer, which needs GPUs.
"""

import os
import statistics
import tempfile
import time
from pathlib import Path

os.environ.setdefault("NCCL_NVLS_ENABLE", "0")
os.environ.setdefault("VLLM_USE_FLASHINFER_SAMPLER", "0")
os.environ.setdefault("HF_HUB_OFFLINE", "1")

import torch
from safetensors.torch import load_file

from benchmarks.gpu.eight_billion import IDS, NUM_LAYERS, ROOT, make_directory, random_weights
from benchmarks.gpu.live_engine import Load, run_live_engine
from benchmarks.gpu.peer_engine import Engines
from benchmarks.gpu.report import Report, folder_of, parser_of
from benchmarks.gpu.ways import PACKED, Direct, OneByOne, Packed
from conformance.doubles.instance import free_port

LOAD = Load(num_streams=256, prompt_len=128, response_len=600, last_id=IDS - 1000)
ARGUMENTS = {
    "dtype": "bfloat16",
    "max_model_len": 1024,
    "kv_cache_memory_bytes": 28 << 30,
    "gpu_memory_utilization": 0.4,
    "max_num_seqs": LOAD.num_streams,
    "max_num_batched_tokens": 16384,
}
TINY_MODEL = ROOT / "fixtures/models/arithmetic"
TINY_LOAD = Load(num_streams=8, prompt_len=8, response_len=480, last_id=250)
TINY = {
    "dtype": "bfloat16",
    "max_model_len": 512,
    "kv_cache_memory_bytes": 128 << 20,
    "max_num_seqs": 8,
    "enforce_eager": True,
}
READY_S = 300


def keep(report, name, figures):
    """One more round of a way."""
    rounds = report.written.setdefault("rounds", {})
    rounds.setdefault(name, []).append(figures)
    report.say(f"{name}: " + ", ".join(f"{key} {value:.4g}" for key, value in figures.items()))
    longest = {name: [figures["longest_s"] for figures in several] for name, several in rounds.items()}
    report.write(
        longest_gap_s={
            name: {"median": statistics.median(values), "worst": max(values)} for name, values in longest.items()
        }
    )


def measure_round(engines, stage, transfer, *, seed, again, by_core=True):
    """Gaps around one sync; ``transfer`` None: around nothing. ``stage``: what comes before requests are frozen."""
    call = engines.call
    call("live.begin", seed, within_s=READY_S)
    began, figures = time.perf_counter(), {}
    if stage is not None:
        stage()
        figures = {"stage_s": time.perf_counter() - began}
    if transfer is not None:
        asked = time.perf_counter()
        lost = call(*(("live.stop",) if again else ("live.pause", by_core)))[0]
        halted = time.perf_counter()
        transfer()
        figures |= {"halt_s": halted - asked, "transfer_s": time.perf_counter() - halted}
        call("live.start" if again else "live.resume")
        figures |= {"lost_tokens": lost} if again else {}
    gaps = call("live.gaps", began)[0]
    call("live.stop")
    return gaps | figures


def measure(report, engines, weights, options):
    """All ways in turn; the first round of each, which sets things up, is forgotten."""
    report.write(num_bytes=sum(tensor.nbytes for tensor in weights.values()), num_streams=options.load.num_streams)
    ours = Direct(engines, weights, port=free_port())
    ours()
    peer = OneByOne(ours) if options.tiny else Packed(engines, weights, port=free_port())
    peer()
    report.say("both ways have carried weights once")
    ways = {
        "no sync": (None, None, False),
        "ours, kept": (None, ours, False),
        "ours, staged, kept": (ours.stage, ours.load, False),
        "peer's pause, ours, kept": (None, ours, False),
        "peer, kept": (None, peer, False),
        "ours, again": (None, ours, True),
        "peer, again": (None, peer, True),
    }
    for number in range(options.rounds + 1):
        for place, (name, (stage, transfer, again)) in enumerate(ways.items()):
            by_core = not name.startswith("peer")
            seed = 100 * number + place
            figures = measure_round(engines, stage, transfer, seed=seed, again=again, by_core=by_core)
            if number:
                keep(report, name, figures)


def main():
    options = parse()
    options.load = TINY_LOAD if options.tiny else LOAD
    report = Report(folder_of(options.results, is_rehearsal=options.tiny) / "pause.json")
    with tempfile.TemporaryDirectory() as folder:
        directory = TINY_MODEL if options.tiny else Path(folder) / "model"
        if not options.tiny:
            make_directory(directory, options.layers)
        arguments = (TINY if options.tiny else ARGUMENTS | PACKED) | {"load": options.load}
        arguments |= {"enforce_eager": True} if options.eager else {}
        engines = Engines(str(directory), 1, arguments, target=run_live_engine)
        try:
            weights = make_weights(options)
            engines.answers(within_s=READY_S)
            report.say("the engine is ready")
            measure(report, engines, weights, options)
        finally:
            engines.end()
    report.end(str(report.written["longest_gap_s"]))


def make_weights(options):
    """The learner's."""
    if options.tiny:
        return load_file(TINY_MODEL / "model.safetensors")
    device = torch.device("cuda", torch.cuda.device_count() - 1)
    torch.cuda.set_device(device)
    return random_weights(device, options.layers)


def parse():
    parser = parser_of(__doc__)
    parser.add_argument("--layers", type=int, default=NUM_LAYERS)
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--eager", action="store_true", help="without CUDA graphs, which take a minute to make")
    parser.add_argument("--tiny", action="store_true", help="on a CPU, to see that it runs")
    return parser.parse_args()


if __name__ == "__main__":
    main()
