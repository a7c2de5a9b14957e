"""SmolLM2 with a slow calculator on a real server: how busy the server's slots are, and what is learnt meanwhile.

    NCCL_NVLS_ENABLE=0 VLLM_USE_FLASHINFER_SAMPLER=0 python -m benchmarks.gpu.calculator --part pace

Needs two GPUs, ``build/real/smollm2`` and ``build/smollm`` (``make smollm`` makes both). All ways run at once, each
with a server on one GPU and a learner on the other one.

pace    4 episodes a slot and window, a first turn of some sentences, a log-normal reply of 0.5 s in the median (sigma
        1.5, one of 370 takes more than 30 s, none more than 60 s): lockstep beside ``ahead`` with first complete groups
curve   short delays, the rewards of each step by seed: lockstep beside ``ahead``, and beside engines of 8 bits

Measured from the first step of a way to the last one within ``run_s`` seconds. Waiting turns: those that are written or
wait, on average. Busy share: responses that are written or wait, at most one a slot, over the slots, 20 times a second;
a sync's seconds count as idle. ``--rehearse`` runs two steps of each way without GPUs.
"""

import statistics
import sys
import tempfile
import threading
import time
from contextlib import ExitStack
from pathlib import Path

import requests
import yaml
from prometheus_client.parser import text_string_to_metric_families

from benchmarks.gpu.report import Report, folder_of, parser_of
from conformance.doubles.digits import ROOT
from conformance.doubles.instance import free_port
from conformance.doubles.started import journal_of, started
from rollmatch.config.layers import merge, nested

CONFIG = ROOT / "fixtures/smollm/calculator.yaml"
VLLM = "rollout.vllm"
LOOK_S = 0.05
LONG = "Explain in a few sentences how the problem is solved. End with the expression to type into a calculator."
AHEAD = {
    "rollout.overlap": "ahead",
    f"{VLLM}.sync.in_flight": "keep",
    "grpo.old_logprobs": "server",
}


def late(lead, windows):
    """``ahead`` with so many windows requested in advance, and groups that come so many windows later."""
    return AHEAD | {
        "rollout.max_staleness": lead + windows,
        "rollout.late_windows": windows,
    }


PACE = {
    "fields": {
        "global_max_length": 640,
        "environment.options": {"median_s": 0.5, "ask": LONG},
        "environment.max_response_tokens": 512,
        "rollout.max_new_tokens": 256,
        "grpo.num_generations": 4,
        "training.per_device_train_batch_size": 16,  # prompts: 64 completions at a time
        "training.gradient_accumulation_steps": 1,
    },
    "slots": 16,
    "run_s": 125,
    "ways": {"off": ({}, 60), "ahead": (late(6, 30), 200)},
    "seeds": (42,),
}
CURVE = {
    "fields": {"environment.options": {"median_s": 0.05}},
    "slots": 64,
    "run_s": 400,
    "ways": {"off": ({}, 40), "ahead": (late(1, 2), 40), "fp8": ({"rollout.vllm.quantization": "fp8"}, 40)},
    "seeds": (42, 1, 2),
}
PARTS = {"pace": PACE, "curve": CURVE}
TINY = {
    "training.max_steps": 2,
    "training.bf16": False,
    "training.per_device_train_batch_size": 2,
    "training.gradient_accumulation_steps": 1,
    "grpo.num_generations": 2,
    "rollout.max_new_tokens": 8,
    "training.eval_scenes": 1,
}


class Watch:
    """A server's ``/metrics/`` while it is used: [(unix seconds, responses written or waiting)]."""

    def __init__(self, url):
        self.url, self.seen, self.ended = url, [], threading.Event()
        self.thread = threading.Thread(target=self._look)
        self.thread.start()

    def _look(self):
        while not self.ended.wait(LOOK_S):
            text = requests.get(f"{self.url}/metrics/", timeout=10).text
            families = {family.name: family for family in text_string_to_metric_families(text)}
            self.seen.append((time.time(), families["rollmatch_running_requests"].samples[0].value))

    def busy_share(self, slots, begin, end):
        """Mean share of the slots that hold a response in these seconds."""
        return statistics.mean(min(running, slots) / slots for at, running in self.seen if begin <= at <= end)

    def end(self):
        self.ended.set()
        self.thread.join()


