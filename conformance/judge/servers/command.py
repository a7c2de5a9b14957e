"""``rollmatch-judge URL``: judge a running rollout server. Also: ``badge``, ``compare``, ``replay``, ``schema``."""

import argparse
import os
import shlex
import signal
import sys
import textwrap
import traceback
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, NoReturn

import requests

from conformance.judge.servers import report_commands
from conformance.judge.servers.badge import write_badge
from conformance.judge.servers.check import INAPPLICABLE, Check
from conformance.judge.servers.dialect_plugins import kind_of
from conformance.judge.servers.exchange import Exchange, RecordedCall, shown
from conformance.judge.servers.gaps import (
    MISSES_MUST,
    MISSES_SHOULD,
    GapMalformed,
    gaps_of,
    known_as,
    load_gaps,
)
from conformance.judge.servers.judgement import JudgingRules, ServerJudgement
from conformance.judge.servers.options import check_options, make_parser
from conformance.judge.servers.preflight import Preflight
from conformance.judge.servers.profiles import UnknownCheck, checks_of, left_out
from conformance.judge.servers.reports import Judged, meaning_of, write_json, write_junit
from conformance.judge.servers.sheet import write_sheet
from conformance.judge.servers.subject import (
    KEY_VARIABLE,
    DialectUnclear,
    Subject,
    bearer,
    find_dialect,
    meeting_place,
)
from conformance.judge.servers.verdicts import JUDGE_FAILED, NOT_JUDGED, VerdictRow, left_out_of, summary

if TYPE_CHECKING:  # loads torch, which calls over HTTP do not need
    from conformance.judge.servers.policy import Policies

LONGEST = 1200
"""Characters of a ``curl`` that a terminal shows."""
NAMED = ("dialect", "served_model", "model", "version", "vllm_version", "world_size", "max_model_len")
"""Facts that the first line names; the reports have all."""
INTERRUPTED = 128 + signal.SIGINT
QUIET = ("pass", "blocked-by", "known-gap", INAPPLICABLE)
"""Verdicts that are counted, not explained."""


class CannotBeJudged(Exception):
    """The server is out of reach, or what the options name is not there."""


class NothingJudged:
    """What the reports of a run say that ended before the first check."""

    family, not_restored, exit_code, seconds = "servers", "", NOT_JUDGED, 0.0

    def __init__(self, options: argparse.Namespace, problem: str, command: str) -> None:
        self.preflight, self.rules, self.server = Preflight(problem=problem), options.rules, options.server_name
        self.rows, self.not_asked = list[VerdictRow](), dict[str, list[str]]()
        self.title = options.url.rstrip("/")
        self.dialect = "" if options.dialect == "auto" else options.dialect
        self.reproduce = "\n".join(filter(None, [options.started_by, command]))

    def again(self, _: Check) -> str:
        """As ``Judged``, of whose three methods nothing is asked where there is no check."""
        return ""

    def curl(self, _: RecordedCall) -> str:
        return ""

    def decisive_curl(self, _: Exchange | None) -> str:
        return ""


def main(arguments: Sequence[str] | None = None, *, prog: str = "rollmatch-judge") -> int:
    """Judge, print and write. Returns the exit code that ``--help`` explains."""
    words = sys.argv[1:] if arguments is None else arguments
    if words and words[0] in report_commands.COMMANDS:
        return report_commands.main(words, say, prog)
    options = make_parser(prog).parse_args(words)
    check_options(make_parser(prog), options)
    signal.signal(signal.SIGTERM, signal.default_int_handler)  # so that the first weights are restored
    try:
        judgement, checks = judgement_of(options)
    except CannotBeJudged as error:
        nothing = NothingJudged(options, str(error), shlex.join([prog, *words]))
        write_reports(nothing, options)
        say(f"{nothing.exit_code}: rules {nothing.rules}: {error}")
        return nothing.exit_code
    found = judgement.preflight
    facts = ", ".join(f"{name} {shown(found.facts[name])}" for name in NAMED if name in found.facts)
    say(f"{judgement.subject.url}: {facts or found.problem}", *(f"warning: {warning}" for warning in found.warnings))
    is_ended = False
    try:
        for check in checks:
            say(judgement.verdict_of(check).line)
    except KeyboardInterrupt:
        is_ended = True
    finally:
        judgement.close()
        write_reports(judgement, options)
    if judgement.not_restored:
        say(f"the server may hold other weights than at the beginning: {judgement.not_restored}")
    say(*explained(judgement), *hint_of(judgement, options), f"\n{summary(judgement.rows)}; {judgement.seconds:g} s")
    code = judgement.exit_code
    meaning = found.problem or meaning_of(code, judgement.rows)
    say("not finished" if is_ended else f"{code}: rules {judgement.rules}: {meaning}{left_out_of(judgement.not_asked)}")
    return INTERRUPTED if is_ended else code


