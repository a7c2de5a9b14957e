"""The learner's two hot paths on one GPU: ``python -m benchmarks.gpu.learner --out DIR``; ``--tiny`` runs anywhere.

Writes one JSON per path with every sample, hardware and versions. Ends with 1 where a bar is missed.
"""

import argparse
import json
import sys
import time
from pathlib import Path

from benchmarks.gpu import decoder_layers, masked_loss, packed_pass, shared_prompt
from benchmarks.gpu.measure import on_gpu, say, surroundings
from benchmarks.gpu.report import RESULTS, folder_of

PATHS = {
    "masked_loss": masked_loss,
    "packed_pass": packed_pass,
    "decoder_layers": decoder_layers,
    "shared_prompt": shared_prompt,
}


def run(name, *, kind, rounds, limit_s, out):
    """Measure one path at one of its shapes and write it down; returns its bars."""
    began, path = time.perf_counter(), PATHS[name]
    figures = path.measure(path.SHAPES[kind], rounds=rounds, limit_s=limit_s)
    figures = {"benchmark": name, "kind": kind, "taken": time.strftime("%Y-%m-%dT%H:%M:%SZ", time.gmtime())} | figures
    out.mkdir(parents=True, exist_ok=True)
    file = out / f"{name}{'' if kind == 'full' else '-' + kind}.json"
    file.write_text(json.dumps(figures | {"on": surroundings()}, indent=1) + "\n")
    say(f"{name}: {time.perf_counter() - began:.0f} s, {file}")
    return figures["bars"]


def main(arguments=None):
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--out", type=Path, default=RESULTS)
    parser.add_argument("--tiny", action="store_true")
    parser.add_argument("--only", choices=PATHS)
    parser.add_argument("--lengths", choices=("full", "short"), default="full", help="of the segments of the pass")
    parser.add_argument("--rounds", type=int, default=15)
    parser.add_argument("--limit-s", type=float, default=25.0, help="of the samples of one comparison")
    options = parser.parse_args(arguments)
    if not (on_gpu() or options.tiny):
        parser.error("not testable: needs a GPU, has none (--tiny runs anywhere)")
    bars, out = {}, folder_of(options.out, is_rehearsal=options.tiny)
    for name in [options.only] if options.only else PATHS:
        short = options.lengths == "short" and "short" in PATHS[name].SHAPES
        kind = "tiny" if options.tiny else "short" if short else "full"
        bars |= run(name, kind=kind, rounds=options.rounds, limit_s=options.limit_s, out=out)
    missed = [] if options.tiny else [name for name, bar in bars.items() if not bar["met"]]
    say(f"{len(bars) - len(missed)} of {len(bars)} bars met" if not options.tiny else "tiny: bars say nothing")
    return int(bool(missed))


if __name__ == "__main__":
    sys.exit(main())
