"""Servers with a key: who sends it, who does not, and what is said where it is missing."""

import os
import sys
from dataclasses import replace

import pytest

from conformance.doubles.digits import ROOT
from conformance.doubles.judged import judgement_of, make_check, replying, small_server, subject_at
from conformance.judge.servers.check import UNTESTABLE
from conformance.judge.servers.checks import BY_ID, checks_for
from conformance.judge.servers.dialects import DIALECTS
from conformance.judge.servers.exchange import Exchange, RecordedCall
from conformance.judge.servers.judge import KEY, Judging
from conformance.judge.servers.known import KNOWN, Known
from conformance.judge.servers.profiles import PROFILES, checks_of, left_out
from conformance.judge.servers.reproduce import curl_for, curl_of
from conformance.judge.servers.run import ask_and_judge
from conformance.judge.servers.subject import KEY_VARIABLE, DialectUnclear, Subject, bearer, find_dialect

OF_KEYS = [name for name, check in BY_ID.items() if "key" in check.needs]
SERVER = f"""
import os, sys
from http.server import BaseHTTPRequestHandler, HTTPServer
from conformance.doubles.http_server import read_body, send

class Answering(BaseHTTPRequestHandler):
    def do_GET(self):
        read_body(self)
        held = [os.environ.get("{KEY_VARIABLE}"), *sys.argv[2:]]
        send(self, 200, {{"pid": os.getpid(), "held": held, "sent": self.headers["Authorization"]}})
    do_POST = do_GET

HTTPServer(("127.0.0.1", int(sys.argv[1])), Answering).serve_forever()
"""
PATHS = os.pathsep.join([str(ROOT), *filter(None, [os.environ.get("PYTHONPATH")])])


@pytest.mark.parametrize(
    ("key", "held"),
    [(KEY_VARIABLE, [KEY]), ("--api-key", [None, "--api-key", KEY]), ("", [None])],
    ids=["variable", "option", "none"],
)
def test_checks_of_a_key_are_asked_of_a_server_that_was_given_one(tmp_path, monkeypatch, key, held):
    def call_server(talk):
        talk.get("asked", "/health/")

    monkeypatch.delenv(KEY_VARIABLE, raising=False)
    known = Known(
        name="x", version="1", dialect="trl", key=key, environment={"PYTHONPATH": PATHS},
        command=lambda _, port: [sys.executable, "-c", SERVER, str(port)],
    )  # fmt: skip
    checks = [make_check("plain", ask=call_server), make_check("keyed", ask=lambda talk: call_server(talk))]
    judged = Judging(known, None, tmp_path)
    asked = judged.run([checks[0], replace(checks[1], needs=("key",))])
    exchanges = {check.check_id: exchange for check, exchange, _ in asked}
    plain = exchanges["plain"].one("asked").reply
    assert (plain["held"], plain["sent"]) == ([None], None)
    if not key:
        assert (exchanges["keyed"].calls, judged.num_starts) == ([], 1)
        return
    keyed = exchanges["keyed"].one("asked").reply
    assert (keyed["held"], keyed["sent"]) == (held, f"Bearer {KEY}")
    assert (keyed["pid"] != plain["pid"], judged.num_starts) == (True, 2)


def test_every_known_server_whose_dialect_has_a_key_takes_one():
    assert {known.name for known in KNOWN if not known.key} == {"trl"}
    assert all("trl" not in BY_ID[name].dialects for name in OF_KEYS)


def test_without_a_key_they_are_left_out_unless_named():
    def lacks(needs):
        return ", ".join({*needs} & {"key"})

    for profile in PROFILES:
        assert not {check.check_id for check in checks_of("swift", profile=profile, lacks=lacks)} & {*OF_KEYS}
        assert {check.check_id for check in checks_of("swift", profile=profile)} >= {*OF_KEYS}
    _, verdict, _ = ask_and_judge(BY_ID[OF_KEYS[0]], subject_at("http://127.0.0.1:1"))
    assert (verdict.state, KEY_VARIABLE in verdict.reason) == (UNTESTABLE, True)


def test_what_a_run_leaves_out_is_counted_by_what_it_needs():
    def lacks(needs):
        return ", ".join({*needs} & {"key", "group"})

    asked = checks_of("swift", profile="http", lacks=lacks)
    wanting = left_out("swift", asked, lacks=lacks)
    assert {name: wanting[name] for name in OF_KEYS} == {name: [KEY_VARIABLE] for name in OF_KEYS}
    assert ["--dangerous"] in wanting.values()
    assert ["--transport", "--dangerous"] in wanting.values()
    of_processes = sum("process" in check.needs for check in checks_for("swift"))
    assert len(asked) + len(wanting) + of_processes == len(checks_for("swift"))


def test_a_url_below_the_root_is_named():
    with replying(404, {}) as url, pytest.raises(DialectUnclear, match="404: URL is the server's root, without /v1"):
        find_dialect(f"{url}/v1")


def test_a_call_that_was_served_without_the_key_is_the_one_to_see_again():
    subject = Subject(name="x", version="1", url="http://h", dialect=DIALECTS["swift"](), headers=bearer("sesame"))
    tried = [("/a", "", 401), ("/b", "", 200), ("/c", "wrong", 422), ("/d", None, 200)]
    calls = [RecordedCall(label=p, method="POST", path=p, sent={}, key=key, status=s) for p, key, s in tried]
    assert curl_of(Exchange(calls=calls), subject) == curl_for(calls[1], subject)
    assert curl_of(Exchange(calls=[calls[0], *calls[2:]]), subject) == curl_for(calls[2], subject)


def test_a_server_that_asks_for_a_key_is_not_mistaken_for_one_without_a_dialect():
    with replying(401, {}) as url, pytest.raises(DialectUnclear, match=f"returns 401: set {KEY_VARIABLE}"):
        find_dialect(url)
    with small_server(generate=lambda body: (403, {})) as server:
        assert judgement_of(server).preflight.problem.endswith(f"set {KEY_VARIABLE} to the server's key")


@pytest.mark.parametrize(("sent", "shown"), [(None, f"${KEY_VARIABLE}"), ("", ""), ("not-the-key", "not-the-key")])
def test_a_curl_sends_the_key_that_was_sent_and_never_shows_the_servers(sent, shown):
    subject = Subject(name="x", version="1", url="http://h", dialect=DIALECTS["swift"](), headers=bearer("sesame"))
    line = curl_for(RecordedCall(label="a", method="POST", path="/infer/", key=sent), subject)
    assert line.endswith(f'-H "Authorization: Bearer {shown}"' if shown else "-d null")
    assert "sesame" not in line
