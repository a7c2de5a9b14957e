"""Checks that end a process of the server: a correct server passes, and each planted mistake is found by its own."""

import sys
from dataclasses import replace

import pytest

from conformance.doubles.judged import subject_at
from conformance.doubles.started import started
from conformance.judge.ports import free_port
from conformance.judge.servers.check import MISSED
from conformance.judge.servers.checks import BY_ID, process
from conformance.judge.servers.run import ask_and_judge

SERVER = """
import signal, subprocess, sys
from http.server import BaseHTTPRequestHandler, HTTPServer
port, mistake = int(sys.argv[1]), sys.argv[2]
worker = subprocess.Popen([sys.executable, "-c", "import time; time.sleep(120)"], start_new_session=True)

class Health(BaseHTTPRequestHandler):
    def do_GET(self):
        is_well = worker.poll() is None or mistake == "health never looks at the worker"
        self.send_response(200 if is_well else 503)
        self.end_headers()

def end(*_):
    if mistake != "the worker outlives the server":
        worker.kill()
        worker.wait()
    sys.exit(0)

signal.signal(signal.SIGTERM, end)
HTTPServer(("127.0.0.1", port), Health).serve_forever()
"""
CHECKS = ("health-reports-a-dead-worker", "a-signal-ends-all")
MISTAKES = {"": [], "health never looks at the worker": [CHECKS[0]], "the worker outlives the server": [CHECKS[1]]}


@pytest.mark.wide
@pytest.mark.parametrize("mistake", MISTAKES)
def test_a_mistake_at_an_end_is_found_by_its_check_alone(tmp_path, monkeypatch, mistake):
    monkeypatch.setattr(process, "DEATH_S", 1.0)
    monkeypatch.setattr(process, "END_S", 1.0)
    missed = []
    for name in CHECKS:
        port = free_port()
        url = f"http://127.0.0.1:{port}"
        with started([sys.executable, "-c", SERVER, str(port), mistake], tmp_path / f"{name}.txt") as running:
            running.wait_healthy(url)
            _, verdict, _ = ask_and_judge(BY_ID[name], replace(subject_at(url, "vllm"), process=running))
            missed += [name] * (verdict.state == MISSED)
    assert missed == MISTAKES[mistake]
