"""Weights as a trainer announces them, compared with the checkpoint; nothing is refused, all is noted."""

import hashlib
from collections import Counter
from collections.abc import Mapping, Sequence
from typing import Any

import torch
from torch import Tensor

from conformance.judge.servers.broken.engine import TinyEngine
from conformance.judge.servers.broken.updates import Updates
from conformance.judge.trainers.arrivals import Arrivals, Event

MOST_NAMED = 5
Announced = tuple[str, tuple[int, ...], str]


class RecordedUpdates(Updates):
    """``dtype``: what each tensor is to have."""

    def __init__(self, engine: TinyEngine, arrivals: Arrivals, dtype: str) -> None:
        super().__init__(engine)
        self.arrivals, self.dtype = arrivals, dtype
        self.announced: list[Announced] = []
        self._first = engine.weights
        self._others = engine.model.state_dict().keys() - self._first.keys()
        """Names of tied tensors and buffers, which may come or not."""

    @property
    def is_open(self) -> bool:
        """Whether an update has begun and not ended."""
        return bool(self.announced)

    def check(self, names: Sequence[str], shapes: Sequence[Sequence[int]], dtypes: Sequence[str]) -> list[Tensor]:
        rows = [(name, tuple(shape), dtype) for name, shape, dtype in zip(names, shapes, dtypes, strict=True)]
        self.announced += rows
        return [torch.empty(shape, dtype=getattr(torch, dtype)) for _, shape, dtype in rows]

    def drop(self) -> None:
        super().drop()
        self.announced = []

    def finish(self) -> bool:
        """Serve what fits; False where nothing was announced."""
        if not self.announced:
            return False
        staged, announced = self.staged, self.announced
        self.drop()
        self.arrivals.note("update", **self._compared(announced, staged))
        self.engine.forget()
        self.engine.load(self.engine.weights | staged)
        self.version += 1
        return True

    def _compared(self, announced: Sequence[Announced], staged: Mapping[str, Tensor]) -> Event:
        first, counted = self._first, Counter(name for name, _, _ in announced)
        wrong = [
            f"{name}: {list(shape)}, not {list(first[name].shape)}"
            for name, shape, _ in announced
            if name in first and shape != tuple(first[name].shape)
        ]
        return {
            "num_tensors": len(announced),
            "missing": _few(first.keys() - counted.keys()),
            "unknown": _few(counted.keys() - first.keys() - self._others),
            "twice": _few(name for name, count in counted.items() if count > 1),
            "shapes": _few(wrong),
            "dtypes": _few(f"{name}: {dtype}" for name, _, dtype in announced if dtype != self.dtype),
            "not_the_checkpoint": _few(name for name, tensor in staged.items() if not _is_close(tensor, first[name])),
            "digest": _digest_of(staged),
        }


def _few(names: Any) -> list[str]:
    """Some, and how many.

    >>> _few("abcdefg")
    ['a', 'b', 'c', 'd', 'e', '7 in all']
    """
    listed = sorted(names)
    return [*listed[:MOST_NAMED], *([f"{len(listed)} in all"] if len(listed) > MOST_NAMED else [])]


def _is_close(one: Tensor, other: Tensor) -> bool:
    """Also after a trainer rounded to bfloat16."""
    return torch.allclose(one, other, rtol=2e-2, atol=1e-4)


def _digest_of(tensors: Mapping[str, Tensor]) -> str:
    made = hashlib.blake2b(digest_size=8)
    for name in sorted(tensors):
        made.update(name.encode())
        made.update(tensors[name].contiguous().numpy().tobytes())
    return made.hexdigest()
