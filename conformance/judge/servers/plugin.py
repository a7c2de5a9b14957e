"""``pytest conformance --server URL``: the checks of one running server, and nothing else; also the judge's engine."""

import argparse
import os
import time
from datetime import date
from pathlib import Path
from typing import TYPE_CHECKING, Any

import pytest
import requests

if TYPE_CHECKING:  # other runs need not load them
    from conformance.judge.servers.check import Check
    from conformance.judge.servers.judgement import ServerJudgement
    from conformance.judge.servers.subject import Subject

LIVE = Path(__file__).parent / "test_server.py"
JUDGEMENT = pytest.StashKey["ServerJudgement"]()
CHECKS = pytest.StashKey[list["Check"]]()


def pytest_addoption(parser: pytest.Parser) -> None:
    group = parser.getgroup("rollout servers")
    group.addoption("--server", metavar="URL", help="judge this running server, and run nothing else")
    group.addoption(
        "--profile", choices=["http", "weights", "full"], default="full", help="which checks; default: full"
    )
    group.addoption("--dialect", metavar="NAME|FILE.py", default="auto", help="default: by its routes")
    group.addoption(
        "--model", metavar="DIR", help="model directory or hub id that it serves; needed to compare numbers"
    )
    group.addoption("--tolerance", type=float, metavar="NATS", help="of numbers beside those of --model")
    group.addoption("--transport", metavar="T", help="how weights reach its workers; else none are sent")
    group.addoption("--group-host", metavar="HOST", help="where its workers and the judge meet to transfer weights")
    group.addoption("--server-name", metavar="NAME-VERSION", default="", help="for its known gaps and the report")
    text = "known gaps: YAML list of check, reason, seen, link and expires"
    group.addoption("--known-gaps", type=Path, metavar="FILE", help=text)
    group.addoption("--rules", metavar="YYYY-MM", help="rule set; default: the newest")
    group.addoption("--started-by", metavar="COMMAND", default="", help="how the server was started")
    group.addoption("--check", action="append", default=[], metavar="ID", help="only this one; several times")
    group.addoption("--minutes", type=float, default=15.0, help="start no check after so many; default: 15")
    group.addoption(
        "--dangerous", action=argparse.BooleanOptionalAction, default=True, help="checks that may stop the server"
    )
    for name, text in (
        ("json", "everything as JSON"),
        ("junit", "JUnit"),
        ("page", "an HTML page"),
        ("badge", "an SVG"),
    ):
        group.addoption(f"--report-{name}", type=Path, metavar="FILE", help=f"write {text}")


def pytest_ignore_collect(collection_path: Path, config: pytest.Config) -> bool | None:
    """The live checks with ``--server``, where other folders are not entered; all else without."""
    if collection_path.is_dir():
        return (config.getoption("server") and collection_path not in LIVE.parents) or None
    return (collection_path != LIVE) if config.getoption("server") else (collection_path == LIVE or None)


def pytest_sessionstart(session: pytest.Session) -> None:
    """Find out whether it can be judged. Errors: ``pytest.UsageError``, which ends pytest with 4."""
    config = session.config
    if not config.getoption("server"):
        return
    from conformance.judge.rule_sets import NEWEST
    from conformance.judge.servers.gaps import GapMalformed, gaps_of, load_gaps
    from conformance.judge.servers.judgement import JudgingRules, ServerJudgement
    from conformance.judge.servers.profiles import UnknownCheck, checks_of, left_out
    from conformance.judge.servers.subject import DialectUnclear

    dangerous, named = config.getoption("dangerous"), config.getoption("server_name")
    rules = config.getoption("rules") or NEWEST
    try:
        subject = subject_of(config)
        config.stash[CHECKS] = checks_of(
            subject.dialect.family,
            profile=config.getoption("profile"),
            lacks=subject.lacks,
            dangerous=dangerous,
            only=config.getoption("check"),
            rules=rules,
        )
        named_file = config.getoption("known_gaps")
        gaps = load_gaps(named_file, server=named) if named_file else gaps_of(named)
    except requests.ConnectionError:
        raise pytest.UsageError(f"{config.getoption('server')} cannot be judged: nothing answers there") from None
    except requests.RequestException as error:  # before ValueError, which a reply that is no JSON is, too
        raise pytest.UsageError(f"{config.getoption('server')} cannot be judged: {error}") from None
    except (DialectUnclear, UnknownCheck, GapMalformed, ValueError) as error:
        raise pytest.UsageError(str(error)) from None
    terms = JudgingRules(
        dangerous=dangerous,
        budget_s=60 * config.getoption("minutes"),
        gaps=gaps,
        rules=rules,
        started_by=config.getoption("started_by"),
    )
    config.stash[JUDGEMENT] = judgement = ServerJudgement(subject, terms)
    if not config.getoption("check"):
        family, asked = subject.dialect.family, config.stash[CHECKS]
        judgement.not_asked = left_out(family, asked, lacks=subject.lacks, dangerous=dangerous, rules=rules)


