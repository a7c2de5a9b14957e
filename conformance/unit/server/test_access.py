"""Who may call a server: its key, host names, origins and content types; its settings travel without the key."""

import dataclasses

import pytest

from conformance.doubles.refusals import refused
from conformance.doubles.stand_in import make_parts
from rollmatch.config.limits import LimitsConfig
from rollmatch.server.settings import check_exposure, settings_from_json


@pytest.mark.parametrize(
    ("headers", "status", "code"),
    [
        ({}, 200, None),
        ({"host": "localhost:8000"}, 200, None),
        ({"host": "[::1]:8000"}, 200, None),
        ({"host": "evil.example"}, 403, "host-refused"),
        ({"host": "["}, 403, "host-refused"),
        ({"host": "0.0.0.0:8000"}, 200, None),  # TRL's default vllm_server_host
        ({"host": "192.168.7.5:8000"}, 200, None),
        ({"host": "[fd00::7]:8000"}, 200, None),
        ({"host": "192.168.7.5.evil.example"}, 403, "host-refused"),
        ({"host": "192.168.7.5:8000", "origin": "http://192.168.7.6"}, 403, "origin-refused"),
        ({"host": "0.0.0.0:8000", "origin": "http://evil.example"}, 403, "origin-refused"),
        ({"origin": "http://evil.example"}, 403, "origin-refused"),
        ({"origin": "null"}, 403, "origin-refused"),
        ({"origin": "http://127.0.0.1:3000"}, 200, None),
        ({"origin": "http://testserver"}, 200, None),  # one of allowed_hosts
        ({"content-type": "text/plain"}, 415, "content-type-refused"),
        ({"content-type": "application/x-www-form-urlencoded"}, 415, "content-type-refused"),
        ({"content-type": "application/json; charset=utf-8"}, 200, None),
    ],
)
@pytest.mark.scenario(clauses=["rollout-server/the-server-keeps-to-itself#5"])
def test_without_a_key_pages_of_other_sites_are_refused(served, headers, status, code):
    _, client = served()
    sent = {"content-type": "application/json"} | headers
    reply = client.post("/generate/", content=b'{"prompts": [[5]]}', headers=sent)
    assert (reply.status_code, reply.json().get("code")) == (status, code)
    assert ("connection" in reply.headers) == (status == 415)  # closed with a body that was not read
    if status == 403:
        assert client.post("/close_communicator/", headers=headers).status_code == 403


def test_with_a_key_any_host_name_is_good(start):
    _, _, client = start(api_key="secret")
    sent = {"host": "node7", "origin": "http://evil.example", "authorization": "Bearer secret"}
    assert client.get("/get_world_size/", headers=sent).status_code == 200
    assert client.get("/get_world_size/", headers={"host": "node7"}).status_code == 401


def test_a_host_that_is_part_of_a_url_is_no_loopback_name(start):
    _, _, client = start()
    for host in ("x@localhost", "localhost/x", "localhost#x", "localhost?x"):
        assert client.get("/get_world_size/", headers={"host": host}).json().get("code") == "host-refused", host


def test_no_host_name_opens_a_route(start):
    """Starlette below 1.0.1 makes ``request.url.path`` from it; routes are chosen by the path."""
    _, _, client = start(api_key="secret")
    for host in ("x/health/#", "x/health/?", "x/health/;"):
        assert client.get("/native/identity/", headers={"host": host}).status_code == 401, host
    assert client.get("/health/", headers={"host": "x/native/identity/#"}).status_code == 200


@pytest.mark.parametrize(
    ("fields", "is_allowed"),
    [
        ({"host": "127.0.0.1"}, True),
        ({"host": "0.0.0.0"}, False),
        ({"host": "::"}, False),
        ({"host": "node7"}, False),
        ({"host": "0.0.0.0", "api_key": "k"}, True),
        ({"host": "0.0.0.0", "allow_no_key": True}, True),
    ],
)
def test_an_open_address_wants_a_key_or_a_word(fields, is_allowed):
    settings = make_parts(**fields).settings
    if is_allowed:
        check_exposure(settings)
    else:
        with refused("open-without-key"):
            check_exposure(settings)


def test_settings_travel_without_their_key():
    settings = make_parts(api_key="secret", limits=LimitsConfig(max_body_bytes=7)).settings
    text = settings.to_json()
    assert "secret" not in text + repr(settings)
    assert settings_from_json(text, api_key="secret") == settings
    assert settings_from_json(text, api_key=None) == dataclasses.replace(settings, api_key=None)
