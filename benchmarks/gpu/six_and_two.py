"""Seed 001's topology as written: six rollout GPUs, two learner ranks, GRPO with DoRA on all parts of the model.

    NCCL_NVLS_ENABLE=0 VLLM_USE_FLASHINFER_SAMPLER=0 python -m benchmarks.gpu.six_and_two --results benchmarks/results

Needs eight GPUs and less than nine minutes. ``--gpus 4`` is the same as 3+1 and 2+2, ``--gpus 2`` as 1+1;
``--rehearse`` is 6+2 without GPUs, on the small model. Expected figures: docs/results/topologies.md. Stages, in this
order, as far as the time goes:

small     20 steps of the summary task: rewards, versions, the journal judged; the trace is kept for everyone's tests
big       the shape of 8B, random weights: tokens per second of the server beside one engine, three steps, phases,
          memory, the sync beside a bare broadcast of as many bytes, the planner's forecast beside all that
divisions the small model by the same file as 4+4 and 3+1 (2+2 of four), fewer steps
"""

import argparse
import json
import os
import shutil
import statistics
import subprocess
import sys
import tempfile
import time
from pathlib import Path

import torch

from benchmarks.gpu.divided_run import SERVER, DividedRun, GpuDivision
from benchmarks.gpu.machine import describe
from benchmarks.gpu.one_engine import EngineLoad, OneEngine, compare
from benchmarks.gpu.report import RESULTS, folder_of
from conformance.doubles.digits import ROOT
from conformance.doubles.division import GRPO
from conformance.doubles.started import cli_command
from conformance.judge.calls import Server

BARS = {"sync / broadcast": 1.1, "server / engine x replicas": 0.95}
"""The first at most, the second at least."""
LONGEST = 12000
MATCHING = "custom.extra.rollout_matching"
SUMMARY_MODEL = ROOT / "fixtures/models/digits-summary"
SMALL = (f"model.model={SUMMARY_MODEL}", "training.eval_scenes=32")
BIG = (
    "model.torch_dtype=bfloat16",
    "training.gradient_checkpointing=true",
    "training.eval_scenes=8",
    f"global_max_length={LONGEST}",
    f"{MATCHING}.vllm.max_model_len={LONGEST}",
    f"{MATCHING}.vllm.kv_cache_memory_mib=null",
    f"{SERVER}.vllm_max_model_len={LONGEST}",
    f"{MATCHING}.max_new_tokens=512",
)
SCALES = {
    "gpu": {"steps": {"small": 20, "divisions": 8, "big": 3}, "rounds": 2, "lengths": (512, 256), "requests": 256},
    "rehearsal": {"steps": {"small": 2, "divisions": 1, "big": 1}, "rounds": 1, "lengths": (64, 32), "requests": 4},
}


def divisions_of(num_gpus):
    """Of a machine: the one that matters, and others of the same file.

    >>> [[str(one) for one in divisions_of(num_gpus)] for num_gpus in (8, 4, 2)]
    [['6+2', '4+4', '3+1'], ['3+1', '2+2'], ['1+1']]
    """
    sizes = {8: ((6, 2), (4, 4), (3, 1)), 4: ((3, 1), (2, 2)), 2: ((1, 1),)}[num_gpus]
    names = [*map(str, range(num_gpus))]
    return [GpuDivision(replicas=",".join(names[:m]), learners=",".join(names[m : m + n])) for m, n in sizes]