def subject_of(config: pytest.Config) -> "Subject":
    """As the options describe it. Errors: ``DialectUnclear``, ``requests.RequestException``, ``ValueError``."""
    from conformance.judge.servers.dialect_plugins import kind_of
    from conformance.judge.servers.subject import KEY_VARIABLE, Subject, bearer, find_dialect, meeting_place

    headers = bearer(os.environ.get(KEY_VARIABLE))  # a command line could be read by everybody
    url, directory = config.getoption("server").rstrip("/"), config.getoption("model")
    wanted, transport = config.getoption("dialect"), config.getoption("transport")
    dialect = find_dialect(url, None if wanted == "auto" else kind_of(wanted).name, headers)
    if transport not in (None, *dialect.transports):
        raise ValueError(f"--transport: {transport} is none of the {dialect.name} dialect: {dialect.transports}")
    name, _, version = config.getoption("server_name").rpartition("-")
    return Subject(
        name=name or dialect.name,
        version=version,
        url=url,
        dialect=dialect,
        transport=transport,
        policies=policies_of(directory, config.getoption("tolerance")) if directory else None,
        group_host=config.getoption("group_host") or meeting_place(url, dialect),
        headers=headers,
    )


def policies_of(directory: str, tolerance: float | None = None) -> Any:
    """``tolerance``: unit: nats. Errors: ``ValueError`` where there is no such model."""
    from rollmatch.model.source import local_directory

    found = local_directory(directory, revision=None, key="--model")
    if not (Path(found) / "config.json").is_file():
        raise ValueError(f"--model: {directory} is neither the directory of a model nor a hub id")
    from conformance.judge.servers.policy import Policies

    return Policies(found) if tolerance is None else Policies(found, tolerance=tolerance)


def pytest_collection_finish(session: pytest.Session) -> None:
    if JUDGEMENT in session.config.stash:
        judgement_of(session.config).num_planned = len(session.items)


def judgement_of(config: pytest.Config) -> "ServerJudgement":
    """Of this run."""
    return config.stash[JUDGEMENT]


def checks_of_run(config: pytest.Config) -> list["Check"]:
    """What is asked, in order; dangerous checks are left out where nobody named them and they are not wanted."""
    return config.stash[CHECKS]


@pytest.hookimpl(trylast=True)
def pytest_sessionfinish(session: pytest.Session) -> None:
    """First weights, reports, exit code; also after an error or Ctrl-C."""
    config = session.config
    if JUDGEMENT not in config.stash:
        return
    from conformance.judge.servers.badge import write_badge
    from conformance.judge.servers.reports import write_json, write_junit
    from conformance.judge.servers.sheet import write_sheet

    judgement = judgement_of(config)
    judgement.close()
    for name, write in (("json", write_json), ("junit", write_junit), ("page", write_sheet), ("badge", write_badge)):
        if (path := config.getoption(f"report_{name}")) is not None:
            write(judgement, path)
    if session.exitstatus not in (pytest.ExitCode.INTERRUPTED, pytest.ExitCode.INTERNAL_ERROR):
        session.exitstatus = judgement.exit_code


def pytest_terminal_summary(terminalreporter: Any, config: pytest.Config) -> None:
    if not config.getoption("server"):
        from conformance.judge.servers.recording import age_lines

        for line in age_lines(date.today()):  # of this machine, as in the recordings
            terminalreporter.write_line(line, yellow=True)
    if JUDGEMENT not in config.stash or not judgement_of(config).rows:
        return
    from conformance.judge.servers.verdicts import summary

    judgement = judgement_of(config)
    terminalreporter.section(f"{config.getoption('server')}")
    for row in judgement.rows:
        is_open = row.state in ("should", "not-testable", "blocked-by")
        terminalreporter.write_line(str(row), red=row.fails, yellow=is_open)
    terminalreporter.write_line(summary(judgement.rows))
    if judgement.not_restored:
        terminalreporter.write_line(judgement.not_restored, red=True)


def rows_of_servers(config: pytest.Config) -> list[dict[str, Any]]:
    """For the matrix: every server that was recorded, and the one that was judged now."""
    from conformance.judge.servers.recording import recordings
    from conformance.judge.servers.verdicts import matrix_rows

    judged = [(each.server, each.facts["date"], each.rows()) for each in recordings()]
    if JUDGEMENT in config.stash:
        live = judgement_of(config)
        name = live.server or f"{live.dialect}-server"
        judged = [entry for entry in judged if entry[0] != name]
        judged.append((name, time.strftime("%Y-%m-%d"), live.rows))
    return matrix_rows(judged)
