"""The ways of splitting GPUs between rollout servers and learner ranks."""

from collections.abc import Iterator
from dataclasses import dataclass


@dataclass(frozen=True, slots=True, kw_only=True)
class Split:
    """So many GPUs generate, so many learn; both at once where an engine lives in each learner's process."""

    num_serving: int
    num_learning: int
    tp: int = 1
    """GPUs of one engine."""
    is_colocated: bool = False

    @property
    def num_engines(self) -> int:
        """Replicas."""
        return self.num_serving // self.tp

    def __str__(self) -> str:
        if self.is_colocated:
            return f"{self.num_learning} colocated" + (f", tp {self.tp}" if self.tp > 1 else "")
        return f"{self.num_serving}v{self.num_learning}" + (f", tp {self.tp}" if self.tp > 1 else "")


def splits_of(num_gpus: int, *, tp: int, colocated: bool) -> Iterator[Split]:
    """All of them, engines of ``tp`` GPUs each.

    >>> [str(split) for split in splits_of(4, tp=1, colocated=False)]
    ['1v3', '2v2', '3v1']
    >>> [str(split) for split in splits_of(4, tp=2, colocated=True)]
    ['4 colocated, tp 2']
    """
    if colocated:
        if num_gpus % tp == 0:
            yield Split(num_serving=num_gpus, num_learning=num_gpus, tp=tp, is_colocated=True)
        return
    for num_serving in range(tp, num_gpus, tp):
        yield Split(num_serving=num_serving, num_learning=num_gpus - num_serving, tp=tp)
