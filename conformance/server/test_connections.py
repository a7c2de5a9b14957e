"""Connections over real sockets: health beside a busy event loop, and callers that send slowly, too much or nothing."""

import asyncio
import contextlib
import os
import resource
import socket
import threading
import time
from functools import partial

import pytest
import requests
import uvicorn

from conformance.server.instance import free_port
from conformance.server.stand_in import make_parts
from rollmatch.cli.server_app import make_app
from rollmatch.config.limits import LimitsConfig
from rollmatch.server.connections import Acceptor, EndedServer, listen
from rollmatch.server.health import health_of
from rollmatch.server.port import bind_http


class ServedConnection:
    """A server over pretending engines that listens in a thread."""

    def __init__(self, **limits):
        self.parts = make_parts(limits=LimitsConfig(**limits))
        self.port = free_port()
        self.url = f"http://127.0.0.1:{self.port}"
        self._thread = threading.Thread(target=lambda: asyncio.run(self._serve()))
        self._thread.start()

    async def _serve(self):
        self._loop = asyncio.get_running_loop()
        listener, health = bind_http("127.0.0.1", self.port), partial(health_of, self.parts)
        serving = listen(
            make_app(self.parts), listener, self.parts.settings.limits, health=health, is_ending=lambda: False
        )
        self._task = self._loop.create_task(serving)
        with contextlib.suppress(asyncio.CancelledError):
            await self._task

    def wait(self):
        deadline = time.monotonic() + 10
        while time.monotonic() < deadline:
            with contextlib.suppress(requests.ConnectionError):
                return requests.get(f"{self.url}/health/", timeout=2).json()
            time.sleep(0.02)
        raise AssertionError("nobody listens")

    @contextlib.contextmanager
    def blocked(self):
        """The event loop does not turn inside."""
        begun, is_over = threading.Event(), threading.Event()
        self._loop.call_soon_threadsafe(lambda: (begun.set(), is_over.wait()))
        assert begun.wait(60)
        try:
            yield
        finally:
            is_over.set()

    def connect(self, raw=b""):
        connection = socket.create_connection(("127.0.0.1", self.port), timeout=10)
        connection.sendall(raw)
        return connection

    def end(self):
        self._loop.call_soon_threadsafe(self._task.cancel)
        self._thread.join(timeout=10)
        assert not self._thread.is_alive()


@pytest.fixture
def serve():
    made = []

    def start(**limits):
        made.append(ServedConnection(**limits))
        made[-1].wait()
        return made[-1]

    yield start
    for each in made:
        each.end()


def closed_after_s(connection):
    """Seconds until the other side closes; what it sent before does not count."""
    began = time.monotonic()
    with contextlib.suppress(ConnectionError):
        while connection.recv(4096):
            pass
    connection.close()
    return time.monotonic() - began


@pytest.mark.scenario(clauses=["rollout-server/health-is-answered-while-tokens-are-generated#1"])
def test_health_is_answered_while_the_event_loop_is_busy(serve):
    served = serve()
    with served.blocked():
        for _ in range(20):
            health = requests.get(f"{served.url}/health", timeout=60).json()
            assert health["status"] == "ok"
    assert health["instance"] == served.parts.instance
    assert requests.post(f"{served.url}/generate/", json={"prompts": [[5]]}, timeout=10).status_code == 200


def wait_for_health(served, status):
    deadline = time.monotonic() + 60
    while (reply := requests.get(f"{served.url}/health/", timeout=60)).status_code != status:
        assert time.monotonic() < deadline
        time.sleep(0.05)
    return reply


@pytest.mark.scenario("rollout-server/health-after-a-dead-worker")
def test_a_stalled_loop_and_a_dead_worker_are_not_well(serve, monkeypatch):
    served = serve()
    monkeypatch.setattr("rollmatch.server.health.STALLED_S", 0.5)
    with served.blocked():
        reply = wait_for_health(served, 503)
        assert reply.json()["status"] == "stalled"
    wait_for_health(served, 200)
    served.parts.pool.replicas[0].is_gone = True
    reply = requests.get(f"{served.url}/health/", timeout=5)
    assert (reply.status_code, reply.json()["code"]) == (503, "worker-dead")


@pytest.mark.parametrize(("lag_s", "status"), [(119, 200), (121, 503)])
def test_a_loop_that_is_silent_for_two_minutes_is_stalled(lag_s, status):
    parts = make_parts()
    parts.pool.turned_at = time.monotonic() - lag_s
    found, about = health_of(parts)
    assert (found, round(about["lag_s"])) == (status, lag_s)
    if status == 503:
        assert (about["status"], about["problem"]) == ("stalled", "the event loop has not turned for 121 s")


@pytest.mark.parametrize("first", [b"", b"POST /generate/ HT", b"GET /health/ HTTP/1.1\r\nHost: 127"])
def test_a_head_that_does_not_end_is_not_waited_for(serve, first):
    served = serve(head_timeout_s=0.4)
    assert closed_after_s(served.connect(first)) < 3


