"""Weights on their way to a backend, counted for the journal."""

from collections.abc import Callable, Iterator, Sequence

from torch import Tensor

from rollmatch.weights.named_weights import Adapter, NamedWeights
from rollmatch.weights.plan import Spec
from rollmatch.weights.stream import ListedWeights


class Counted:
    """Passes weights through and counts them; they are made when the backend first iterates, as a part of the push."""

    def __init__(self, weights: Callable[[], NamedWeights]) -> None:
        self._weights = weights
        self.num_tensors = 0
        self.num_bytes = 0

    @property
    def is_sharded(self) -> bool:
        """As of the weights; sharded by default, because that is safe."""
        return bool(getattr(self._weights(), "is_sharded", True))

    def specs(self) -> Sequence[Spec] | None:
        """As of the weights."""
        weights: object = self._weights()
        return weights.specs() if isinstance(weights, ListedWeights) else None

    def adapter(self) -> Adapter:
        """The adapter alone, counted."""
        adapter = self._weights().adapter()
        self.num_tensors = self.num_bytes = 0
        for _, tensor in adapter.tensors:
            self._count(tensor)
        return adapter

    def __iter__(self) -> Iterator[tuple[str, Tensor]]:
        self.num_tensors = self.num_bytes = 0
        for name, tensor in self._weights():
            self._count(tensor)
            yield name, tensor
            del tensor  # not kept while the next one is gathered

    def _count(self, tensor: Tensor) -> None:
        self.num_tensors += 1
        self.num_bytes += tensor.numel() * tensor.element_size()
