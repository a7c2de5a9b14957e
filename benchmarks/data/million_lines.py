"""Seconds and memory of a data set of a million lines: ``check``, and ``train`` to the first request of its first step.

Records of the digits, again and again (their image files are shared, so that the disk is warm), beside the same
commands with 512 lines, whose memory is that of the packages and the model::

    PYTHONPATH=impl:. python benchmarks/data/million_lines.py [LINES] [RANKS]
"""

import os
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable
from contextlib import suppress
from dataclasses import dataclass
from itertools import cycle, islice
from pathlib import Path

import psutil

from rollmatch.journal import read_journal

ROOT = Path(__file__).parents[2]
DIGITS = ROOT / "fixtures/digits"
BAR_S, BAR_GB = 60.0, 1.5
PAUSE_S = 0.25
FEW = 512
HF = (
    "custom.extra.rollout_matching.rollout_backend=hf",
    "custom.extra.rollout_matching.rollout_generate_batch_size=16",
    "custom.extra.rollout_matching.vllm.max_model_len=null",
    "training.max_steps=1",
    "training.eval_scenes=1",
    "custom.extra.rollout_matching.max_new_tokens=8",
    "training.report_to=none",
)


@dataclass(frozen=True, slots=True, kw_only=True)
class Cost:
    """Of one command, all of its processes together."""

    seconds: float
    cpu_s: float
    """Processor time: on a busy machine the seconds are more."""
    gigabytes: float
    """Most private memory at any time, looked for every ``PAUSE_S``; files that processes share are left out."""


def measure(command: list[str], is_done: Callable[[], bool]) -> Cost:
    """Run until ``is_done`` or the end, then end it. Errors: ``RuntimeError`` if it failed before."""
    began, most, cpu_s = time.monotonic(), 0, 0.0
    with tempfile.TemporaryFile("w+") as log:
        process = psutil.Popen(command, cwd=ROOT, stdout=log, stderr=subprocess.STDOUT)
        while process.poll() is None and not is_done():
            members = [process, *process.children(recursive=True)]
            found_bytes, found_s = zip(*map(_look_at, members), strict=True)
            most, cpu_s = max(most, sum(found_bytes)), max(cpu_s, sum(found_s))
            time.sleep(PAUSE_S)
        seconds = time.monotonic() - began
        if process.poll() not in (None, 0):
            log.seek(0)
            raise RuntimeError(log.read()[-3000:])
        _end(process)
    return Cost(seconds=seconds, cpu_s=cpu_s, gigabytes=most / 1e9)


def _look_at(process: psutil.Process) -> tuple[int, float]:
    """Private bytes and processor time; none of a process that has ended."""
    with suppress(psutil.NoSuchProcess, psutil.ZombieProcess):
        times = process.cpu_times()
        return process.memory_full_info().uss, times.user + times.system
    return 0, 0.0


def _end(process: psutil.Popen) -> None:
    with suppress(psutil.NoSuchProcess):
        members = [process, *process.children(recursive=True)]
        for member in members:
            with suppress(psutil.NoSuchProcess):
                member.kill()
        psutil.wait_procs(members)
    process.wait()


def write_lines(path: Path, num_lines: int) -> None:
    """The digits' records, again and again."""
    lines = (DIGITS / "train.jsonl").read_text().splitlines(keepends=True)
    with path.open("w") as file:
        file.writelines(islice(cycle(lines), num_lines))


def costs(folder: Path, num_lines: int, num_ranks: int) -> dict[str, Cost]:
    """``check``, and ``train`` to its first request."""
    train_jsonl, out = folder / f"{num_lines}.jsonl", folder / f"run-{num_lines}"
    write_lines(train_jsonl, num_lines)
    where = (f"train_jsonl={train_jsonl}", f"val_jsonl={DIGITS / 'val.jsonl'}", f"image_root={DIGITS}")
    settings = (*(f"custom.{each}" for each in where), f"training.output_dir={out}", *HF)
    words = [str(DIGITS / "digits.yaml"), *(word for each in settings for word in ("--set", each))]
    ranks = ["--gpus", ",".join(map(str, range(num_ranks)))] if num_ranks > 1 else []
    program = [sys.executable, "-m", "rollmatch"]

    def has_requested() -> bool:
        journal = out / "journal.jsonl"
        return journal.exists() and any(
            event["event"] == "requested" and event["purpose"] == "train" for event in read_journal(journal)
        )

    return {
        "check": measure([*program, "check", *words], lambda: False),
        "start": measure([*program, "train", *words, *ranks], has_requested),
    }


def main() -> int:
    """Both commands beside the bars. Returns 1 where one is missed."""
    given = [int(word) for word in sys.argv[1:]]
    num_lines, num_ranks = (*given, *(1_000_000, 1)[len(given) :])
    load = os.getloadavg()[0]
    _say(f"{num_lines} lines, {num_ranks} rank(s), {os.cpu_count()} cores, load {load:.1f} before the start")
    with tempfile.TemporaryDirectory() as name:
        small, large = (costs(Path(name), lines, num_ranks) for lines in (FEW, num_lines))
    _say(f"| command | lines | seconds | processor time, s | GB | bars: {BAR_S:.0f} s, {BAR_GB} GB |")
    _say("|---" * 6 + "|")
    is_met = True
    for command, cost in large.items():
        fits = cost.seconds < BAR_S and cost.gigabytes < BAR_GB
        is_met &= fits
        for lines, each, verdict in ((FEW, small[command], ""), (num_lines, cost, "met" if fits else "missed")):
            _say(f"| {command} | {lines} | {each.seconds:.1f} | {each.cpu_s:.1f} | {each.gigabytes:.2f} | {verdict} |")
    return 0 if is_met else 1


def _say(line: str) -> None:
    sys.stdout.write(line + "\n")
    sys.stdout.flush()


if __name__ == "__main__":
    sys.exit(main())
