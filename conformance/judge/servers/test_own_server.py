"""Our own server, judged as anybody's is; what takes longest, or ends it, is judged by its recording."""

import pytest

from conformance.doubles.digits import MODEL
from conformance.doubles.learner_side import native_backend
from conformance.judge.servers.check import Check
from conformance.judge.servers.checks import checks_for
from conformance.judge.servers.dialects import DIALECTS
from conformance.judge.servers.judgement import JudgingRules, ServerJudgement
from conformance.judge.servers.peers import sync
from conformance.judge.servers.policy import Policies
from conformance.judge.servers.preflight import answers_of
from conformance.judge.servers.run import ask_and_judge
from conformance.judge.servers.subject import Subject, find_dialect
from conformance.judge.servers.talk import Talk

pytestmark = pytest.mark.engine
RECORDED_ONLY = {
    *(
        "hanging-up-frees-the-engine",
        "replies-are-never-swapped",
        "short-call-passes-long-one",
        "stop-token-is-kept-or-not",
    ),
    *("health-while-generating", "logprobs-fit-the-ids", "alone-as-in-a-batch"),
    *("order-holds-when-responses-end-out-of-order", "finish-reason-says-how-it-ended"),
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
    for dialect in ("swift", "trl", "vllm", "native")
    for check in checks_for(dialect)
    if not {"process", "key"} & {*check.needs}
    and check.check_id not in RECORDED_ONLY
    and (dialect == "swift" or check.check_id in OF_LEARNERS)
]
EVERY_DAY = {
    *("new-weights-are-served", "wrong-shape-is-rejected", "pictures-are-seen", "unknown-tensor-is-rejected"),
    *("an-incomplete-update-is-rejected", "a-dead-learner-leaves-no-half-update", "greedy-equals-transformers"),
}
"""A second of processor time each; the rest is asked where ``wide`` tests run."""


@pytest.fixture(scope="module")
def policies(instance):
    """What the server holds now, and other weights; tests before may have left it any."""
    made = Policies(MODEL)
    backend = native_backend(instance.server.url)
    backend.push(made.weights(0).items(), version=backend.policy_version + 1)
    backend.close()
    made.weights(1)
    return made


@pytest.mark.parametrize(
    ("dialect", "check"),
    [
        pytest.param(
            name, check, id=f"{name}-{check.check_id}", marks=[pytest.mark.wide] * (check.check_id not in EVERY_DAY)
        )
        for name, check in ASKED
    ],
)
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


@pytest.mark.scenario("judging/the-first-weights-come-back", clauses=["judging/the-server-is-left-as-it-was-found#2"])
def test_the_first_weights_are_back_after_a_check_that_fails_on_others(instance, policies):
    def ask_and_fail(talk):
        sync(talk, 1)
        changed.extend(answers_of(talk))
        raise ValueError("a fault of the judge")

    changed = []
    dialect = DIALECTS["native"]()
    subject = Subject(name="x", version="", url=instance.url, dialect=dialect, transport="gloo", policies=policies)
    sync(Talk(subject), 0).close()
    judgement = ServerJudgement(subject, JudgingRules())
    row = judgement.verdict_of(Check(check_id="x", sentence="", ask=ask_and_fail, judge=str, needs=("model", "group")))
    assert len(changed) == len(judgement.preflight.first_ids)
    assert changed != judgement.preflight.first_ids
    judgement.close()
    assert (row.state, judgement.not_restored) == ("harness-error", "")
    assert answers_of(Talk(subject)) == judgement.preflight.first_ids


def test_its_own_dialect_is_the_first_that_fits(instance):
    assert find_dialect(instance.url).name == "native"
