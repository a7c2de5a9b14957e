"""A real run on a real rollout server that can be killed."""

import os
from collections import Counter
from contextlib import contextmanager, suppress
from types import SimpleNamespace

import psutil

from conformance.doubles.division import MATCHING, SMALL, named, typed
from conformance.doubles.instance import free_port
from conformance.doubles.started import journal_of, started

STEPS, SAVED_AT, BATCH = 6, 3, 3


@contextmanager
def server_of(run, gpus="0"):
    """A replica per GPU, ready."""
    run.num_servers += 1
    command = typed("serve", MATCHING, gpus, run.overrides)
    with started(command, run.folder / f"server{run.num_servers}.txt") as server:
        server.wait_healthy(run.url)
        yield server


def steps_of(run):
    return [event["step"] for event in journal_of(run.out, "step")]


def parts_of(server):
    """The process that answers HTTP, and those of its engines."""
    front = psutil.Process(server.process.pid)
    engines = front.children(recursive=True)
    assert engines
    return front, engines


def wait_for_sync(run, learner, step):
    """Until a call to the server is open for long, after ``step`` steps; its engines stand still."""
    learner.wait_until(lambda: step in steps_of(run))
    seen = Counter()

    def is_waiting():
        with suppress(psutil.NoSuchProcess):
            for each in psutil.Process(learner.process.pid).net_connections("tcp"):
                if each.raddr and run.url.endswith(f":{each.raddr.port}") and each.status == psutil.CONN_ESTABLISHED:
                    seen[each.laddr.port] += 1
        return any(times >= 10 for times in seen.values())

    learner.wait_until(is_waiting)


def make_run(folder, stack, *fields):
    http, out = free_port(), folder / "run"
    overrides = (
        *named(MATCHING, http, free_port()),
        *(override for override in SMALL if not override.startswith("training.save_steps")),
        *(f"training.output_dir={out}", f"training.max_steps={STEPS}", f"training.save_steps={SAVED_AT}"),
        "custom.extra.rollout_server.vllm_data_parallel_size=null",
        "custom.extra.rollout_matching.vllm.server.retry_budget_s=5",
        *fields,
    )
    url = f"http://127.0.0.1:{http}"
    return SimpleNamespace(folder=folder, out=out, url=url, overrides=overrides, num_servers=0, stack=stack)


def in_session(session):
    found = []
    for process in psutil.process_iter():
        with suppress(psutil.Error, ProcessLookupError):
            if os.getsid(process.pid) == session and process.status() != psutil.STATUS_ZOMBIE:
                found.append(process.pid)
    return found