def test_a_call_may_take_longer_than_its_head_and_its_body(serve):
    served = serve(head_timeout_s=0.2, idle_timeout_s=0.2)
    for replica in served.parts.pool.replicas:
        replica.delay_s = 0.8
    assert requests.post(f"{served.url}/generate/", json={"prompts": [[5]]}, timeout=60).status_code == 200


def test_a_second_head_is_timed_as_well(serve):
    served = serve(head_timeout_s=0.4)
    whole = b"GET /get_world_size/ HTTP/1.1\r\nHost: localhost\r\n\r\n"
    connection = served.connect(whole)
    assert b"200" in connection.recv(4096)
    connection.sendall(b"POST /gen")
    assert closed_after_s(connection) < 3


def test_a_head_without_end_is_cut(serve):
    served = serve()
    connection = served.connect(b"GET /get_world_size/ HTTP/1.1\r\n")
    with contextlib.suppress(ConnectionError):
        for number in range(200):
            connection.sendall(b"x-%d: " % number + b"y" * 1000 + b"\r\n")
            time.sleep(0.001)
    assert closed_after_s(connection) < 3


def test_a_body_that_does_not_come_is_408(serve):
    served = serve(idle_timeout_s=0.4)
    head = (
        b"POST /generate/ HTTP/1.1\r\nHost: localhost\r\nContent-Type: application/json\r\nContent-Length: 50\r\n\r\n{"
    )
    connection = served.connect(head)
    reply = connection.recv(4096)
    assert b"408" in reply
    assert b"connection: close" in reply
    assert closed_after_s(connection) < 3


def test_more_connections_than_allowed_are_429_and_health_is_answered(serve):
    served = serve(max_connections=2)
    whole = b"GET /get_world_size/ HTTP/1.1\r\nHost: localhost\r\n\r\n"
    kept = [served.connect(whole) for _ in range(2)]
    assert all(b"200" in connection.recv(4096) for connection in kept)
    assert requests.get(f"{served.url}/get_world_size/", timeout=5).status_code == 429
    assert requests.get(f"{served.url}/health/", timeout=5).status_code == 200
    for connection in kept:
        connection.close()
    deadline = time.monotonic() + 60
    while requests.get(f"{served.url}/get_world_size/", timeout=60).status_code == 429:
        assert time.monotonic() < deadline
        time.sleep(0.05)


@pytest.mark.parametrize(("num_silent", "status"), [(1, 200), (2, 429), (3, 429)])
def test_connections_count_that_say_nothing_though_more_of_them_are_accepted(serve, num_silent, status):
    served = serve(max_connections=2)
    silent = [served.connect() for _ in range(num_silent)]
    assert requests.get(f"{served.url}/get_world_size/", timeout=60).status_code == status
    for connection in silent:
        connection.close()


def test_a_server_without_free_descriptors_answers_once_there_are_some(serve, monkeypatch):
    served, tried = serve(), threading.Event()
    accept = Acceptor._accept
    monkeypatch.setattr(Acceptor, "_accept", lambda acceptor: (accept(acceptor), tried.set()))
    with socket.socket() as caller:
        with no_free_descriptor():
            caller.connect(("127.0.0.1", served.port))
            assert tried.wait(60)
        caller.settimeout(60)
        caller.sendall(b"GET /health/ HTTP/1.1\r\nHost: localhost\r\n\r\n")
        assert caller.recv(4096).startswith(b"HTTP/1.1 200 ")


@pytest.mark.parametrize(("should_exit", "is_ending"), [(False, False), (True, False), (False, True), (True, True)])
def test_a_server_ends_when_uvicorn_or_the_caller_says_so(should_exit, is_ending):
    server = EndedServer(uvicorn.Config(lambda: None), lambda: is_ending)
    server.should_exit = should_exit
    assert asyncio.run(server.on_tick(1)) is (should_exit or is_ending)


@contextlib.contextmanager
def no_free_descriptor():
    """This process can open nothing inside."""
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    free = os.dup(0)  # the lowest one
    os.close(free)
    resource.setrlimit(resource.RLIMIT_NOFILE, (free, hard))
    try:
        yield
    finally:
        resource.setrlimit(resource.RLIMIT_NOFILE, (soft, hard))


def test_a_million_tokens_are_prepared_beside_the_loop(serve):
    """A call that takes long to prepare delays nobody's health."""
    served = serve()
    make, begun, is_over = served.parts.prompts.make, threading.Event(), threading.Event()

    def slow(*arguments, **keywords):
        begun.set()
        is_over.wait(120)
        return make(*arguments, **keywords)

    served.parts.prompts.make = slow
    call = threading.Thread(
        target=requests.post, args=(f"{served.url}/generate/",), kwargs={"json": {"prompts": [[5]]}}
    )
    call.start()
    assert begun.wait(60)
    assert requests.get(f"{served.url}/get_world_size/", timeout=60).status_code == 200
    is_over.set()
    call.join()
