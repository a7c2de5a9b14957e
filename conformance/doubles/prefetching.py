"""Servers in this process that answer, wait and fail as a test says, behind a prefetch."""

import threading
import time
from contextlib import contextmanager

from conformance.doubles.records import make_reply, make_request
from rollmatch.rollout.backend import Decoding
from rollmatch.rollout.monitor import ThreadMonitor
from rollmatch.rollout.prefetch import Prefetch, PrefetchRules

GREEDY = Decoding(max_new_tokens=4)


def requests_of(step, num_requests):
    """Requests of one window; sample ids count on over the windows."""
    first = step * num_requests
    return [make_request(first + place, request_id=f"{step}.0.{place}") for place in range(num_requests)]


def rollouts_of(requests, version):
    """Answers, whose only token is the sample's id."""
    return [make_reply(request, (request.sample.sample_id,), version=version) for request in requests]


class Servers:
    """Answers with ``version``, after ``pause_s``; a gate that is closed keeps all calls waiting."""

    lost = ()

    def __init__(self, num_servers=2, *, version=1):
        self.num_servers, self.version, self.pause_s = num_servers, version, 0.0
        self.gate, self.asked, self.under_way, self.lock = threading.Event(), [], 0, threading.Lock()
        self.gate.set()
        self.broken = {}

    def generate_on(self, server_index, requests, decoding, *, start):
        with self.lock:
            self.asked.append((server_index, [request.sample.sample_id for request in requests]))
            place = len(self.asked)
            self.under_way += 1
        try:
            assert self.gate.wait(10)
            time.sleep(self.pause_s)
            if place in self.broken:
                raise self.broken[place]
            return rollouts_of(requests, self.version)
        finally:
            with self.lock:
                self.under_way -= 1


class QuickMonitor(ThreadMonitor):
    """A learner that waits looks again every 20 ms."""

    def wait(self, condition, *, timeout_s=None):
        return super().wait(condition, timeout_s=timeout_s and 0.02)


@contextmanager
def opened(servers, *, is_open=True, monitor=None, **rules):
    chosen = PrefetchRules(**({"max_windows": 3, "callers_per_server": 2} | rules))
    prefetch = Prefetch(servers, GREEDY, chosen, monitor=monitor)
    if is_open:
        with prefetch.quiet():
            pass
    try:
        yield prefetch
    finally:
        servers.gate.set()
        prefetch.close()


def ids_of(rollouts):
    return [rollout.response_token_ids[0] for rollout in rollouts]


def until(condition):
    deadline = time.monotonic() + 10
    while not condition():
        assert time.monotonic() < deadline
        time.sleep(0.005)
