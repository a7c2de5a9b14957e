"""The judge, judged: a correct server passes every check, and each mistake is found by the check that looks for it.

A mistake can only change checks that came to its switch while all were off, so that these alone are asked again.
"""

import random
from collections import Counter

import pytest

from conformance.doubles.digits import MODEL
from conformance.judge.servers.broken.app import serving
from conformance.judge.servers.broken.calls import wait_while
from conformance.judge.servers.broken.engine import TinyEngine
from conformance.judge.servers.broken.switches import Switches
from conformance.judge.servers.broken.updates import NORM
from conformance.judge.servers.check import MISSED
from conformance.judge.servers.checks import BY_ID, calls, checks_for, ends, generation, liveness
from conformance.judge.servers.dialects import DIALECTS
from conformance.judge.servers.numbers import FALSE_ALARM, chance_at_most
from conformance.judge.servers.policy import Policies
from conformance.judge.servers.profiles import required_by
from conformance.judge.servers.run import ask_and_judge
from conformance.judge.servers.subject import Subject, bearer

MISTAKES = {
    # what maintainers of servers have found in theirs, or did not find for long
    "log-probabilities are shifted by one": "logprobs-equal-transformers",
    "every log-probability is -1": "logprobs-equal-transformers",
    "temperature is ignored": "temperature-is-applied",
    "the n responses are the same": "n-responses-differ",
    "wrong greedy id from position 20": "long-responses-stay-greedy",
    "prompts beyond eight are dropped": "every-prompt-of-a-call-is-answered",
    "one layernorm is never updated": "every-tensor-is-updated",
    "the vision tower is never updated": "every-tensor-is-updated",
    # liveness
    "health has one form only": "health-with-and-without-slash",
    "health waits for generation": "health-while-generating",
    "the world size is not returned": "world-size-is-returned",
    "the world size is a text": "world-size-is-returned",
    "a route is not listed": "routes-are-listed",
    "a wrong method is served": "wrong-method-is-405",
    "a missing field is not named": "missing-field-is-named",
    "a missing field is a failure": "missing-field-is-named",
    "invalid JSON is a failure": "invalid-json-is-4xx",
    "an unknown field is a failure": "unknown-field-is-harmless",
    "no version is returned": "version-is-returned",
    # keys
    "prompts need no key": "prompts-need-the-key",
    "any key will do": "prompts-need-the-key",
    "a path without its slash needs no key": "prompts-need-the-key",
    "control calls need no key": "control-calls-need-the-key",
    "adapters take no key": "control-calls-need-the-key",
    # calls
    "a bad sampling value is a failure": "bad-sampling-value-is-4xx",
    "an error closes the connection": "connection-survives-an-error",
    "too long prompts are cut": "too-long-prompt-is-4xx",
    "a too long prompt is a failure": "too-long-prompt-is-4xx",
    "a too long prompt ends the service": "too-long-prompt-is-4xx",
    "a bad prompt is a failure": "a-bad-prompt-is-reported",
    "a bad prompt ends the service": "a-bad-prompt-is-reported",
    "requests lose their names": "request-name-comes-back",
    "calls wait for each other": "short-call-passes-long-one",
    "nobody notices who hangs up": "hanging-up-frees-the-engine",
    "callers get each other's replies": "replies-are-never-swapped",
    # responses
    "replies are reversed": "replies-in-order",
    "one prompt gets two replies": "one-prompt-one-response",
    "texts begin with a space": "text-is-the-ids-decoded",
    "some stop tokens are left out": "stop-token-is-kept-or-not",
    "goes on after the stop token": "stop-token-is-kept-or-not",
    "the last log-probability is missing": "logprobs-fit-the-ids",
    "log-probabilities are positive": "logprobs-fit-the-ids",
    "a repeated greedy call ends otherwise": "greedy-repeats",
    "the seed is ignored": "a-seed-repeats",
    "copies share one seed": "copies-of-a-prompt-differ",
    "a short prompt alone ends otherwise": "alone-as-in-a-batch",
    "n gives one response": "n-responses-of-a-prompt",
    "n responses are interleaved": "n-responses-of-a-prompt",
    "a call without prompts is a failure": "no-prompts-no-responses",
    "a call without prompts gets a response": "no-prompts-no-responses",
    # numbers
    "log-probabilities are base 2": "logprobs-equal-transformers",
    "log-probabilities are sums": "logprobs-equal-transformers",
    "log-probability of the likeliest id": "logprobs-equal-transformers",
    "long prompts are cut": "prompts-of-other-lengths-are-read-whole",
    "prompts beyond 64 repeat the first": "every-prompt-of-a-call-is-answered",
    "pictures are blank": "pictures-are-seen",
    "pictures are swapped": "pictures-are-seen",
    "all prompts see the first picture": "pictures-are-seen",
    # sampling
    "temperature is inverted": "temperature-is-applied",
    "top_k has a hidden default": "sampling-is-from-the-whole-distribution",
    "top_k is ignored": "top-k-is-applied",
    "top_k keeps one too many": "top-k-is-applied",
    "top_k keeps one too few": "top-k-is-applied",
    "top_p is ignored": "top-p-is-applied",
    "top_p leaves out the last one": "top-p-is-applied",
    "min_p is ignored": "min-p-is-applied",
    "every seed is the same": "another-seed-differs",
    "seeds are cut to 16 bits": "another-seed-differs",
    "max_tokens 1 gives two": "max-tokens-is-the-limit",
    "responses are capped": "max-tokens-is-the-limit",
    "stop texts are ignored": "a-stop-text-ends-the-response",
    "replies come as they end": "order-holds-when-responses-end-out-of-order",
    "the finish reason is always length": "finish-reason-says-how-it-ended",
    "the finish reason is always stop": "finish-reason-says-how-it-ended",
    # groups
    "a group opens only twice": "a-group-opens-again",
    "a second communicator is welcome": "second-communicator-is-refused",
    "generation waits for a learner": "serves-while-nobody-joins",
    "a taken port is not named": "taken-group-port-is-named",
    "a taken port is found out later": "taken-group-port-is-named",
    "any world size will do": "wrong-world-size-is-refused",
    "a dead learner locks updates": "recovers-from-a-dead-learner",
    # updates
    "an update without a group is welcome": "update-without-group-is-refused",
    "unknown tensors are ignored": "unknown-tensor-is-rejected",
    "wrong shapes are ignored": "wrong-shape-is-rejected",
    "a wrong shape zeroes the tensor": "wrong-shape-is-survived",
    "a wrong shape ends the service": "wrong-shape-is-survived",
    "another type spoils the next update": "another-type-is-cast-or-refused",
    "no version of the weights is returned": "weight-version-grows",
    "the version stays": "weight-version-grows",
    "two updates are started": "calls-out-of-order-are-refused",
    "an update that never began is finished": "calls-out-of-order-are-refused",
    "an update without pause ends the service": "update-without-pause-is-survived",
    # weights
    "the same weights are loaded twice": "same-weights-same-responses",
    "updates are ignored": "new-weights-are-served",
    "the first weights never come back": "old-weights-come-back",
    "half an update is served": "no-half-update-is-served",
    "an incomplete update is served": "an-incomplete-update-is-rejected",
    "an update fails running calls": "running-calls-survive-an-update",
    "prefix cache is kept": "caches-forget-old-weights",
    "encoder cache is kept": "caches-forget-old-pictures",
    "a reset returns no success": "a-reset-returns-its-success",
    "log-probabilities are lost with an update": "logprobs-stay-finite",
    "biases are never updated": "every-tensor-is-updated",
}
"""Switch -> the check that must miss, and no other."""
COSTLY = {"biases are never updated", "the vision tower is never updated", "temperature is ignored"}
COSTLY |= {"goes on after the stop token", "health waits for generation", "the finish reason is always length"}
DANGER = ("calls-out-of-order-are-refused", "update-without-pause-is-survived")
KEYS = ("prompts-need-the-key", "control-calls-need-the-key")
OF_OTHERS = {
    "vllm": (*DANGER, *KEYS, "pictures-are-seen", "replies-in-order", "new-weights-are-served"),
    "trl": ("pictures-are-seen", "replies-in-order", "new-weights-are-served", "top-k-is-applied"),
    "native": (*KEYS, "pictures-are-seen", "replies-in-order", "a-seed-repeats", "top-p-is-applied"),
}
"""What other dialects are asked beside; the swift dialect is asked everything."""
ASKED = [("swift", check) for check in checks_for("swift") if "process" not in check.needs]
ASKED += [(dialect, BY_ID[name]) for dialect, names in OF_OTHERS.items() for name in names]


