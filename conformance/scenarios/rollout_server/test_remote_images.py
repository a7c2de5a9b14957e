"""Images by URL: fetched from hosts that the operator named, and from no other."""

import asyncio
import contextlib
import socket
import threading
import time
from pathlib import Path

import pytest

from conformance.doubles.digits import scenes
from conformance.doubles.hostile import moved_without_end
from conformance.doubles.http_server import http_server
from conformance.doubles.refusals import refused
from conformance.judge.servers.bounded import in_thread
from rollmatch.config.limits import LimitsConfig
from rollmatch.errors import RollmatchError
from rollmatch.server.images import ImageReader
from rollmatch.server.workers import Workers

IMAGE = Path(scenes()[0].images[0]).read_bytes()


@pytest.fixture
def host():
    """A web server's port, and the paths that were requested of it."""
    asked = []

    def answer(handler):
        asked.append(handler.path if "Authorization" not in handler.headers else "with credentials")
        if handler.path == "/moved.png":
            moved_without_end(handler, "/a.png")
        handler.send_response(200)
        handler.send_header("Content-Length", str(len(IMAGE)))
        handler.end_headers()
        handler.wfile.write(IMAGE)

    with http_server(answer) as server:
        yield server.server_port, asked


def read(url, domains, **limits):
    reader = ImageReader((), LimitsConfig(**limits), domains=domains)
    return reader.read(url, reader.budget(), item=0, key="image")


def test_an_image_of_a_named_host_is_fetched_once_per_call(host):
    port, asked = host
    reader = ImageReader((), domains=("127.0.0.1",))
    budget, url = reader.budget(), f"http://127.0.0.1:{port}/a.png"
    first = reader.read(url, budget, item=0, key="image")
    assert reader.read(url, budget, item=0, key="image") is first
    assert asked == ["/a.png"]
    assert first.size[0] > 0


@pytest.mark.scenario(clauses=["rollout-server/images-come-from-where-the-operator-allows#3"])
@pytest.mark.parametrize(
    "url",
    [
        "http://127.0.0.1:{port}/a.png",
        "HTTP://127.0.0.1:{port}/a.png",
        "http://allowed.invalid@127.0.0.1:{port}/a.png",
        "http://me:key@allowed.invalid/a.png",
        "ftp://allowed.invalid/a.png",
        "http://not-allowed.invalid/a.png",
        "http://www.allowed.invalid/a.png",
        "http://allowed.invalid.example/a.png",
        "http://[broken/a.png",
    ],
)
def test_a_url_of_another_host_is_refused_and_not_requested(host, url):
    port, asked = host
    for domains in ((), ("allowed.invalid",)):
        with refused("image-url-refused", "image"):
            read(url.format(port=port), domains)
    assert asked == []


def test_a_url_that_parsers_read_as_two_hosts_reaches_no_other_host(host):
    port, asked = host
    with pytest.raises(RollmatchError):
        read(f"http://allowed.invalid\\@127.0.0.1:{port}/a.png", ("allowed.invalid",))
    assert asked == []


@pytest.mark.scenario(clauses=["rollout-server/images-come-from-where-the-operator-allows#4"])
def test_a_redirect_is_neither_followed_nor_read(host):
    port, asked = host
    with refused("image-unreadable", "image", problem="307"):
        read(f"http://127.0.0.1:{port}/moved.png", ("127.0.0.1",))
    assert asked == ["/moved.png"]


def in_environment(monkeypatch, **variables):
    """Downloads begin in a process with these variables; one that has been started has those of its start."""
    begin = f"import os; os.environ.pop('no_proxy', None); os.environ.update({variables!r})"
    monkeypatch.setattr("rollmatch.server.remote_images._DOWNLOADS", Workers(1, begin=exec, arguments=(begin,)))


def test_a_proxy_of_the_servers_environment_is_not_used(host, monkeypatch):
    port, asked = host
    in_environment(monkeypatch, **dict.fromkeys(("http_proxy", "HTTP_PROXY", "all_proxy"), f"http://127.0.0.1:{port}"))
    with refused("image-unreadable", "image"):
        read("http://allowed.invalid/a.png", ("allowed.invalid",))
    assert asked == []


