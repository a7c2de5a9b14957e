"""The judge, judged: a correct server passes every check, and each mistake is found by the check that looks for it.

A mistake can only change checks that came to its switch while all were off, so that these alone are asked again.
"""

import os
import random
from collections import Counter
from functools import partial

import pytest

from conformance.doubles.broken_bench import MISTAKES, BrokenBench
from conformance.doubles.checkpoints import make_checkpoint
from conformance.doubles.digits import MODEL
from conformance.judge.servers.broken.app import serving
from conformance.judge.servers.broken.calls import LONG, PAUSED, wait_while
from conformance.judge.servers.broken.engine import TinyEngine
from conformance.judge.servers.broken.switches import Switches
from conformance.judge.servers.broken.updates import NORM
from conformance.judge.servers.check import MISSED
from conformance.judge.servers.checks import BY_ID, calls, checks_for, ends, generation, liveness, pauses
from conformance.judge.servers.numbers import FALSE_ALARM, chance_at_most
from conformance.judge.servers.policy import Policies
from conformance.judge.servers.profiles import required_by
from conformance.judge.servers.run import SIGNS_OF_LIFE, ask_and_judge, is_well

QUICK = {
    *("log-probabilities are shifted by one", "health has one form only", "the world size is a text"),
    *("a missing field is not named", "invalid JSON is a failure", "prompts need no key", "control calls need no key"),
    *("a bad sampling value is a failure", "too long prompts are cut", "a bad prompt ends the service"),
    *("callers get each other's replies", "log-probabilities are positive", "copies share one seed"),
    *("n responses are interleaved", "pictures are swapped", "top_k keeps one too few", "min_p is ignored"),
    *("stop texts are ignored", "the finish reason is always stop", "log-probabilities fit what top_k leaves"),
    *("a stream leaves out an id", "a chat loses its end", "waking at once forgets the weights"),
    *("an adapter is never replaced", "a second communicator is welcome", "a taken port is not named"),
    *("unknown tensors are ignored", "two updates are started", "half an update is served"),
}
"""A mistake of each kind, found in a second or two; the others are made where ``wide`` tests run."""
COSTLY = {
    *("a-pause-loses-no-response", "every-prompt-of-a-call-is-answered", "max-tokens-is-the-limit"),
    *("every-tensor-is-updated", "an-update-may-come-in-small-parts", "an-adapter-is-served-by-its-name"),
    *("stop-token-is-kept-or-not", "health-while-generating", "short-call-passes-long-one", "another-seed-differs"),
    *("long-responses-stay-greedy", "update-without-pause-is-survived", "logprobs-of-penalties-are-of-one-kind"),
    *("a-second-update-is-as-exact", "order-holds-when-responses-end-out-of-order", "a-replaced-adapter-is-served"),
}
"""Checks of more than two seconds, asked where ``wide`` tests run."""
ASKS_ALL = "ROLLMATCH_STRICT" in os.environ and "ROLLMATCH_WIDE" not in os.environ
"""Whether costly checks are asked about mistakes that are not their own: where all ``wide`` tests run."""
DANGER = ("calls-out-of-order-are-refused", "update-without-pause-is-survived")
KEYS = ("prompts-need-the-key", "control-calls-need-the-key")
OF_VLLM = ("routes-read-a-prompt-alike", "a-stream-is-the-whole-response", "a-pause-loses-no-response")
OF_VLLM += ("a-server-that-slept-answers-as-before", "an-update-may-come-in-small-parts")
OF_VLLM += ("a-deep-sleeper-serves-the-weights-it-is-sent", "an-adapter-is-served-by-its-name")
OF_VLLM += ("a-replaced-adapter-is-served", "an-unloaded-adapter-is-gone", "an-adapter-of-too-high-a-rank-is-refused")
OF_VLLM += ("a-stream-survives-an-update", "a-response-names-the-weights-that-wrote-it")
OF_VLLM += ("every-stop-token-ends-a-response",)
OF_OTHERS = {
    "vllm": (*OF_VLLM, *DANGER, *KEYS, "pictures-are-seen", "replies-in-order", "new-weights-are-served"),
    "trl": ("pictures-are-seen", "replies-in-order", "new-weights-are-served", "top-k-is-applied"),
    "sglang": (
        *("pictures-are-seen", "replies-in-order", "new-weights-are-served", "logprobs-equal-transformers"),
        *("a-seed-repeats", "finish-reason-says-how-it-ended", "every-stop-token-ends-a-response"),
        *("weight-version-grows", "running-calls-survive-an-update", "recovers-from-a-dead-learner"),
        *("second-communicator-is-refused", *DANGER, "a-pause-loses-no-response"),
        *("a-server-that-slept-answers-as-before", "a-deep-sleeper-serves-the-weights-it-is-sent"),
    ),
    "native": (*KEYS, "pictures-are-seen", "replies-in-order", "a-seed-repeats", "top-p-is-applied"),
}
"""What other dialects are asked beside; the swift dialect is asked everything."""
ASKED = [("swift", check) for check in checks_for("swift") if "process" not in check.needs]
ASKED += [(dialect, BY_ID[name]) for dialect, names in OF_OTHERS.items() for name in names]


