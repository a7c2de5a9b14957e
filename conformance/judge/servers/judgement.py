"""One run over one server: blame, confirmation, quiet between checks, and the first weights at the end."""

import time
from collections.abc import Callable, Mapping
from concurrent.futures import TimeoutError as StillRunning
from contextlib import suppress
from dataclasses import dataclass, field

from conformance.judge.rule_sets import NEWEST
from conformance.judge.servers.bounded import in_thread
from conformance.judge.servers.check import INAPPLICABLE, MISSED, PASSED, UNTESTABLE, Check, CheckVerdict, judge
from conformance.judge.servers.exchange import Exchange, RecordedCall
from conformance.judge.servers.gaps import BLOCKED, Gap, settle
from conformance.judge.servers.peers import sync
from conformance.judge.servers.preflight import QUESTIONS, Preflight, answers_of, look_at
from conformance.judge.servers.profiles import required_by
from conformance.judge.servers.protocol import ReplyUnreadable
from conformance.judge.servers.reproduce import command_for, curl_for, curl_of, run_again
from conformance.judge.servers.run import ALIVE_S, LEAVE_S, ask
from conformance.judge.servers.subject import Subject
from conformance.judge.servers.talk import Talk
from conformance.judge.servers.verdicts import VerdictRow, exit_code

QUIET_S, RESTORE_S, PAUSE_S = 30.0, 120.0, 0.2
"""How long to wait for quiet, for the first weights, and between two looks."""
QUIET_FACTOR, LEAST_QUIET_S = 3.0, 0.3
"""A server is quiet when one token takes at most so many times what it took at first, or so many seconds."""
PREFLIGHT = "preflight"
Asked = tuple[Exchange, float]


@dataclass(slots=True, kw_only=True)
class JudgingRules:
    """What the user allows."""

    dangerous: bool = False
    budget_s: float = 900.0
    gaps: Mapping[str, Gap] = field(default_factory=dict)
    rules: str = NEWEST
    started_by: str = ""
    """Command that starts the server, for who wants to see the report again."""


