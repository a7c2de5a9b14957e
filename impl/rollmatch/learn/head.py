"""A loss in the place of the output head, in chunks of rows, so that logits never exist all at once.

With 152k ids the logits of a row outweigh the rest of its pass, so ``Scoring`` puts the loss in the head's place: the
head returns the loss, within the model's forward pass, so wrappers (DDP, adapters, autocast) see every weight used.

Each score belongs to one row, so its gradient by that row's hidden state has that state's size. With a frozen linear
head (adapters are trained, or the language model is frozen) this gradient is made in the forward pass, where the logits
are; backward only scales it, and no logits are made twice. Any other head is called again by backward. Source of making
gradients in forward: Liger kernel (arXiv 2410.10989), cut cross-entropy (2411.09009).
"""

from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager, nullcontext
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn
from torch.autograd.function import once_differentiable
from torch.nn import functional
from torch.utils.checkpoint import checkpoint

from rollmatch.learn.softmax import logsumexps, to_probs


def to_device(numbers: Iterable[float], *, dtype: torch.dtype, device: torch.device) -> Tensor:
    """A tensor of them there; a GPU reads them from pinned memory when it gets that far.

    >>> to_device([1, 2], dtype=torch.int64, device=torch.device("cpu"))
    tensor([1, 2])
    """
    made = torch.tensor(list(numbers), dtype=dtype)
    return made.pin_memory().to(device, non_blocking=True) if device.type == "cuda" else made.to(device)


def widened(logits: Tensor) -> Tensor:
    """In float32, or wider where they are."""
    return logits.to(torch.promote_types(logits.dtype, torch.float32))


CHUNK_LEN = 256
"""Rows at once of a head that is called again by backward: half a GB for 152k ids."""
CHUNK_BYTES = 280_000_000
"""Of a chunk's logits, whose gradient is made in forward: rows enough for matrix products at full speed."""
ROWS_STEP = 128
"""Rows of a tile of a matrix product, of which chunks are made."""

_PROBES = (12345.678, 0.1)
"""Numbers that change where logits are capped, scaled, moved or rounded to half precision."""

Head = Callable[[Tensor], Tensor]
"""[K, H] hidden states -> [K, V] logits."""
ColumnScore = Callable[[Tensor, Tensor, Tensor], Tensor]
"""([n, C] logits of chosen ids, [n] logsumexp of all, [n] truth) -> [n] scores; every row by itself."""


@dataclass(frozen=True, slots=True, kw_only=True)
class HeadStates:
    """What goes into the head, [N, H]; stands for logits [N, V] that are not made whole."""

    hidden: Tensor
    head: Head
    weight: Tensor | None = None
    """[V, H] of a linear head that does not learn."""
    bias: Tensor | None = None

    @classmethod
    def of(cls, hidden: Tensor, head: Head, *, forward: Head | None = None) -> "HeadStates":
        """``forward``: how to call the head, where that is not the head itself."""
        learns = isinstance(head, nn.Module) and any(part.requires_grad for part in head.parameters())
        plain = nn.Linear.forward  # of classes that FSDP2 derives, too
        linear = head if isinstance(head, nn.Linear) and type(head).forward is plain and not learns else None
        weight, bias = (linear.weight, linear.bias) if linear is not None else (None, None)
        return cls(hidden=hidden, head=forward or head, weight=weight, bias=bias)

    def __len__(self) -> int:
        return len(self.hidden)

    @property
    def device(self) -> torch.device:
        """Where the hidden states are."""
        return self.hidden.device

    def __getitem__(self, rows: Tensor) -> "HeadStates":
        return HeadStates(hidden=self.hidden[rows], head=self.head, weight=self.weight, bias=self.bias)


Logits = Tensor | HeadStates
"""Logits, or what stands for them."""
Score = Callable[[Logits], Tensor]
"""Logits [N, V], or what stands for them, -> losses of any shape."""


