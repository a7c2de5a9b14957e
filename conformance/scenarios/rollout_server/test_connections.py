"""Connections over real sockets: health beside a busy event loop, and callers that send slowly, too much or nothing."""

import asyncio
import contextlib
import ctypes
import socket
import subprocess
import sys
import threading
import time
from functools import partial

import psutil
import pytest
import requests
import uvicorn

from conformance.doubles.instance import free_port
from conformance.doubles.stand_in import make_parts
from conformance.judge.servers.bounded import in_thread
from rollmatch.config.limits import LimitsConfig
from rollmatch.serve.app import make_app
from rollmatch.server.connections import EndedServer, listen
from rollmatch.server.health import STALLED_S, health_of
from rollmatch.server.port import bind_http

_JSON = b"POST /generate/ HTTP/1.1\r\nHost: localhost\r\nContent-Type: application/json\r\n"
BEGUN = _JSON + b"Content-Length: 50000\r\n\r\n{"
CHUNKED = _JSON + b"Transfer-Encoding: chunked\r\n\r\n"
WHOLE = b"GET /get_world_size/ HTTP/1.1\r\nHost: localhost\r\n\r\n"


class ServedConnection:
    """A server over pretending engines that listens in a thread."""

    def __init__(self, **limits):
        self.parts = make_parts(limits=LimitsConfig(**limits))
        self.port = free_port()
        self.url = f"http://127.0.0.1:{self.port}"
        self.is_ending = False
        self._thread = threading.Thread(target=lambda: asyncio.run(self._serve()))
        self._thread.start()

    async def _serve(self):
        self._loop = asyncio.get_running_loop()
        listener, health = bind_http("127.0.0.1", self.port), partial(health_of, self.parts)
        serving = listen(
            make_app(self.parts), listener, self.parts.settings.limits, health=health, is_ending=lambda: self.is_ending
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

    def connections(self):
        """Descriptors of this process that are connected to the server's port from its side."""
        return [each for each in psutil.Process().net_connections() if each.laddr.port == self.port and each.raddr]

    def fronts(self):
        """The process that accepts connections for this server."""
        listener = [each for each in psutil.Process().children() if "front.py" in " ".join(each.cmdline())]
        return [each for each in listener if any(one.laddr.port == self.port for one in each.net_connections())]

    def join(self):
        self._thread.join(timeout=30)

    def end(self):
        with contextlib.suppress(RuntimeError):  # it has ended by itself
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


def is_closed(connection):
    """Whether the other side has closed it, all that it sent before left aside."""
    connection.setblocking(False)
    with contextlib.suppress(BlockingIOError):
        with contextlib.suppress(ConnectionError):
            while connection.recv(4096):
                pass
        return True
    return False


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
    served, line = serve(), b"x-%d: " + b"y" * 1000 + b"\r\n"
    whole = served.connect(WHOLE.removesuffix(b"\r\n") + b"".join(line % number for number in range(60)) + b"\r\n")
    assert b"200 OK" in whole.recv(4096)
    whole.close()
    connection = served.connect(b"GET /get_world_size/ HTTP/1.1\r\n")
    with contextlib.suppress(ConnectionError):
        for number in range(200):
            connection.sendall(line % number)
            time.sleep(0.001)
    assert closed_after_s(connection) < 3


@pytest.mark.scenario(clauses=["rollout-server/a-bad-request-costs-nobody-else-anything#8"])
def test_a_body_that_breaks_off_is_counted_and_leaves_no_traceback(serve, caplog):
    served = serve()
    for _ in range(3):
        served.connect(BEGUN).close()
    deadline = time.monotonic() + 60
    while '499"} 3.0' not in requests.get(f"{served.url}/metrics/", timeout=60).text:
        assert time.monotonic() < deadline
        time.sleep(0.05)
    assert not [record for record in caplog.records if record.exc_info]


def test_a_body_that_does_not_come_is_408(serve):
    served = serve(idle_timeout_s=0.4)
    connection = served.connect(BEGUN)
    reply = connection.recv(4096)
    assert b"408" in reply
    assert b"connection: close" in reply
    assert closed_after_s(connection) < 3


def test_more_calls_than_allowed_are_429_and_health_is_answered(serve):
    served = serve(max_connections=2)
    for replica in served.parts.pool.replicas:
        replica.delay_s = 5.0
    calls = [in_thread(requests.post, f"{served.url}/generate/", json={"prompts": [[5]]}) for _ in range(2)]
    while requests.get(f"{served.url}/health/", timeout=60).json()["running"] < 2:
        assert not any(call.done() for call in calls)
    refused = requests.get(f"{served.url}/get_world_size/", timeout=5)
    assert (refused.status_code, refused.json()["code"]) == (429, "server-busy")
    assert requests.get(f"{served.url}/health/", timeout=5).status_code == 200
    assert [call.result().status_code for call in calls] == [200, 200]
    deadline = time.monotonic() + 60
    while requests.get(f"{served.url}/get_world_size/", timeout=60).status_code == 429:
        assert time.monotonic() < deadline
        time.sleep(0.05)


@pytest.mark.parametrize(("first", "num"), [(b"", 160), (BEGUN, 40), (WHOLE, 40)], ids=["silent", "slow body", "idle"])
def test_connections_that_send_no_call_make_room_for_those_that_do(serve, first, num):
    served = serve(max_connections=20)
    slow = [served.connect(first) for _ in range(num)]
    time.sleep(1.5)
    for _ in range(30):
        assert requests.get(f"{served.url}/get_world_size/", timeout=60).status_code == 200
    assert any(is_closed(connection) for connection in slow)
    for connection in slow:
        connection.close()


def test_the_connection_that_has_sent_the_least_makes_room(serve):
    served = serve(max_connections=2)
    most, least = served.connect(BEGUN + b" " * 10_000), served.connect(BEGUN)
    time.sleep(1.5)
    assert requests.get(f"{served.url}/get_world_size/", timeout=60).status_code == 200
    assert closed_after_s(least) < 3
    most.sendall(b" " * 39_998 + b"}")
    assert b"422" in most.recv(4096), "it was read to its end"
    most.close()


BODY_BEGUN = CHUNKED + b"2\r\n{}\r\n"


@pytest.mark.parametrize(
    ("first", "part"),
    [
        (BODY_BEGUN + b"0\r\n", b"x: y\r\n" * 1000),
        (BODY_BEGUN + b"0\r\n", b"x" * 6000),
        (BODY_BEGUN, b"1;e=" + b"x" * 60 + b"\r\n \r\n"),
    ],
    ids=["trailers", "one trailer", "sizes of chunks"],
)
def test_trailers_without_end_are_cut(serve, first, part):
    """They took 3 GB of memory in 9 s: neither a body's limit nor a head's counted them."""
    served = serve()
    connection = served.connect(first)
    sent = 0
    with contextlib.suppress(ConnectionError):
        while sent < 32 << 20:
            sent += connection.send(part)
    assert sent < 16 << 20
    connection.close()


def test_a_body_of_chunks_of_one_byte_is_served(serve):
    served = serve()
    body = b'{"prompts": [[5]], "max_tokens": 2}' + b" " * 100_000
    connection = served.connect(CHUNKED + b"".join(b"1\r\n%c\r\n" % byte for byte in body) + b"0\r\n\r\n")
    assert b"200 OK" in connection.recv(4096)


def test_a_body_that_comes_too_slowly_is_408(serve):
    served = serve(idle_timeout_s=0.5)
    connection = served.connect(BEGUN)
    connection.settimeout(0.1)
    reply, began = b"", time.monotonic()
    while not reply and time.monotonic() - began < 10:
        connection.sendall(b" ")
        with contextlib.suppress(TimeoutError):
            reply = connection.recv(4096)
    assert b"408" in reply
    assert time.monotonic() - began < 5
    with contextlib.suppress(OSError):
        reply += connection.recv(4096)
    assert b'"body-too-slow"' in reply


@pytest.mark.parametrize("num_bytes", [0, 10])
def test_a_caller_that_does_not_read_its_response_is_given_up(serve, num_bytes):
    """Or that reads ``num_bytes`` of it 20 times a second."""
    served = serve(idle_timeout_s=0.3)
    served.parts.metrics.text = lambda: b"x" * (16 << 20)
    connection = served.connect(b"GET /metrics/ HTTP/1.1\r\nHost: localhost\r\n\r\n")
    deadline = time.monotonic() + 30
    while served.connections():
        assert time.monotonic() < deadline
        time.sleep(0.05)
        if num_bytes:
            connection.recv(num_bytes)
    connection.close()


@pytest.mark.parametrize(("stalled_s", "status"), [(STALLED_S, 200), (1.0, 503)])
def test_health_is_answered_while_the_interpreter_lock_is_held(serve, stalled_s, status, monkeypatch):
    """pydantic and JSON decoders hold it for seconds; ``PyDLL`` does so on purpose."""
    monkeypatch.setattr("rollmatch.server.connections.STALLED_S", stalled_s)
    served, wait_s = serve(), 0 if status == 200 else 2.5
    asking = (
        "import time; from requests import get; print('begun', flush=True); input(); "
        f"time.sleep({wait_s}); reply = get('{served.url}/health/', timeout=2); print(reply, reply.json()['status'])"
    )
    pipes = {"stdin": subprocess.PIPE, "stdout": subprocess.PIPE, "text": True}
    asker = subprocess.Popen([sys.executable, "-c", asking], **pipes)
    assert asker.stdout.readline() == "begun\n"
    asker.stdin.write("\n")
    held = threading.Thread(target=ctypes.PyDLL(None).sleep, args=(4,))
    asker.stdin.flush()
    held.start()
    said = "ok" if status == 200 else "stalled"
    assert asker.communicate(timeout=60)[0] == f"<Response [{status}]> {said}\n"
    held.join()


def test_a_front_that_is_killed_is_started_again(serve):
    served = serve()
    served.parts.pool.replicas[0].delay_s = 3.0
    call = in_thread(requests.post, f"{served.url}/generate/", json={"prompts": [[5]]}, timeout=60)
    while not requests.get(f"{served.url}/health/", timeout=60).json()["running"]:
        assert not call.done(), call.result()
    before = served.fronts()
    assert before
    for front in before:
        front.kill()
        front.wait()
    assert served.wait()["status"] == "ok"
    assert served.fronts() not in ([], before)
    assert call.result().status_code == 200, "it had its connection already"


def test_a_signal_leaves_calls_three_seconds(serve):
    served = serve()
    short, long = served.parts.pool.replicas[:2]
    short.delay_s, long.delay_s = 1.5, 60.0
    calls = [in_thread(requests.post, f"{served.url}/generate/", json={"prompts": [[5]]}) for _ in range(2)]
    while requests.get(f"{served.url}/health/", timeout=60).json()["running"] < 2:
        assert not any(call.done() for call in calls)
    served.is_ending, began = True, time.monotonic()
    served.join()
    assert time.monotonic() - began < 15
    ends = [type(call.exception()) if call.exception() else call.result().status_code for call in calls]
    assert 200 in ends
    assert ends != [200, 200]


def test_bodies_of_all_calls_are_counted_together(serve):
    served = serve(max_buffered_bytes=100_000)
    first, body = served.connect(BEGUN + b" " * 49_000), {"prompts": [[5] * 20_000]}

    def wait_for(status):
        deadline = time.monotonic() + 30
        while (reply := requests.post(f"{served.url}/generate/", json=body, timeout=60)).status_code != status:
            assert time.monotonic() < deadline
        return reply.json()

    assert wait_for(429)["code"] == "server-busy"
    assert requests.post(f"{served.url}/generate/", json={"prompts": [[5]]}, timeout=60).status_code == 200
    first.close()
    assert wait_for(400)["code"] == "prompt-too-long", "it is read again"


@pytest.mark.parametrize(("should_exit", "is_ending"), [(False, False), (True, False), (False, True), (True, True)])
def test_a_server_ends_when_uvicorn_or_the_caller_says_so(should_exit, is_ending):
    server = EndedServer(uvicorn.Config(lambda: None), lambda: is_ending)
    server.should_exit = should_exit
    assert asyncio.run(server.on_tick(1)) is (should_exit or is_ending)


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