class Run:
    """One way with one seed: a server and a learner."""

    def __init__(self, name, part, *, seed, folder, gpus):
        self.name, self.part, self.seed, self.gpus = name, part, seed, gpus
        self.fields, self.steps = part["ways"][name]
        self.out, self.port = folder / f"{name}-{seed}", free_port()
        self.url = f"http://127.0.0.1:{self.port}"

    def write(self, *, rehearse):
        """Its YAML: the calculator's, with what is unlike it."""
        given = yaml.safe_load(CONFIG.read_text())
        server = {"base_url": self.url, "group_port": free_port()}
        fields = {
            **self.part["fields"],
            **self.fields,
            "extends": str(CONFIG.with_name(given["extends"])),
            "custom.train_jsonl": str(ROOT / "build/smollm/train.jsonl"),
            "custom.val_jsonl": str(ROOT / "build/smollm/test.jsonl"),
            "model.model": str(ROOT / "build/real/smollm2"),
            "rollout.rollout_backend": "vllm",
            f"{VLLM}.mode": "server",
            f"{VLLM}.server": server,
            f"{VLLM}.max_num_seqs": self.part["slots"],
            f"{VLLM}.dtype": "bfloat16",
            f"{VLLM}.kv_cache_memory_mib": 2048,
            "training.bf16": True,
            "custom.extra.rollout_server.vllm_gpu_memory_utilization": 0.12,
            "training.seed": self.seed,
            "training.max_steps": self.steps,
            "training.output_dir": str(self.out),
            "training.packing": False,
            "training.eval_scenes": 64,
            "training.save_steps": 10**6,
            "training.report_to": "none",
        }
        if rehearse:
            fields |= TINY | {f"{VLLM}.dtype": "float32", f"{VLLM}.kv_cache_memory_mib": 256}
        self.out.parent.mkdir(parents=True, exist_ok=True)
        self.config = self.out.with_suffix(".yaml")
        self.config.write_text(yaml.safe_dump(merge(nested(given), nested(fields))))

    def start(self, name, stack, place):
        """``rollmatch serve`` or ``train`` on a GPU."""
        gpus = ["--gpus", self.gpus[place]] if self.gpus else []
        command = [sys.executable, "-m", "rollmatch", name, str(self.config), *gpus]
        return stack.enter_context(started(command, self.out.with_suffix(f".{name}.txt")))

    def figures(self, watch):
        """Of its journal and of what its server showed."""
        steps, synced = journal_of(self.out, "step"), journal_of(self.out, "synced")
        begin, end = steps[0]["time"], steps[-1]["time"]
        sync_s = sum(event["seconds"] for event in synced if begin < event["time"] <= end)
        played = [event for event in journal_of(self.out, "episodes") if begin < event["time"] <= end]
        durations = [seconds for event in played for seconds in event["durations"]]
        busy = watch.busy_share(self.part["slots"], begin, end)
        return {
            "busy_share": busy - sync_s / (end - begin),
            "sync_share": sync_s / (end - begin),
            "waiting_turns": sum(event["engine_s"] for event in played) / (end - begin),
            "seconds_per_window": (end - begin) / (len(steps) - 1),
            "tokens_per_second": sum(event["learn_tokens"] for event in steps[1:]) / (end - begin),
            "longest_episode_s": max(durations),
            "median_episode_s": statistics.median(durations),
            "late_groups": sum(event["num_late"] for event in journal_of(self.out, "taken")),
            "evaluated": [[e["step"], e["metrics"]["reward"]] for e in journal_of(self.out, "evaluated")],
            "rewards": [statistics.mean(e["rewards"]) for e in journal_of(self.out, "rewarded")],
        }


def measure(part, report, folder, *, rehearse):
    """All ways and seeds at once; odd ones have GPUs the other way round."""
    pairs = [(name, seed) for seed in part["seeds"] for name in part["ways"]]
    pairs = pairs[:2] if rehearse else pairs
    runs = [
        Run(name, part, seed=seed, folder=folder, gpus=() if rehearse else ("01"[number % 2], "10"[number % 2]))
        for number, (name, seed) in enumerate(pairs)
    ]
    with ExitStack() as stack:
        servers = []
        for run in runs:
            run.write(rehearse=rehearse)
            servers.append(run.start("serve", stack, 0))
        for run, server in zip(runs, servers, strict=True):
            server.wait_healthy(run.url)
        report.say("servers are ready")
        watches = [Watch(run.url) for run in runs]
        learners = [run.start("train", stack, 1) for run in runs]
        began, found = time.monotonic(), {}
        try:
            for run, learner, watch in zip(runs, learners, watches, strict=True):
                while (code := learner.process.poll()) is None and time.monotonic() - began < part["run_s"]:
                    time.sleep(1)
                watch.end()
                if code:
                    report.say(f"{run.name}, seed {run.seed}: ended with {code}\n{learner.output()[-3000:]}")
                    continue
                found[f"{run.name}-{run.seed}"] = run.figures(watch)
                report.write(ways=found)
                shown = {key: value for key, value in found[f"{run.name}-{run.seed}"].items() if key != "rewards"}
                report.say(f"{run.name}, seed {run.seed}: {shown}")
        finally:
            for watch in watches:
                watch.end()


def main():
    parser = parser_of(__doc__)
    parser.add_argument("--part", choices=tuple(PARTS), required=True)
    parser.add_argument("--out", type=Path, help="keep logs and journals here")
    parser.add_argument("--rehearse", action="store_true", help="two steps of each way, without GPUs")
    options = parser.parse_args()
    report = Report(folder_of(options.results, is_rehearsal=options.rehearse) / f"calculator-{options.part}.json")
    with tempfile.TemporaryDirectory() as name:
        measure(PARTS[options.part], report, options.out or Path(name), rehearse=options.rehearse)
    report.end()
    return 0


if __name__ == "__main__":
    sys.exit(main())
