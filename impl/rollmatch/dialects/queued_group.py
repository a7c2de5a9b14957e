"""The group that servers of the swift and trl dialects open: vLLM's ``StatelessProcessGroup``, and gloo on its store.

The server's first worker holds the store, the learner is the last rank. Only what the learner needs is here: to join,
to send, and to pass the group's barrier, whose name rank 0 puts into the store as a pickled text. Source: vLLM 0.32
``distributed/utils.py``.
"""

import io
import pickle
from collections.abc import Sequence
from datetime import timedelta
from typing import Any

from torch import Tensor
from torch._C._distributed_c10d import TCPStore

from rollmatch.weights.gloo_group import GroupAddress, TransferFailed, broadcast_on, not_joined, open_stateless


class QueuedGroup:
    """One server's workers and the learner. Errors of ``send``: ``TransferFailed``."""

    def __init__(self, address: GroupAddress) -> None:
        """Join as the last rank. Errors: ``CommunicatorTimeout``."""
        self.address, self._num_barriers = address, 0
        try:
            self._store = _enter_store(address)
            self._group = open_stateless(address, self._store)
        except RuntimeError as error:
            raise not_joined(address, error) from error
        self._store.set_timeout(timedelta(seconds=address.timeout_s))

    def send(self, tensor: Tensor) -> None:
        """Broadcast, then the barrier: the workers have the bytes, but may not have loaded them."""
        try:
            broadcast_on(self._group, tensor, source=self.address.rank, timeout_s=self.address.timeout_s)
            self._barrier()
        except (RuntimeError, ValueError) as error:
            problem = f"at {self.address.host}:{self.address.port}: {str(error).splitlines()[0]}"
            raise TransferFailed(problem, key="broadcast", remedy="Look at the server's output.") from error

    def _barrier(self) -> None:
        name = read_text(self._store.get(f"broadcast_from/0/{self._num_barriers}"))
        self._num_barriers += 1
        arrivals: Sequence[str] = [f"arrival_{name}_{rank}" for rank in range(self.address.world_size)]
        self._store.set(arrivals[self.address.rank], "1")
        for arrival in arrivals:
            self._store.get(arrival)
        self._store.set(f"departure_{name}_{self.address.rank}", "1")


def _enter_store(address: GroupAddress) -> TCPStore:
    """A real server's store counts those who enter and is not ready before all are counted; so this side is counted."""
    limit = timedelta(seconds=address.join_timeout_s)
    return TCPStore(address.host, address.port, address.world_size, is_master=False, timeout=limit)


class _TextOnly(pickle.Unpickler):
    """A pickle could otherwise run whatever the store's writer likes."""

    def find_class(self, module_name: str, global_name: str, /) -> Any:
        raise ValueError(f"a barrier's name is a text, not {module_name}.{global_name}")


def read_text(packed: bytes) -> str:
    """A pickled text; nothing else is read.

    >>> read_text(pickle.dumps("barrier_7"))
    'barrier_7'
    """
    return str(_TextOnly(io.BytesIO(packed)).load())
