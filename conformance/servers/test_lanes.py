"""Judging one server on several instances: which check sees which instance, and what runs beside what."""

import sys
import threading
import time

import psutil
import pytest

from conformance.servers.check import MISSED, PASSED, Check, judge
from conformance.servers.known import Known
from conformance.servers.lanes import Judging, rows_to_ask
from conformance.servers.launched import NotStarted
from conformance.servers.machine import Machine, servers_that_fit

SERVER = """
import json, os, sys
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer

class LaneAnswering(BaseHTTPRequestHandler):
    def do_GET(self):
        self.rfile.read(int(self.headers.get("content-length", 0)))
        if self.path == "/break/":
            os._exit(1)
        text = json.dumps({"pid": os.getpid()}).encode()
        self.send_response(200)
        self.send_header("content-length", str(len(text)))
        self.end_headers()
        self.wfile.write(text)

    do_POST = do_GET

    def log_message(self, *_):
        pass

ThreadingHTTPServer(("127.0.0.1", int(sys.argv[1])), LaneAnswering).serve_forever()
"""


def ask_pid(talk):
    talk.get("pid", "/health/")


def ask_and_break(talk):
    talk.get("pid", "/health/")
    talk.get("break", "/break/")


def check(check_id, ask=ask_pid, **fields):
    fields = {"judge": lambda told: "", "sentence": ""} | fields
    return Check(check_id=check_id, ask=ask, **fields)


def asked_anew(ask):
    """The same as another function, so that it is asked by itself."""
    return lambda talk: ask(talk)


class Docket:
    """Words passed, exchanges kept."""

    def __init__(self, tmp_path, *, num_lanes=1, machine=None, command=None):
        command = command or (lambda _, port: [sys.executable, "-c", SERVER, str(port)])
        known = Known(name="x", version="1", dialect="trl", command=command, num_lanes=num_lanes)
        self.kept = {}
        self.judging = Judging(known, None, tmp_path, machine=machine or Machine(), keep=self.keep)

    def keep(self, check, exchange, seconds):
        self.kept[check.check_id] = exchange, judge(check, exchange).state

    def pid(self, check_id):
        return self.kept[check_id][0].one("pid").reply["pid"]


def test_gentle_checks_share_an_instance_and_what_breaks_is_replaced(tmp_path):
    docket = Docket(tmp_path)
    docket.judging.run([
        check("a"), check("b", asked_anew(ask_pid)),
        check("c", asked_anew(ask_pid), is_dangerous=True),
        check("d", ask_and_break, is_dangerous=True), check("e", asked_anew(ask_pid), is_dangerous=True),
    ])  # fmt: skip
    assert docket.pid("a") == docket.pid("b") == docket.pid("c") == docket.pid("d") != docket.pid("e")
    assert docket.judging.num_starts == 2
    assert docket.judging.cpu_s > 0
    assert not [pid for pid in (docket.pid("a"), docket.pid("e")) if psutil.pid_exists(pid)]


def test_a_gentle_check_that_breaks_the_server_is_seen_by_none_that_comes_after(tmp_path):
    docket = Docket(tmp_path)
    docket.judging.run([check("a", ask_and_break, judge=lambda told: "broken"), check("b")])
    assert docket.pid("a") != docket.pid("b")
    assert docket.kept["a"][1] == MISSED


def test_checks_that_ask_the_same_are_asked_once_and_judged_each(tmp_path):
    docket = Docket(tmp_path)
    docket.judging.run([check("a", judge=lambda told: "no"), check("b")])
    assert docket.kept["a"][0] is docket.kept["b"][0]
    assert (docket.kept["a"][1], docket.kept["b"][1]) == (MISSED, PASSED)
    assert docket.judging.passed == {"b"}


def test_lanes_wait_at_the_same_time_on_instances_of_their_own(tmp_path):
    meeting = threading.Barrier(2)

    def ask(talk):
        ask_pid(talk)
        meeting.wait(timeout=20)

    docket = Docket(tmp_path, num_lanes=2)
    docket.judging.run([check("gentle"), *(check(n, asked_anew(ask), is_dangerous=True) for n in "ab")])
    assert [docket.kept[name][1] for name in "ab"] == [PASSED, PASSED]
    assert docket.pid("a") != docket.pid("b")


def test_a_server_that_does_not_start_is_an_error_with_what_it_printed(tmp_path):
    docket = Docket(tmp_path, command=lambda *_: [sys.executable, "-c", "print('cannot'); raise SystemExit(3)"])
    with pytest.raises(NotStarted, match=r"(?s)ended with 3.*cannot"):
        docket.judging.run([check("a"), check("b", asked_anew(ask_pid), is_dangerous=True)])


def test_a_server_that_never_answers_is_ended(tmp_path, monkeypatch):
    monkeypatch.setattr("conformance.servers.launched.START_TIMEOUT_S", 0.5)
    told = tmp_path / "pid"
    script = f"import os, time; open({str(told)!r}, 'w').write(str(os.getpid())); time.sleep(60)"
    docket = Docket(tmp_path, command=lambda *_: [sys.executable, "-S", "-c", script])
    with pytest.raises(NotStarted, match="ended with None"):
        docket.judging.run([check("a")])
    assert not (told.exists() and psutil.pid_exists(int(told.read_text())))


def test_timed_checks_come_after_other_gentle_ones_and_long_ones_first_where_lanes_are_many():
    asked = [
        check("timed", asked_anew(ask_pid), is_timed=True), check("gentle"),
        check("short", asked_anew(ask_pid), is_dangerous=True, deadline_s=1),
        check("long", asked_anew(ask_pid), is_dangerous=True, deadline_s=9),
    ]  # fmt: skip
    assert [row[0].check_id for row in rows_to_ask(asked)] == ["gentle", "timed", "short", "long"]
    assert [row[0].check_id for row in rows_to_ask(asked, longest_first=True)] == ["gentle", "timed", "long", "short"]


def test_no_more_work_than_cores_and_quiet_is_alone():
    machine, now, most = Machine(num_cores=2), [], []

    def work(kind):
        with machine.quiet() if kind == "quiet" else machine.core():
            now.append(kind)
            most.append(sorted(now))
            time.sleep(0.02)
            now.remove(kind)

    threads = [threading.Thread(target=work, args=(kind,)) for kind in ("core", "core", "core", "quiet", "core")]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(timeout=20)
    assert now == []
    assert len(most) == len(threads)
    assert ["quiet"] in most
    assert all(each in (["quiet"], ["core"], ["core"] * 2) for each in most)


def test_nobody_gets_a_core_while_it_is_to_be_quiet():
    machine, got = Machine(num_cores=2), threading.Event()

    def work():
        with machine.core():
            got.set()

    with machine.quiet():
        threading.Thread(target=work, daemon=True).start()
        assert not got.wait(0.2)
    assert got.wait(20)


def test_who_holds_a_core_is_given_it_again():
    machine = Machine(num_cores=1)
    with machine.quiet(), machine.core():
        machine.turn()
    with machine.core():
        pass


def test_quiet_waits_until_servers_only_wait():
    used = iter([0.0, 0.5, 1.0, 1.01])
    seen = []
    machine = Machine(cpu_s=lambda: seen.append(next(used)) or seen[-1])
    with machine.quiet():
        assert seen == [0.0, 0.5, 1.0, 1.01]


def test_at_least_one_server_fits(monkeypatch):
    assert servers_that_fit() >= 1
    monkeypatch.setattr("conformance.servers.machine.SERVER_BYTES", 1 << 60)
    assert servers_that_fit() == 1
