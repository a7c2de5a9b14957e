"""A learner's side of a weight transfer, as checks use it; nothing here loads torch until a peer is made."""

from collections.abc import Mapping
from typing import TYPE_CHECKING, Any

from conformance.judge.servers.talk import Stopped, Talk

if TYPE_CHECKING:
    from torch import Tensor

BESIDE_EMBEDDINGS = 2
"""A policy with the embeddings, and a head that is tied to them, as they were: for checks that ask after other things
than whether every weight has arrived.
"""


def make_peer(talk: Talk) -> Any:
    """Of the subject's dialect; leaves at the end of the check."""
    peer = talk.subject.dialect.make_peer(talk)
    talk.leaving.append(peer.close)
    return peer


def world_size(talk: Talk) -> int:
    """Workers that take part, as the server returns it; ``Stopped`` where it does not."""
    for path in ("/get_world_size/", "/get_world_size"):
        call = talk.get("world-size", path, note=False)
        if call.is_ok and isinstance(call.reply, dict) and isinstance(call.reply.get("world_size"), int):
            return int(call.reply["world_size"])
    raise Stopped("the server returns no world size")


def sync(talk: Talk, number: int, *, peer: Any = None) -> Any:
    """A whole update with the weights of policy ``number``; the peer, still open."""
    peer = peer or open_peer(talk)
    peer.send(talk.subject.policies.weights(number))
    peer.finish()
    return peer


def open_peer(talk: Talk) -> Any:
    """Joined; ``Stopped`` where that fails."""
    peer = make_peer(talk)
    peer.open()
    return peer


def halves(weights: "Mapping[str, Tensor]") -> "tuple[dict[str, Tensor], dict[str, Tensor]]":
    """Every other name, so that each layer has some in both."""
    names = list(weights)
    return {n: weights[n] for n in names[::2]}, {n: weights[n] for n in names[1::2]}