def wide_if(is_wide, *values, **named):
    return pytest.param(*values, marks=[pytest.mark.wide] * is_wide, **named)


@pytest.fixture(scope="module")
def bench():
    with pytest.MonkeyPatch.context() as patch:
        patch.setitem(liveness.LONG, "max_tokens", LONG)
        patch.setattr(calls, "begin_long", partial(calls.begin_long, seed=1))  # the server holds it, and writes it once
        patch.setattr(pauses, "HELD", pauses.HELD | {"max_tokens": PAUSED, "seed": 1})
        patch.setattr(calls, "MIX_S", 0.5)
        patch.setattr(calls, "NUM_MIXED", 10)
        patch.setattr(generation, "ENDING_SEEDS", (1, 2))
        for module in (generation, ends):
            patch.setattr(module, "ENDING_TOKENS", 100)
        with serving(TinyEngine(str(MODEL), Switches())) as server:
            server.key = "sesame"
            patch.setattr(
                calls, "let_in", lambda call, _: wait_while(lambda: not (server.calls.num_running or call.done()))
            )
            yield BrokenBench(server)


@pytest.mark.scenario("judging/a-correct-server", clauses=["judging/the-judge-is-judged#1"])
@pytest.mark.parametrize(
    ("dialect", "check"), [wide_if(c.check_id in COSTLY, d, c, id=f"{d}-{c.check_id}") for d, c in ASKED]
)
def test_a_correct_server_passes(bench, dialect, check):
    verdict, _ = bench.ask_clean(dialect, check)
    assert verdict.state == "passed", verdict.reason


LATE = [BY_ID[name] for name in OF_OTHERS["vllm"] if BY_ID[name].is_dangerous and "adapter" not in name]
"""They are asked behind checks that leave other weights; those of adapters are not."""


@pytest.mark.parametrize("check", LATE, ids=[check.check_id for check in LATE])
def test_a_correct_server_passes_with_the_weights_that_an_earlier_check_has_left(bench, check):
    verdict = bench.ask("vllm", check, served=1)
    assert verdict.state == "passed", verdict.reason


@pytest.mark.scenario(
    "judging/one-mistake-at-a-time",
    "servers/nine-prompts-in-one-call",
    "servers/a-finish-reason-that-is-always-the-same",
    "servers/log-probabilities-are-shifted-by-one",
    "servers/temperature-is-ignored",
    "servers/a-route-that-is-not-listed",
    "servers/a-prompt-that-is-too-long-is-cut",
    "servers/a-second-communicator-is-welcome",
    "servers/routes-for-weights-are-open",
    "servers/one-layernorm-keeps-its-weights",
    "servers/a-wrong-shape-zeroes-the-tensor",
    "servers/a-pause-that-cuts-responses",
    "servers/an-adapter-that-is-never-replaced",
    clauses=[
        "judging/the-judge-is-judged#2",
        "judging/numbers-are-compared-with-transformers#1,3",
        "servers/each-prompt-gets-its-own-responses#1,2,3,4,5,6,7,8,9,10,11",
        "servers/a-key-is-asked-for#1,2",
        "servers/a-response-says-what-was-generated#1,2,3,4,5,6",
        "servers/numbers-are-those-of-the-model#1,2,3,4,5,6,7,8",
        "servers/sampling-follows-its-parameters#1,2,3,4,5,6,7,8,9,10",
        "servers/a-server-can-be-found-and-watched#1,2,3,4,5",
        "servers/a-bad-call-is-an-error-and-harms-nobody-else#1,2,3,4,5,6,7,8,9,10",
        "servers/one-learner-at-a-time-opens-the-weight-group#1,2,3,4,5,6,7",
        "servers/what-was-sent-is-what-is-served#1,2,3,4,5,6,7,8,9,10,11,12,13,14,15",
        "servers/a-server-that-rests-comes-back#1,2,3",
        "servers/an-adapter-is-one-of-several#1,2,3,4",
        "servers/a-wrong-update-is-an-error-and-the-next-one-works#1,2,3,4,5,6,7,8",
    ],
)
@pytest.mark.parametrize("mistake", [wide_if(one not in QUICK, one) for one in MISTAKES])
def test_a_mistake_is_found_by_its_check_alone(bench, mistake):
    """A check that requires the mistake's own would be explained by it."""
    own = MISTAKES[mistake]
    concerned = [
        (dialect, check)
        for dialect, check in ASKED
        if (ASKS_ALL or check.check_id == own or check.check_id not in COSTLY)
        and mistake in bench.ask_clean(dialect, check)[1]
        and own not in required(check.check_id)
    ]
    found = {check.check_id for dialect, check in concerned if bench.ask(dialect, check, mistake).state == MISSED}
    assert unexplained(found) == {own}


