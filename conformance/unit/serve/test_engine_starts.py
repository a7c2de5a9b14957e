"""Engines of a server with GPUs start side by side, each with GPUs of its own; a server without forks one by one."""

import asyncio
import multiprocessing
import os
import time

import pytest

from conformance.doubles.engine_process import LIMIT_S, engine_process
from conformance.doubles.instance import settings_for
from rollmatch.serve import serving


class SpawnedReplica:
    """Starts a process as vLLM does, and is made when that is ready; ``fails``: index of one that does not start."""

    fails = None

    def __init__(self, settings, *, index):
        if index == self.fails:
            raise RuntimeError("no memory")
        if settings.gpus:
            os.environ["CUDA_VISIBLE_DEVICES"] = settings.gpus[index]
        context = multiprocessing.get_context("spawn")
        receiver, sender = context.Pipe(duplex=False)
        time.sleep(0.05)  # what comes before the process
        process = context.Process(target=engine_process, args=(self.barrier, sender))
        process.start()
        sender.close()  # so that the end of the process shows
        self.gpu = receiver.recv() if receiver.poll(LIMIT_S) else None
        process.join()

    def params_of(self, request, *, seed):
        """Nothing."""

    async def generate(self, prompt, params, request_id):
        """Nothing."""


@pytest.fixture
def start(monkeypatch):
    """Starts the engines of a server whose processes wait until ``together`` of them are there."""
    monkeypatch.setattr(serving, "VllmReplica", SpawnedReplica)
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "none")

    def start(*, together, **fields):
        SpawnedReplica.barrier = multiprocessing.get_context("spawn").Barrier(together)
        return asyncio.run(serving.start_replicas(settings_for(**fields)))

    return start


def test_engines_start_side_by_side_and_take_the_gpus_of_their_place(start, capsys):
    replicas = start(together=3, data_parallel_size=3, gpus=("4", "5", "6"))
    assert [replica.gpu for replica in replicas] == ["4", "5", "6"]
    lines = capsys.readouterr().err.splitlines()
    assert lines[0].startswith("rollout server: starting 3 engines of ")
    assert sorted(line.split(" after ")[0] for line in lines[1:]) == [
        f"rollout server: engine {number} of 3 is up" for number in (1, 2, 3)
    ]


def test_engines_without_gpus_start_one_after_the_other(start):
    assert [replica.gpu for replica in start(together=1, data_parallel_size=2)] == ["none", "none"]


def test_an_engine_that_fails_takes_the_others_with_it(start, monkeypatch):
    """Their processes would wait for it; here those of the other tests stay."""
    ended = []

    def end_engines():
        ended.extend(each for each in multiprocessing.active_children() if each.name.startswith("SpawnProcess"))
        for each in ended:
            each.terminate()

    monkeypatch.setattr(SpawnedReplica, "fails", 1)
    monkeypatch.setattr(serving, "kill_children", end_engines)
    with pytest.raises(RuntimeError, match="no memory"):
        start(together=2, data_parallel_size=2, gpus=("4", "5"))
    assert len(ended) == 1
