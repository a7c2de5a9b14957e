"""Run a fault campaign and print its figures; exits with 1 where something was found."""

import argparse
import logging
import multiprocessing
import random
import sys
import time
from collections import Counter
from concurrent.futures import ProcessPoolExecutor
from concurrent.futures.process import BrokenProcessPool
from itertools import count, repeat

from conformance.doubles import processes
from conformance.tools.campaign.attack import HEALTH_S, KEYS, attack
from conformance.tools.campaign.bodies import bodies
from conformance.tools.campaign.doubles import trial
from conformance.tools.campaign.observe import HealthLooks
from conformance.tools.campaign.real import faults_of, possible, story

FAULTS_OF_STORY = 20


def on_doubles(seed, *, num_faults, minutes, workers, show=print):
    """Trials in processes until enough faults have struck; returns their number and that of findings."""
    began, struck, findings, ends = time.monotonic(), [], 0, Counter()
    for number, (faults, outcomes, wrong) in in_processes(seed, workers):
        struck += faults
        ends.update(outcomes)
        findings += len(wrong)
        for problem in wrong:
            show(f"seed {seed}, trial {number}: {problem}\n    {faults}\n    {outcomes}")
        if len(struck) >= num_faults or time.monotonic() > began + 60 * minutes:
            break
    show(f"doubles, seed {seed}: {len(struck)} faults in {number + 1} runs, {findings} findings")
    show(f"  {(time.monotonic() - began) / 60:.1f} minutes")
    show(f"  faults: {dict(Counter(f'{fault.phase} {fault.kind}' for fault in struck).most_common())}")
    show(f"  ends of processes: {dict(ends.most_common())}")
    return len(struck), findings


def be_quiet():
    """What the learner says of the faults is expected."""
    logging.getLogger("rollmatch").setLevel(logging.CRITICAL)


def in_processes(seed, workers):
    """(number, result) of trials; a process that crashes is a finding and ends them."""
    with ProcessPoolExecutor(workers, mp_context=multiprocessing.get_context("fork"), initializer=be_quiet) as pool:
        for first in count(step=2 * workers):
            numbers = range(first, first + 2 * workers)
            try:
                yield from zip(numbers, pool.map(trial, numbers, repeat(seed)), strict=True)
            except BrokenProcessPool:
                crash = f"UNNAMED: one of the trials {first} to {numbers[-1]} crashed its process"
                yield first, ([], ["crashed"], [crash])
                return


def on_processes(seed, *, num_faults, minutes, only="", show=print):
    """Stories until enough faults have struck; returns their number and that of findings."""
    began, struck, ends, wrong, looks = time.monotonic(), [], Counter(), [], HealthLooks()
    processes.PRELOAD += processes.ENGINE
    faults = possible(faults_of(only), show)
    for number in count() if faults else ():
        here = story(number, seed, min(FAULTS_OF_STORY, num_faults - len(struck)), looks, show, faults)
        struck, ends, wrong = struck + here[0], ends + here[1], wrong + here[2]
        for problem in here[2]:
            show(f"seed {seed}, story {number}: {problem}")
        if not here[0] or len(struck) >= num_faults or time.monotonic() > began + 60 * minutes:
            break
    if looks.p99() > HEALTH_S or looks.num_failed:
        wrong.append("health")
    show(f"processes, seed {seed}: {len(struck)} faults, {len(wrong)} findings")
    show(f"  {(time.monotonic() - began) / 60:.1f} minutes; health: {looks.shown()}")
    show(f"  faults: {dict(Counter(f'{kind}, {place}' for kind, place, _ in struck).most_common())}")
    for place in ("generation", "sync"):
        costs = [seconds for kind, where, seconds in struck if (kind, where) == ("server killed", place)]
        show(f"  a server restarted in {place} cost, less its own start, at most {max(costs, default=0.0):.1f} s")
    show(f"  ends of learners: {dict(ends.most_common())}")
    return len(struck), len(wrong)


def main():
    parser = argparse.ArgumentParser(prog="conformance.tools.campaign", description=__doc__)
    parser.add_argument("--seed", type=int, default=random.SystemRandom().randrange(10**6))
    parser.add_argument("--faults", type=int, default=1000, metavar="N", help="faults on doubles")
    parser.add_argument("--minutes", type=float, default=20.0, help="at most, on doubles")
    parser.add_argument("--workers", type=int, default=8, help="runs on doubles at a time")
    parser.add_argument("--real", type=int, default=0, metavar="N", help="faults on real servers and learners")
    parser.add_argument("--attacks", type=int, default=0, metavar="N", help="attacks on a real server")
    parser.add_argument(
        "--together", action="store_true", help="all kinds of attacks at once, without a key and with one"
    )
    parser.add_argument(
        "--bodies", type=int, default=0, metavar="N", help="wrong bodies of each dialect to a real server"
    )
    parser.add_argument("--attack-minutes", type=float, default=20.0, help="at most, on a real server")
    parser.add_argument(
        "--only",
        default="",
        help="kinds of attacks, and kinds or places of faults on real processes, by commas; all by default",
    )
    parser.add_argument("--real-minutes", type=float, default=30.0, help="at most, on real servers and learners")
    options, findings = parser.parse_args(), 0
    if options.faults:
        bounds = {"num_faults": options.faults, "minutes": options.minutes, "workers": options.workers}
        findings += on_doubles(options.seed, **bounds)[1]
    if options.real:
        findings += on_processes(
            options.seed, num_faults=options.real, minutes=options.real_minutes, only=options.only
        )[1]
    if options.attacks:
        chance = random.Random(options.seed)
        for key in KEYS if options.together else (chance.choice(KEYS),):
            words = {"num": options.attacks, "minutes": options.attack_minutes, "looks": HealthLooks(), "key": key}
            words |= {"chance": chance, "kinds": options.only, "together": options.together}
            findings += len(attack(options.seed, **words)[1])
    if options.bodies:
        limits = {"num": options.bodies, "minutes": options.attack_minutes, "looks": HealthLooks()}
        findings += len(bodies(options.seed, **limits, dialects=options.only)[1])
    return int(findings > 0)


if __name__ == "__main__":
    sys.exit(main())