def test_credentials_of_the_servers_environment_are_not_sent(host, monkeypatch, tmp_path):
    port, asked = host
    (tmp_path / "netrc").write_text("machine 127.0.0.1 login me password sesame\n")
    in_environment(monkeypatch, NETRC=str(tmp_path / "netrc"))
    assert read(f"http://127.0.0.1:{port}/a.png", ("127.0.0.1",)).size[0] > 0
    assert asked == ["/a.png"]


def test_an_image_that_is_longer_than_a_body_may_be_is_refused(host):
    port, _ = host
    with refused("image-unreadable", "image", problem="more than 100 bytes"):
        read(f"http://127.0.0.1:{port}/a.png", ("127.0.0.1",), max_body_bytes=100)


def test_the_images_of_a_call_are_together_as_long_as_a_body_may_be(host):
    url, limits = f"http://127.0.0.1:{host[0]}", LimitsConfig(max_body_bytes=2 * len(IMAGE) - 1)
    reader = ImageReader((), limits, domains=("127.0.0.1",))
    budget = reader.budget()
    reader.read(f"{url}/a.png", budget, item=0, key="image")
    with refused("image-unreadable", "image", problem=f"more than {len(IMAGE) - 1} bytes"):
        reader.read(f"{url}/b.png", budget, item=0, key="image")


def test_a_host_that_trickles_is_given_up_in_time_and_delays_nobody(monkeypatch):
    """A byte every 0.3 s, in the head already: no pause is long, and nothing ends."""
    monkeypatch.setattr("rollmatch.server.remote_images.LONGEST_S", 2.0)
    with socket.create_server(("127.0.0.1", 0)) as listener:
        port = listener.getsockname()[1]
        in_thread(trickle, listener)
        reader = ImageReader((), domains=("127.0.0.1",))
        began = time.monotonic()
        with refused("image-unreadable", problem="takes longer"):
            reader.read(f"http://127.0.0.1:{port}/a.png", reader.budget(), item=0, key="image")
    assert time.monotonic() - began < 30


def trickle(listener):
    connection, _ = listener.accept()
    connection.sendall(b"HTTP/1.1 200 OK\r\nx-long: ")
    with contextlib.suppress(OSError):
        while True:
            connection.sendall(b"y")
            time.sleep(0.3)


IN_PARTS = [{"type": "text", "text": "a"}]


@pytest.mark.parametrize("content", ["What is at http://127.0.0.1?", IN_PARTS], ids=["text", "parts"])
def test_chats_without_urls_of_images_do_not_wait_for_downloads(start, content):
    parts, _, client = start(max_model_len=512, allowed_media_domains=("127.0.0.1",))
    is_over = threading.Event()
    for _ in range(40):
        parts.prompts.reader._downloading.submit(is_over.wait, 60)
    body = {"infer_requests": [{"messages": [{"role": "user", "content": content}]}]}
    try:
        assert in_thread(client.post, "/infer/", json=body).result(timeout=20).status_code == 200
    finally:
        is_over.set()


@pytest.mark.parametrize("form", [lambda url: url, lambda url: {"url": url}])
def test_an_image_that_a_chat_names_by_its_url_is_fetched(start, host, form):
    port, asked = host
    _, _, client = start(max_model_len=512, allowed_media_domains=("127.0.0.1",))
    parts = [{"type": "image_url", "image_url": form(f"http://127.0.0.1:{port}/a.png")}, {"type": "text", "text": "a"}]
    body = {"infer_requests": [{"messages": [{"role": "user", "content": parts}]}]}
    assert client.post("/infer/", json=body).status_code == 200
    assert asked == ["/a.png"]


def test_prompts_are_made_while_all_downloads_wait():
    reader, begun, is_over = ImageReader((), domains=("127.0.0.1",)), threading.Semaphore(0), threading.Event()

    async def calls():
        waiting = [
            asyncio.create_task(reader.beside(True, lambda: (begun.release(), is_over.wait()))) for _ in range(40)
        ]
        await asyncio.to_thread(begun.acquire)
        assert await asyncio.wait_for(reader.beside(False, int, "7"), 30) == 7
        is_over.set()
        await asyncio.gather(*waiting)

    asyncio.run(calls())
