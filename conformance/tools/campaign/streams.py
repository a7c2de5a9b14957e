"""Streams of chat completions while updates come one after another.

Callers read at once, hardly read, or hang up. What is judged: each stream is one policy's, under the version that it
names, or ends with ``policy-changed``; no update waits for longer than ``drain_s`` and its own time.
"""

import http.client
import json
import socket
import threading
import time
from contextlib import closing, suppress
from dataclasses import dataclass, field
from urllib.parse import urlsplit

from conformance.judge.servers.bounded import in_thread

ROUTE, NUM_CHOICES, NUM_TOKENS, BOUND_S = "/v1/chat/completions/", 8, 150, 90.0
CALL = {
    "n": NUM_CHOICES, "seed": 7, "max_tokens": NUM_TOKENS, "ignore_eos": True, "logprobs": True, "top_logprobs": 5,
    "return_token_ids": True,
}  # fmt: skip
READERS = ("whole", "whole", "slow", "slow", "leaves", "leaves")
"""What the callers do, each again and again."""
SLOW_S = 0.02
"""Between two events: above the 1 KiB/s below which a server closes the connection."""
SMALL_BUFFER = 4096
"""That a slow caller receives ahead. Unit: bytes."""
CLOSED = "closed"


@dataclass(slots=True)
class StreamRead:
    """What a caller has read of one stream."""

    prompt: str
    reader: str
    versions: set[int] = field(default_factory=set)
    ids: list[list[int]] = field(default_factory=lambda: [[] for _ in range(NUM_CHOICES)])
    """Of each choice."""
    end: str = CLOSED
    """``whole``, ``left`` by the caller, the code of an error, or ``CLOSED``: nothing said why."""

    def take(self, event):
        """One event. Returns whether the stream continues."""
        if "error" in event:
            self.end = event["error"].get("code") or f"UNNAMED {event}"
            return False
        for choice in event["choices"]:
            self.versions |= {event["policy_version"], choice["policy_version"]}
            self.ids[choice["index"]] += choice.get("token_ids") or []
        return True


def wrong_in(stream, references):
    """What is wrong with a stream, in words. ``references``: version -> prompt -> ids of each choice."""
    if len(stream.versions) > 1:
        return [f"mixed: one stream names the versions {sorted(stream.versions)}"]
    wrong = []
    for version in stream.versions:
        whole = references[version][stream.prompt]
        for choice, ids in enumerate(stream.ids):
            if ids != whole[choice][: len(ids)] or (stream.end == "whole" and ids != whole[choice]):
                wrong.append(
                    f"mislabelled: choice {choice} under version {version} of a stream that ended {stream.end}"
                )
    if stream.end not in ("whole", "left", "policy-changed", "server-busy"):
        wrong.append(f"a stream of a caller that reads {stream.reader} ended with {stream.end}")
    return wrong


def read_stream(url, headers, prompt, reader, *, chance, is_over):
    """A stream as a caller reads it; a slow one hurries when ``is_over`` is set."""
    found = StreamRead(prompt, reader)
    address = urlsplit(url)
    connection = http.client.HTTPConnection(address.hostname, address.port, timeout=BOUND_S)
    connection.sock = socket.socket()
    if reader == "slow":
        connection.sock.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, SMALL_BUFFER)
    connection.sock.settimeout(BOUND_S)
    left_after = chance.randrange(NUM_CHOICES * NUM_TOKENS) if reader == "leaves" else None
    with closing(connection), suppress(ConnectionError, http.client.HTTPException):
        connection.sock.connect((address.hostname, address.port))
        connection.request("POST", ROUTE, json.dumps(body_of(prompt, stream=True)), headers)
        reply = connection.getresponse()
        if reply.status != http.HTTPStatus.OK:
            found.end = json.loads(reply.read())["code"]
            return found
        for number, line in enumerate(each for each in reply if each.strip()):
            text = line.removeprefix(b"data: ").strip()
            if text == b"[DONE]":
                found.end = "whole"
            if text == b"[DONE]" or not found.take(json.loads(text)):
                break
            if number == left_after:
                found.end = "left"
                break
            if reader == "slow" and not is_over.is_set():
                time.sleep(SLOW_S)
    return found


def body_of(prompt, **fields):
    return CALL | {"messages": [{"role": "user", "content": prompt}]} | fields


def ids_of(server, prompts):
    """Prompt -> ids of each choice, with the weights that are served."""
    found = {}
    for prompt in prompts:
        status, body = server.post(ROUTE, body_of(prompt))
        assert status == http.HTTPStatus.OK, body
        found[prompt] = [choice["token_ids"] for choice in sorted(body["choices"], key=lambda each: each["index"])]
    return found


def stream_over_updates(server, sync, policies, *, num_updates, chance):
    """Streams that were read, seconds of each update, and what is wrong, in words.

    ``sync``: weights -> status of an update to them, as the version after the one that is served.
    """
    references, by_policy, streams, seconds, wrong = {}, [], [], [], []
    prompts = [f"{letter}{chance.randrange(10**6)}" for letter in "ab"]
    for weights in policies:
        if sync(weights) != http.HTTPStatus.OK:
            return [], [], ["an update before the streams was refused"]
        by_policy.append(ids_of(server, prompts))
    is_over = threading.Event()

    def read_on(reader):
        while not is_over.is_set():
            found = read_stream(
                server.url, server.headers | {"Content-Type": "application/json"}, chance.choice(prompts), reader,
                chance=chance, is_over=is_over,
            )  # fmt: skip
            streams.append(found)

    references[server.version] = by_policy[-1]
    callers = [in_thread(read_on, reader) for reader in READERS]
    for number in range(num_updates):
        place = number % len(policies)
        references[server.version + 1], began = by_policy[place], time.monotonic()
        if sync(policies[place]) != http.HTTPStatus.OK:
            wrong.append("an update beside streams was refused")
        seconds.append(time.monotonic() - began)
    is_over.set()
    for caller in callers:
        caller.result(timeout=2 * BOUND_S)
    wrong += [problem for stream in streams for problem in wrong_in(stream, references)]
    return streams, seconds, wrong
