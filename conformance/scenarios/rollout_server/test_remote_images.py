"""Images by URL: fetched from hosts that the operator named, and from no other."""

from pathlib import Path

import pytest

from conformance.doubles.digits import scenes
from conformance.doubles.http_server import http_server
from conformance.doubles.refusals import refused
from rollmatch.config.limits import LimitsConfig
from rollmatch.errors import RollmatchError
from rollmatch.server.images import ImageReader

IMAGE = Path(scenes()[0].images[0]).read_bytes()


@pytest.fixture
def host():
    """A web server's port, and the paths that were requested of it."""
    asked = []

    def answer(handler):
        asked.append(handler.path)
        moved = handler.path == "/moved.png"
        handler.send_response(302 if moved else 200)
        handler.send_header("Location", "/a.png")
        handler.send_header("Content-Length", str(0 if moved else len(IMAGE)))
        handler.end_headers()
        handler.wfile.write(b"" if moved else IMAGE)

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
def test_a_redirect_is_not_followed(host):
    port, asked = host
    with refused("image-unreadable", "image", problem="302"):
        read(f"http://127.0.0.1:{port}/moved.png", ("127.0.0.1",))
    assert asked == ["/moved.png"]


def test_an_image_that_is_longer_than_a_body_may_be_is_refused(host):
    port, _ = host
    with refused("image-unreadable", "image", problem="more than 100 bytes"):
        read(f"http://127.0.0.1:{port}/a.png", ("127.0.0.1",), max_body_bytes=100)
