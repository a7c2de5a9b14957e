"""A rollout server of the native dialect without an engine: real HTTP, a real gloo group, tensors in a dictionary.

``faults`` is what goes wrong: ``flip`` (a bit of that tensor arrives changed), ``refuse`` (a sync is a 409), ``wrong
digest``, ``lie`` (a commit that is none), ``stall`` (nothing is received after the hand-shake), ``late`` (so many
seconds go by before it).
"""

import threading
from contextlib import ExitStack, contextmanager

import torch

from conformance.doubles.http_server import http_server, read_body, send
from rollmatch.errors import RollmatchError
from rollmatch.server.payloads import PROTOCOL
from rollmatch.weights.digest import DIGEST_KIND, NUM_DIGEST_BYTES, cut, digest_of
from rollmatch.weights.gloo import GlooGroup
from rollmatch.weights.group_address import GroupAddress
from rollmatch.weights.group_store import GO


class Refused(Exception):
    def __init__(self, code, *, status=409, **fields):
        super().__init__(code)
        self.status = status
        self.body = {"code": code, "key": "", "item": None, "problem": code, "remedy": "Do not.", **fields}


def address_in(body, host, port):
    """The worker's place in the group that a call names."""
    rest = {name: body[name] for name in ("world_size", "secret", "timeout_s", "join_timeout_s")}
    return GroupAddress(host=host, port=port, rank=body["rank_offset"], **rest)


