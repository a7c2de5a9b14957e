"""A digest that a GPU makes as fast as it reads: each 64-bit word is mixed with its place, and all are summed.

Bytes are taken as little-endian words, the last one filled up with zeros. A word and its place become

    x = m(word + (place + 1) * STEP)        y = (x ^ x >> 32) * SECOND

where m is the finalizer of splitmix64 (Steele, Lea and Flood, 2014); the digest is the sum of all x and the sum of all
y, modulo 2^64. Both maps are one to one, so that one changed word always changes both sums; the order in which words
are summed does not matter. It finds faults, not forgers. On CPUs torch computes the same numbers.
"""

from collections.abc import Sequence

import torch

from rollmatch.weights.digest import bytes_of

MIXED_KIND = "splitmix-2x64"
STEP, FIRST, FURTHER, SECOND = 0x9E3779B97F4A7C15, 0xBF58476D1CE4E5B9, 0x94D049BB133111EB, 0xD6E8FEB86659FD93
_PART_WORDS = 2**20
_WORD_BYTES = 8


@torch.no_grad()
def add_mixed(raw: Sequence[torch.Tensor], sums: torch.Tensor) -> None:
    """Add to [n, 2] int64 ``sums`` those of n runs of bytes on the same device; on a GPU it is only begun."""
    words = [_words(part) for part in raw]
    if sums.is_cuda:
        from rollmatch.weights.mixed_digest_kernel import add_mixed_on_gpu

        add_mixed_on_gpu(words, sums)
        return
    for place, part in enumerate(words):
        for start in range(0, len(part), _PART_WORDS):
            sums[place] += _mixed(part[start : start + _PART_WORDS], start)


def mixed_digest_of(tensor: torch.Tensor) -> bytes:
    """[16] of a tensor's bytes in C order.

    >>> mixed_digest_of(torch.zeros(1, dtype=torch.int64))[7::-1].hex()
    'e220a8397b1dcdaf'
    """
    sums = torch.zeros(1, 2, dtype=torch.int64, device=tensor.device)
    add_mixed([bytes_of(tensor)], sums)
    return mixed_digests(sums)[0]


def mixed_digests(sums: torch.Tensor) -> list[bytes]:
    """[n] 16 bytes of each row of sums."""
    raw = sums.cpu().numpy().astype("<i8").tobytes()
    return [raw[start : start + 16] for start in range(0, len(raw), 16)]


def _words(raw: torch.Tensor) -> torch.Tensor:
    """[ceil(n / 8)] int64; a view where the bytes are whole words at an address that words may have."""
    if len(raw) % _WORD_BYTES == 0 and raw.data_ptr() % _WORD_BYTES == 0:
        return raw.view(torch.int64)
    whole = raw.new_zeros(-(-len(raw) // _WORD_BYTES) * _WORD_BYTES)
    whole[: len(raw)] = raw
    return whole.view(torch.int64)


def _mixed(words: torch.Tensor, start: int) -> torch.Tensor:
    """[2] sums over words whose first one has the place ``start``."""
    places = torch.arange(start + 1, start + 1 + len(words), device=words.device)
    x = words + places * _signed(STEP)
    x = (x ^ _shifted(x, 30)) * _signed(FIRST)
    x = (x ^ _shifted(x, 27)) * _signed(FURTHER)
    x = x ^ _shifted(x, 31)
    y = (x ^ _shifted(x, 32)) * _signed(SECOND)
    return torch.stack([x.sum(), y.sum()])


def _shifted(x: torch.Tensor, by: int) -> torch.Tensor:
    """To the right, with zeros from the left, which torch has not for signed numbers."""
    return (x >> by) & ((1 << (64 - by)) - 1)


def _signed(number: int) -> int:
    """The signed number of the same 64 bits.

    >>> _signed(2**64 - 1)
    -1
    """
    return number - 2**64 if number >= 2**63 else number
