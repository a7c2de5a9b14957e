"""A real server under bodies that are wrong, too large or too slow: no 5xx, no lost engine, no memory, no silence.

``ROLLMATCH_BODIES`` sets how many bodies each dialect gets (default 50; with ``ROLLMATCH_STRICT`` 300).
"""

import base64
import contextlib
import io
import os
import socket
import sys
import threading
import time
from collections import Counter

import msgspec
import numpy as np
import psutil
import pytest
import requests
from hypothesis import HealthCheck, Phase, given, settings
from hypothesis import strategies as st
from PIL import Image

from conformance.doubles.fuzzed_bodies import BODIES, calls, encoded, is_not_of_groups
from conformance.doubles.request_bodies import picture
from conformance.judge.calls import text_batch
from conformance.judge.servers.bounded import in_thread

pytestmark = [pytest.mark.engine, pytest.mark.wide]
OF_GROUPS_ALONE = {"vllm"}
NUM_BODIES = int(os.environ.get("ROLLMATCH_BODIES", "300" if "ROLLMATCH_STRICT" in os.environ else "50"))
SLOW_CALLERS, MAX_GROWTH_MIB = 300, 200
PAUSE_S = 0.05
"""Between two questions for health: a stall of a second is one slow answer, however often one asks."""
IMAGE = 414


@contextlib.contextmanager
def pinging(url):
    """Ask for health over and over, over a new connection each time; [n] seconds that each answer took."""
    waits, is_over = [], threading.Event()

    def ping():
        while not is_over.wait(PAUSE_S):
            began = time.perf_counter()
            assert requests.get(f"{url}/health/", timeout=60).status_code == 200
            waits.append(time.perf_counter() - began)

    thread = threading.Thread(target=ping)
    thread.start()
    try:
        yield waits
    finally:
        is_over.set()
        thread.join()


def post(server, route, body, **keywords):
    return requests.post(server.url + route, json=body, timeout=60, **keywords)


def resident_mib(pid):
    return psutil.Process(pid).memory_info().rss / 2**20


def bomb():
    """A PNG of 900 megapixels in a few hundred KiB."""
    file = io.BytesIO()
    Image.new("1", (30000, 30000)).save(file, "PNG", compress_level=1)
    return base64.b64encode(file.getvalue()).decode()


def attack(server):
    """Each of these took seconds of the event loop, gigabytes of memory, or an answer of 500."""
    text = "word " * (4 << 20)
    assert post(server, "/generate/", {"prompts": [text]}).status_code == 400
    turns = [{"role": "user", "content": text}]
    assert post(server, "/infer/", {"infer_requests": [{"messages": turns}]}).status_code == 400
    assert post(server, "/generate/", {"prompts": [[5]], "n": 10**6}).status_code == 422
    assert post(server, "/generate/", {"prompts": [[5, IMAGE]], "images": [[bomb()]]}).status_code == 413
    many = {"prompts": [[5]], "generation_kwargs": {"logit_bias": dict.fromkeys(map(str, range(2000)), 1.0)}}
    assert post(server, "/generate/", many).status_code == 400
    assert post(server, "/generate/", {"prompts": [[2**31 - 1]]}).status_code == 400
    assert post(server, "/generate/", {"prompts": [[5]], "top_k": 2**31 - 1, "max_tokens": 2}).status_code == 200


def fuzz(server):
    """Statuses: ``NUM_BODIES`` for each dialect."""
    statuses = []
    dialects = (calls(dialect).filter(is_not_of_groups) for dialect in sorted(BODIES.keys() - OF_GROUPS_ALONE))

    @settings(max_examples=NUM_BODIES, phases=[Phase.generate], suppress_health_check=list(HealthCheck))
    @given(st.tuples(*dialects))
    def run(one_of_each):
        for route, body in one_of_each:
            raw, kind = encoded(body, "json")
            reply = requests.post(server.url + route, data=raw, headers={"content-type": kind}, timeout=60)
            statuses.append(reply.status_code)
            assert reply.status_code < 500, (route, body, reply.text)

    run()
    return statuses


def test_a_real_server_survives_and_answers_health(instance, server):
    before = server.infer(text_batch([[7, 8, 9]]), max_tokens=8)
    grown = resident_mib(instance.process.pid)
    slow = []
    with contextlib.ExitStack() as stack, pinging(server.url) as waits:
        for _ in range(SLOW_CALLERS):
            slow.append(
                stack.enter_context(socket.create_connection(("127.0.0.1", instance.settings.port), timeout=10))
            )
            slow[-1].sendall(b"POST /generate/ HTTP/1.1\r\nHost: loc")
        attack(server)
        statuses = fuzz(server)
        call = in_thread(server.infer, text_batch([[i] for i in range(5, 69)]), max_tokens=64)
        call.result()
    assert server.infer(text_batch([[7, 8, 9]]), max_tokens=8) == before
    assert {200, 422} <= set(statuses)
    assert len(waits) > 20
    grown, slowest = resident_mib(instance.process.pid) - grown, float(np.quantile(waits, 0.99))
    sys.stdout.write(f"{Counter(statuses)}; {grown:.0f} MiB more; health p99 {slowest:.3f} s of {len(waits)}\n")
    assert grown < MAX_GROWTH_MIB
    assert slowest < 1.0, sorted(waits)[-5:]
    assert msgspec.json.decode(requests.get(f"{server.url}/health/", timeout=5).content)["running"] == 0


def test_large_images_leave_no_memory_behind(instance, server):
    """Four of 36 megapixels in 100 KiB each; a second time, as what is loaded for the first images stays."""
    url = f"data:image/png;base64,{picture(6000, 6000)}"
    content = [{"type": "image_url", "image_url": {"url": url}}]
    body = {"messages": [{"role": "user", "content": content}], "max_tokens": 2}
    sizes = []
    for _ in range(3):
        calls = [in_thread(post, server, "/v1/chat/completions/", body) for _ in range(4)]
        assert {call.result().status_code for call in calls} == {200}
        sizes.append(resident_mib(instance.process.pid))
    assert sizes[-1] - sizes[0] < MAX_GROWTH_MIB, sizes
    assert sizes[0] < 1500, sizes
