"""``pytest conformance --server URL``: the checks of one running server, and nothing else."""

import os
from collections.abc import Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any

import pytest

if TYPE_CHECKING:  # they load torch: only where a server is judged
    from conformance.servers.recording import Recording
    from conformance.servers.verdicts import VerdictRow

LIVE = Path(__file__).parent / "test_server.py"
ROWS = pytest.StashKey[list["VerdictRow"]]()
RECORDING = pytest.StashKey["Recording"]()
KEY_VARIABLE = "ROLLMATCH_API_KEY"


def pytest_addoption(parser: pytest.Parser) -> None:
    group = parser.getgroup("rollout servers")
    group.addoption("--server", metavar="URL", help="judge this running server, and run nothing else")
    group.addoption("--dialect", choices=["swift", "trl", "native", "vllm"], help="else by its routes")
    group.addoption("--model", metavar="DIR", help="the directory that it serves; without it, no weights are compared")
    group.addoption("--transport", choices=["gloo"], help="how weights reach its workers; else none are sent")
    group.addoption("--server-name", metavar="NAME-VERSION", default="", help="for its known gaps and the record")
    group.addoption("--record", type=Path, metavar="DIR", help="write what was sent and what came back")
    group.addoption("--check", action="append", default=[], metavar="ID", help="only this one; several times")
    group.addoption("--no-dangerous", action="store_true", help="leave out what may stop the server")


def pytest_configure(config: pytest.Config) -> None:
    config.stash[ROWS] = []


def pytest_ignore_collect(collection_path: Path, config: pytest.Config) -> bool | None:
    """The live checks with ``--server``, where other folders are not entered; all else without."""
    if collection_path.is_dir():
        return (config.getoption("server") and collection_path not in LIVE.parents) or None
    return (collection_path != LIVE) if config.getoption("server") else (collection_path == LIVE or None)


def pytest_terminal_summary(terminalreporter: Any, config: pytest.Config) -> None:
    rows = config.stash[ROWS]
    if not rows:
        return
    from conformance.servers.recording import write_recording
    from conformance.servers.verdicts import summary

    terminalreporter.section(f"{config.getoption('server')}")
    for row in rows:
        terminalreporter.write_line(str(row), red=row.fails, yellow=row.state in ("advice", "not-testable"))
    terminalreporter.write_line(summary(rows))
    if (folder := config.getoption("record")) is not None:
        terminalreporter.write_line(f"recorded in {write_recording(config.stash[RECORDING], folder)}")


def start_recording(config: pytest.Config, dialect: str) -> "Recording":
    """Empty, with the facts of today."""
    from conformance.servers.recording import Recording, facts_of_today

    name = config.getoption("server_name") or f"{dialect}-server"
    facts = facts_of_today(url=config.getoption("server"))
    config.stash[RECORDING] = Recording(server=name, dialect=dialect, facts=facts)
    return config.stash[RECORDING]


def rows_of_servers(config: pytest.Config) -> list[dict[str, Any]]:
    """For the matrix: every server that was recorded, and the one that was judged now."""
    from conformance.servers.recording import recordings
    from conformance.servers.verdicts import matrix_rows, rows_of

    judged = [(each.server, each.facts["date"], rows_of(each)) for each in recordings()]
    if config.stash[ROWS]:
        live = config.stash[RECORDING]
        judged = [entry for entry in judged if entry[0] != live.server]
        judged.append((live.server, live.facts["date"], config.stash[ROWS]))
    return matrix_rows(judged)


def headers() -> Mapping[str, str]:
    """A key that a command line would show to everybody comes by the environment."""
    key = os.environ.get(KEY_VARIABLE)
    return {"Authorization": f"Bearer {key}"} if key else {}
