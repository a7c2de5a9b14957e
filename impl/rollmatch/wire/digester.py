"""Digests of tensors while others are still on their way."""

from collections.abc import Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from types import TracebackType

import torch

from rollmatch.wire.digest import digest_of_bytes

BATCH_BYTES = 16 * 2**20
"""Fewer, larger pieces of work; a thread that is woken for every small tensor costs more than it hashes."""


class Digester:
    """Hashes on a thread of its own, in the order in which tensors are added; both ends of a transfer have one.

    >>> from rollmatch.wire.digest import bytes_of, digest_of
    >>> with Digester() as digester:
    ...     digester.add([bytes_of(torch.zeros(1)), bytes_of(torch.ones(1))])
    ...     digester.take() == [digest_of(torch.zeros(1)), digest_of(torch.ones(1))]
    True
    """

    def __init__(self) -> None:
        self._pool = ThreadPoolExecutor(1, thread_name_prefix="rollmatch-digester")
        self._batches: list[Future[list[bytes]]] = []
        self._waiting: list[torch.Tensor] = []
        self._num_bytes = 0

    def __enter__(self) -> "Digester":
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._pool.shutdown(cancel_futures=True)

    def add(self, raw: Sequence[torch.Tensor]) -> None:
        """Bytes of tensors, which stay as they are until their digests are taken."""
        self._waiting += raw
        self._num_bytes += sum(map(len, raw))
        if self._num_bytes >= BATCH_BYTES:
            batch, self._waiting, self._num_bytes = self._waiting, [], 0
            self._batches.append(self._pool.submit(_hash, batch))

    def take(self) -> list[bytes]:
        """[n] the digests of all tensors; once."""
        last = _hash(self._waiting)
        return [digest for batch in self._batches for digest in batch.result()] + last


def _hash(raw: Sequence[torch.Tensor]) -> list[bytes]:
    return [digest_of_bytes(part) for part in raw]
