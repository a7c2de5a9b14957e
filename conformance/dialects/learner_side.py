"""The learner's side of a connection to rollout servers, as tests make it."""

from types import SimpleNamespace

from conformance.server.instance import free_port
from rollmatch.dialects.native.group import Rendezvous
from rollmatch.dialects.native.sender import NativeSender
from rollmatch.dialects.session import ClientSettings, RolloutServer
from rollmatch.ranks import Ranks
from rollmatch.rollout.vllm_server import VllmServerBackend

ALONE = Ranks()
TEMPLATE = SimpleNamespace(
    messages=lambda sample: [{"role": "user", "content": str(sample.sample_id)}],
    banned_ids=(),
    vocabulary=SimpleNamespace(stop_id=9, stop_token="<|im_end|>"),
)


def connected(url, timeout_s=20):
    server = RolloutServer(url, ClientSettings(timeout_s=timeout_s))
    server.connect()
    return server


def rendezvous(**fields):
    """On a free port unless ``fields`` say otherwise."""
    usual = {"host": "127.0.0.1", "client": "learner", "timeout_s": 20, "join_timeout_s": 30}
    return Rendezvous(**({"port": free_port()} | usual | fields))


def native_backend(url, template=TEMPLATE, *, ranks=ALONE, **fields):
    """A backend that generates, and sends on the first rank; ``fields`` of the rendezvous."""
    server = connected(url)
    sender = NativeSender([server], rendezvous(**fields), stage=False) if ranks.is_primary else None
    return VllmServerBackend([server], template, ranks, sender=sender)
