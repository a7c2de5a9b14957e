"""A judge that is killed takes its servers with it, and all that these have started."""

import os
import signal
import subprocess
import sys
import time

import psutil
import pytest

from conformance.servers.survivor import ROOT

SERVER = """
import signal, subprocess, sys, time
signal.signal(signal.SIGTERM, signal.SIG_IGN)
child = subprocess.Popen([sys.executable, "-c", "import time; time.sleep(600)"], start_new_session=True)
open(sys.argv[1], "w").write(str(child.pid))
time.sleep(600)
"""
JUDGE = """
import sys, threading, time
from pathlib import Path
from conformance.servers.launched import Launched
folder, started = Path(sys.argv[1]), []

def start():
    for place in range(2):
        words = [sys.executable, str(folder / "server.py"), str(folder / f"child{place}")]
        started.append(Launched(words, {}, folder / f"log{place}"))

lane = threading.Thread(target=start)
lane.start()
lane.join()
while not all((folder / f"child{place}").exists() and (folder / f"child{place}").read_text() for place in range(2)):
    time.sleep(0.02)
print(*[launched.process.pid for launched in started], flush=True)
if sys.argv[2] == "leave":
    for launched in started:
        launched.end(grace_s=0.2)
else:
    time.sleep(600)
"""


def running(process_ids):
    found = []
    for process_id in process_ids:
        try:
            if psutil.Process(process_id).status() != psutil.STATUS_ZOMBIE:
                found.append(process_id)
        except psutil.NoSuchProcess:
            pass
    return found


def wait_for(condition, within_s=40.0):
    deadline = time.monotonic() + within_s
    while not condition():
        assert time.monotonic() < deadline
        time.sleep(0.05)


@pytest.fixture
def judge(tmp_path):
    """``judge("stay")``: one with two servers, which have a child each; all their process ids."""
    (tmp_path / "server.py").write_text(SERVER)
    environment, started, ids = os.environ | {"PYTHONPATH": os.pathsep.join(sys.path)}, [], []

    def begin(what):
        words = [sys.executable, "-c", JUDGE, str(tmp_path), what]
        started.append(subprocess.Popen(words, cwd=ROOT, env=environment, stdout=subprocess.PIPE, text=True))
        ids.extend(map(int, started[0].stdout.readline().split()))
        ids.extend(int((tmp_path / f"child{place}").read_text()) for place in range(2))
        return started[0], ids

    yield begin
    for process_id in running(ids):
        os.kill(process_id, signal.SIGKILL)
    for one in started:
        one.kill()
        one.stdout.close()
        one.wait(timeout=20)


def test_a_judge_that_is_killed_leaves_nothing(judge):
    killed, ids = judge("stay")
    (survivor,) = [process for process in psutil.Process(killed.pid).children() if process.pid not in ids]
    time.sleep(0.3)
    assert running(ids) == ids
    killed.kill()
    wait_for(lambda: not running(ids))
    wait_for(lambda: not running([survivor.pid]))  # where nobody buries the dead it stays, as a zombie


def test_a_judge_that_ends_its_servers_leaves_nothing(judge):
    process, ids = judge("leave")
    assert process.wait(timeout=40) == 0
    wait_for(lambda: not running(ids))