def judgement_of(options: argparse.Namespace) -> tuple[ServerJudgement, list[Check]]:
    """The server, looked at, and the checks to ask in order. Errors: ``CannotBeJudged``."""
    try:
        subject = subject_of(options)
        family, wanted = subject.dialect.family, {"dangerous": options.dangerous, "rules": options.rules}
        checks = checks_of(family, profile=options.profile, lacks=subject.lacks, only=options.check, **wanted)
        path, named = options.known_gaps, options.server_name
        gaps = load_gaps(path, server=named) if path else gaps_of(named)
    except requests.ConnectionError:
        raise CannotBeJudged(f"{options.url} cannot be judged: nothing answers there") from None
    except requests.RequestException as error:  # before ValueError, which a reply that is no JSON is, too
        raise CannotBeJudged(f"{options.url} cannot be judged: {error}") from None
    except (DialectUnclear, UnknownCheck, GapMalformed, ValueError) as error:
        raise CannotBeJudged(str(error)) from None
    terms = JudgingRules(budget_s=60 * options.minutes, gaps=gaps, started_by=options.started_by, **wanted)
    judgement = ServerJudgement(subject, terms)
    judgement.num_planned = len(checks)
    if not options.check:
        judgement.not_asked = left_out(family, checks, lacks=subject.lacks, **wanted)
    return judgement, checks


def subject_of(options: argparse.Namespace) -> Subject:
    """As the options describe it. Errors: ``DialectUnclear``, ``requests.RequestException``, ``ValueError``."""
    headers = bearer(os.environ.get(KEY_VARIABLE))  # a command line could be read by everybody
    url, transport = options.url.rstrip("/"), options.transport
    dialect = find_dialect(url, None if options.dialect == "auto" else kind_of(options.dialect).name, headers)
    if transport not in (None, *dialect.transports):
        raise ValueError(f"--transport: {transport} is none of the {dialect.name} dialect: {dialect.transports}")
    name, _, version = options.server_name.rpartition("-")
    return Subject(
        name=name or dialect.name,
        version=version,
        url=url,
        dialect=dialect,
        transport=transport,
        policies=policies_of(options.model, options.tolerance) if options.model else None,
        group_host=options.group_host or meeting_place(url, dialect),
        headers=headers,
    )


def policies_of(directory: str, tolerance: float | None = None) -> "Policies":
    """``tolerance``: unit: nats. Errors: ``ValueError`` where there is no such model."""
    from rollmatch.model.source import local_directory

    found = local_directory(directory, revision=None, key="--model")
    if not (Path(found) / "config.json").is_file():
        raise ValueError(f"--model: {directory} is neither the directory of a model nor a hub id")
    from conformance.judge.servers.policy import Policies

    return Policies(found) if tolerance is None else Policies(found, tolerance=tolerance)


def run() -> NoReturn:
    """``main`` as a process of its own."""
    leave(main)


def leave(work: Callable[[], int]) -> NoReturn:
    """Work, and end the process with its exit code: threads that were left hanging may break an ordinary end."""
    try:
        code = work()
    except KeyboardInterrupt:
        code = INTERRUPTED
    except Exception:  # noqa: BLE001  # Python would end with 1, which says that a MUST is missed
        traceback.print_exc()
        code = JUDGE_FAILED
    sys.stdout.flush()
    sys.stderr.flush()
    os._exit(code)


def write_reports(judgement: Judged, options: argparse.Namespace) -> None:
    """Those that the options name."""
    for name, write in (("json", write_json), ("junit", write_junit), ("page", write_sheet), ("badge", write_badge)):
        if (path := getattr(options, name)) is not None:
            write(judgement, path)


def say(*lines: object) -> None:
    """Write at once."""
    sys.stdout.write("".join(f"{line}\n" for line in lines))
    sys.stdout.flush()


def explained(judgement: Judged) -> Iterator[str]:
    """The worst comes last, where one looks first."""
    blamed = [row.reason for row in judgement.rows if row.state == "blocked-by"]
    yield from (f"\n{blamed.count(name)} blocked-by {name}" for name in dict.fromkeys(blamed))
    left_out = [row for row in judgement.rows if row.state == INAPPLICABLE]
    yield from (f"\n{INAPPLICABLE}: {row.check.check_id}: {row.reason}" for row in left_out)
    to_explain = [row for row in judgement.rows if row.state not in QUIET or (row.state == "pass" and row.reason)]
    for row in sorted(to_explain, key=lambda row: row.fails):
        yield from _about(row, judgement)


def hint_of(judgement: ServerJudgement, options: argparse.Namespace) -> Iterator[str]:
    """How the gaps of a server that is known, but was not named, are taken into account."""
    missed = {row.check.check_id: row.reason for row in judgement.rows if row.state in (MISSES_MUST, MISSES_SHOULD)}
    version = str(judgement.preflight.facts.get("version", ""))
    name = known_as(judgement.subject.dialect.name, version, missed)
    if name and not (options.server_name or options.known_gaps):
        yield f"\nthis looks like {name}, which has known gaps: add --server-name {name}"


def _about(row: VerdictRow, judgement: Judged) -> Iterator[str]:
    yield f"\n{row.state}: {judgement.family}/{row.check.check_id}"
    yield f"    {row.check.clause or row.check.grade}"
    yield textwrap.indent(textwrap.fill(row.check.sentence, 112), "    ")
    yield textwrap.indent(textwrap.fill(shown(row.reason), 112), "    ")
    if row.state != "not-testable":
        yield f"    {judgement.again(row.check)}"
    if row.fails:
        curl = judgement.decisive_curl(row.exchange)
        yield from ([f"    {curl}"] if 0 < len(curl) <= LONGEST else [])


if __name__ == "__main__":
    run()
