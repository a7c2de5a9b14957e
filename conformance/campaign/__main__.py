"""Run a fault campaign and print its figures; exits with 1 where something was found."""

import argparse
import logging
import multiprocessing
import random
import sys
import time
from collections import Counter
from functools import partial

from conformance.campaign.doubles import trial


def numbered(number, seed):
    return number, *trial(number, seed)


def on_doubles(seed, *, num_faults, minutes, workers, show=print):
    """Trials in processes until enough faults have struck; returns their number and that of findings."""
    began, struck, findings, ends, num_trials = time.monotonic(), [], 0, Counter(), 0
    logging.getLogger("rollmatch").setLevel(logging.CRITICAL)
    with multiprocessing.get_context("fork").Pool(workers, maxtasksperchild=20) as pool:
        for number, faults, outcomes, wrong in pool.imap_unordered(partial(numbered, seed=seed), range(10**6)):
            struck += faults
            ends.update(outcomes)
            num_trials, findings = num_trials + 1, findings + len(wrong)
            for problem in wrong:
                show(f"seed {seed}, trial {number}: {problem}\n    {faults}\n    {outcomes}")
            if len(struck) >= num_faults or time.monotonic() > began + 60 * minutes:
                break
        pool.terminate()
    show(f"doubles, seed {seed}: {len(struck)} faults in {num_trials} runs, {findings} findings")
    show(f"  {(time.monotonic() - began) / 60:.1f} minutes")
    show(f"  faults: {dict(Counter(f'{fault.phase} {fault.kind}' for fault in struck).most_common())}")
    show(f"  ends of processes: {dict(ends.most_common())}")
    return len(struck), findings


def main():
    parser = argparse.ArgumentParser(prog="conformance.campaign", description=__doc__)
    parser.add_argument("--seed", type=int, default=random.SystemRandom().randrange(10**6))
    parser.add_argument("--faults", type=int, default=1000, metavar="N", help="faults on doubles")
    parser.add_argument("--minutes", type=float, default=20.0, help="at most, on doubles")
    parser.add_argument("--workers", type=int, default=8, help="runs on doubles at a time")
    options = parser.parse_args()
    _, findings = on_doubles(options.seed, num_faults=options.faults, minutes=options.minutes, workers=options.workers)
    return int(findings > 0)


if __name__ == "__main__":
    sys.exit(main())
