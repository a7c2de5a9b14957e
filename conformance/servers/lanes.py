"""One known server, judged from start to end: gentle checks on one instance, dangerous ones in lanes beside each other.

An instance that is not well after a check is replaced, so that no check suffers from the one before. Most of the time
of a server that breaks goes by waiting for an answer that does not come; several lanes wait at the same time.
"""

import itertools
import threading
from collections import deque
from collections.abc import Callable, Iterable, Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

from conformance.servers.check import MISSED, PASSED, Check, judge
from conformance.servers.dialects import DIALECTS
from conformance.servers.exchange import Exchange
from conformance.servers.known import Known
from conformance.servers.launched import Launched
from conformance.servers.machine import Machine
from conformance.servers.peers import free_port
from conformance.servers.policy import Policies
from conformance.servers.run import answers, ask_and_judge, is_well
from conformance.servers.subject import Subject

Keep = Callable[[Check, Exchange, float], None]


class Judging:
    """A known server under judgement; ``keep`` is told each exchange as it comes, by one lane at a time."""

    def __init__(self, known: Known, policies: Policies, folder: Path, *, machine: Machine, keep: Keep) -> None:
        self.known, self.policies, self.folder, self.machine = known, policies, folder, machine
        self.num_starts, self.cpu_s = 0, 0.0
        self.passed: set[str] = set()
        self._keep, self._lock = keep, threading.Lock()

    def run(self, checks: Sequence[Check]) -> None:
        """All of them; all instances are ended."""
        rows = rows_to_ask(checks, longest_first=self.known.num_lanes > 1)
        dangerous = deque(row for row in rows if row[0].is_dangerous)
        first = JudgeLane(self)
        with ThreadPoolExecutor(self.known.num_lanes) as pool:
            lanes = [pool.submit(first.run, (row for row in rows if not row[0].is_dangerous), dangerous)]
            first.is_gentle_done.wait()
            lanes += [pool.submit(JudgeLane(self).run, (), dangerous) for _ in range(1, self.known.num_lanes)]
        for lane in lanes:
            lane.result()

    def keep(self, checks: Iterable[Check], exchange: Exchange, seconds: float) -> str:
        """The worst state of these checks, which all ask the same."""
        states = []
        with self._lock:
            for check in checks:
                states.append(judge(check, exchange).state)
                if states[-1] == PASSED:
                    self.passed.add(check.check_id)
                self._keep(check, exchange, seconds)
        return MISSED if MISSED in states else states[0]

    def next_log(self) -> Path:
        with self._lock:
            self.num_starts += 1
            return self.folder / f"{self.known.server}-{self.num_starts}.log"

    def count(self, process: Launched) -> None:
        with self._lock:
            self.cpu_s += process.cpu_s()


class JudgeLane:
    """A place for one instance at a time."""

    def __init__(self, judging: Judging) -> None:
        self.judging, self.machine = judging, judging.machine
        self.is_gentle_done = threading.Event()
        self._subject: Subject | None = None

    def run(self, gentle: Iterable[Sequence[Check]], dangerous: "deque[Sequence[Check]]") -> None:
        """The gentle rows of checks, then dangerous ones as long as there are any."""
        try:
            with self.machine.room:
                try:
                    self._run_gentle(gentle)
                    self.is_gentle_done.set()
                    while dangerous:
                        self._run_dangerous(dangerous.popleft())
                finally:
                    self.end()
        finally:
            self.is_gentle_done.set()

    def end(self) -> None:
        if self._subject is not None:
            self._subject.process.end()
            self.judging.count(self._subject.process)
        self._subject = None

    def _run_gentle(self, rows: Iterable[Sequence[Check]]) -> None:
        for is_timed, together in itertools.groupby(rows, lambda row: row[0].is_timed):
            self._running()
            with self.machine.quiet() if is_timed else self.machine.core():
                for row in together:
                    if self._ask(row) == MISSED and not self._is_well():
                        self.end()

    def _run_dangerous(self, row: Sequence[Check]) -> None:
        self._running()
        self.machine.turn()
        self._ask(row)
        if not self._is_well():
            self.end()

    def _ask(self, row: Sequence[Check]) -> str:
        exchange, _, seconds = ask_and_judge(row[0], self._running())
        return self.judging.keep(row, exchange, seconds)

    def _is_well(self) -> bool:
        subject = self._running()
        if not answers(subject):
            return False
        with self.machine.core():
            return is_well(subject, self.judging.passed)

    def _running(self) -> Subject:
        if self._subject is None:
            with self.machine.core():
                self._subject = self._start()
        return self._subject

    def _start(self) -> Subject:
        known, port = self.judging.known, free_port()
        process = Launched(known.words(port), known.variables(), self.judging.next_log())
        dialect = DIALECTS[known.dialect]()
        url = f"http://127.0.0.1:{port}"
        try:
            process.wait_ready(url + dialect.health_path)
        except BaseException:
            process.end()
            raise
        return Subject(
            name=known.name,
            version=known.version,
            url=url,
            dialect=dialect,
            transport="gloo",
            policies=self.judging.policies,
            process=process,
        )


def rows_to_ask(checks: Sequence[Check], *, longest_first: bool = False) -> list[list[Check]]:
    """Checks that ask the same are asked once; gentle ones first, of these the timed ones last."""
    rows: dict[object, list[Check]] = {}
    for check in checks:
        rows.setdefault(check.ask, []).append(check)

    def place(row: list[Check]) -> tuple[bool, bool, float]:
        check = row[0]
        return check.is_dangerous, check.is_timed, -check.deadline_s if check.is_dangerous and longest_first else 0.0

    return sorted(rows.values(), key=place)
