"""``python -m conformance.judge.servers.judge --all``: install, start, judge and record the servers that people run."""

import argparse
import os
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator, Mapping, Sequence
from datetime import date
from pathlib import Path

from conformance.doubles.digits import MODEL
from conformance.doubles.processes import Running
from conformance.judge.ports import free_port
from conformance.judge.servers.check import MISSED, PASSED, Check, judge
from conformance.judge.servers.checks import checks_for
from conformance.judge.servers.command import say
from conformance.judge.servers.exchange import Exchange
from conformance.judge.servers.install import InstallFailed
from conformance.judge.servers.known import BY_NAME, KNOWN, Known, UnknownServer, find_known
from conformance.judge.servers.page import write_pages
from conformance.judge.servers.policy import Policies
from conformance.judge.servers.recording import (
    Recording,
    facts_of_today,
    is_due,
    path_of,
    read_recording,
    write_recording,
)
from conformance.judge.servers.run import ask, is_well
from conformance.judge.servers.subject import Subject, bearer, find_dialect
from conformance.judge.servers.verdicts import summary

KEY = "of-the-judge"


class Judging:
    """One known server: checks on one instance, which is replaced where it is not well after a check.

    Checks of its key have an instance that was given one, and so have those for which it needs further options.
    """

    def __init__(self, known: Known, policies: Policies | None, folder: Path) -> None:
        self.known, self.policies, self.folder = known, policies, folder
        self.num_starts = 0
        self._started: tuple[str, Sequence[str]] = "", ()
        self._subject: Subject | None = None

    def run(self, checks: Sequence[Check]) -> Iterator[tuple[Check, Exchange, float]]:
        """Yield check, exchange and seconds; end every instance. Errors: ``AssertionError`` if one cannot start."""
        passed: set[str] = set()
        try:
            for row in rows_to_ask(checks, self.known.options):
                key = KEY if "key" in row[0].needs and self.known.key else ""
                wanted = key, self.known.options.get(row[0].check_id, ())
                if self._subject is not None and self._started != wanted:
                    self.end()
                self._started = wanted
                self._subject = subject = self._subject or self._start(*wanted)
                began = time.monotonic()
                exchange = ask(row[0], subject)
                seconds = round(time.monotonic() - began, 1)
                states = {check.check_id: judge(check, exchange).state for check in row}
                passed |= {name for name, state in states.items() if state == PASSED}
                yield from ((check, exchange, seconds) for check in row)
                if (row[0].is_dangerous or MISSED in states.values()) and not is_well(subject, passed):
                    self.end()
        finally:
            self.end()

    def end(self) -> None:
        if self._subject is not None:
            self._subject.process.end(grace_s=3.0)
        self._subject = None

    def _start(self, key: str, options: Sequence[str]) -> Subject:
        known, port = self.known, free_port()
        self.num_starts += 1
        log, url = self.folder / f"{known.server}-{self.num_starts}.log", f"http://127.0.0.1:{port}"
        environment = os.environ | known.variables(key)
        with log.open("w") as output:
            process = subprocess.Popen(
                known.words(port, key, options),
                cwd=self.folder,
                env=environment,
                stdout=output,
                stderr=output,
                start_new_session=True,
            )
        server = Running(process, log)
        try:
            server.wait_healthy(url)
        except BaseException:
            server.end()
            raise
        return Subject(
            name=known.name, version=known.version, url=url, dialect=find_dialect(url, known.dialect, bearer(key)),
            transport="gloo", policies=self.policies, headers=bearer(key), process=server,
        )  # fmt: skip


def rows_to_ask(checks: Sequence[Check], options: Mapping[str, Sequence[str]]) -> list[list[Check]]:
    """Group checks with the same calls; those of a key first, then those without ``options`` (check -> options).

    Of one instance, timed ones come later, dangerous ones last.
    """
    rows: dict[object, list[Check]] = {}
    for check in checks:
        rows.setdefault(check.ask, []).append(check)

    def place(row: list[Check]) -> tuple[bool, tuple[str, ...], bool, bool]:
        first = row[0]
        further = tuple(options.get(first.check_id, ()))
        return "key" not in first.needs, further, first.is_dangerous, first.is_timed

    return sorted(rows.values(), key=place)


def judge_known(known: Known, policies: Policies, folder: Path, *, only: Sequence[str] = ()) -> int:
    """Judge and record one server; with ``only``, keep the other checks of an older recording.

    Returns the number of failing checks.
    """
    began, path = time.monotonic(), path_of(known.server)
    facts = facts_of_today(model="fixtures/models/digits", **known.facts())
    say(*(f"{known.server:16} {line}" for line in facts["outside"]))
    recording = Recording(server=known.server, dialect=known.dialect, facts=facts, reproduce=known.reproduce)
    if only and path.exists():
        recording = read_recording(path)
        recording.facts |= facts | {"date": recording.facts["date"]}  # of the oldest of its checks
    judging = Judging(known, policies, folder)
    for check, exchange, seconds in judging.run(checks_for(known.dialect, only=only)):
        recording.keep(check, exchange, seconds)
        write_recording(recording)  # kept even if the judge is ended
        say(*(f"{known.server:16} {row}" for row in recording.rows() if row.check.check_id == check.check_id))
    if not only:
        recording.facts |= {"seconds": round(time.monotonic() - began), "starts": judging.num_starts}
    write_recording(recording)
    rows = recording.rows()
    say(f"{known.server}: {summary(rows)}; {round(time.monotonic() - began)} s")
    return sum(row.fails for row in rows)


def main(arguments: Sequence[str] | None = None) -> int:
    """Returns 1 where a server cannot start, a check is missed that no gap explains, or a gap is stale."""
    options = _parse(arguments)
    os.environ.setdefault("TORCH_CPP_LOG_LEVEL", "FATAL")
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(143))  # so that servers are ended
    folder, policies, num_failing = Path(tempfile.mkdtemp(prefix="rollmatch-judge-")), Policies(MODEL), 0
    today = date.today()  # of this machine, as in the recordings
    listed = KNOWN if options.all else options.servers
    judged = [known for known in listed if is_due(path_of(known.server), options.older_than, today)]
    say(f"{', '.join(known.server for known in judged)}; output below {folder}")
    for known in judged:
        try:
            num_failing += judge_known(known, policies, folder, only=options.check)
        except (AssertionError, InstallFailed) as error:
            say(f"{known.server} cannot be judged: {error}")
            num_failing += 1
    write_pages()
    os._exit(bool(num_failing))  # a thread that a server left hanging may break an ordinary end


def _parse(arguments: Sequence[str] | None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(prog="python -m conformance.judge.servers.judge", description=__doc__)
    parser.add_argument("servers", nargs="*", type=_known, metavar="NAME[==VERSION]", help=", ".join(BY_NAME))
    parser.add_argument("--all", action="store_true", help=f"all {len(KNOWN)}")
    parser.add_argument("--check", action="append", default=[], metavar="ID", help="only this one; several times")
    parser.add_argument("--older-than", type=int, metavar="DAYS", help="only what was not recorded in so many days")
    options = parser.parse_args(arguments)
    if bool(options.servers) == options.all:
        parser.error("name servers, or say --all")
    return options


def _known(word: str) -> Known:
    try:
        return find_known(word)
    except UnknownServer as error:
        raise argparse.ArgumentTypeError(str(error)) from None


if __name__ == "__main__":
    sys.exit(main())