class Scoring:
    """Forward passes that end in a loss. ``head``: where to score; None: on logits."""

    def __init__(self, head: nn.Module | None) -> None:
        self.head = head
        self._is_proven = False

    def __call__(self, model: nn.Module, inputs: dict[str, object], score: Score) -> tuple[Tensor, object]:
        """What ``score`` makes of the logits of one forward pass, with its graph, and the model's output."""
        if self.head is not None and not self._is_proven:
            if (proven := self._prove(self.head, model, inputs, score)) is not None:
                return proven
            self.head = None
        with losing_logits(self.head, score) if self.head is not None else nullcontext():
            outputs = model(**inputs)
        return outputs.logits if self.head is not None else score(outputs.logits.flatten(0, -2)), outputs

    def _prove(
        self, head: nn.Module, model: nn.Module, inputs: dict[str, object], score: Score
    ) -> tuple[Tensor, object] | None:
        """The first pass; None where the model makes something of what its head returns (caps it, scales it).

        A loss alone cannot show it, as one of 0 stays 0: ``_PROBES`` stand below it.
        """
        scored: list[Tensor] = []

        def probed(logits: Logits) -> Tensor:
            scored.append(score(logits))
            return torch.cat([scored[-1].flatten(), scored[-1].new_tensor(_PROBES)])[:, None]

        with losing_logits(head, probed) as made:
            outputs = model(**inputs)
        found, probes = outputs.logits, slice(-len(_PROBES), None)
        is_same = len(made) == 1 and found.shape == made[0].shape
        self._is_proven = is_same and torch.equal(found[probes].double(), made[0][probes].double())
        return (found[: probes.start, 0].reshape(scored[0].shape), outputs) if self._is_proven else None


@contextmanager
def losing_logits(head: nn.Module, score: Score) -> Iterator[list[Tensor]]:
    """While this lasts, the head returns what ``score`` makes of its input; yields all it returned."""
    plain, own = head.forward, head.__dict__.get("forward")
    made: list[Tensor] = []

    def scored(hidden: Tensor) -> Tensor:
        made.append(score(HeadStates.of(hidden.flatten(0, -2), head, forward=plain)))
        return made[-1]

    head.forward = scored
    try:
        yield made
    finally:
        del head.forward
        if own is not None:
            head.forward = own


def logprobs_of(logits: Logits, ids: Tensor, *, temperature: float = 1.0, excluded_ids: Sequence[int] = ()) -> Tensor:
    """[n] log-probabilities of ids [n] under softmax(logits / temperature), in float32 at least.

    ``excluded_ids`` have probability 0: the distribution is that of a sampler that bans them.

    >>> head = torch.nn.Linear(2, 4, bias=False).requires_grad_(False)
    >>> states = HeadStates.of(torch.zeros(1, 2), head)
    >>> logprobs_of(states, torch.tensor([3])).exp().tolist()
    [0.25]
    """
    if isinstance(logits, Tensor):
        scaled = _without_ids(widened(logits) / temperature, excluded_ids)
        return -functional.cross_entropy(scaled, ids, reduction="none")
    if logits.weight is None or not torch.is_grad_enabled():  # without autograd, no gradient is needed

        def score(hidden: Tensor, some: Tensor) -> Tensor:
            return logprobs_of(logits.head(hidden), some, temperature=temperature, excluded_ids=excluded_ids)

        (scores,) = _in_chunks(score, logits.hidden, ids)
        return scores
    hidden, weight, bias = _as_computed(logits)
    logprobs: Tensor = _Logprobs.apply(hidden, (weight, bias), ids, (temperature, excluded_ids))  # type: ignore[no-untyped-call]
    return logprobs


def row_scores(logits: Logits, score: Callable[..., tuple[Tensor, ...]], *columns: Tensor) -> tuple[Tensor, ...]:
    """What ``score`` makes of logits [n, V], in float32 at least, and of columns [n, ...]: tensors of [n, ...]; every
    row by itself."""
    if isinstance(logits, Tensor):
        return score(widened(logits), *columns)

    def of_hidden(hidden: Tensor, *some: Tensor) -> tuple[Tensor, ...]:
        return score(widened(logits.head(hidden)), *some)

    return _in_chunks(of_hidden, logits.hidden, *columns)


