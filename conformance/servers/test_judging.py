"""The judge itself: what passes, what is missed, what gaps change; with a server that answers what it is told to."""

import json
import sys
import threading
from contextlib import contextmanager
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer

import pytest

from conformance.cli.started import finish
from conformance.servers.check import MISSED, MUST, PASSED, SHOULD, UNTESTABLE, Check, CheckVerdict, judge
from conformance.servers.checks import BY_ID, CHECKS
from conformance.servers.dialects import DIALECTS
from conformance.servers.exchange import Exchange, RecordedCall
from conformance.servers.gaps import Gap, GapMalformed, load_gaps, settle
from conformance.servers.recording import Recording, read_recording, write_recording
from conformance.servers.run import ask, ask_and_judge
from conformance.servers.subject import DialectUnclear, Subject, find_dialect

HEALTH = BY_ID["health-with-and-without-slash"]


@contextmanager
def answering(answer, *, closes=False):
    """``answer``: (method, path) -> (status, JSON); ``closes``: without having said so, after each answer."""

    class JudgedAnswering(BaseHTTPRequestHandler):
        protocol_version = "HTTP/1.1"

        def reply(self):
            self.rfile.read(int(self.headers.get("content-length", 0)))
            status, body = answer(self.command, self.path)
            self.close_connection = closes or self.close_connection
            text = json.dumps(body).encode()
            self.send_response(status)
            self.send_header("content-length", str(len(text)))
            self.end_headers()
            self.wfile.write(text)

        do_GET = do_POST = reply

        def log_message(self, *_):
            pass

    server = ThreadingHTTPServer(("127.0.0.1", 0), JudgedAnswering)
    threading.Thread(target=server.serve_forever, kwargs={"poll_interval": 0.02}, daemon=True).start()
    yield f"http://127.0.0.1:{server.server_port}"
    server.shutdown()


def subject_at(url, dialect="swift", **fields):
    return Subject(name="x", version="1", url=url, dialect=DIALECTS[dialect](), **fields)


def ok(method, path):
    return 200, {"status": "ok", "world_size": 1, "paths": {}}


def test_nothing_that_always_answers_the_same_passes_what_asks_for_content():
    passing = {}
    for name, answer in (("empty", ok), ("error", lambda *_: (500, {})), ("refusal", lambda *_: (400, {}))):
        with answering(answer) as url:
            asked = [check for check in CHECKS if "swift" in check.dialects and not check.needs]
            passing[name] = {c.check_id for c in asked if ask_and_judge(c, subject_at(url))[1].state == PASSED}
    assert passing["error"] == set()
    assert passing["empty"] & passing["refusal"] == {"unknown-field-is-harmless"}
    assert passing["empty"] <= {
        *(
            "health-with-and-without-slash",
            "world-size-is-told",
            "unknown-field-is-harmless",
        ),
        *("health-while-generating", "hanging-up-frees-the-engine", "connection-survives-an-error"),
    }
    assert passing["refusal"] <= {"invalid-json-is-4xx", "no-prompts-no-responses", "unknown-field-is-harmless"}


def test_a_check_that_needs_what_the_judge_lacks_is_not_testable_and_asks_nothing():
    check = BY_ID["new-weights-are-served"]
    exchange, verdict, _ = ask_and_judge(check, subject_at("http://127.0.0.1:1"))
    assert (verdict.state, exchange.calls) == (UNTESTABLE, [])
    assert "--model" in verdict.reason
    assert "--transport" in verdict.reason


def test_a_check_that_does_not_end_is_left_behind_and_missed():
    with answering(lambda *_: threading.Event().wait(20) or ok("", "")) as url:
        slow = Check(
            check_id="slow", sentence="", ask=HEALTH.ask, judge=HEALTH.judge, deadline_s=0.3
        )  # fmt: skip
        assert judge(slow, ask(slow, subject_at(url))) == CheckVerdict(state=MISSED, reason="no end within 0.3 s")


def test_an_unreachable_server_misses_and_does_not_break_the_judge():
    _, verdict, _ = ask_and_judge(HEALTH, subject_at("http://127.0.0.1:1"))
    assert verdict.state == MISSED
    assert "ConnectionError" in verdict.reason


def test_an_answer_of_another_form_is_missed():
    told = Exchange(calls=[RecordedCall(label="world-size", method="GET", path="/", status=200, reply=["1"])])
    verdict = judge(BY_ID["world-size-is-told"], told)
    assert verdict.state == MISSED
    assert "another form" in verdict.reason


