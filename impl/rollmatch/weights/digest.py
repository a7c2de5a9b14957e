"""Bytes of tensors on their way, and one digest per tensor, which shows that learner and server hold the same bytes.

Each transport has a digest of its own, 16 bytes in hexadecimal, named in a server's identity. Gloo: XXH3 with 128 bits,
which hashes as fast as memory is read. Direct: a digest that a GPU makes as fast as it reads. Each 64-bit word is mixed
with its index, and all are summed. Bytes are taken as little-endian words, the last one filled up with zeros:

    x = m(word + (index + 1) * STEP)        y = (x ^ x >> 32) * SECOND

where m is the finalizer of splitmix64 (Steele, Lea and Flood, 2014); the digest is the sum of all x and the sum of all
y, modulo 2^64. Both maps are one to one, so that one changed word always changes both sums. On CPUs torch computes the
same numbers. Digests find faults of a transport, not forgers: whoever may send weights may send any.
"""

from collections.abc import Iterable, Iterator, Sequence
from itertools import accumulate, cycle, islice
from typing import NamedTuple, cast

import torch
from torch import Tensor
from xxhash import xxh3_128_digest

from rollmatch.errors import SyncError
from rollmatch.weights.plan import DTYPES, WeightTransfer

GLOO, DIRECT = "gloo", "direct"
"""Transports: staged beside what is served, over gloo; straight into what is served, over NCCL where there are GPUs."""
DIGEST_KIND, MIXED_KIND = "xxh3-128", "splitmix-2x64"
DIGEST_KINDS = {GLOO: DIGEST_KIND, DIRECT: MIXED_KIND}
NUM_DIGEST_BYTES = 16
_PART_WORDS, _WORD_BYTES = 2**20, 8
_AT_ONCE = 16
"""Tensors whose digests are made in one launch, and which stand in memory until then."""
_REMEDY = "The transport changed the bytes, or the server runs another version of rollmatch."


class MixConstants(NamedTuple):
    """Multipliers of the mixed digest."""

    step: int = 0x9E3779B97F4A7C15
    first: int = 0xBF58476D1CE4E5B9
    further: int = 0x94D049BB133111EB
    second: int = 0xD6E8FEB86659FD93


MIX = MixConstants()


class DigestMismatch(SyncError):
    """What a server holds is not bit for bit what was sent."""

    code = "digest-mismatch"


def digest_of(tensor: Tensor) -> bytes:
    """[16] digest of a tensor's raw bytes in C order; type and shape are not part of it.

    >>> digest_of(torch.zeros(2)) == digest_of(torch.zeros(2, 1)), digest_of(torch.zeros(2)) == digest_of(torch.ones(2))
    (True, False)
    """
    return digest_of_bytes(bytes_of(tensor).cpu())


def digest_of_bytes(raw: Tensor) -> bytes:
    """[16] digest of bytes on the CPU.

    >>> digest_of_bytes(torch.zeros(0, dtype=torch.uint8)).hex()
    '99aa06d3014798d86001c324468d497f'
    """
    return xxh3_128_digest(cast(bytes, raw.numpy()))  # any buffer; the stubs name bytes only


def digests_of(tensors: Iterable[Tensor]) -> list[str]:
    """[n] digest of each tensor's bytes, in hexadecimal; no tensor is kept."""
    return [digest_of(tensor).hex() for tensor in tensors]


def bytes_of(tensor: Tensor) -> Tensor:
    """[n] the tensor's bytes, a view where it is contiguous."""
    flat = tensor.detach().contiguous().reshape(-1)
    return flat.view(torch.uint8)


