"""One running server, by its URL; collected only with ``--server``."""

import pytest

from conformance.servers.checks import checks_for
from conformance.servers.gaps import gaps_of, load_gaps, settle
from conformance.servers.plugin import ROWS, headers, start_recording
from conformance.servers.policy import Policies
from conformance.servers.run import ask_and_judge
from conformance.servers.subject import Subject, find_dialect
from conformance.servers.verdicts import VerdictRow


def pytest_generate_tests(metafunc):
    config = metafunc.config
    url = config.getoption("server").rstrip("/")
    dialect = find_dialect(url, config.getoption("dialect"), headers())
    checks = checks_for(dialect.name, only=config.getoption("check"))
    gentle = [check for check in checks if not (check.is_dangerous and config.getoption("no_dangerous"))]
    metafunc.parametrize("check", gentle, ids=[check.check_id for check in gentle])


@pytest.fixture(scope="module")
def subject(request):
    config = request.config
    url, directory = config.getoption("server").rstrip("/"), config.getoption("model")
    dialect = find_dialect(url, config.getoption("dialect"), headers())
    name, _, version = config.getoption("server_name").rpartition("-")
    return Subject(
        name=name or dialect.name,
        version=version,
        url=url,
        dialect=dialect,
        transport=config.getoption("transport"),
        policies=Policies(directory) if directory else None,
        headers=headers(),
    )


@pytest.fixture(scope="module")
def recording(request, subject):
    return start_recording(request.config, subject.dialect.name)


def test_check(check, subject, recording, request):
    exchange, verdict, seconds = ask_and_judge(check, subject)
    recording.keep(check, exchange, seconds)
    state, reason = settle(check, verdict, load_gaps(gaps_of(recording.server)))
    row = VerdictRow(check=check, state=state, reason=reason, seconds=seconds)
    request.config.stash[ROWS].append(row)
    if row.fails:
        pytest.fail(f"{check.sentence}\n{reason}", pytrace=False)
