"""``rollmatch-judge badge``, ``compare``, ``replay`` and ``schema``: what is done with reports, without a server."""

import argparse
import json
import os
from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path

from conformance.judge.rule_sets import NEWEST, rule_sets
from conformance.judge.servers.badge import FAILING, badge_text, badge_words
from conformance.judge.servers.exchange import shown
from conformance.judge.servers.gaps import GapMalformed, load_gaps
from conformance.judge.servers.recording import read_recording
from conformance.judge.servers.reports import Report, ReportEntry, ReportInvalid, meaning_of, read_report, schema
from conformance.judge.servers.verdicts import CONFORMS, MISSES, NOT_JUDGED, exit_code, left_out_of, summary

NOT_ASKED = "not asked"


def badge(options: argparse.Namespace) -> Iterator[str]:
    """Write an SVG that says by which rules it was judged, and what came of it."""
    report = read_report(options.report)
    options.out.write_text(badge_text(report), encoding="utf-8")
    yield f"{options.out}: {' '.join(badge_words(report))}"
    options.code = CONFORMS


def compare(options: argparse.Namespace) -> Iterator[str]:
    """Name the checks whose verdict differs; 1 where one fails that did not."""
    old, new = (read_report(path) for path in (options.old, options.new))
    was, now = ({entry.id: entry for entry in report.checks} for report in (old, new))
    yield f"{_titled(old)} -> {_titled(new)}"
    states = {name: (_state(was, name), _state(now, name)) for name in dict.fromkeys([*was, *now])}
    alone = [name for name, pair in states.items() if NOT_ASKED in pair and not {*pair} & {*FAILING}]
    differing = [name for name, (old_one, new_one) in states.items() if old_one != new_one and name not in alone]
    worse = [name for name in differing if states[name][1] in FAILING and states[name][0] not in FAILING]
    for name in sorted(differing, key=lambda name: name in worse):
        reason = f": {shown(now[name].reason)}" if name in now and now[name].reason else ""
        yield f"{name}: {' -> '.join(states[name])}{reason}"
    for report, entries in ((old, was), (new, now)):
        if count := sum(name in entries for name in alone):
            yield f"{count} further checks were asked for {_titled(report)} alone"
    yield f"{len(differing)} verdicts differ, {len(worse)} checks fail that did not"
    options.code = MISSES if worse else CONFORMS


def _titled(report: Report) -> str:
    return f"{report.server or report.url} ({report.date[:10]}, rules {report.rules})"


def _state(entries: Mapping[str, ReportEntry], name: str) -> str:
    return entries[name].verdict if name in entries else NOT_ASKED


def replay(options: argparse.Namespace) -> Iterator[str]:
    """Judge what a report holds once more: by other rules, against other gaps, without the server."""
    recording = read_recording(options.report)
    recording.rules = options.rules or recording.rules
    if recording.rules not in rule_sets():
        raise ReportInvalid(f"{options.report}: these rules are newer than this judge: {recording.rules}")
    gaps = load_gaps(options.known_gaps, server=recording.server) if options.known_gaps else None
    rows = recording.rows(gaps)
    for row in rows:
        yield str(row)
    options.code = exit_code(rows, problem="" if rows else "nothing was asked")
    yield f"\nrules {recording.rules}; {summary(rows)}"
    yield f"{options.code}: {meaning_of(options.code, rows)}{left_out_of(recording.not_asked)}"


def print_schema(options: argparse.Namespace) -> Iterator[str]:
    """The JSON schema of every report."""
    yield json.dumps(schema(), indent=1)
    options.code = CONFORMS


COMMANDS: Mapping[str, Callable[[argparse.Namespace], Iterator[str]]] = {
    "badge": badge,
    "compare": compare,
    "replay": replay,
    "schema": print_schema,
}


def make_parser(prog: str = "rollmatch-judge") -> argparse.ArgumentParser:
    """All commands."""
    parser = argparse.ArgumentParser(prog=prog, description=__doc__)
    commands = parser.add_subparsers(dest="command", required=True)
    made = {name: commands.add_parser(name, help=work.__doc__) for name, work in COMMANDS.items()}
    made["badge"].add_argument("report", type=Path, metavar="REPORT", help="written by --json")
    made["badge"].add_argument("--out", type=Path, metavar="FILE", default=Path("badge.svg"), help="default: badge.svg")
    for name in ("old", "new"):
        made["compare"].add_argument(name, type=Path, metavar=name.upper(), help="written by --json")
    made["replay"].add_argument("report", type=Path, metavar="REPORT", help="written by --json, or kept in reports/")
    add_rules(made["replay"], default=None, shown="those of the report")
    add_gaps(made["replay"])
    return parser


def add_rules(parser: argparse.ArgumentParser, *, default: str | None = NEWEST, shown: str = NEWEST) -> None:
    """``--rules``."""
    text = f"rule set that it is judged by; default: {shown}"
    parser.add_argument("--rules", choices=rule_sets(), default=default, metavar="YYYY-MM", help=text)


def add_gaps(parser: argparse.ArgumentParser) -> None:
    """``--known-gaps``."""
    text = "known gaps: YAML list of check, reason, seen, link and expires"
    parser.add_argument("--known-gaps", type=Path, metavar="FILE", help=text)


def check_files(parser: argparse.ArgumentParser, options: argparse.Namespace, *written: str) -> None:
    """What the options ``written`` name can be written, and gaps can be read; else wrong usage."""
    for name in written:
        path = getattr(options, name, None)
        if path is None:
            continue
        if not path.resolve().parent.is_dir():
            parser.error(f"--{name}: {path} cannot be written: make the folder {path.parent} first")
        if path.is_dir() or not os.access(path if path.exists() else path.resolve().parent, os.W_OK):
            parser.error(f"--{name}: {path} is no file that can be written here")
    gaps = getattr(options, "known_gaps", None)
    if gaps is not None and not gaps.is_file():
        parser.error(f"--known-gaps: {gaps} cannot be read: there is no such file")


def main(arguments: Sequence[str], say: Callable[[str], None], prog: str = "rollmatch-judge") -> int:
    """Run a command on reports. Returns 4 where one cannot be read."""
    parser = make_parser(prog)
    options = parser.parse_args(arguments)
    check_files(parser, options, "out")
    try:
        for line in COMMANDS[options.command](options):
            say(line)
    except (ReportInvalid, GapMalformed) as error:
        say(str(error))
        return NOT_JUDGED
    code: int = options.code
    return code
