"""Deliberate faults of protocols, fences and concurrency, which mutation of single expressions does not make.

    python -m conformance.tools.faults [--only WORD] [--part 1/4] [--workers N]

``faults.toml`` holds them: a text of one module, what replaces it, and the rules of the specification whose tests have
to fail then. A fault is found if a test fails in its own code; one that keeps tests from running shows nothing.
"""

import argparse
import sys
import tomllib
from dataclasses import dataclass
from pathlib import Path

from conformance.tools.binding import map_tests, read_claims
from conformance.tools.trial import IMPL, Trial, run_trials

FAULTS = Path(__file__).with_suffix(".toml")


@dataclass(frozen=True, slots=True, kw_only=True)
class Fault:
    fault_id: str
    what: str
    file: str
    """Below ``impl/rollmatch``."""
    old: str
    new: str
    rules: tuple[str, ...]

    @property
    def path(self) -> Path:
        return Path("rollmatch") / self.file

    def apply(self) -> str:
        """The file's source with the fault. Errors: ``ValueError`` unless ``old`` occurs once."""
        source = (IMPL / self.path).read_text(encoding="utf-8")
        if (count := source.count(self.old)) != 1:
            raise ValueError(
                f"{self.fault_id}: its text occurs {count} times in {self.path}; adapt or remove the fault"
            )
        return source.replace(self.old, self.new)


def read_faults(path: Path = FAULTS) -> list[Fault]:
    """Faults in the order of the file."""
    tables = tomllib.loads(path.read_text(encoding="utf-8"))
    return [Fault(fault_id=name, **{**table, "rules": tuple(table["rules"])}) for name, table in tables.items()]


def trial_of(fault: Fault, tests: dict[str, list[str]]) -> Trial:
    """The trial of a fault with the tests of its rules."""
    chosen = dict.fromkeys(test for rule in fault.rules for test in tests[rule])
    return Trial(name=fault.fault_id, path=fault.path, source=fault.apply(), tests=tuple(chosen))


def main() -> int:
    """Exit status: 1 when more than one in twenty was missed; fewer are printed, as a trial may hit its time limit."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--only", default="", help="faults whose id contains this word")
    parser.add_argument("--part", default="0/1", help="1/4: each fourth fault, from the second one on")
    parser.add_argument("--workers", type=int, default=2)
    options = parser.parse_args()
    tests = map_tests(read_claims())
    part, _, num_parts = options.part.partition("/")
    faults = read_faults()[int(part) :: int(num_parts)]
    trials = [trial_of(fault, tests) for fault in faults if options.only in fault.fault_id]
    missed = 0
    for verdict in run_trials(trials, num_workers=options.workers):
        sys.stdout.write(f"{verdict.outcome:8} {verdict.trial.name}\n")
        if verdict.outcome != "failed":
            missed += 1
            sys.stdout.write(verdict.log[-2000:])
        sys.stdout.flush()
    sys.stdout.write(f"{len(trials) - missed} of {len(trials)} faults found\n")
    return int(20 * missed > len(trials))


if __name__ == "__main__":
    raise SystemExit(main())