class Buffer:
    """One stretch of memory, used for one bucket after the other; grows when a bucket does not fit."""

    def __init__(self, device: torch.device | None = None) -> None:
        self._memory = torch.empty(0, dtype=torch.uint8, device=device)

    def fill(self, parts: Sequence[Tensor]) -> Tensor:
        """[n] the bytes of tensors, one after the other, without padding.

        A single part is not copied; the bytes of several are valid until the next call.

        >>> Buffer().fill([torch.tensor([1, 2], dtype=torch.uint8), bytes_of(torch.tensor([[258]]))[:2]])
        tensor([1, 2, 2, 1], dtype=torch.uint8)
        """
        if len(parts) == 1:
            return parts[0]
        size = sum(len(part) for part in parts)
        if len(self._memory) < size:
            self._memory = torch.empty(size, dtype=torch.uint8, device=self._memory.device)
        return torch.cat(list(parts), out=self._memory[:size]) if parts else self._memory[:0]


def cut(flat: Tensor, tensors: Sequence[tuple[torch.dtype, tuple[int, ...]]]) -> list[Tensor]:
    """The tensors of a bucket, as views of its bytes where these are aligned.

    >>> cut(torch.tensor([1, 2, 2, 1], dtype=torch.uint8), [(torch.int8, (2,)), (torch.int16, (1, 1))])[1].tolist()
    [[258]]
    """
    found, start = [], 0
    for dtype, shape in tensors:
        stop = start + torch.Size(shape).numel() * dtype.itemsize
        part = flat[start:stop]
        aligned = part if start % dtype.itemsize == 0 else part.clone()
        found.append(aligned.view(dtype).view(shape))
        start = stop
    return found


def pieces_of(transfer: WeightTransfer, buffers: Sequence[Buffer], digests: list[bytes]) -> Iterator[Tensor]:
    """Raw bytes of each bucket, then the digests, each made just before its bytes go, while others travel.

    Buffers take turns, so that a chunk is whole while one less than ``buffers`` are in flight. What is hashed is what
    is sent: a tensor that changes on its way does not arrive unnoticed. ``digests`` receives one per tensor.
    """
    memory = cycle(buffers)
    for bucket in transfer.plan.buckets:
        parts = _bytes_in(transfer, bucket.start, bucket.stop)
        digests += [digest_of_bytes(part) for part in parts]
        yield next(memory).fill(parts)
    yield torch.frombuffer(bytearray(b"".join(digests)), dtype=torch.uint8)


def _bytes_in(transfer: WeightTransfer, start: int, stop: int) -> list[Tensor]:
    """Of each tensor, in the type in which it travels."""
    pairs = zip(transfer.tensors[start:stop], transfer.plan.specs[start:stop], strict=True)
    return [bytes_of(tensor.to("cpu", DTYPES[spec.dtype])) for tensor, spec in pairs]


def check_digests(names: Sequence[str], sent: Sequence[str], held: Sequence[str], *, server: str) -> None:
    """Errors: ``DigestMismatch``, with the first tensor that differs as the key."""
    if len(held) != len(sent):
        problem = f"{server} returned digests of {len(held)} of {len(sent)} tensors"
        raise DigestMismatch(problem, key=names[min(len(held), len(names) - 1)], remedy=_REMEDY)
    for name, ours, theirs in zip(names, sent, held, strict=True):
        if ours != theirs:
            problem = f"{name} has digest {ours} here and {theirs} on {server}"
            raise DigestMismatch(problem, key=name, remedy=_REMEDY)


def add_mixed(raw: Sequence[Tensor], sums: Tensor) -> None:
    """Add the sums of n runs of bytes to [n, 2] int64 ``sums`` on the same device; on a GPU the work is only queued."""
    words = [_words(part) for part in raw]
    if sums.is_cuda:
        from rollmatch.weights.digest_kernel import add_mixed_at

        add_mixed_at([part.data_ptr() for part in words], [len(part) for part in words], sums, MIX)
        return
    for index, part in enumerate(words):
        for start in range(0, len(part), _PART_WORDS):
            sums[index] += _mixed(part[start : start + _PART_WORDS], start)


