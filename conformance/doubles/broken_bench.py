"""The broken server on a bench: each of its mistakes, and the check that finds it."""

from conformance.doubles.digits import MODEL
from conformance.judge.servers.dialects import DIALECTS
from conformance.judge.servers.peers import sync
from conformance.judge.servers.policy import Policies
from conformance.judge.servers.run import ask_and_judge
from conformance.judge.servers.subject import Subject, bearer
from conformance.judge.servers.talk import Talk

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
    "until the first update, responses end otherwise": "greedy-equals-transformers",
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
    "log-probabilities fit what top_p leaves": "logprobs-are-of-one-kind",
    "log-probabilities fit what a penalty leaves": "logprobs-of-penalties-are-of-one-kind",
    "log-probabilities are of a hot model": "logprobs-are-of-one-kind",
    "log-probabilities fit what top_k leaves": "logprobs-are-of-one-kind",
    "a stop token that is forced is passed over": "every-stop-token-ends-a-response",
    # routes
    "a chat begins twice": "routes-read-a-prompt-alike",
    "a stream leaves out an id": "a-stream-is-the-whole-response",
    "a stream ends without a reason": "a-stream-is-the-whole-response",
    "a stream repeats its end": "a-stream-is-the-whole-response",
    "a stream has no log-probabilities": "a-stream-is-the-whole-response",
    "a chat loses its end": "routes-read-a-prompt-alike",
    "tokenization leaves out the end of the template": "routes-read-a-prompt-alike",
    # pauses
    "a pause to wait cuts what runs": "a-pause-loses-no-response",
    "waking at once forgets the weights": "a-server-that-slept-answers-as-before",
    "a pause to keep cuts what runs": "a-pause-loses-no-response",
    "after an abort, prompts are answered otherwise": "a-pause-loses-no-response",
    "waking by tags forgets the weights": "a-server-that-slept-answers-as-before",
    "after a deep sleep, an update is lost": "a-deep-sleeper-serves-the-weights-it-is-sent",
    # adapters
    "the second adapter answers for all": "an-adapter-is-served-by-its-name",
    "an adapter is never replaced": "a-replaced-adapter-is-served",
    "an adapter that was unloaded answers": "an-unloaded-adapter-is-gone",
    "unloading one adapter ends all": "an-unloaded-adapter-is-gone",
    "an adapter of any rank is welcome": "an-adapter-of-too-high-a-rank-is-refused",
    "an adapter of too high a rank spoils the model": "an-adapter-of-too-high-a-rank-is-refused",
    # groups
    "a group opens only twice": "a-group-opens-again",
    "a second communicator is welcome": "second-communicator-is-refused",
    "generation waits for a learner": "serves-while-nobody-joins",
    "a taken port is not named": "taken-group-port-is-named",
    "a taken port is found out later": "taken-group-port-is-named",
    "any world size will do": "wrong-world-size-is-refused",
    "a dead learner locks updates": "recovers-from-a-dead-learner",
    "a dead learner's half is served": "a-dead-learner-leaves-no-half-update",
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
    "an update cuts streams": "a-stream-survives-an-update",
    "a response names the weights that came later": "a-response-names-the-weights-that-wrote-it",
    "the last id has no version": "a-response-names-the-weights-that-wrote-it",
    "the second update leaves out a layernorm": "a-second-update-is-as-exact",
    "every eighth part of an update is lost": "an-update-may-come-in-small-parts",
    "the parts of an update behind the 64th are lost": "an-update-may-come-in-small-parts",
    "prefix cache is kept": "caches-forget-old-weights",
    "encoder cache is kept": "caches-forget-old-pictures",
    "a reset returns no success": "a-reset-returns-its-success",
    "log-probabilities are lost with an update": "logprobs-stay-finite",
    "biases are never updated": "every-tensor-is-updated",
}
"""Switch -> the check that must miss, and no other."""


class BrokenBench:
    """The broken server, and what each check came to while it was not broken."""

    def __init__(self, server, policies=None):
        self.server, self.policies = server, policies or Policies(MODEL)
        self.clean = {}

    def ask(self, dialect, check, mistake="", *, served=0):
        """The verdict; ``served``: the policy whose weights an earlier check has left."""
        self.server.restart()
        self.server.broken.turn(mistake)
        subject = self.subject(dialect)
        if served:
            earlier = Talk(subject)
            sync(earlier, served)
            earlier.leave()
        _, verdict, _ = ask_and_judge(check, subject)
        return verdict

    def subject(self, dialect):
        """As it stands."""
        return Subject(
            name="broken", version="", url=self.server.url, dialect=DIALECTS[dialect](), transport="gloo",
            policies=self.policies, headers=bearer(self.server.key),
        )  # fmt: skip

    def ask_clean(self, dialect, check):
        """Once; the verdict, and the switches that mattered."""
        key = dialect, check.check_id
        if key not in self.clean:
            self.clean[key] = self.ask(dialect, check), frozenset(self.server.broken.asked)
        return self.clean[key]