@pytest.mark.scenario(
    "judging/a-tensor-that-is-left-out-is-named", clauses=["judging/numbers-are-compared-with-transformers#5"]
)
@pytest.mark.wide
def test_a_tensor_that_is_left_out_is_named(bench):
    scorer, check = bench.policies.scorer, BY_ID["every-tensor-is-updated"]
    verdict = bench.ask("swift", check, "one layernorm is never updated")
    assert (verdict.state, verdict.reason.split()[-1]) == (MISSED, NORM)
    assert len(scorer.weights_that_show()) == 120
    assert scorer.hidden_names == []


@pytest.mark.wide
def test_experts_that_are_updated_only_once_are_found(tmp_path):
    """As loaders do that put experts into another form at the first update."""
    make_checkpoint("qwen3_moe", tmp_path)
    check = BY_ID["a-second-update-is-as-exact"]
    with serving(TinyEngine(str(tmp_path), Switches())) as server:
        server.key = "sesame"
        mixture = BrokenBench(server, Policies(tmp_path))
        for dialect in ("swift", "trl"):
            assert mixture.ask(dialect, check).state == "passed"
            assert mixture.ask(dialect, check, "experts are never updated again").state == MISSED


@pytest.mark.scenario(
    "judging/chance-alone-is-not-a-miss", clauses=["judging/numbers-are-compared-with-transformers#4"]
)
def test_chance_alone_is_not_a_miss():
    draw = random.Random(5)
    shares = [1 / (place + 1) for place in range(24)]
    chances = [chance_at_most(drawn_from(draw, shares, shares)) for _ in range(1000)]
    assert min(chances) > FALSE_ALARM
    assert chance_at_most(drawn_from(draw, [share**2 for share in shares], shares)) < FALSE_ALARM


def drawn_from(draw, shares, due):
    """512 draws by ``shares``, as cells of what was ``due``."""
    came = Counter(draw.choices(range(len(shares)), shares, k=512))
    return [(value / sum(due), came[place]) for place, value in enumerate(due)]


def unexplained(missed):
    """Those of which no other missed one is the cause."""
    return {name for name in missed if not missed & required(name)}


def required(name):
    """All that it requires, also by others."""
    direct = set(required_by(BY_ID[name]))
    return direct.union(*map(required, direct))


def test_a_server_that_was_found_well_holds_its_first_weights(bench):
    bench.ask("vllm", BY_ID["greedy-repeats"])
    subject = bench.subject("vllm")
    assert is_well(subject, SIGNS_OF_LIFE)
    _, verdict, _ = ask_and_judge(BY_ID["greedy-equals-transformers"], subject)
    assert verdict.state == "passed", verdict.reason


@pytest.mark.wide
def test_of_a_server_that_has_died_its_last_answer_is_the_reason(bench):
    """Not what a learner finds then: a refused join, or a group that nobody enters."""
    verdict = bench.ask("vllm", BY_ID["wrong-shape-is-survived"], "a wrong shape ends the service")
    assert verdict.reason == "after: POST /v1/completions -> 500 {'problem': 'the engine is dead'}"


def test_where_no_response_stops_nothing_is_known_of_stop_tokens(bench, monkeypatch):
    monkeypatch.setattr(generation, "ENDING_TOKENS", 1)
    verdict = bench.ask("swift", BY_ID["stop-token-is-kept-or-not"])
    assert (verdict.state, verdict.reason) == ("not-testable", "no response of up to 1 ids has stopped")


def test_where_long_responses_are_over_at_once_no_call_can_pass_them(bench, monkeypatch):
    monkeypatch.setattr(calls, "let_in", lambda call, _: call.result())
    verdict = bench.ask("swift", BY_ID["short-call-passes-long-one"])
    assert (verdict.state, verdict.reason) == ("not-testable", "the long responses end before another call can arrive")


def test_every_check_has_a_mistake():
    of_processes = {check.check_id for check in BY_ID.values() if "process" in check.needs}
    assert BY_ID.keys() - set(MISTAKES.values()) == of_processes  # of these: test_ends