def mixed_digest_of(tensor: Tensor) -> bytes:
    """[16] mixed digest of a tensor's bytes in C order.

    >>> mixed_digest_of(torch.zeros(1, dtype=torch.int64))[7::-1].hex()
    'e220a8397b1dcdaf'
    """
    sums = torch.zeros(1, 2, dtype=torch.int64, device=tensor.device)
    add_mixed([bytes_of(tensor)], sums)
    return mixed_digests(sums)[0]


def add_mixed_in(flat: Tensor, sizes: Sequence[int], sums: Tensor) -> None:
    """``add_mixed`` of n runs of ``sizes`` bytes that lie one after the other in contiguous memory.

    >>> sums = torch.zeros(2, 2, dtype=torch.int64)
    >>> add_mixed_in(torch.tensor([0, 1]), [8, 8], sums)
    >>> mixed_digests(sums)[1] == mixed_digest_of(torch.tensor([1]))
    True
    """
    raw = bytes_of(flat)
    if not flat.is_cuda or flat.data_ptr() % _WORD_BYTES or any(size % _WORD_BYTES for size in sizes):
        add_mixed(torch.split(raw, list(sizes)), sums)
        return
    from rollmatch.weights.digest_kernel import add_mixed_at

    ends = list(accumulate(sizes, initial=flat.data_ptr()))
    add_mixed_at(ends[:-1], [size // _WORD_BYTES for size in sizes], sums, MIX)


def add_mixed_of_each(tensors: Iterable[Tensor], sums: Tensor) -> None:
    """``add_mixed`` of the bytes of [n] tensors, each made when its turn comes; few of them stand at the same time.

    >>> sums = torch.zeros(2, 2, dtype=torch.int64)
    >>> add_mixed_of_each((torch.tensor([number]) for number in (0, 1)), sums)
    >>> mixed_digests(sums) == [mixed_digest_of(torch.tensor([0])), mixed_digest_of(torch.tensor([1]))]
    True
    """
    made, start = iter(tensors), 0
    while some := list(islice(made, _AT_ONCE)):
        add_mixed([bytes_of(tensor) for tensor in some], sums[start : start + len(some)])
        start += len(some)


def mixed_digests(sums: Tensor) -> list[bytes]:
    """[n] 16 bytes of each row of sums."""
    raw = sums.cpu().numpy().astype("<i8").tobytes()
    return [raw[start : start + NUM_DIGEST_BYTES] for start in range(0, len(raw), NUM_DIGEST_BYTES)]


def _words(raw: Tensor) -> Tensor:
    """[ceil(n / 8)] int64; a view where the bytes are whole words at an address that words may have."""
    if len(raw) % _WORD_BYTES == 0 and raw.data_ptr() % _WORD_BYTES == 0:
        return raw.view(torch.int64)
    whole = raw.new_zeros(-(-len(raw) // _WORD_BYTES) * _WORD_BYTES)
    whole[: len(raw)] = raw
    return whole.view(torch.int64)


def _mixed(words: Tensor, start: int) -> Tensor:
    """[2] sums over words whose first one has the index ``start``."""
    indices = torch.arange(start + 1, start + 1 + len(words), device=words.device)
    x = words + indices * _signed(MIX.step)
    x = (x ^ _shifted(x, 30)) * _signed(MIX.first)
    x = (x ^ _shifted(x, 27)) * _signed(MIX.further)
    x = x ^ _shifted(x, 31)
    y = (x ^ _shifted(x, 32)) * _signed(MIX.second)
    return torch.stack([x.sum(), y.sum()])


def _shifted(x: Tensor, by: int) -> Tensor:
    """To the right, with zeros from the left, which torch lacks for signed numbers."""
    return (x >> by) & ((1 << (64 - by)) - 1)


def _signed(number: int) -> int:
    """The signed number of the same 64 bits.

    >>> _signed(2**64 - 1)
    -1
    """
    return number - 2**64 if number >= 2**63 else number
