"""What a benchmark on GPUs finds: said as it goes, written down after every step, as the machine may be taken away."""

import argparse
import json
import statistics
import sys
import time
from pathlib import Path

import torch

from benchmarks.gpu.machine import describe

_ROOT = Path(__file__).parents[2]
RESULTS, REHEARSALS = _ROOT / "benchmarks/results", _ROOT / "build/benchmarks"


class Report:
    """One file of results: the machine, and what is noted and sampled."""

    def __init__(self, path, *, bars=None):
        """``bars``: names "one / other" -> what the ratio of these samples' medians is held against."""
        path.parent.mkdir(parents=True, exist_ok=True)
        self.path, self.began = path, time.monotonic()
        self.bars = bars or {}
        self.written = {"machine": describe()}

    def say(self, text):
        sys.stdout.write(f"[{time.monotonic() - self.began:6.1f} s] {text}\n")
        sys.stdout.flush()

    def write(self, **fields):
        """These fields too."""
        self.written |= fields
        if self.bars:
            self.written |= {"ratios": self.ratios(), "bars": self.bars}
        self.path.write_text(json.dumps(self.written, indent=1) + "\n")

    def note(self, **fields):
        """Facts that are no samples."""
        self.say(" ".join(f"{name}={value}" for name, value in fields.items()))
        self.write(notes=self.written.get("notes", {}) | fields)

    def sample(self, name, call):
        """How long a call takes, the GPU's work included."""
        _finish()
        began = time.perf_counter()
        call()
        _finish()
        took = time.perf_counter() - began
        self.samples.setdefault(name, []).append(took)
        self.say(f"{name}: {took * 1e3:.1f} ms")
        self.write()

    @property
    def samples(self):
        """Name -> seconds."""
        return self.written.setdefault("samples_s", {})

    def ratios(self):
        """Of those bars whose samples are there."""
        medians = {name: statistics.median(samples) for name, samples in self.samples.items() if samples}
        pairs = {ratio_name: [medians.get(name) for name in ratio_name.split(" / ")] for ratio_name in self.bars}
        return {ratio_name: one / other for ratio_name, (one, other) in pairs.items() if one and other}

    def end(self, text=""):
        """The ratios, and where all of it is."""
        for ratio_name, ratio in self.ratios().items():
            self.say(f"{ratio_name}: {ratio:.3f} (bar {self.bars[ratio_name]})")
        self.say(f"{text}{', ' if text else ''}{self.path}")


def parser_of(description):
    """Of a benchmark's command line, with where results go."""
    parser = argparse.ArgumentParser(description=description, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--results", type=Path, default=RESULTS)
    return parser


def folder_of(results, *, is_rehearsal):
    """Where results go, made; those of a rehearsal beside the ones that are kept, unless a folder is named."""
    folder = REHEARSALS if is_rehearsal and results == RESULTS else results
    folder.mkdir(parents=True, exist_ok=True)
    return folder


def _finish():
    if torch.cuda.is_available():
        torch.cuda.synchronize()
