"""What carries weights to a set of servers, whatever dialect they speak."""

from abc import ABC, abstractmethod
from collections.abc import Iterable, Sequence

from torch import Tensor

from rollmatch.weights.named_weights import Adapter
from rollmatch.weights.plan import Spec


class WeightSender(ABC):
    """Carries weights to all servers as one version, or fails as a whole. Made by ``rollout.weight_sender``."""

    @property
    def instances(self) -> tuple[str, ...] | None:
        """The start id of each server that took the last sync; None where servers do not report it."""
        return None

    def check(self, specs: Sequence[Spec]) -> bool:
        """Compare names, shapes and types with what the servers hold; False where servers do not list it."""
        return False

    @abstractmethod
    def send(self, weights: Iterable[tuple[str, Tensor]], *, version: int) -> None:
        """All weights, committed as ``version`` by every server."""

    @abstractmethod
    def send_adapter(self, adapter: Adapter, *, version: int) -> None:
        """The same for an adapter that the servers merge themselves."""

    @abstractmethod
    def close(self) -> None:
        """Leave the group."""