class BrokenBench:
    """The broken server, and what each check came to while it was not broken."""

    def __init__(self, server, policies=None):
        self.server, self.policies = server, policies or Policies(MODEL)
        self.clean = {}

    def ask(self, dialect, check, mistake=""):
        """The verdict."""
        self.server.restart()
        self.server.broken.turn(mistake)
        subject = Subject(
            name="broken", version="", url=self.server.url, dialect=DIALECTS[dialect](), transport="gloo",
            policies=self.policies, headers=bearer(self.server.key),
        )  # fmt: skip
        _, verdict, _ = ask_and_judge(check, subject)
        return verdict

    def ask_clean(self, dialect, check):
        """Once; the verdict, and the switches that mattered."""
        key = dialect, check.check_id
        if key not in self.clean:
            self.clean[key] = self.ask(dialect, check), frozenset(self.server.broken.asked)
        return self.clean[key]


@pytest.fixture(scope="module")
def bench():
    with pytest.MonkeyPatch.context() as patch:
        patch.setitem(liveness.LONG, "max_tokens", 40)
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
@pytest.mark.parametrize(("dialect", "check"), ASKED, ids=[f"{dialect}-{check.check_id}" for dialect, check in ASKED])
def test_a_correct_server_passes(bench, dialect, check):
    verdict, _ = bench.ask_clean(dialect, check)
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
    clauses=[
        "judging/the-judge-is-judged#2",
        "judging/numbers-are-compared-with-transformers#1,3",
        "servers/each-prompt-gets-its-own-responses#1,2,3,4,5,6,7,8,9,10",
        "servers/a-key-is-asked-for#1,2",
        "servers/a-response-says-what-was-generated#1,2,3,4",
        "servers/numbers-are-those-of-the-model#1,2,3,4,5,6",
        "servers/sampling-follows-its-parameters#1,2,3,4,5,6,7,8,9,10",
        "servers/a-server-can-be-found-and-watched#1,2,3,4,5",
        "servers/a-bad-call-is-an-error-and-harms-nobody-else#1,2,3,4,5,6,7,8,9,10",
        "servers/one-learner-at-a-time-opens-the-weight-group#1,2,3,4,5,6",
        "servers/what-was-sent-is-what-is-served#1,2,3,4,5,6,7,8,9,10,11",
        "servers/a-wrong-update-is-an-error-and-the-next-one-works#1,2,3,4,5,6,7,8",
    ],
)
@pytest.mark.parametrize("mistake", [pytest.param(one, marks=[pytest.mark.wide] * (one in COSTLY)) for one in MISTAKES])
def test_a_mistake_is_found_by_its_check_alone(bench, mistake):
    """A check that requires the mistake's own would be explained by it."""
    own = MISTAKES[mistake]
    concerned = [
        (dialect, check)
        for dialect, check in ASKED
        if mistake in bench.ask_clean(dialect, check)[1] and own not in required(check.check_id)
    ]
    found = {check.check_id for dialect, check in concerned if bench.ask(dialect, check, mistake).state == MISSED}
    assert unexplained(found) == {own}


@pytest.mark.scenario(
    "judging/a-tensor-that-is-left-out-is-named", clauses=["judging/numbers-are-compared-with-transformers#5"]
)
def test_a_tensor_that_is_left_out_is_named(bench):
    scorer, check = bench.policies.scorer, BY_ID["every-tensor-is-updated"]
    verdict = bench.ask("swift", check, "one layernorm is never updated")
    assert (verdict.state, verdict.reason.split()[-1]) == (MISSED, NORM)
    assert len(scorer.weights_that_show()) == 120
    assert scorer.hidden_names == []


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
    assert BY_ID.keys() - set(MISTAKES.values()) == {"greedy-equals-transformers"} | of_processes
