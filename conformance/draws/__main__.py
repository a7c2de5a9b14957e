"""``python -m conformance.draws [--seconds N | --draws N] [--seed S]``; with ``FOLDER``: repeat a draw that failed."""

import argparse
import json
import shutil
import sys
import tempfile
import time
import traceback
from pathlib import Path

from hypothesis import HealthCheck, Phase, Verbosity, assume, given, seed, settings

from rollmatch.run.machine import set_environment

set_environment(eager=True)  # before torch loads


class Search:
    """Draws until one fails or the time is over; Hypothesis shrinks what fails."""

    def __init__(self, folder: Path, *, seconds: float, shrink_s: float) -> None:
        self.folder, self.end, self.shrink_s = folder, time.monotonic() + seconds, shrink_s
        self.num_judged = self.num_close = 0
        self.failures: dict[str, BaseException] = {}
        self.failed, self.found_after = None, 0

    def judge(self, draw: dict) -> None:
        """Raise what this draw fails with; the same draw once more fails alike."""
        from conformance.draws.compare import judge
        from conformance.oracle.sampling import TooClose

        name = json.dumps(draw)
        if name in self.failures:
            raise self.failures[name]
        assume(time.monotonic() < self.end)
        folder = Path(tempfile.mkdtemp(prefix="draw-", dir=self.folder))
        try:
            judge(draw, folder, self.folder / "models")
        except TooClose:
            self.num_close += 1
            shutil.rmtree(folder)
            assume(False)
        except Exception as error:
            self.failures[name] = error
            if self.failed is None:
                self.found_after, self.end = self.num_judged + 1, time.monotonic() + self.shrink_s
                sys.stderr.write(f"draw {self.found_after}: {type(error).__name__}: {error} in {folder}\n")
            self.failed = folder
            raise
        self.num_judged += 1
        shutil.rmtree(folder)


def tell(text: str) -> None:
    sys.stdout.write(f"{text}\n")


def main() -> int:
    parser = argparse.ArgumentParser(prog="python -m conformance.draws", description=__doc__)
    parser.add_argument("folder", nargs="?", type=Path, help="of a draw that failed")
    parser.add_argument("--seconds", type=float, default=1e9)
    parser.add_argument("--draws", type=int, default=150)
    parser.add_argument("--seed", type=int, default=None)
    parser.add_argument("--shrink-seconds", type=float, default=60)
    options = parser.parse_args()
    if options.folder is not None:
        from conformance.draws.compare import judge

        judge(
            json.loads((options.folder / "draw.json").read_text()),
            Path(tempfile.mkdtemp()),
            options.folder.parent / "models",
        )
        tell("agrees")
        return 0
    return search(options)


def search(options: argparse.Namespace) -> int:
    from conformance.draws.strategy import runs

    number = options.seed if options.seed is not None else int(time.time())
    folder = Path(tempfile.mkdtemp(prefix="rollmatch-oracle-"))
    found = Search(folder, seconds=options.seconds, shrink_s=options.shrink_seconds)
    rules = settings(
        max_examples=options.draws if options.seconds > 1e8 else 10**6,
        deadline=None,
        database=None,
        print_blob=False,
        suppress_health_check=list(HealthCheck),
        phases=(Phase.generate, Phase.shrink),
        verbosity=Verbosity.quiet,
        report_multiple_bugs=False,
    )
    try:
        seed(number)(rules(given(draw=runs())(found.judge)))()
    except Exception:
        if found.failed is None:
            raise
        traceback.print_exc(limit=-3)
        tell(f"seed {number}: draw {found.found_after} failed; shrunk to {found.failed}/run.yaml")
        tell((found.failed / "run.yaml").read_text())
        tell(f"again: python -m conformance.draws {found.failed}")
        return 1
    tell(f"seed {number}: {found.num_judged} draws agree, {found.num_close} left out (too close to call)")
    return 0


if __name__ == "__main__":
    sys.exit(main())
