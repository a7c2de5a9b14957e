"""The pages of promises name tests that exist, and every line that promises something names one."""

import ast
import re
from pathlib import Path

import pytest

from conformance.doubles.server_fixtures import HELD_S, MOST_OF_TURNS
from conformance.tools.campaign.attack import MAX_GROWTH_MIB
from rollmatch import errors
from rollmatch.config.limits import LimitsConfig
from rollmatch.dialects import http
from rollmatch.dialects.native import group
from rollmatch.rollout import retry, source
from rollmatch.run import connect
from rollmatch.serve import serving
from rollmatch.server import connections, front, health, http_protocol, reading, remote_images, structures
from rollmatch.server.settings import ServerSettings
from rollmatch.weights import group_store

ROOT = Path(__file__).parents[3]
PROMISE_NOTHING = (
    "group of the swift and trl dialects", "traffic", "a stranger at the port", "the clients themselves",
    "What a rollout server and the group", "What is repeated, for how long", "Keys of `custom", "Use these dialects",
    "Code that a configuration names", "ms-swift's and TRL's clients bring", "Not promised",
)  # fmt: skip
"""How lines and paragraphs begin that introduce others, advise, or say what is not promised."""
OTHER_SECTIONS = ("On an open network", "Not promised", "What a restart costs", "Try it")
"""Advice, measurements and tools."""


def names_of_tests():
    found = set()
    for path in (ROOT / "conformance").rglob("test_*.py"):
        tree = ast.parse(path.read_text(encoding="utf-8"))
        found |= {node.name for node in ast.walk(tree) if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef)}
    return found


@pytest.mark.parametrize("page", ["security.md", "failures.md"])
def test_a_page_of_promises_names_tests_that_exist(page):
    text = (ROOT / "docs" / page).read_text(encoding="utf-8")
    named = set(re.findall(r"`(test_\w+)`", text))
    assert len(named) > 10
    assert named <= names_of_tests()


def promises_of(text):
    """Lines of tables and paragraphs."""
    for section in re.split(r"^#+ ", text, flags=re.MULTILINE)[1:]:
        title, _, body = section.partition("\n")
        if title not in OTHER_SECTIONS:
            for block in re.split(r"\n\s*\n", body.strip()):
                lines = [line.removeprefix("| ") for line in block.splitlines()]
                yield from lines[2:] if block.startswith("|") else [" ".join(lines)]


@pytest.mark.parametrize("page", ["security.md", "failures.md"])
def test_every_line_and_paragraph_that_promises_names_a_test(page):
    promises = [*promises_of((ROOT / "docs" / page).read_text(encoding="utf-8"))]
    assert len(promises) > 20
    for promise in filter(None, promises):
        assert "`test_" in promise or promise.startswith(PROMISE_NOTHING), promise


MIB = 1 << 20
FIGURES = {
    "security.md": [
        f"{remote_images.LONGEST_S:g} s an image",
        f"before anything else is read, within {group_store._HANDSHAKE_S:g} s",
        f"(default `{ServerSettings.__dataclass_fields__['host'].default}`)",
        f"values ({errors._SHORTEST_SECRET} characters or more)",
        f"A reply is at most {http.REPLY_BYTES // MIB} MiB, and {http.TOKEN_BYTES // 1024} KiB for each token",
        f"| {front.MAX_HEAD_BYTES // 1024} KiB, and {http_protocol.FRAMING_PER_BYTE} bytes for each byte of a body",
        f"| {reading.MAX_CONTAINERS:,}, and {reading.MAX_DEPTH} in each other",
        f"`idle_timeout_s`, {http_protocol.MIN_BYTES_PER_S // 1024} KiB/s",
        f"| {http_protocol.MIN_BYTES_PER_S // 1024} KiB/s after `idle_timeout_s` |",
        f"within {structures.COMPILE_S:g} s and {structures._COMPILE_BYTES >> 30} GiB",
        f"`max_waiting_logprobs` ({LimitsConfig().max_waiting_logprobs:,})",
        f"`max_decoded_pixels` ({LimitsConfig().max_decoded_pixels:,})",
        f"after {health.STALLED_S:g} s without an answer",
        f"{MOST_OF_TURNS * 100:g} % of all turns take at most {HELD_S * 1000:g} ms",
        f"attacks of all kinds at once take at most {MAX_GROWTH_MIB} MiB",
        f"bodies above {reading.SMALL_BYTES // 1024} KiB",
        f"limits on memory and time ({reading.READ_S:g} s)",
        f"`max_buffered_bytes` ({LimitsConfig().max_buffered_bytes:,})",
    ],
    "failures.md": [
        f"pauses of {retry.FIRST_WAIT_S:g} to {retry.LONGEST_WAIT_S:g} s",
        f"| {source.MAX_RESTARTS} times per call |",
        f"`worker-dead` for {serving.DEAD_GRACE_S:g} s, then the server ends with exit code {serving.DEAD_CODE}",
        f"the longest broadcast ({connect.BROADCAST_TIMEOUT_S:g} s) and {group.GRACE_S:g} s",
        f"is reported after {group.GRACE_S:g} s | {connect.BROADCAST_TIMEOUT_S + group.GRACE_S:g} s |",
        f"(header `{http.CALL_HEADER}`)",
        f"Calls have {connections._GRACE_S} s to end",
    ],
}
"""What pages say, as constants of the product have it."""


@pytest.mark.parametrize("page", FIGURES)
def test_figures_of_promises_are_those_of_the_product(page):
    text = (ROOT / "docs" / page).read_text(encoding="utf-8")
    assert [figure for figure in FIGURES[page] if figure not in text] == []


def test_lines_without_a_test_are_found():
    page = "# A\n\n## B\none\ntwo\n\n| x |\n|---|\n| y |\n\n## Try it\nz\n"
    assert [*filter(None, promises_of(page))] == ["one two", "y |"]
