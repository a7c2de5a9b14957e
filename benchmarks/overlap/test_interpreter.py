"""Small operations of the learner's thread beside threads that parse replies, by how soon threads change places."""

import json
import sys
import threading
import time

import torch

from rollmatch.training.trainer import SWITCH_S

THREADS, OPERATIONS, ROUNDS, BAR = 16, 3000, 3, 1.2
REPLY = json.dumps([list(range(200)) for _ in range(50)])
"""About a millisecond of parsing."""
PYTHONS_OWN = 0.005


def seconds(interval):
    """Of the operations while the others parse a reply every 20 ms or so."""
    before, ended = sys.getswitchinterval(), threading.Event()
    sys.setswitchinterval(interval)

    def play():
        while not ended.wait(0.02):
            for _ in range(3):
                json.loads(REPLY)

    threads = [threading.Thread(target=play) for _ in range(THREADS)]
    try:
        for thread in threads:
            thread.start()
        values, began = torch.randn(64, 64), time.perf_counter()
        for _ in range(OPERATIONS):
            values = (values @ values).tanh_()
            values.add_(1).sum()
        return time.perf_counter() - began
    finally:
        ended.set()
        for thread in threads:
            thread.join()
        sys.setswitchinterval(before)


def test_the_learner_gets_the_interpreter_back_soon(benchmark, check_bar):
    def rounds():
        return [(seconds(PYTHONS_OWN), seconds(SWITCH_S)) for _ in range(ROUNDS)]

    torch.set_num_threads(1)
    took = benchmark.pedantic(rounds, rounds=1)
    slow, quick = (min(each) for each in zip(*took, strict=True))
    benchmark.extra_info |= {"seconds": took, "bar": BAR}
    check_bar(f"0.5 ms beside 5 ms: {slow / quick:.2f} x as fast (bar {BAR})", slow / quick >= BAR)
