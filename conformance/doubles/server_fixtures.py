"""One server with two replicas for all tests that need an engine; it restarts what does not finish quickly."""

import time
from contextlib import ExitStack, contextmanager

import pytest
import requests
from starlette.testclient import TestClient

from conformance.doubles.digits import BRIEF, load_model, perturb, requests_for, scenes, template_of
from conformance.doubles.instance import free_port
from conformance.doubles.learner_side import native_backend
from conformance.doubles.processes import stopped, stopped_when
from conformance.doubles.stand_in import make_stand_in
from conformance.judge.calls import RawLearner, text_batch
from conformance.judge.servers.bounded import in_thread
from rollmatch.config.limits import LimitsConfig
from rollmatch.data.ids import pack_ids
from rollmatch.model.checkpoint import merged_weights
from rollmatch.rollout.hf import HfBackend

NUM_SCENES = 6
HELD_S, MOST_OF_TURNS = 0.05, 0.99
"""Of processor time, and the share of turns of the event loop that take no more."""


@pytest.fixture(scope="session")
def anyio_backend():
    return "asyncio"


@pytest.fixture
def server(instance):
    return instance.server


@pytest.fixture
def learner(server):
    """Attached; leaves at the end."""
    attached = RawLearner(server, port=free_port())
    status, body = attached.open()
    assert status == 200, body
    yield attached
    attached.close(force=True)


@pytest.fixture
def backend(instance):
    """The learner's rollout side on the server, in the native dialect."""
    made = native_backend(instance.server.url, template_of())
    yield made
    made.close()


@pytest.fixture(scope="session")
def scene_requests():
    return requests_for(scenes()[:NUM_SCENES])


@pytest.fixture(scope="session")
def scene_batch(scene_requests):
    """The scenes as a native call has them."""
    return [
        {
            "request_id": request.request_id,
            "prompt_token_ids": pack_ids(request.prompt_token_ids),
            "images": [open(request.sample.images[0], "rb").read()],
            "seed": request.seed,
        }
        for request in scene_requests
    ]


@pytest.fixture(scope="session")
def greedy():
    """Sampling values under which the server decodes as ``transformers`` does here."""
    template = template_of()
    return {
        "max_tokens": BRIEF.max_new_tokens,
        "stop_token_ids": [template.vocabulary.stop_id],
        "logit_bias": dict.fromkeys(template.banned_ids, -100.0),
    }


@pytest.fixture
def start():
    """Fields of a server over pretending engines -> its parts, a function that posts to it, and its client."""
    with ExitStack() as stack:

        def begin(**fields):
            parts, app = make_stand_in(**{"drain_s": 0.1} | fields)
            client = stack.enter_context(TestClient(app))

            def post(route, body=None):
                reply = client.post(route, json=body or {})
                return reply.status_code, reply.json()

            return parts, post, client

        yield begin


@pytest.fixture
def served(start):
    """Limits -> the parts and a client of a server with these limits."""

    def begin(**limits):
        parts, _, client = start(max_model_len=512, limits=LimitsConfig(**limits))
        return parts, client

    return begin


@pytest.fixture
def pretending(start):
    return start()


@pytest.fixture
def stand_in(pretending):
    """A server over pretending engines: its parts, and a client."""
    return pretending[0], pretending[2]


@pytest.fixture
def post(pretending):
    """JSON to a route of the stand-in: status and body."""
    return pretending[1]


class Policy:
    """Some weights, and what ``transformers`` writes greedily with them."""

    def __init__(self, seed, requests):
        model = load_model()
        if seed:
            perturb(model, seed=seed, scale=0.05)
        self.weights = {name: tensor.clone() for name, tensor in merged_weights(model)}
        rollouts = HfBackend(model, template_of(), batch_size=NUM_SCENES).generate(requests, BRIEF)
        self.responses = [rollout.response_token_ids for rollout in rollouts]

    def wrote(self, responses):
        """Whether these are its responses; the server leaves the stop token in."""
        stop = template_of().vocabulary.stop_id
        return [tuple(i for i in ids if i != stop) for ids in responses] == self.responses


@pytest.fixture(scope="session")
def policies(scene_requests):
    """Three that differ in what they write; the first is the model directory's."""
    made = [Policy(seed, scene_requests) for seed in range(3)]
    assert len({str(policy.responses) for policy in made}) == 3
    return made


def turns_of(server):
    """Turns of the event loop by their longest processor time in seconds, as the server's monitor counts them."""
    lines = requests.get(f"{server.url}/metrics/", headers=server.headers, timeout=60).text.splitlines()
    buckets = [line for line in lines if line.startswith("rollmatch_turn_cpu_seconds_bucket")]
    return {float(line.split('le="')[1].split('"')[0]): float(line.split()[-1]) for line in buckets}


def num_restarted(server):
    """Responses that commits have ended since the server's start."""
    text = requests.get(f"{server.url}/metrics/", timeout=60).text
    return next(float(line.split()[1]) for line in text.splitlines() if line.startswith("rollmatch_restarted_requests"))


@contextmanager
def held(instance, write, *, num_tokens=1, num_running=0):
    """A call in a thread; inside, its responses have so many tokens, and the engines stand still.

    None has ended: on a busy machine some would have before others begin. ``num_running``: engines stand still, too,
    until the server has so many responses, whose images it reads one by one.
    """
    engines, call = instance.workers(), in_thread(write)

    def count(name):
        assert not call.done(), call.result()
        return instance.server.health()[name]

    with stopped(*engines):
        while count("running") < num_running:
            time.sleep(0.01)
        begun = count("progress")
    with stopped_when(lambda: count("progress") >= begun + num_tokens, *engines):
        yield call


class LongResponses:
    """What some prompts are answered at length, greedily: much longer than a sync takes."""

    def __init__(self):
        self.prompts = text_batch([[7, 8, i] for i in range(12)])
        self._by_policy = {}

    def write(self, server):
        return server.infer(self.prompts, max_tokens=400, ignore_eos=True)

    def of(self, policy, server):
        """By a server that holds the policy; asked for once."""
        if policy not in self._by_policy:
            self._by_policy[policy], _ = self.write(server)
        return self._by_policy[policy]

    def interrupted_by(self, update, instance):
        """Begin the responses, and hold the engines in the middle of them until ``update`` has ended them all.

        Returns the call and the result of ``update``. However slow the machine is, work is unfinished then.
        """
        server = instance.server
        restarted = num_restarted(server)
        with held(instance, lambda: self.write(server)) as call:
            updating = in_thread(update)
            while num_restarted(server) == restarted:
                assert server.health()["running"], "all responses ended before the engines stood still"
        return call, updating.result()

    def check_whole(self, call, before, after, server):
        """Each response of a call that ran during a sync is one policy's, under the version that it names."""
        old, new = self.of(before, server), self.of(after, server)
        assert new != old
        responses, versions = call.result()
        by_version = {server.version - 1: old, server.version: new}
        for place, (ids, version) in enumerate(zip(responses, versions, strict=True)):
            assert ids == by_version[version][place], place
        assert server.version in versions


@pytest.fixture(scope="session")
def long_responses():
    return LongResponses()