class Stages:
    """Each returns what it measured; ``folder`` keeps logs and traces."""

    def __init__(self, options, folder, say):
        self.options, self.folder, self.say = options, folder, say
        self.first, *self.others = divisions_of(options.gpus)
        self.scale = SCALES["rehearsal" if options.rehearse else "gpu"]
        self.model = SUMMARY_MODEL
        self._making = None
        if not options.rehearse and "big" in options.stages:  # on a GPU that the small runs need least
            self.model = folder / "model"
            command = [sys.executable, "-m", "conformance.gpu.big_model", str(self.model)]
            chosen = os.environ | {"CUDA_VISIBLE_DEVICES": str(options.gpus - 1)}
            self._making = subprocess.Popen(command, cwd=ROOT, env=chosen)

    def small(self):
        run = self._run("small", self.first, SMALL)
        with run.server() as ready_s:
            values = run.learn() | {"server_ready_s": ready_s}
        shutil.copy(run.folder / "trace.jsonl", self.options.results / f"trace-{self.first}.jsonl")
        return values

    def divisions(self):
        values = []
        for division in self.others:
            run = self._run("divisions", division, SMALL)
            with run.server() as ready_s:
                values.append(run.learn() | {"server_ready_s": ready_s})
            self.say(f"{division}: {values[-1]['step_s']:.2f} s a step")
        return values

    def big(self):
        if self._making is not None:
            assert self._making.wait() == 0, "the model of 8B was not made"
        sizes = () if self.options.rehearse else BIG
        run = self._run("big", self.first, (f"model.model={self.model}", *sizes))
        load = self._load()
        with (run.folder / "engine.txt").open("w") as log:
            engine = OneEngine(load, log, gpu=self.first.learners[-1], **engine_arguments(run))
        try:
            with run.server() as ready_s:
                engine.wait_ready()
                replicas = self.first.num_replicas
                rounds, server = self.scale["rounds"], Server(run.url)
                samples = compare(server, engine, load, num_replicas=replicas, rounds=rounds, say=self.say)
                engine.end()
                values = run.learn() | {"server_ready_s": ready_s, "throughput_s": samples}
        finally:
            engine.process.kill()
        values["broadcast_s"] = broadcast(values["sync_bytes"], self.first.num_replicas + 1)
        values["ratios"] = {
            "sync / broadcast": statistics.median(values["sync_s"][1:] or values["sync_s"])
            / statistics.median(values["broadcast_s"]),
            "server / engine x replicas": statistics.median(samples["engine"]) / statistics.median(samples["server"]),
        }
        return values | {"forecasts": forecasts(run, self.options.gpus, values["prompt_len"], values["response_len"])}

    def _run(self, stage, division, overrides):
        steps, folder = self.scale["steps"][stage], self.folder / f"{stage}-{division}"
        return DividedRun(folder, division, steps=steps, overrides=overrides)

    def _load(self):
        prompt_len, response_len = self.scale["lengths"]
        num_ids = json.loads((self.model / "config.json").read_text())["text_config"]["vocab_size"]
        sizes = {"num_requests": self.scale["requests"], "first_id": num_ids // 10, "last_id": num_ids // 5}
        return EngineLoad(prompt_len=prompt_len, response_len=response_len, **sizes)


def engine_arguments(run):
    """Of ``LLM``, as the server gives them to each of its engines."""
    done = subprocess.run(run.serve_command("--dry-run"), capture_output=True, text=True, check=True, cwd=ROOT)
    settings = json.loads(done.stdout[done.stdout.index("{") : done.stdout.rindex("}") + 1])
    both = {name: settings[name] for name in ("model", "dtype", "max_model_len")}
    return both | settings["engine_arguments"]


def broadcast(num_bytes, num_ranks):
    """Seconds of each round."""
    torchrun = ("-m", "torch.distributed.run", "--standalone", "--nproc-per-node", str(num_ranks))
    command = [sys.executable, *torchrun, "-m", "benchmarks.gpu.bare_broadcast", str(num_bytes)]
    done = subprocess.run(command, capture_output=True, text=True, check=True, cwd=ROOT, timeout=120)
    return json.loads(done.stdout.strip().splitlines()[-1])


def forecasts(run, num_gpus, prompt_len, response_len):
    """Of the planner, for every division of such a machine and for rollouts as long as they were."""
    lengths = ("--prompt-tokens", str(round(prompt_len)), "--response-tokens", str(round(response_len)))
    command = [*cli_command("plan", GRPO, *run.overrides), "--gpus", str(num_gpus), *lengths, "--json"]
    done = subprocess.run(command, capture_output=True, text=True, check=True, cwd=ROOT)
    return [
        {name: one[name] for name in ("name", "rollout_s", "score_s", "learn_s", "sync_s", "step_s", "problem")}
        for one in json.loads(done.stdout)["forecasts"]
    ]


def main():
    options = parse()
    began = time.monotonic()

    def say(text):
        sys.stdout.write(f"[{time.monotonic() - began:6.1f} s] {text}\n")
        sys.stdout.flush()

    path = options.results / f"six_and_two{'-rehearsal' if options.rehearse else ''}-{options.gpus}.json"
    values = {"machine": describe(), "bars": BARS, "rehearsal": options.rehearse}
    with tempfile.TemporaryDirectory() as folder:
        stages = Stages(options, Path(folder), say)
        for name in options.stages:
            if time.monotonic() - began > options.limit_s:
                say(f"{name}: not begun, the time is over")
                continue
            say(f"{name}: begins")
            values[name] = getattr(stages, name)()
            path.write_text(json.dumps(values, indent=1) + "\n")
            say(f"{name}: {json.dumps(values[name])}")
    say(f"written: {path}")


def parse():
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--results", type=Path, default=RESULTS)
    parser.add_argument("--gpus", type=int, default=8, choices=(2, 4, 8))
    parser.add_argument("--rehearse", action="store_true", help="without GPUs, on the small model")
    parser.add_argument("--stages", nargs="+", default=["small", "big", "divisions"])
    parser.add_argument("--limit-s", type=float, default=400.0, help="no stage begins after this")
    options = parser.parse_args()
    options.results = folder_of(options.results, is_rehearsal=options.rehearse)
    if not options.rehearse and torch.cuda.device_count() < options.gpus:
        parser.error(f"not testable: needs {options.gpus} GPUs, has {torch.cuda.device_count()}")
    return options


if __name__ == "__main__":
    main()
