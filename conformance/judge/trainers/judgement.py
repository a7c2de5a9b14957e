"""Verdicts on one trainer."""

import time
import traceback
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field

from conformance.judge.rule_sets import NEWEST
from conformance.judge.servers.check import FAULTY, PASSED, UNTESTABLE, Check, CheckVerdict, judge
from conformance.judge.servers.exchange import Exchange, RecordedCall
from conformance.judge.servers.gaps import BLOCKED, Gap, settle
from conformance.judge.servers.preflight import Preflight
from conformance.judge.servers.verdicts import VerdictRow, exit_code
from conformance.judge.trainers.arrivals import of_kind
from conformance.judge.trainers.checks import BY_ID, CHECKS
from conformance.judge.trainers.reading import ended
from conformance.judge.trainers.runs import PLAIN, TrainerRuns, TrainerSubject, ending_of


def with_required(only: Sequence[str]) -> list[Check]:
    """The named checks and those that they build on; all where none is named. Errors: ``KeyError``."""
    wanted, waiting = set[str](), list(only)
    while waiting:
        name = waiting.pop()
        wanted.add(name)
        waiting += set(BY_ID[name].requires) - wanted
    return [check for check in CHECKS if not only or check.check_id in wanted]


@dataclass(slots=True)
class TrainerJudgement:
    """What arrived is evidence, so that a miss is not asked for again; the runs that checks share are made once."""

    subject: TrainerSubject | None
    """None: its runs were recorded."""
    command: Callable[[str], str]
    """(id of a check) -> what judges it alone; all where the id is empty."""
    gaps: Mapping[str, Gap] = field(default_factory=dict)
    budget_s: float = 1800.0
    name: str = "trainer"
    rules: str = NEWEST
    rows: list[VerdictRow] = field(default_factory=list)
    preflight: Preflight = field(default_factory=Preflight)
    not_restored: str = ""
    """Empty: no server is left behind."""
    not_asked: dict[str, list[str]] = field(default_factory=dict)
    """Empty: all checks are asked."""
    is_finished: bool = False
    runs: TrainerRuns = field(init=False)
    _began: float = field(default_factory=time.monotonic)
    _blocks: dict[str, str] = field(default_factory=dict)

    def __post_init__(self) -> None:
        self.runs = TrainerRuns(self.subject)
        if self.subject is not None:
            self.preflight.facts |= {"dialect": self.subject.dialect, "model": self.subject.engine.directory}

    def look(self) -> None:
        """Run it once: is there anything to judge?"""
        exchange = self.runs.run(PLAIN)
        if not of_kind(exchange.notes["events"], "generate"):
            self.preflight.problem = f"no rollout was requested; {_calls(exchange.calls)}; {_ending(exchange)}"

    def verdict_of(self, check: Check) -> VerdictRow:
        """Settled."""
        began, problem = time.monotonic(), self.preflight.problem
        blamed = "preflight" if problem else next((self._blocks[n] for n in check.requires if n in self._blocks), "")
        if blamed:
            self._blocks[check.check_id] = blamed
            return self._keep(VerdictRow(check=check, state=BLOCKED, reason=blamed, seconds=0.0))
        exchange, verdict = self._judge(check)
        if verdict.state not in (PASSED, UNTESTABLE):
            self._blocks[check.check_id] = check.check_id
        state, reason = settle(check, verdict, self.gaps)
        seconds = round(time.monotonic() - began, 1)
        return self._keep(VerdictRow(check=check, state=state, reason=reason, seconds=seconds, exchange=exchange))

    def _judge(self, check: Check) -> tuple[Exchange | None, CheckVerdict]:
        if self.seconds >= self.budget_s:
            reason = f"the {self.budget_s / 60:g} minutes are over (--minutes)"
            return None, CheckVerdict(state=UNTESTABLE, reason=reason)
        try:
            exchange = check.ask(self.runs)
        except Exception as error:  # noqa: BLE001  # the judge's own fault, and its verdict
            place = traceback.extract_tb(error.__traceback__)[-1]
            reason = f"{type(error).__name__}: {error} ({place.name}, line {place.lineno})"
            return None, CheckVerdict(state=FAULTY, reason=reason)
        return exchange, judge(check, exchange)

    def _keep(self, row: VerdictRow) -> VerdictRow:
        self.rows.append(row)
        return row

    @property
    def family(self) -> str:
        return "trainers"

    @property
    def title(self) -> str:
        return self.name

    @property
    def server(self) -> str:
        """None: the trainer is its command."""
        return ""

    @property
    def dialect(self) -> str:
        return self.subject.dialect if self.subject else ""

    @property
    def reproduce(self) -> str:
        return self.command("")

    @property
    def exit_code(self) -> int:
        return exit_code(self.rows, problem=self.preflight.problem, is_finished=self.is_finished)

    @property
    def seconds(self) -> float:
        return round(time.monotonic() - self._began, 1)

    def again(self, check: Check) -> str:
        return self.command(check.check_id)

    def curl(self, call: RecordedCall) -> str:
        """None: what a trainer sent is not sent again."""
        return ""

    def decisive_curl(self, exchange: Exchange | None) -> str:
        """None, as ``curl``."""
        return ""


def _calls(calls: Sequence[RecordedCall]) -> str:
    """What came instead of rollouts."""
    if not calls:
        return "no call came: does the command use {url}, or ROLLMATCH_JUDGE_URL?"
    refused = [f"refused: {call.summary().partition(': ')[2]}" for call in calls if not call.is_ok]
    return f"calls: {len(calls)}, {(refused or ['none refused'])[-1]}"


def _ending(exchange: Exchange) -> str:
    """How the command ended, and what it wrote last."""
    output = exchange.notes["output"].strip()[-600:]
    return ended(ending_of(exchange)) + (f": {output}" if output else ", and wrote nothing")
