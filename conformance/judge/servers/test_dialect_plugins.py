"""Dialects that the judge does not know: a file, an installed package, and the one for prime-rl as an example."""

import json
import shutil
import textwrap

import pytest
from safetensors.torch import load_file
from torch import ones

from conformance.doubles.digits import ROOT
from conformance.doubles.http_server import http_server, read_body, send
from conformance.doubles.judge_wheel import judge
from conformance.doubles.judged import make_check
from conformance.judge.servers import dialect_plugins
from conformance.judge.servers.check import MUST
from conformance.judge.servers.dialect_plugins import DialectUnusable, kind_of
from conformance.judge.servers.judgement import JudgingRules, ServerJudgement
from conformance.judge.servers.recording import read_recording, recorded_verdicts
from conformance.judge.servers.subject import Subject
from conformance.judge.servers.talk import Stopped, Talk

FOLDER = ROOT / "fixtures/dialects"
FILE = FOLDER / "prime_rl.py"
RECORDED = FOLDER / "prime-rl-0.8.1.dev67.json"
CHOICE = {"index": 0, "prompt_token_ids": [1, 2], "token_ids": [3, 4], "text": "x", "finish_reason": "length"}


@pytest.fixture(autouse=True)
def _no_others(monkeypatch):
    monkeypatch.setattr(dialect_plugins, "_plugged", {})


@pytest.fixture
def prime_rl():
    """A double of its routes: ``calls`` are path and body of each POST, ``received`` the tensors of each update."""
    routes = kind_of(str(FILE)).routes | {"/init_broadcaster"}

    def answer(handler):
        body = read_body(handler)
        if body is not None:
            server.calls.append((handler.path, body))
        if handler.path == "/openapi.json":
            send(handler, 200, {"paths": {route: {} for route in routes}})
        elif handler.path == "/v1/models":
            send(handler, 200, {"data": [{"id": "policy"}]})
        elif handler.path == "/update_weights":
            [file] = server.folder_of(body).glob("*.safetensors")
            server.received.append(load_file(file))
            send(handler, server.status, {"status": "ok"})
        else:
            send(handler, 200, {"choices": [CHOICE], "id": "cmpl"})

    with http_server(answer) as server:
        server.calls, server.received, server.status = [], [], 200
        server.folder_of = lambda body: FOLDER.__class__(body["weight_dir"])
        yield server


def subject_of(server):
    return Subject(name="", version="", url=server.url, dialect=kind_of(str(FILE))(), transport="filesystem")


@pytest.mark.scenario("judging/a-dialect-in-a-file", clauses=["judging/a-dialect-can-come-from-outside#1"])
def test_a_server_is_judged_by_a_file_in_an_empty_directory(installed, tmp_path, prime_rl):
    shutil.copy(FILE, tmp_path)
    words = ["--dialect", "prime_rl.py", "--check", "one-prompt-one-response", "--json", "report.json"]
    code, output = judge(installed, tmp_path, prime_rl.url, *words)
    assert (code, "dialect prime-rl, served_model policy" in output) == (0, True), output
    [entry] = json.loads((tmp_path / "report.json").read_text())["checks"]
    assert "--dialect prime_rl.py" in entry["again"]
    assert {body["cache_salt"] for path, body in prime_rl.calls} == {"0"}


@pytest.mark.scenario(clauses=["judging/a-dialect-can-come-from-outside#2"])
def test_an_installed_dialect_is_found_by_the_routes_of_its_server(installed, tmp_path, prime_rl):
    site = tmp_path / "site"
    shutil.copytree(installed, site)
    shutil.copy(FILE, site)
    (site / "prime_rl_judge-1.dist-info").mkdir()
    (site / "prime_rl_judge-1.dist-info/METADATA").write_text(
        "Metadata-Version: 2.1\nName: prime-rl-judge\nVersion: 1\n"
    )
    (site / "prime_rl_judge-1.dist-info/entry_points.txt").write_text(
        "[rollmatch.dialects]\nprime-rl = prime_rl:PrimeRl\n"
    )
    for place, name in ((site, "prime-rl"), (installed, "vllm")):
        code, output = judge(place, tmp_path, prime_rl.url, "--check", "one-prompt-one-response")
        assert (code, f"dialect {name}," in output) == (0, True), output


