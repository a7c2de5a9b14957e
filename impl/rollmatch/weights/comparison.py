"""Proof that both sides hold the same numbers: one digest per tensor, compared by name."""

from collections.abc import Sequence

from torch import Tensor

from rollmatch.errors import SyncError
from rollmatch.weights.digest import digest_of


class DigestMismatch(SyncError):
    """What a server received, bit for bit, is what was sent."""

    code = "digest-mismatch"


def digests_of(tensors: Sequence[Tensor]) -> list[str]:
    """[n] digest of each tensor's bytes, in hexadecimal."""
    return [digest_of(tensor).hex() for tensor in tensors]


def check_digests(names: Sequence[str], sent: Sequence[str], held: Sequence[str], *, server: str) -> None:
    """Errors: ``DigestMismatch``, with the first tensor that differs as the key."""
    if len(held) != len(sent):
        problem = f"{server} proved {len(held)} of {len(sent)} tensors"
        raise DigestMismatch(problem, key=names[min(len(held), len(names) - 1)], remedy=_REMEDY)
    for name, ours, theirs in zip(names, sent, held, strict=True):
        if ours != theirs:
            problem = f"{name} has digest {ours} here and {theirs} on {server}"
            raise DigestMismatch(problem, key=name, remedy=_REMEDY)


_REMEDY = "The transport changed the bytes, or the server runs another version of rollmatch."
