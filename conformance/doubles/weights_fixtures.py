from contextlib import ExitStack

import pytest

from conformance.doubles.learner_side import connected, native_backend, rendezvous
from conformance.doubles.native_double import serving
from rollmatch.rollout.weight_sender import make_sender


@pytest.fixture
def start_sender():
    """Doubles -> a sender to them; ``fields`` of the rendezvous. Ends both."""
    with ExitStack() as stack:

        def begin(*doubles, bucket_bytes=64, **fields):
            servers = [connected(url, timeout_s=5) for url in stack.enter_context(serving(*doubles))]
            usual = {"timeout_s": 2.0, "join_timeout_s": 5}
            sender = make_sender(servers, [rendezvous(**usual | fields)] * len(servers), stage=False)
            sender.bucket_bytes = bucket_bytes
            stack.callback(sender.close)
            return sender

        yield begin


@pytest.fixture
def attach_backend():
    """A double -> a backend whose sender has a group with it."""
    with ExitStack() as stack:

        def begin(double, **fields):
            (url,) = stack.enter_context(serving(double))
            backend = native_backend(url, **{"timeout_s": 5, "join_timeout_s": 5} | fields)
            stack.callback(backend.close)
            return backend

        yield begin
