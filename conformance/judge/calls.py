"""Calls to a rollout server, spelled out: no client of ours is involved, so that server and client are judged apart."""

import base64

import msgspec
import requests
import torch

from conformance.judge.servers.bounded import in_thread
from rollmatch.data.ids import pack_ids, unpack_ids
from rollmatch.weights.digest import bytes_of, digest_of
from rollmatch.weights.gloo import GlooGroup
from rollmatch.weights.group_address import CommunicatorTimeout, GroupAddress
from rollmatch.weights.group_store import DROP, GO

MSGPACK = {"Content-Type": "application/msgpack"}
TIMEOUT_S = 60
SECRET = "of the learner's group"


class Server:
    """A server by its URL; replies are (status, body)."""

    def __init__(self, url, *, key=None):
        self.url = url
        self.headers = {"Authorization": f"Bearer {key}"} if key else {}

    def get(self, route, *, timeout=TIMEOUT_S):
        reply = requests.get(self.url + route, headers=self.headers, timeout=timeout)
        return reply.status_code, reply.json()

    def post(self, route, body=None, *, timeout=TIMEOUT_S):
        reply = requests.post(self.url + route, json=body or {}, headers=self.headers, timeout=timeout)
        return reply.status_code, reply.json()

    def post_packed(self, route, body, *, timeout=TIMEOUT_S):
        data = msgspec.msgpack.encode(body)
        reply = requests.post(self.url + route, data=data, headers=self.headers | MSGPACK, timeout=timeout)
        return reply.status_code, msgspec.msgpack.decode(reply.content)

    def health(self):
        return self.get("/health/")[1]

    @property
    def version(self):
        return self.health()["policy_version"]

    def infer(self, batch, **sampling):
        """Native, packed: response ids of each request, and their versions."""
        status, body = self.post_packed(
            "/native/infer/", {"requests": batch, "sampling": {"max_tokens": 32} | sampling}
        )
        assert status == 200, body
        answers = body["responses"]
        assert [answer["request_id"] for answer in answers] == [request["request_id"] for request in batch]
        ids = [tuple(unpack_ids(answer["response_token_ids"]).tolist()) for answer in answers]
        return ids, [answer["policy_version"] for answer in answers]


def text_batch(prompts, **fields):
    return [{"request_id": str(i), "prompt_token_ids": pack_ids(ids)} | fields for i, ids in enumerate(prompts)]


def data_url(path):
    return "data:image/png;base64," + base64.b64encode(path.read_bytes()).decode()


class RawLearner:
    """A learner in the native dialect, step by step."""

    def __init__(self, server, *, port, client="learner", timeout_s=20.0, num_workers=2, host="127.0.0.1"):
        self.server, self.client, self.port, self.timeout_s, self.host = server, client, port, timeout_s, host
        self.world_size = num_workers + 1
        self.group = None

    def request_body(self, **fields):
        request_body = {
            "client": self.client,
            "host": self.host,
            "port": self.port,
            "world_size": self.world_size,
            "secret": SECRET,
            "timeout_s": self.timeout_s,
            "join_timeout_s": 20.0,
        }
        return request_body | fields

    def open(self, **fields):
        call = in_thread(self.server.post, "/native/communicator/", self.request_body(**fields))
        address = GroupAddress(
            host=self.host, port=self.port, rank=self.world_size - 1, world_size=self.world_size, secret=SECRET,
            timeout_s=self.timeout_s, join_timeout_s=20.0,
        )  # fmt: skip
        try:
            self.group = GlooGroup.open(address)
        except CommunicatorTimeout:
            if call.done():  # a refusal says more than that nobody came
                return call.result()
            raise
        return call.result()

    def close(self, **fields):
        if self.group is not None:
            self.group.close()
            self.group = None
        return self.server.post("/native/communicator/close/", {"client": self.client} | fields)

    def announcement(self, tensors, *, version, sync_id, per_bucket=16, **fields):
        """Buckets of up to ``per_bucket`` tensors; all of one dtype."""
        names = list(tensors)
        sizes = [len(names[first : first + per_bucket]) for first in range(0, len(names), per_bucket)]
        return {
            "client": self.client,
            "sync_id": sync_id,
            "version": version,
            "tensors": [
                {"name": name, "dtype": str(t.dtype).removeprefix("torch."), "shape": list(t.shape)}
                for name, t in tensors.items()
            ],
            "buckets": sizes,
            "digests": [digest_of(tensor).hex() for tensor in tensors.values()],
        } | fields

    def announce(self, announcement):
        """Posts; when the workers are ready, None, else the refusal."""
        self.call = in_thread(self.server.post, "/native/sync/", announcement)
        while not self.group.store.is_ready(announcement["sync_id"], range(self.world_size - 1), within_s=0):
            if self.call.done():
                self.group.store.give_verdict(announcement["sync_id"], DROP)
                return self.call.result()
        return None

    def send(self, announcement, tensors, *, num_buckets=None):
        """The broadcasts, after the word to begin."""
        self.group.store.give_verdict(announcement["sync_id"], GO)
        values, first = list(tensors.values()), 0
        for size in announcement["buckets"][:num_buckets]:
            bucket = torch.cat([bytes_of(tensor) for tensor in values[first : first + size]])
            self.group.broadcast(bucket, source=self.world_size - 1)
            first += size

    def sync(self, tensors, *, version, sync_id=None, sent=None, **fields):
        """Announce ``tensors`` and send ``sent`` (by default the same); the server's answer."""
        announcement = self.announcement(tensors, version=version, sync_id=sync_id or f"s{version}", **fields)
        refusal = self.announce(announcement)
        if refusal is not None:
            return refusal
        self.send(announcement, sent or tensors)
        if announcement["digests"] is None:
            trailer = b"".join(digest_of(tensor) for tensor in tensors.values())
            self.group.broadcast(torch.frombuffer(bytearray(trailer), dtype=torch.uint8), source=self.world_size - 1)
        return self.call.result()