def logprobs_with_top(
    logits: Logits, ids: Tensor, *, top_k: int, temperature: float = 1.0, excluded_ids: Sequence[int] = ()
) -> Tensor:
    """[n, 1 + 2 * top_k] as ``logprobs_of``; then the likeliest ids, likeliest first, and their log-probabilities.

    Ids are exact in float32. Where fewer ids than ``top_k`` have a probability, the rest has minus infinity.

    >>> logits = torch.tensor([[0.0, 2.0, 1.0]])
    >>> [round(value, 2) for value in logprobs_with_top(logits, torch.tensor([0]), top_k=2)[0].tolist()]
    [-2.41, 1.0, 2.0, -0.41, -1.41]
    """

    def of_rows(rows: Tensor, some: Tensor) -> tuple[Tensor]:
        logprobs = log_distribution(rows, temperature=temperature, excluded_ids=excluded_ids)
        top = logprobs.topk(top_k, dim=-1)
        return (torch.cat([logprobs.gather(-1, some[:, None]), top.indices, top.values], dim=-1),)

    return row_scores(logits, of_rows, ids)[0]


def log_distribution(rows: Tensor, *, temperature: float, excluded_ids: Sequence[int]) -> Tensor:
    """[n, V] log-probabilities by which responses are sampled, of logits [n, V]; minus infinity at excluded ids."""
    return _without_ids(rows / temperature, excluded_ids).log_softmax(-1)


def _without_ids(logits: Tensor, excluded_ids: Sequence[int]) -> Tensor:
    """Logits [n, V] with minus infinity at the excluded ids."""
    columns = to_device(excluded_ids, dtype=torch.int64, device=logits.device)
    return logits.index_fill(-1, columns, -torch.inf) if excluded_ids else logits


def column_scores(
    logits: HeadStates, columns: Tensor, truth: Tensor, *, score: ColumnScore, temperature: float
) -> Tensor:
    """[n] ``score`` of logits / temperature at the ids ``columns`` [C], for rows with ``truth`` [n]."""
    if logits.weight is None:

        def of_logits(hidden: Tensor, some: Tensor) -> Tensor:
            scaled = widened(logits.head(hidden)) / temperature
            return score(scaled[:, columns], scaled.logsumexp(-1), some)

        return _in_chunks(of_logits, logits.hidden, truth)[0]
    hidden, weight, bias = _as_computed(logits)
    settings = (columns, truth, score, temperature)
    scores: Tensor = _ColumnScores.apply(hidden, (weight, bias), settings)  # type: ignore[no-untyped-call]
    return scores


def _in_chunks(score: Callable[..., Any], *columns: Tensor) -> tuple[Tensor, ...]:
    """Rows of ``score`` over chunks of equally long columns; empty columns make one empty chunk, for the graph."""
    pieces = zip(*(torch.split(column, CHUNK_LEN) for column in columns), strict=True)
    parts = [checkpoint(score, *piece, use_reentrant=False, preserve_rng_state=False) for piece in pieces]
    rows = [part if isinstance(part, tuple) else (part,) for part in parts]
    return tuple(torch.cat(column) for column in zip(*rows, strict=True))


def _as_computed(states: HeadStates) -> tuple[Tensor, Tensor, Tensor | None]:
    """Hidden states, weight and bias in the dtype of the matrix product, converted once and not chunk by chunk."""
    assert states.weight is not None
    kind = states.device.type
    dtype = torch.get_autocast_dtype(kind) if torch.is_autocast_enabled(kind) else states.weight.dtype
    return states.hidden.to(dtype), states.weight.to(dtype), None if states.bias is None else states.bias.to(dtype)