class NativeDouble:
    """One server with one worker."""

    def __init__(self, tensors, *, aliases=None, policy_version=0):
        self.served = dict(tensors)
        self.aliases = aliases or {}
        self.policy_version = policy_version
        self.instance, self.num_starts = "0", 1
        self.keeps = True
        self.faults, self.calls, self.digests = {}, [], None
        self.group, self.client, self.staged, self.version = None, None, None, 0
        self.announced = {}
        """By ``sync_id``, in this group."""
        self.lock = threading.Lock()

    def restart(self, tensors):
        """Another process at the same address."""
        self.served, self.policy_version = dict(tensors), 0
        self.num_starts += 1
        self.instance = str(self.num_starts)
        self.group = self.client = self.staged = None

    def answer(self, handler):
        name, body = ROUTES.get(handler.path.rstrip("/")), read_body(handler)
        with self.lock:
            self.calls.append((name, body))
        try:
            send(handler, *((200, getattr(self, name)(body)) if name else (404, {"code": "route-unknown"})))
        except Refused as refused:
            send(handler, refused.status, refused.body)
        except RollmatchError as error:
            send(handler, 409, {"code": error.code, "problem": error.problem})

    def health(self, _body):
        return {
            "status": "ok",
            "policy_version": self.policy_version,
            "world_size": 1,
            "instance": self.instance,
        }

    def openapi(self, _body):
        return {"paths": {f"{route}/": {} for route in ROUTES if route not in self.faults.get("lacks", ())}}

    def identity(self, _body):
        tensors = [
            {"name": name, "dtype": str(t.dtype).removeprefix("torch."), "shape": list(t.shape)}
            for name, t in self.served.items()
        ]
        return self.health(None) | {
            "protocol": PROTOCOL,
            "digest": DIGEST_KIND,
            "transports": ["gloo"],
            "keep": self.keeps,
            "tensors": tensors,
            "aliases": self.aliases,
        }

    def communicator(self, body):
        if self.client is not None and self.client != body["client"]:
            raise Refused("client-already-attached")
        address = address_in(body, body["host"], body["port"])
        self.group, self.client, self.announced = GlooGroup.open(address), body["client"], {}
        return {"ranks": [address.rank], "transport": "gloo"}

    def close_communicator(self, body):
        if self.client not in (None, body["client"]):
            return {"closed": False, "leaving": False}
        closed, self.group, self.client, self.staged = self.group is not None, None, None, None
        return {"closed": closed, "leaving": bool(self.faults.get("leaving"))}

    def sync(self, body):
        if "refuse" in self.faults:
            raise Refused(self.faults["refuse"], key="a")
        if self.group is None:
            raise Refused("communicator-missing")
        threading.Event().wait(self.faults.get("late", 0))
        self.group.store.set_ready(body["sync_id"])
        if self.group.store.wait_verdict(body["sync_id"]) != GO:
            raise Refused("sync-dropped")
        if "stall" in self.faults:
            threading.Event().wait(self.faults["stall"])
            raise Refused("transfer-failed")
        tensors, announced = self.receive(body), self.receive_digests(body)
        digests = [digest_of(tensor).hex() for tensor in tensors.values()]
        for name, held, sent in zip(tensors, digests, announced, strict=True):
            if held != sent:
                raise Refused("digest-mismatch", key=name)
        if "wrong digest" in self.faults:
            digests[0] = "0" * 32
        self.announced[body["sync_id"]] = body
        self.staged, self.version = tensors, body["version"]
        state = self.commit({}) if body["commit"] else {"policy_version": self.policy_version, "committed": False}
        return state | {"digests": digests, "merged_digests": (body["adapter"] or {}).get("merged_digests")}

    def sync_again(self, body):
        if self.group is not None and body["like"] not in self.announced:
            raise Refused("announcement-unknown", key="like")
        return self.sync(self.announced.get(body["like"], {}) | body)

    def receive(self, body):
        first, tensors = 0, {}
        for num_tensors in body["buckets"]:
            specs = body["tensors"][first : first + num_tensors]
            kinds = [(getattr(torch, spec["dtype"]), tuple(spec["shape"])) for spec in specs]
            flat = torch.empty(sum(dt.itemsize * torch.Size(sh).numel() for dt, sh in kinds), dtype=torch.uint8)
            self.group.broadcast(flat, source=self.group.address.world_size - 1)
            tensors |= dict(zip((spec["name"] for spec in specs), cut(flat, kinds), strict=True))
            first += num_tensors
        if "flip" in self.faults:
            tensors[self.faults["flip"]].view(-1).view(torch.uint8)[0] ^= 1
        return tensors

    def receive_digests(self, body):
        """From the group, where the announcement has none."""
        self.digests = body["digests"]
        if self.digests is None:
            raw = torch.empty(NUM_DIGEST_BYTES * len(body["tensors"]), dtype=torch.uint8)
            self.group.broadcast(raw, source=self.group.address.world_size - 1)
            self.digests = [bytes(part).hex() for part in raw.view(-1, NUM_DIGEST_BYTES).numpy()]
        return self.digests

    def commit(self, _body):
        if self.staged is None:
            raise Refused("nothing-staged")
        if "lie" not in self.faults:
            self.served |= self.staged
            self.policy_version = self.version
        self.staged = None
        return {"policy_version": self.policy_version, "committed": True}

    def drop(self, _body):
        dropped, self.staged = self.staged is not None, None
        return {"dropped": dropped}

    def infer(self, body):
        """Every response says which version wrote it, and repeats the prompt."""
        responses = [
            {
                "request_id": request["request_id"],
                "prompt_token_ids": request["prompt_token_ids"],
                "response_token_ids": request["prompt_token_ids"],
                "finish_reason": "stop",
                "policy_version": self.policy_version,
            }
            for request in body["requests"]
        ]
        return {"instance": self.instance, "policy_version": self.policy_version, "responses": responses}


ROUTES = {
    "/health": "health",
    "/openapi.json": "openapi",
    "/native/identity": "identity",
    "/native/communicator": "communicator",
    "/native/communicator/close": "close_communicator",
    "/native/sync": "sync",
    "/native/sync/again": "sync_again",
    "/native/sync/commit": "commit",
    "/native/sync/drop": "drop",
    "/native/infer": "infer",
}


@contextmanager
def serving(*doubles, host="127.0.0.1"):
    """URLs of running doubles; each has an ``answer(handler)``."""
    with ExitStack() as stack:
        yield [stack.enter_context(http_server(double.answer, host=host)).url for double in doubles]


def tensors_of(seed, *, dtype=torch.float32):
    generator = torch.Generator().manual_seed(seed)
    return {
        "a": torch.randn(5, 3, generator=generator).to(dtype),
        "half": torch.randn(7, generator=generator).to(torch.bfloat16),
        "b": torch.randn(11, generator=generator).to(dtype),
        "scalar": torch.randn((), generator=generator).to(dtype),
        "c": torch.randn(2, 2, 2, generator=generator).to(dtype),
    }


def equal(one, other):
    return one.keys() == other.keys() and all(torch.equal(one[name], other[name]) for name in one)


def names_called(double):
    return [name for name, _ in double.calls if name not in ("health", "openapi", "identity", "close_communicator")]
