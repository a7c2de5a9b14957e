"""Replies of our own server that were changed in one place: a learner ends by name, or its rollouts are right."""

import copy
import json
import math
from typing import NamedTuple

import msgspec
import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from conformance.doubles.fuzzed_bodies import VALUES, places_in, set_at, value_at
from conformance.doubles.http_server import MSGPACK, is_packed, read_body
from conformance.doubles.learner_side import TEMPLATE, rendezvous
from conformance.doubles.native_double import ROUTES, NativeDouble, equal, serving, tensors_of
from conformance.doubles.records import make_request
from conformance.doubles.refusals import refused
from rollmatch.dialects.native.sender import NativeSender
from rollmatch.dialects.session import ClientSettings, RolloutServer
from rollmatch.dialects.watch import WatchRules
from rollmatch.errors import RollmatchError
from rollmatch.ranks import Ranks
from rollmatch.rollout.backend import Decoding
from rollmatch.rollout.retry import CallRules
from rollmatch.rollout.servers import VllmServerBackend

NUM_IDS = 64
REQUESTS = [make_request(number, prompt_token_ids=(1, 2 + number)) for number in range(2)]
DECODING = Decoding(max_new_tokens=4, logprobs=True)
CALLS = {"health": 5, "openapi": 1, "identity": 1, "communicator": 1, "sync": 1, "sync_again": 1, "commit": 2}
CALLS |= {"close_communicator": 2, "infer": 2}
"""Route -> how often ``learned`` calls it."""
FRAMES = {
    "cut": lambda raw: raw[: len(raw) // 2],
    "doubled": lambda raw: raw + raw,
    "noise": lambda raw: raw[: len(raw) // 3] + b"\xc1\xff" + raw[len(raw) // 3 :],
    "nested": lambda raw: b"[" * 100_000,
}


class Change(NamedTuple):
    """What is done to the first server's reply to one call."""

    route: str
    count: int = 1
    how: str = "set"
    """Also ``drop``, ``repeat``, ``other type``, or one of ``FRAMES``."""
    place: object = ()
    """Path to it, or its number, counted round."""
    value: object = None
    status: int = 200
    num_servers: int = 1


CHANGES = st.sampled_from(sorted(CALLS)).flatmap(
    lambda route: st.builds(
        Change,
        route=st.just(route),
        count=st.integers(1, CALLS[route]),
        how=st.sampled_from(["set"] * 6 + ["drop"] * 2 + ["repeat", "other type", *FRAMES]),
        place=st.integers(0, 200),
        value=VALUES | st.binary(max_size=9),
        status=st.sampled_from([200] * 12 + [204, 302, 404, 409, 500, 503]),
        num_servers=st.integers(1, 2),
    )
)


def changed(body, change):
    """The body with another value at a place, without it, or with more of it."""
    paths = [*places_in(body)]
    path = change.place if isinstance(change.place, tuple) else paths[change.place % len(paths)]
    if change.how == "drop" and path:
        del value_at(body, path[:-1])[path[-1]]
    elif change.how == "repeat" and isinstance(value := value_at(body, path), list | bytes):
        return set_at(body, path, value + value[:1])
    return set_at(body, path, change.value) if change.how == "set" else body


class Changing(NativeDouble):
    """Changes its reply to one call."""

    def __init__(self, change):
        super().__init__(tensors_of(0))
        self.change, self.left = change, change.count if change else 0

    def answer(self, handler):
        name = ROUTES.get(handler.path.rstrip("/"))
        if self.change and name == self.change.route:
            self.left -= 1
            if self.left == 0:
                self.answer_changed(handler, copy.deepcopy(getattr(self, name)(read_body(handler))))
                return
        super().answer(handler)

    def answer_changed(self, handler, body):
        body, is_msgpack, status = changed(body, self.change), is_packed(handler), self.change.status
        try:
            raw = msgspec.msgpack.encode(body) if is_msgpack else json.dumps(body, default=list).encode()
        except OverflowError:
            raw, is_msgpack = json.dumps(body, default=list).encode(), False
        raw, is_msgpack = FRAMES.get(self.change.how, bytes)(raw), is_msgpack ^ (self.change.how == "other type")
        handler.send_response(status)
        handler.send_header("Content-Type", MSGPACK if is_msgpack else "application/json")
        handler.send_header("Content-Length", str(len(raw) + 5 * (status == 204)))
        if status == 302:
            handler.send_header("Location", repr(self.change.value).encode().decode("latin1"))
        handler.end_headers()
        handler.wfile.write(raw)

    def infer(self, body):
        returned = super().infer(body)
        for each in returned["responses"]:
            num = len(each["response_token_ids"]) // 4
            each["logprobs"] = np.full(num, -0.5, dtype="<f4").tobytes()
            each["policy_versions"] = [[self.policy_version, num]]
        return returned


def learned(urls):
    """Rollouts by version, of a learner that connects, sends weights twice and generates by each."""
    watch = WatchRules(poll_s=0.1, look_timeout_s=0.5, silence_s=1.0)
    servers = [RolloutServer(url, ClientSettings(timeout_s=1.5, watch=watch)) for url in urls]
    for server in servers:
        server.connect()
    sender = NativeSender(servers, rendezvous(timeout_s=2, join_timeout_s=2), stage=False)
    backend, found = VllmServerBackend(servers, TEMPLATE, Ranks(), sender=sender), {}
    backend.calls.rules = CallRules(num_ids=NUM_IDS)
    try:
        for _ in range(2):
            version = backend.policy_version + 1
            backend.push(tensors_of(version).items(), version=version)
            found[version] = backend.generate(REQUESTS, DECODING)
            backend.is_current()
    finally:
        backend.close()
    return found


@pytest.mark.wide
@given(CHANGES)
def test_a_learner_ends_by_name_or_has_what_it_asked_for(change):
    doubles = [Changing(change), *(Changing(None) for _ in range(change.num_servers - 1))]
    with serving(*doubles) as urls:
        try:
            found = learned(urls)
        except RollmatchError:
            return
    for version, rollouts in found.items():
        for request, rollout in zip(REQUESTS, rollouts, strict=True):
            assert (rollout.request_id, rollout.policy_version) == (request.request_id, version)
            assert all(type(each) is int and 0 <= each < NUM_IDS for each in rollout.sampled_ids)
            assert len(rollout.response_logprobs) == len(rollout.sampled_ids)
            assert all(math.isfinite(each) for each in rollout.response_logprobs)
            assert change.route == "infer" or rollout.sampled_ids == request.prompt_token_ids
    assert all(equal(each.served, tensors_of(max(found))) for each in doubles)


@pytest.mark.parametrize(
    ("change", "code"),
    [
        (Change("identity", value=[1]), "reply-malformed"),
        (Change("identity", how="drop", place=("tensors", 0, "shape")), "reply-malformed"),
        (Change("identity", place=("tensors", 0, "name"), value=[]), "reply-malformed"),
        (Change("identity", place=("transports",), value=[]), "reply-malformed"),
        (Change("identity", place=("world_size",), value=10**8), "reply-malformed"),
        (Change("identity", place=("protocol",), value={}), "protocol-unknown"),
        (Change("sync"), "reply-malformed"),
        (Change("sync", place=("digests", 0), value=[]), "reply-malformed"),
        (Change("sync_again", how="drop", place=("digests",)), "digest-mismatch"),
        (Change("commit", value=["committed"], num_servers=2), "reply-malformed"),
        (Change("health", 2, place=("policy_version",), value=[]), "reply-malformed"),
        (Change("health", 2, place=("policy_version",), value=math.nan), "reply-malformed"),
        (Change("openapi", status=302, value="\xb4"), "transport-failed"),
        (Change("infer", place=("responses", 0, "logprobs"), value=b"abc"), "reply-malformed"),
    ],
    ids=lambda value: value if isinstance(value, str) else value.route,
)
def test_replies_that_are_none_have_names(change, code):
    doubles = [Changing(change), *(Changing(None) for _ in range(change.num_servers - 1))]
    with serving(*doubles) as urls, refused(code):
        learned(urls)


def test_a_code_that_is_none_and_endless_words_of_a_server_stay_out_of_messages():
    said = {"code": "a\nb", "problem": "no"}, {"code": "busy", "problem": "x" * 10**6, "remedy": "y" * 10**6}
    for value, code in zip(said, ("server-refused", "busy"), strict=True):
        with serving(Changing(Change("identity", value=value, status=409))) as urls, refused(code) as caught:
            learned(urls)
        assert len(str(caught.value)) < 10_000