class ServerJudgement:
    """Verdicts on one server, one check after the other; ``close`` at the end, however it came."""

    family = "servers"

    def __init__(self, subject: Subject, terms: JudgingRules) -> None:
        self.subject, self.terms = subject, terms
        self.rows: list[VerdictRow] = []
        self.num_planned = 0
        """Checks that the run is to ask."""
        self.not_asked: dict[str, list[str]] = {}
        """Ids of checks that the run left out -> the options that they need."""
        self.not_restored = ""
        """Why the server may not hold its first weights."""
        self.preflight: Preflight = look_at(subject)
        self._began = time.monotonic()
        self._asked: dict[Callable[[Talk], None], list[Asked]] = {}
        """What was sent and came back, by its calls: several checks may judge the same ones."""
        self._blocks: dict[str, str] = {}
        """Check that shows nothing -> the check to blame, itself where it was missed."""
        self._ended_by = PREFLIGHT if self.preflight.problem else ""
        self._is_changed = False

    def verdict_of(self, check: Check) -> VerdictRow:
        """Ask, confirm what is missed, and settle it."""
        began = time.monotonic()
        if why := self.subject.dialect.not_applicable.get(check.check_id):
            return self._keep(VerdictRow(check=check, state=INAPPLICABLE, reason=why, seconds=0.0, num_asked=0))
        blamed = self._ended_by or next((self._blocks[n] for n in required_by(check) if n in self._blocks), "")
        if blamed:
            self._blocks[check.check_id] = blamed
            return self._keep(VerdictRow(check=check, state=BLOCKED, reason=blamed, seconds=0.0))
        lacking = self._lacking(check)
        verdict = CheckVerdict(state=UNTESTABLE, reason=lacking) if lacking else self._judge(check)
        if verdict.state not in (PASSED, UNTESTABLE, INAPPLICABLE):
            self._blocks[check.check_id] = check.check_id
        asked = [] if lacking else self._asked[check.ask]
        state, reason = settle(check, verdict, self.terms.gaps)
        seconds = round(time.monotonic() - began, 1)
        shown = next((e for e, _ in reversed(asked) if judge(check, e).state == verdict.state), None)
        shown = shown or (asked[-1][0] if asked else None)
        return self._keep(
            VerdictRow(check=check, state=state, reason=reason, seconds=seconds, exchange=shown, num_asked=len(asked))
        )

    def close(self) -> None:
        """Bring the first weights back, where updates were sent."""
        if self._is_changed:
            self.not_restored = self._restore() and self._restore()
            self._is_changed = bool(self.not_restored)

    @property
    def exit_code(self) -> int:
        return exit_code(
            self.rows,
            problem=self.preflight.problem,
            is_restored=not self.not_restored,
            is_finished=len(self.rows) >= self.num_planned,
        )

    @property
    def title(self) -> str:
        return self.subject.url

    @property
    def rules(self) -> str:
        return self.terms.rules

    @property
    def server(self) -> str:
        return f"{self.subject.name}-{self.subject.version}" if self.subject.version else ""

    @property
    def dialect(self) -> str:
        return self.subject.dialect.name

    @property
    def reproduce(self) -> str:
        judged = run_again(self.subject, rules=self.terms.rules, dangerous=self.terms.dangerous)
        return "\n".join(filter(None, [self.terms.started_by, judged]))

    def again(self, check: Check) -> str:
        return command_for(check, self.subject)

    def curl(self, call: RecordedCall) -> str:
        return curl_for(call, self.subject)

    def decisive_curl(self, exchange: Exchange | None) -> str:
        return curl_of(exchange, self.subject)

    @property
    def seconds(self) -> float:
        return round(time.monotonic() - self._began, 1)

    def _keep(self, row: VerdictRow) -> VerdictRow:
        self.rows.append(row)
        return row

    def _lacking(self, check: Check) -> str:
        lacking = self.subject.lacks(check.needs)
        if check.is_dangerous and not self.terms.dangerous:
            lacking = ", ".join(filter(None, [lacking, "leave to stop the server (--dangerous)"]))
        if lacking:
            return f"needs {lacking}"
        is_over = self.seconds >= self.terms.budget_s
        return f"the {self.terms.budget_s / 60:g} minutes are over (--minutes)" if is_over else ""

    def _judge(self, check: Check) -> CheckVerdict:
        """A miss counts if it is seen in two of at most three times; each time nothing else is asked."""
        first = verdict = judge(check, self._attempt(check, 0))
        if verdict.state == PASSED and self._ended_by:
            return CheckVerdict(state=MISSED, reason="afterwards the server generates no more")
        if verdict.state != MISSED:
            return verdict
        for number in (1, 2):
            if self._ended_by:
                return _with(verdict, "the server generates no more, so that it was not asked again")
            if self.seconds >= self.terms.budget_s:
                return CheckVerdict(state=UNTESTABLE, reason=f"missed, and no time to confirm it: {first.reason}")
            verdict = judge(check, self._attempt(check, number))
            if verdict.state != PASSED:
                return verdict
        return _with(verdict, f"missed once in three times: {first.reason}")

    def _attempt(self, check: Check, number: int) -> Exchange:
        """Once for all checks with the same calls; afterwards the server is quiet, or this check has ended it."""
        asked = self._asked.setdefault(check.ask, [])
        if len(asked) <= number:
            is_update = {"group", "model"} <= {*check.needs}
            if not is_update and not self.not_restored:
                self.close()
            self._is_changed = self._is_changed or is_update
            began = time.monotonic()
            exchange = ask(check, self.subject)
            asked.append((exchange, round(time.monotonic() - began, 1)))
            if not self._becomes_quiet():
                self._ended_by = check.check_id
        return asked[number][0]

    def _becomes_quiet(self) -> bool:
        """Whether it generates; waits until it does so as fast as at first, or long enough."""
        deadline = time.monotonic() + QUIET_S
        limit_s = max(LEAST_QUIET_S, QUIET_FACTOR * self.preflight.quiet_s)
        while True:
            call = Talk(self.subject).generate("quiet", QUESTIONS[:1], max_tokens=1, timeout_s=ALIVE_S)
            if call.is_ok and call.seconds <= limit_s:
                return True
            if time.monotonic() > deadline:
                self.preflight.quiet_s = max(self.preflight.quiet_s, call.seconds)
                return call.is_ok
            time.sleep(PAUSE_S)

    def _restore(self) -> str:
        """Send policy 0; returns why that failed."""
        talk = Talk(self.subject)
        sending = in_thread(sync, talk, 0)
        try:
            sending.result(timeout=RESTORE_S)
        except StillRunning:
            return f"the first weights were not taken within {RESTORE_S:g} s"
        except Exception as error:  # noqa: BLE001  # whatever it is, reports are written, and name it
            return f"the first weights were not taken: {type(error).__name__}: {error}"
        else:  # leaving fails on vLLM 0.26, which has no route for it, with the weights in place
            failed = [call.summary() for call in talk.exchange.calls if not call.is_ok]
        finally:
            with suppress(StillRunning):
                in_thread(talk.leave).exception(timeout=LEAVE_S)
        if failed:
            return f"the first weights were not taken: {failed[0]}"
        try:
            is_same = answers_of(talk) == self.preflight.first_ids
        except ReplyUnreadable as error:
            return f"prompts are not answered any more: {error}"
        return "" if is_same else "prompts have other answers than at the beginning"


def _with(verdict: CheckVerdict, remark: str) -> CheckVerdict:
    return CheckVerdict(state=verdict.state, reason="; ".join(filter(None, [verdict.reason, remark])))
