"""``python -m benchmarks.overlap.same_f1 FOLDER [--seeds 42 1 2] [--modes off ahead]``: F1 after equal samples.

The digits job of 60 steps on one server, a run for every seed and mode, the server started for each. What has been
done in FOLDER stays; a run that was broken off continues from its last checkpoint. About five minutes each.
"""

import argparse
from pathlib import Path

from benchmarks.overlap.pinned import MATCHING, MODES, pinned_server
from conformance.doubles.started import journal_of

SAVE_STEPS = 10


def scores(out: Path) -> tuple[float, float] | None:
    """F1 on held-out scenes before and after training, once it has ended."""
    figures = [event["metrics"]["f1"] for event in journal_of(out, "evaluated")]
    return (figures[0], figures[-1]) if journal_of(out, "finished") else None


def learn(folder: Path, mode: str, seed: int) -> tuple[float, float]:
    """Of a run that was there already, or of one that ends now."""
    out = folder / f"{mode}-{seed}"
    found = scores(out)
    if found is None:
        settings = (f"{MATCHING}.overlap={mode}", f"training.seed={seed}", f"training.save_steps={SAVE_STEPS}")
        with pinned_server(folder) as server:
            server.learn(out, *settings, resume=any(out.glob("checkpoint-*")))
        found = scores(out)
    assert found is not None
    return found


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("folder", type=Path)
    parser.add_argument("--seeds", type=int, nargs="+", default=[42, 1, 2])
    parser.add_argument("--modes", nargs="+", default=list(MODES), choices=MODES)
    options = parser.parse_args()
    options.folder.mkdir(parents=True, exist_ok=True)
    for seed in options.seeds:
        for mode in options.modes:
            before, after = learn(options.folder, mode, seed)
            print(f"seed {seed:>3}  {mode:<6}  F1 {before:.3f} -> {after:.3f}", flush=True)  # noqa: T201


if __name__ == "__main__":
    main()
