"""Run a fault campaign and print its figures; exits with 1 where something was found."""

import argparse
import logging
import multiprocessing
import random
import sys
import time
from collections import Counter
from concurrent.futures import FIRST_COMPLETED, ProcessPoolExecutor, wait
from concurrent.futures.process import BrokenProcessPool
from itertools import count, islice

from conformance import processes
from conformance.campaign.doubles import trial
from conformance.campaign.observe import HealthLooks
from conformance.campaign.real import story

FAULTS_OF_STORY = 20


def on_doubles(seed, *, num_faults, minutes, workers, show=print):
    """Trials in processes until enough faults have struck; returns their number and that of findings."""
    began, struck, findings, ends, num_trials = time.monotonic(), [], 0, Counter(), 0
    for number, (faults, outcomes, wrong) in in_processes(seed, workers, show=show):
        struck += faults
        ends.update(outcomes)
        num_trials, findings = num_trials + 1, findings + len(wrong)
        for problem in wrong:
            show(f"seed {seed}, trial {number}: {problem}\n    {faults}\n    {outcomes}")
        if len(struck) >= num_faults or time.monotonic() > began + 60 * minutes:
            break
    show(f"doubles, seed {seed}: {len(struck)} faults in {num_trials} runs, {findings} findings")
    show(f"  {(time.monotonic() - began) / 60:.1f} minutes")
    show(f"  faults: {dict(Counter(f'{fault.phase} {fault.kind}' for fault in struck).most_common())}")
    show(f"  ends of processes: {dict(ends.most_common())}")
    return len(struck), findings


def be_quiet():
    """What the learner says of the faults is expected."""
    logging.getLogger("rollmatch").setLevel(logging.CRITICAL)


def in_processes(seed, workers, *, show):
    """(number, result) of trials as they end; a process that crashes is a finding and ends them."""
    numbers = count()
    with ProcessPoolExecutor(workers, mp_context=multiprocessing.get_context("fork"), initializer=be_quiet) as pool:
        running = {pool.submit(trial, number, seed): number for number in islice(numbers, 2 * workers)}
        try:
            while True:
                for future in wait(running, return_when=FIRST_COMPLETED).done:
                    yield running.pop(future), future.result()
                    following = next(numbers)
                    running[pool.submit(trial, following, seed)] = following
        except BrokenProcessPool:
            show(f"seed {seed}: one of the trials {sorted(running.values())} crashed its process")
            yield -1, ([], ["crashed"], ["UNNAMED: a process crashed"])
        finally:
            pool.shutdown(wait=False, cancel_futures=True)


def on_processes(seed, *, num_faults, minutes, show=print):
    """Stories until enough faults have struck; returns their number and that of findings."""
    began, struck, ends, wrong, looks = time.monotonic(), [], Counter(), [], HealthLooks()
    processes.PRELOAD += processes.ENGINE
    number, goes_on = 0, True
    for number in count():
        if len(struck) >= num_faults or time.monotonic() > began + 60 * minutes or not goes_on:
            break
        here = story(number, seed, min(FAULTS_OF_STORY, num_faults - len(struck)), looks, show)
        struck, ends, wrong, goes_on = struck + here[0], ends + here[1], wrong + here[2], bool(here[0])
        for problem in here[2]:
            show(f"seed {seed}, story {number}: {problem}")
    show(f"processes, seed {seed}: {len(struck)} faults in {number} runs, {len(wrong)} findings")
    show(f"  {(time.monotonic() - began) / 60:.1f} minutes; health: {looks.shown()}")
    show(f"  faults: {dict(Counter(f'{kind}, {place}' for kind, place, _ in struck).most_common())}")
    for place in ("generation", "sync"):
        costs = [seconds for kind, where, seconds in struck if (kind, where) == ("server killed", place)]
        show(f"  a server restarted in {place} cost, less its own start, at most {max(costs, default=0.0):.1f} s")
    show(f"  ends of learners: {dict(ends.most_common())}")
    return len(struck), len(wrong)


def main():
    parser = argparse.ArgumentParser(prog="conformance.campaign", description=__doc__)
    parser.add_argument("--seed", type=int, default=random.SystemRandom().randrange(10**6))
    parser.add_argument("--faults", type=int, default=1000, metavar="N", help="faults on doubles")
    parser.add_argument("--minutes", type=float, default=20.0, help="at most, on doubles")
    parser.add_argument("--workers", type=int, default=8, help="runs on doubles at a time")
    parser.add_argument("--real", type=int, default=0, metavar="N", help="faults on real servers and learners")
    parser.add_argument("--real-minutes", type=float, default=30.0, help="at most, on real servers and learners")
    options, findings = parser.parse_args(), 0
    if options.faults:
        findings += on_doubles(
            options.seed, num_faults=options.faults, minutes=options.minutes, workers=options.workers
        )[1]
    if options.real:
        findings += on_processes(options.seed, num_faults=options.real, minutes=options.real_minutes)[1]
    return int(findings > 0)


if __name__ == "__main__":
    sys.exit(main())
