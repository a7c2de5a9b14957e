"""Bodies that cost more than they are long: counted before they are validated, and read by a process that may die."""

import asyncio
import subprocess
import sys
import time

import msgspec
import psutil
import pytest
from pydantic import ValidationError

from rollmatch.dialects.openai.bodies import ChatBody
from rollmatch.dialects.trl.bodies import TrlChats
from rollmatch.server.failures import Refusal
from rollmatch.server.payloads import SyncRequest
from rollmatch.server.reading import MAX_CONTAINERS, MAX_DEPTH, Form, decode, read

MAX_BYTES = 64 << 20


def form(kind, *, packed=False, **longest):
    return Form(kind=kind, packed=packed, sampling_at=(), longest=longest)


def tensors(num):
    body = {"client": "a", "sync_id": "s", "version": 1, "buckets": [num]}
    return body | {"tensors": [{"name": f"layer.{i}", "dtype": "float32", "shape": [i]} for i in range(num)]}


def many(field, num, entry=b"{},"):
    return b'{"%s": [' % field + entry * num + entry[:-1] + b"]}"


@pytest.mark.parametrize(
    ("raw", "kind", "packed", "code"),
    [
        (many(b"tensors", 1 << 20), SyncRequest, False, "call-too-large"),
        (many(b"tensors", 1 << 19), SyncRequest, False, "body-invalid"),
        (many(b"messages", (16 << 20) // 3), ChatBody, False, "call-too-large"),
        (many(b"tools", (8 << 20) // 3), ChatBody, False, "call-too-large"),
        (many(b"messages", 1 << 20, b'{"a":1},'), TrlChats, False, "call-too-large"),
        (b'{"messages": ' + b"[" * 900 + b"]" * 900 + b"}", ChatBody, False, "call-too-large"),
        (b"\x81\xa5tools\xdd\x03\xd0\x00\x00" + b"\x80" * (61 << 20), ChatBody, True, "call-too-large"),
    ],
    ids=["sync", "sync within", "messages", "tools", "chats", "deep", "msgpack"],
)
def test_a_body_of_many_lists_is_refused_and_costs_this_process_nothing(raw, kind, packed, code):
    """3 MiB of ``{},`` took 4.3 GB and 15 s, in which health was not answered."""
    before, turns = psutil.Process().memory_info().rss, []

    async def reading():
        watching = asyncio.create_task(watch())
        with pytest.raises(Refusal) as caught:
            await read(raw, form(kind, packed=packed), max_bytes=MAX_BYTES)
        watching.cancel()
        return caught.value.code

    async def watch():
        while True:
            began = time.perf_counter()
            await asyncio.sleep(0.01)
            turns.append(time.perf_counter() - began)

    assert asyncio.run(reading()) == code
    assert psutil.Process().memory_info().rss - before < 150 << 20
    if len(raw) < 4 << 20:
        assert max(turns, default=0) < 1.0


@pytest.mark.parametrize("packed", [False, True])
def test_a_large_body_is_read_as_a_small_one_is(packed):
    encode = msgspec.msgpack.encode if packed else msgspec.json.encode
    raw = encode(tensors(5000))
    found = asyncio.run(read(raw, form(SyncRequest, packed=packed), max_bytes=MAX_BYTES))
    assert found == SyncRequest.model_validate(tensors(5000))
    wrong = tensors(5000)
    wrong["tensors"][4000]["shape"] = [-1]
    with pytest.raises(Refusal) as caught:
        asyncio.run(read(encode(wrong), form(SyncRequest, packed=packed), max_bytes=MAX_BYTES))
    assert (caught.value.code, caught.value.key) == ("body-invalid", "tensors[4000].shape[0]")


LARGE = """
import asyncio, multiprocessing, sys
from rollmatch.server.payloads import SyncRequest
from rollmatch.server.reading import Form, read
if __name__ == "__main__":
    multiprocessing.set_forkserver_preload(["held"])
    form = Form(kind=SyncRequest, packed=False, sampling_at=(), longest={})
    raw = sys.stdin.buffer.read()
    print(len(asyncio.run(read(raw, form, max_bytes=1 << 20)).tensors))
"""


@pytest.mark.wide
def test_memory_of_the_process_that_forks_readers_does_not_count(tmp_path):
    (tmp_path / "held.py").write_text("memory = bytearray(3 << 30)\n")  # reserved, not used
    (tmp_path / "large.py").write_text(LARGE)
    command, raw = [sys.executable, "large.py"], msgspec.json.encode(tensors(5000))
    done = subprocess.run(command, input=raw, cwd=tmp_path, capture_output=True, check=False)
    assert done.stdout == b"5000\n", done.stderr.decode()


@pytest.mark.parametrize(("depth", "is_read"), [(MAX_DEPTH, True), (MAX_DEPTH + 1, False)])
def test_a_body_is_as_deep_as_a_body_may_be(depth, is_read):
    raw = b'{"messages": [], "chat_template_kwargs": {"a": ' + b"[" * (depth - 2) + b"]" * (depth - 2) + b"}}"
    if is_read:
        decode(raw, form(TrlChats))
    else:
        with pytest.raises(Refusal, match="deep"):
            decode(raw, form(TrlChats))


def test_the_first_wrong_entry_ends_validation():
    with pytest.raises(ValidationError) as caught:
        SyncRequest.model_validate(tensors(0) | {"buckets": [1], "tensors": [{}] * 1000, "digests": ["x"] * 1000})
    assert caught.value.error_count() < 10
    assert MAX_CONTAINERS > 1000


def test_a_body_that_takes_too_long_is_given_up(monkeypatch):
    raw = msgspec.json.encode(tensors(3000))
    monkeypatch.setattr("rollmatch.server.reading.READ_S", 0.001)
    with pytest.raises(Refusal, match="takes longer than") as caught:
        asyncio.run(read(many(b"tensors", MAX_CONTAINERS - 10), form(SyncRequest), max_bytes=MAX_BYTES))
    assert caught.value.code == "call-too-large"
    monkeypatch.undo()
    assert asyncio.run(read(raw, form(SyncRequest), max_bytes=MAX_BYTES)).version == 1


def test_a_process_that_dies_costs_its_call_only():
    raw = msgspec.json.encode(tensors(3000))
    asyncio.run(read(raw, form(SyncRequest), max_bytes=MAX_BYTES))
    for each in psutil.Process().children(recursive=True):
        if "forkserver" in " ".join(each.cmdline()) and each.ppid() != psutil.Process().pid:
            each.kill()
    found = set()
    for _ in range(50):
        try:
            found.add(asyncio.run(read(raw, form(SyncRequest), max_bytes=MAX_BYTES)).version)
        except Refusal as refusal:
            found.add(refusal.code)
    assert 1 in found
    assert found <= {1, "call-too-large"}
