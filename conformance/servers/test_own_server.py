"""Our own server, judged as anybody's is; what takes longest, or ends it, is judged by its recording."""

import pytest

from conformance.rollout.digits import MODEL
from conformance.servers.checks import checks_for
from conformance.servers.dialects import DIALECTS
from conformance.servers.policy import Policies
from conformance.servers.run import ask_and_judge
from conformance.servers.subject import Subject, find_dialect

pytestmark = pytest.mark.engine
RECORDED_ONLY = {
    *(
        "hanging-up-frees-the-engine",
        "replies-are-never-swapped",
        "short-call-passes-long-one",
        "stop-token-is-kept-or-not",
    ),
    *("health-while-generating", "logprobs-fit-the-ids", "alone-as-in-a-batch"),
}
OF_LEARNERS = {
    *(
        "same-weights-same-responses",
        "new-weights-are-served",
        "unknown-tensor-is-rejected",
        "second-communicator-is-refused",
        "weight-version-grows",
    ),
    *("running-calls-survive-an-update", "update-without-group-is-refused"),
}
"""What the other dialects are asked here: their ways to take weights differ, the rest is shared."""
ASKED = [
    (dialect, check)
    for dialect in ("swift", "trl", "native")
    for check in checks_for(dialect)
    if "process" not in check.needs
    and check.check_id not in RECORDED_ONLY
    and (dialect == "swift" or check.check_id in OF_LEARNERS)
]


@pytest.fixture(scope="module")
def policies():
    made = Policies(MODEL)
    made.weights(1)
    return made


@pytest.mark.parametrize(("dialect", "check"), ASKED, ids=[f"{dialect}-{check.check_id}" for dialect, check in ASKED])
def test_it_passes(instance, policies, dialect, check):
    subject = Subject(
        name="rollmatch",
        version="",
        url=instance.url,
        dialect=DIALECTS[dialect](),
        transport="gloo",
        policies=policies,
    )
    exchange, verdict, _ = ask_and_judge(check, subject)
    assert verdict.state == "passed", "\n".join([verdict.reason, *(call.summary() for call in exchange.calls)])


def test_its_own_dialect_is_the_first_that_fits(instance):
    assert find_dialect(instance.url).name == "native"
