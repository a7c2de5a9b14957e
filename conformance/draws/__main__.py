"""``python -m conformance.draws [--seconds N | --draws N] [--seed S]``; with ``FOLDER``: repeat a draw that failed."""

import argparse
import json
import shutil
import sys
import tempfile
import time
import traceback
from itertools import count
from pathlib import Path

import yaml
from hypothesis import HealthCheck, Phase, Verbosity, given, seed, settings

from rollmatch.run.machine import set_environment

set_environment(eager=True)  # before torch loads


ROUND = 6
"""Examples of a round of Hypothesis: in longer ones it varies what it has drawn, and leaves whole objectives out."""


class Search:
    """Draws until one fails, or there are enough; Hypothesis shrinks what fails."""

    def __init__(self, folder: Path, *, draws: int, seconds: float, shrink_s: float) -> None:
        self.folder, self.draws, self.shrink_s = folder, draws, shrink_s
        self.end = time.monotonic() + seconds
        self.num_judged = self.num_close = 0
        self.known: dict[str, BaseException | None] = {}
        self.failed, self.found_after = None, 0

    @property
    def is_over(self) -> bool:
        return time.monotonic() >= self.end or (self.failed is None and self.num_judged >= self.draws)

    def judge(self, draw: dict) -> None:
        """Raise what this draw fails with; the same draw once more fails alike."""
        from conformance.draws.compare import judge
        from conformance.oracle.sampling import TooClose

        name = json.dumps(draw)
        if name in self.known:
            if (error := self.known[name]) is not None:
                raise error
            return
        if self.is_over:
            return
        folder, self.known[name] = Path(tempfile.mkdtemp(prefix="draw-", dir=self.folder)), None
        try:
            judge(draw, folder, self.folder / "models")
        except TooClose:
            self.num_close += 1
        except Exception as error:
            self.known[name] = error
            if self.failed is None:
                self.found_after, self.end = self.num_judged + 1, time.monotonic() + self.shrink_s
                sys.stderr.write(f"draw {self.found_after}: {type(error).__name__}: {error} in {folder}\n")
            self.failed = folder
            raise
        else:
            self.num_judged += 1
        shutil.rmtree(folder)


def say(text: str) -> None:
    sys.stdout.write(f"{text}\n")


def main() -> int:
    parser = argparse.ArgumentParser(prog="python -m conformance.draws", description=__doc__)
    parser.add_argument("folder", nargs="?", type=Path, help="of a draw that failed")
    parser.add_argument("--seconds", type=float, default=1e9)
    parser.add_argument("--draws", type=int, default=10**9)
    parser.add_argument("--ranks", type=int, default=None, help="learner ranks of every draw")
    parser.add_argument("--seed", type=int, default=None)
    parser.add_argument("--only", action="append", default=[], metavar="KEY=VALUE", help="draws with this value alone")
    parser.add_argument("--shrink-seconds", type=float, default=60)
    options = parser.parse_args()
    if options.folder is not None:
        from conformance.draws.compare import judge

        judge(
            json.loads((options.folder / "draw.json").read_text()),
            Path(tempfile.mkdtemp()),
            options.folder.parent / "models",
        )
        say("agrees")
        return 0
    return search(options)


def rules_of(*phases: Phase) -> settings:
    """Those of a round."""
    return settings(
        max_examples=ROUND,
        deadline=None,
        database=None,
        print_blob=False,
        suppress_health_check=list(HealthCheck),
        phases=phases,
        verbosity=Verbosity.quiet,
        report_multiple_bugs=False,
    )


def search(options: argparse.Namespace) -> int:
    from conformance.draws.strategy import runs

    only = [(key, yaml.safe_load(value)) for key, _, value in (one.partition("=") for one in options.only)]
    drawn = runs(ranks=options.ranks).filter(lambda draw: all(draw["keys"].get(key) == value for key, value in only))
    number = options.seed if options.seed is not None else int(time.time())
    folder = Path(tempfile.mkdtemp(prefix="rollmatch-oracle-"))
    found = Search(folder, draws=options.draws, seconds=options.seconds, shrink_s=options.shrink_seconds)
    rules = rules_of(Phase.generate, Phase.shrink)
    try:
        for part in count():
            if found.is_over:
                break
            seed(1000 * number + part)(rules(given(draw=drawn)(found.judge)))()
    except Exception as problem:
        if found.failed is None:
            raise
        traceback.print_exc(limit=-3)
        say(f"seed {number}: draw {found.found_after} failed: {problem}; shrunk to {found.failed}/run.yaml")
        say((found.failed / "run.yaml").read_text())
        say(f"again: python -m conformance.draws {found.failed}")
        return 1
    say(f"seed {number}: {found.num_judged} draws agree, {found.num_close} left out (too close to call)")
    return 0


if __name__ == "__main__":
    sys.exit(main())
