"""What trials said goes into the ledger and ``rests.txt``; nothing of the implementation is imported: trials fork."""

import json
import time
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from conformance.harness.faults.bank import BANK
from conformance.harness.faults.rests import read_rests, write_rests
from conformance.harness.faults.subject import SUBJECTS
from conformance.harness.faults.workers import Tried

LEDGER = Path(__file__).with_name("ledger.json")
PAUSE_S = 5.0
"""Between two times that the files are written: what was tried before a run is broken off stays."""


def read_ledger() -> Any:
    return json.loads(LEDGER.read_text(encoding="utf-8")) if LEDGER.exists() else {"faults": {}, "subjects": {}}


@dataclass(slots=True, kw_only=True)
class Book:
    """Rows that wait to be written, and what is bad in all that were given; ``digests`` are of tests."""

    digests: dict[str, str]
    rows: dict[str, dict[str, Any]] = field(default_factory=lambda: {"faults": {}, "subjects": {}})
    rests: dict[str, list[str]] = field(default_factory=dict)
    bad: list[str] = field(default_factory=list)
    written: float = field(default_factory=time.monotonic)

    def enter(self, tried: Tried) -> None:
        name, outcomes = tried.trial.name, tried.answer.outcomes
        verdicts = {test: each.verdict for test, each in outcomes.items()}
        if name in SUBJECTS:
            passed, skipped = (sorted(t for t, v in verdicts.items() if v == what) for what in ("passed", "skipped"))
            self.rows["subjects"][name] = {"passed": passed, "tests": sorted(verdicts.keys() - set(skipped))}
            self.bad += [f"{name}: {test} {verdicts[test]}" for test in (*passed, *skipped)]
            self.bad += [] if "killed" in verdicts.values() else [f"{name}: no test has run"]
        else:
            killed = {test: each.said for test, each in outcomes.items() if each.verdict == "killed"}
            kills = {test: {"digest": self.digests[test], "said": said} for test, said in killed.items()}
            self.rows["faults"][name] = {"digest": BANK[name].digest, "tests": kills}
            self.rests[name] = tried.answer.rests
            self.bad += [f"{name}: {t} {e.verdict} {e.said}" for t, e in outcomes.items() if t not in kills]
            self.bad += [] if outcomes else [f"{name}: no test claims it"]
        if time.monotonic() > self.written + PAUSE_S:
            self.write()

    def write(self) -> None:
        """Rows of others stay, but those of faults that the bank has no more."""
        ledger = read_ledger()
        for kind, known in (("faults", BANK), ("subjects", SUBJECTS)):
            ledger[kind] = {row_id: row for row_id, row in (ledger[kind] | self.rows[kind]).items() if row_id in known}
        LEDGER.write_text(json.dumps(ledger, indent=1, sort_keys=True) + "\n", encoding="utf-8")
        write_rests({name: rest for name, rest in (read_rests() | self.rests).items() if name in BANK})
        self.written = time.monotonic()