@pytest.mark.scenario("judging/a-check-that-does-not-apply", clauses=["judging/a-dialect-can-come-from-outside#3"])
def test_a_check_that_does_not_apply_is_reported_and_not_asked(prime_rl):
    judgement = ServerJudgement(subject_of(prime_rl), JudgingRules())
    judgement.subject.dialect.not_applicable = {"no-group": "no group"}
    rows = [judgement.verdict_of(make_check(name, "no", grade=MUST)) for name in ("no-group", "other")]
    assert [(row.state, row.reason) for row in rows] == [("not-applicable", "no group"), ("must", "no")]
    assert "/no-group/" not in dict(prime_rl.calls)
    assert judgement.exit_code == 1
    judgement.rows.pop()
    assert judgement.exit_code == 0


GOOD = """
    from conformance.judge.servers.dialects import Trl

    class Mine(Trl):
        name = "mine"
"""


def test_a_file_of_few_lines_is_a_dialect(tmp_path):
    (tmp_path / "mine.py").write_text(textwrap.dedent(GOOD))
    assert kind_of(str(tmp_path / "mine.py")).family == "trl"


@pytest.mark.parametrize(
    ("change", "named"),
    [
        (("mine", "trl"), "the name trl"),
        (('    name = "mine"', '    name, family = "mine", "sglang"'), "the family sglang"),
        (('    name = "mine"', '    name = "mine"\n        not_applicable = {"no-check": "x"}'), "no-check"),
        (("(Trl)", ""), "defines 0 dialects"),
        (("class Mine(Trl):", "class Other(Trl):\n        name = 'o'\n    class Mine(Trl):"), "defines 2 dialects"),
        (("(Trl):", ":\n        generate_path = '/g'"), "lacks family, signs"),
    ],
)
def test_a_dialect_that_cannot_be_used_is_refused(tmp_path, change, named):
    (tmp_path / "mine.py").write_text(textwrap.dedent(GOOD.replace(*change)))
    with pytest.raises(DialectUnusable, match=named):
        kind_of(str(tmp_path / "mine.py"))


@pytest.mark.parametrize(
    ("words", "named"),
    [
        (["--dialect", "none.py"], "--dialect: there is no file none.py"),
        (["--dialect", "dynamo"], "--dialect: dynamo is none of native"),
        (["--dialect", str(FILE), "--transport", "gloo"], "--transport: gloo is none of filesystem"),
    ],
)
def test_unknown_dialects_and_transports_are_wrong_usage(installed, tmp_path, words, named):
    code, output = judge(installed, tmp_path, "http://127.0.0.1:9", *words)
    assert (code, named in output) == (2, True), output


def test_an_update_is_a_folder_between_pause_and_resume(prime_rl):
    talk = Talk(subject_of(prime_rl))
    peer = talk.subject.dialect.make_peer(talk)
    peer.send({"a": ones(2, 3).T})
    peer.finish()
    talk.generate("after", ["Say one."])
    assert [path for path, _ in prime_rl.calls] == [
        "/pause?mode=keep&clear_cache=false", "/update_weights", "/resume", "/v1/completions",
    ]  # fmt: skip
    assert prime_rl.received[0]["a"].tolist() == ones(3, 2).tolist()
    assert not prime_rl.folder_of(prime_rl.calls[1][1]).exists()
    assert prime_rl.calls[3][1]["cache_salt"] == "1"


def test_a_refused_update_keeps_the_salt_and_lets_generation_go_on(prime_rl):
    talk, prime_rl.status = Talk(subject_of(prime_rl)), 500
    peer = talk.subject.dialect.make_peer(talk)
    with pytest.raises(Stopped, match="500"):
        peer.send({"a": ones(2)})
    peer.close()
    assert (prime_rl.calls[-1][0], talk.subject.dialect.version) == ("/resume", 0)


def test_what_was_recorded_of_prime_rl_is_judged_as_it_was():
    kind_of(str(FILE))
    judged = {row.check.check_id: row.state for row in read_recording(RECORDED).rows()}
    assert judged == recorded_verdicts(RECORDED)