@pytest.mark.parametrize(
    ("state", "grade", "has_gap", "settled"),
    [
        (PASSED, MUST, False, "passed"),
        (PASSED, MUST, True, "stale-gap"),
        (MISSED, MUST, False, "missed"),
        (MISSED, SHOULD, False, "advice"),
        (MISSED, MUST, True, "known-gap"),
        (UNTESTABLE, MUST, True, "not-testable"),
    ],
)
def test_gaps_excuse_what_is_missed_and_go_stale(state, grade, has_gap, settled):
    check = Check(check_id="x", sentence="", ask=HEALTH.ask, judge=HEALTH.judge, grade=grade)
    gaps = {"x": Gap(check_id="x", reason="so", link="there")} if has_gap else {}
    assert settle(check, CheckVerdict(state=state, reason="r"), gaps)[0] == settled


def test_a_gap_names_a_check_a_reason_and_a_link(tmp_path):
    path = tmp_path / "x-1.yaml"
    path.write_text("- {check: no-such-check, reason: r, link: l}\n")
    with pytest.raises(GapMalformed, match="no-such-check"):
        load_gaps(path)
    path.write_text(f"- {{check: {HEALTH.check_id}, reason: r}}\n")
    with pytest.raises(GapMalformed, match="reason"):
        load_gaps(path)
    path.write_text(f"- {{check: {HEALTH.check_id}, reason: r, link: l}}\n")
    assert load_gaps(path)[HEALTH.check_id].reason == "r"


def test_a_recording_is_judged_as_the_live_exchange_was(tmp_path):
    recording = Recording(server="x-1", dialect="swift", facts={"date": "today"})
    with answering(ok) as url:
        for name in ("health-with-and-without-slash", "routes-are-listed"):
            exchange, _, seconds = ask_and_judge(BY_ID[name], subject_at(url))
            recording.keep(BY_ID[name], exchange, seconds)
    read = read_recording(write_recording(recording, tmp_path))
    assert read == recording
    assert {name: verdict.state for name, verdict in read.verdicts().items()} == {
        "health-with-and-without-slash": PASSED,
        "routes-are-listed": MISSED,
    }


@pytest.mark.parametrize("closes", [False, True])
def test_a_connection_that_is_closed_after_an_error_is_seen_although_the_next_call_opens_another(closes):
    with answering(ok, closes=closes) as url:
        exchange, verdict, _ = ask_and_judge(BY_ID["connection-survives-an-error"], subject_at(url))
    assert exchange.one("after").is_ok
    assert verdict.state == (MISSED if closes else PASSED)


def test_the_dialect_is_found_by_the_routes_or_told():
    paths = {route: {} for route in DIALECTS["trl"]().routes}
    with answering(lambda *_: (200, {"paths": paths})) as url:
        assert find_dialect(url, None, {}).name == "trl"
        assert find_dialect(url, "swift", {}).name == "swift"
    with answering(ok) as url, pytest.raises(DialectUnclear, match="--dialect"):
        find_dialect(url, None, {})


def pytest_ended(folder, *arguments):
    command = [sys.executable, "-m", "pytest", "-p", "no:cacheprovider", "--no-header", *arguments]
    return finish(command, folder / "log")


def test_a_server_is_judged_by_its_url_and_nothing_else_runs(tmp_path):
    with answering(ok) as url:
        code, told = pytest_ended(
            tmp_path,
            *("conformance", "--server", url, "--dialect", "swift", "--no-dangerous", "--record", str(tmp_path)),
            *("--check", HEALTH.check_id, "--check", "routes-are-listed", "--check", "version-is-told"),
            *("--check", "greedy-equals-transformers", "--matrix", str(tmp_path / "matrix")),
        )
    assert code == 1
    assert "passed        MUST   health-with-and-without-slash" in told
    assert "missed        MUST   routes-are-listed" in told
    assert "advice        SHOULD version-is-told" in told
    assert "not-testable  MUST   greedy-equals-transformers" in told
    assert "1 failed, 3 passed" in told
    assert read_recording(tmp_path / "swift-server.json").exchanges.keys() >= {HEALTH.check_id}
    rows = {row["id"]: row["cells"] for row in json.loads((tmp_path / "matrix/matrix.json").read_text())["checks"]}
    assert rows["servers/health-with-and-without-slash"]["swift-server"]["verdict"] == "passed"
    assert rows["servers/routes-are-listed"]["swift-server"]["verdict"] == "failed"


def test_gpu_tests_without_gpus_are_not_testable_and_fail(tmp_path):
    test = tmp_path / "test_four.py"
    test.write_text("import pytest\n\n@pytest.mark.gpu(4)\ndef test_four():\n    assert True\n")
    code, told = pytest_ended(
        *(tmp_path, str(test)), "-m", "gpu", "-p", "conformance.gpus", "--rootdir", str(tmp_path), "-c", "/dev/null"
    )
    assert code == 1
    assert "not testable: needs 4, has 0" in told
