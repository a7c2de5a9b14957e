"""The learner's side of a connection to rollout servers, as tests make it."""

from types import SimpleNamespace

from conformance.doubles.instance import free_port
from conformance.doubles.records import make_request
from rollmatch.dialects.native.group import Rendezvous
from rollmatch.dialects.native.sender import NativeSender
from rollmatch.dialects.session import DIALECTS, ClientSettings, RolloutServer
from rollmatch.journal import Journal
from rollmatch.model.template import TemplateOptions
from rollmatch.ranks import Ranks
from rollmatch.rollout.backend import Decoding
from rollmatch.rollout.fence import Fence
from rollmatch.rollout.servers import VllmServerBackend
from rollmatch.weights.named_weights import named_weights

ALONE = Ranks()
BUCKET_BYTES = 2**16
TEMPLATE = SimpleNamespace(
    messages=lambda sample: [{"role": "user", "content": str(sample.sample_id)}],
    banned_ids=(),
    options=TemplateOptions(),
    is_plain_chat=lambda sample: True,
    vocabulary=SimpleNamespace(stop_ids={9}, stop_texts=("<|im_end|>",)),
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


def make_fence(url, port, folder, ranks):
    """The fence of one of several ranks, with a journal in the folder."""
    backend = native_backend(url, ranks=ranks, port=port)
    if backend.sender:
        backend.sender.bucket_bytes = BUCKET_BYTES
    return Fence(backend, ranks, Journal(folder / f"journal-rank{ranks.rank}.jsonl", rank=ranks.rank))


def roll_out(fence, model, step):
    """As the trainer does: sync if due, then ask; the seconds that the sync took."""
    seconds = fence.sync_if_due(step, lambda: named_weights(model))
    request = make_request(request_id=f"{step}.{fence.ranks.rank}.0", prompt_token_ids=(1, 2, 3))
    (rollout,) = fence.backend.generate([request], Decoding(max_new_tokens=4))
    return {"step": step, "synced": seconds > 0, "version": rollout.policy_version, "ids": rollout.response_token_ids}


URL = "http://h:1"


def server_of(dialect):
    server = RolloutServer(URL, ClientSettings(timeout_s=5, infer_timeout_s=5.0))
    server.dialect = DIALECTS[dialect](URL)
    return server


def sync(learner, policy, **fields):
    version = learner.server.version + 1
    status, body = learner.sync(policy.weights, version=version, **fields)
    assert status == 200, body
    assert body["policy_version"] == version == learner.server.version
    return body