def _chunks(hidden: Tensor, weight: Tensor, *columns: Tensor) -> list[tuple[Tensor, ...]]:
    """Chunks of rows whose logits take ``CHUNK_BYTES`` at most."""
    size = max(1, CHUNK_BYTES // (len(weight) * weight.element_size()))
    size -= size % ROWS_STEP if size > ROWS_STEP else 0
    return list(zip(*(torch.split(column, size) for column in (hidden, *columns)), strict=True))


class _MadeInForward(torch.autograd.Function):
    """Scores of rows; ``forward`` saves their gradients by the hidden states, its first argument."""

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad: Tensor, *_: Tensor) -> tuple[Tensor | None, ...]:
        (grad_hidden,) = ctx.saved_tensors
        return (grad[:, None] * grad_hidden).to(grad_hidden.dtype), *[None] * (len(ctx.needs_input_grad) - 1)


class _Logprobs(_MadeInForward):
    """Log-probabilities with their gradient by the hidden states: (onehot - p) @ weight / temperature."""

    @staticmethod
    def forward(ctx: Any, hidden: Tensor, linear: Any, ids: Tensor, sampling: tuple[float, Sequence[int]]) -> Tensor:
        scores, grad_hidden = [], torch.empty_like(hidden)
        with torch.autocast(hidden.device.type, enabled=False):
            for rows, some, place in _chunks(hidden, linear[0], ids, grad_hidden):
                scores.append(_logprobs_of_chunk(rows, linear, (some, *sampling), place))
        ctx.save_for_backward(grad_hidden)
        return torch.cat(scores)


def _logprobs_of_chunk(rows: Tensor, linear: Any, settings: Any, grad_hidden: Tensor) -> Tensor:
    """Scores; their gradients are written to ``grad_hidden``."""
    (weight, bias), (ids, temperature, excluded_ids) = linear, settings
    logits, ids = _without_ids(functional.linear(rows, weight, bias), excluded_ids), ids[:, None]
    everything = logsumexps(logits, temperature)
    scores: Tensor = widened(logits.gather(-1, ids)) / temperature - everything[:, None]
    to_probs(logits, everything, temperature)
    # Recompute the chosen probability: subtracting 1 after rounding would lose its digits.
    logits.scatter_(-1, ids, (scores.exp() - 1).to(logits.dtype))
    grad_hidden.copy_((logits @ weight).div_(-temperature))
    return scores[:, 0]


class _ColumnScores(_MadeInForward):
    """Scores of some columns and the logsumexp of all, with their gradients by the hidden states."""

    @staticmethod
    def forward(ctx: Any, hidden: Tensor, linear: Any, settings: Any) -> Tensor:
        columns, truth, *rest = settings
        scores, grad_hidden = [], torch.empty_like(hidden)
        with torch.autocast(hidden.device.type, enabled=False):
            for rows, some, place in _chunks(hidden, linear[0], truth, grad_hidden):
                scores.append(_columns_of_chunk(rows, linear, (columns, some, *rest), place))
        ctx.save_for_backward(grad_hidden)
        return torch.cat(scores)


def _columns_of_chunk(rows: Tensor, linear: Any, settings: Any, grad_hidden: Tensor) -> Tensor:
    """Scores; their gradients are written to ``grad_hidden``."""
    (weight, bias), (columns, truth, score, temperature) = linear, settings
    logits = functional.linear(rows, weight, bias)
    chosen = (widened(logits[:, columns]) / temperature).requires_grad_()
    everything = logsumexps(logits, temperature).requires_grad_()
    with torch.enable_grad():
        scores: Tensor = score(chosen, everything, truth)
        of_chosen, of_all = torch.autograd.grad(scores.sum(), (chosen, everything), allow_unused=True)
    assert of_chosen is not None
    gradient = of_chosen.to(weight.dtype) @ weight[columns]
    if of_all is not None:  # the score moves with the logsumexp, through which all logits count
        to_probs(logits, everything.detach(), temperature, factors=of_all)
        gradient += logits @ weight
    grad_hidden.copy_(gradient.div_(temperature))
    return scores.detach()
