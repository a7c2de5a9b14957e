"""Three rollout GPUs and one learner: steps with overlap beside steps without, and F1 after equal samples.

    VLLM_USE_FLASHINFER_SAMPLER=0 python -m benchmarks.gpu.overlap --results benchmarks/results

The digits job by the commands people type: one server of three replicas, then a whole run for every seed and mode, one
after another, on equal samples.
"""

import statistics
import tempfile
from contextlib import contextmanager
from pathlib import Path

from benchmarks.gpu.report import Report, parser_of
from benchmarks.overlap.pinned import MATCHING, MODES
from benchmarks.overlap.steps import busy, samples_of, steps_of
from conformance.doubles.division import MATCHING as CONFIG
from conformance.doubles.division import typed
from conformance.doubles.instance import free_port
from conformance.doubles.started import finish, journal_of, started

BAR = 1.3
MEASURED = {"num_warm_up": 5, "tail": 2}


class Runs:
    """On one server, each in a directory of its own."""

    def __init__(self, options, folder):
        self.options, self.folder = options, folder
        self.url = f"http://127.0.0.1:{free_port()}"
        self.overrides = (
            f"{MATCHING}.vllm.server.base_url={self.url}",
            f"{MATCHING}.vllm.server.group_port={free_port()}",
            f"{MATCHING}.vllm.kv_cache_memory_mib={options.kv_mib}",
            f"custom.extra.rollout_server.vllm_data_parallel_size={len(options.replicas.split(','))}",
            f"training.max_steps={options.steps}",
            f"training.per_device_train_batch_size={options.batch}",
            f"training.gradient_accumulation_steps={options.parts}",
            "training.packing=false",
            "training.save_steps=1000",
            "training.report_to=none",
        )

    @contextmanager
    def server(self):
        command = typed("serve", CONFIG, self.options.replicas, self.overrides)
        with started(command, self.folder / "server.txt") as server:
            server.wait_healthy(self.url)
            yield

    def learn(self, mode, seed):
        """Its journal."""
        out = self.folder / f"{mode}-{seed}"
        more = (f"{MATCHING}.overlap={mode}", f"training.seed={seed}", f"training.output_dir={out}")
        command = typed("train", CONFIG, self.options.learner, (*self.overrides, *more))
        code, log = finish(command, out.with_suffix(".txt"))
        assert code == 0, log[-3000:]
        return journal_of(out, None)


def figures(journal):
    """Of one run."""
    first, *_, last = [event["metrics"]["f1"] for event in journal if event["event"] == "evaluated"]
    measured = {name: busy(journal, name, **MEASURED) for name in ("rollout_s", "learn_s")}
    return measured | {"f1": [first, last], "steps_s": steps_of(journal, **MEASURED)}


def measure(options, folder, report):
    runs, measured, learnt = Runs(options, folder), {}, {}
    with runs.server():
        for seed in options.seeds:
            for mode in options.modes:
                journal = runs.learn(mode, seed)
                measured[f"{mode}-{seed}"] = one = figures(journal)
                learnt.setdefault(seed, []).append(samples_of(journal))
                report.write(runs=measured)
                took, (before, after) = statistics.median(one["steps_s"]), one["f1"]
                busy_s = f"R {one['rollout_s']:.3f} s, L {one['learn_s']:.3f} s"
                report.say(f"{mode} seed {seed}: {took:.3f} s a step, {busy_s}, F1 {before:.3f} -> {after:.3f}")
    equal = all(samples == several[0] for several in learnt.values() for samples in several)
    report.write(equal_samples=equal, ratios=ratios(measured, options), bar=BAR)


def ratios(measured, options):
    """Seconds of a step without overlap over those of each mode, of all seeds together."""
    medians = {
        mode: statistics.median(took for seed in options.seeds for took in measured[f"{mode}-{seed}"]["steps_s"])
        for mode in options.modes
    }
    return {mode: medians["off"] / took for mode, took in medians.items() if mode != "off"}


def main():
    options = parse()
    report = Report(options.results / "overlap_3v1.json")
    with tempfile.TemporaryDirectory() as folder:
        measure(options, Path(folder), report)
    measured = report.written
    report.end(f"{measured['ratios']} (bar {BAR}), equal samples: {measured['equal_samples']}")


def parse():
    parser = parser_of(__doc__)
    parser.add_argument("--seeds", type=int, nargs="+", default=[42, 1, 2])
    parser.add_argument("--modes", nargs="+", default=list(MODES), choices=MODES)
    parser.add_argument("--steps", type=int, default=60)
    parser.add_argument("--batch", type=int, default=4, help="rollouts of a micro-batch")
    parser.add_argument("--parts", type=int, default=4, help="micro-batches of a step")
    parser.add_argument("--replicas", default="0,1,2")
    parser.add_argument("--learner", default="3")
    parser.add_argument("--kv-mib", type=int, default=1024, help="of each replica's cache")
    return parser.parse_args()


if __name__ == "__main__":
    main()
