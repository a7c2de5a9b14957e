"""One running server, by its URL; collected only with ``--server``."""

import pytest

from conformance.judge.servers.check import INAPPLICABLE, UNTESTABLE
from conformance.judge.servers.gaps import BLOCKED
from conformance.judge.servers.plugin import checks_of_run, judgement_of


class HarnessError(Exception):
    """The judge itself does its work."""


def pytest_generate_tests(metafunc):
    checks = checks_of_run(metafunc.config)
    metafunc.parametrize("check", checks, ids=[check.check_id for check in checks])


def test_check(check, request):
    row = judgement_of(request.config).verdict_of(check)
    if row.fails:
        pytest.fail(f"{check.sentence}\n{row.reason}", pytrace=False)
    if row.state == "harness-error":
        raise HarnessError(row.reason)
    if row.state in (UNTESTABLE, INAPPLICABLE, BLOCKED):
        pytest.skip(f"{row.state} {row.reason}")
