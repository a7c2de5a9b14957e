"""The contract of every rollout backend, and requests with their seeds."""

from abc import ABC, abstractmethod
from collections.abc import Callable, Container, Iterable, Sequence
from dataclasses import asdict, dataclass
from typing import TYPE_CHECKING, Any

import numpy as np
from torch import Tensor

from rollmatch.errors import RolloutError
from rollmatch.model.vocabulary import split_at_stop
from rollmatch.records import Rollout, RolloutRequest, Sample, cut_runs

if TYPE_CHECKING:
    from rollmatch.errors import RollmatchError
    from rollmatch.rollout.episodes import TurnWriter
    from rollmatch.rollout.members import ServerMembers
    from rollmatch.weights.named_weights import Adapter


@dataclass(frozen=True, slots=True, kw_only=True)
class Decoding:
    """How a response is sampled; goes into the journal as it is."""

    max_new_tokens: int
    temperature: float = 0.0
    """0 takes the likeliest token."""
    top_p: float = 1.0
    top_k: int = -1
    """-1: all tokens."""
    repetition_penalty: float = 1.0
    num_beams: int = 1
    """Above 1: beam search (``hf`` only)."""
    logprobs: bool = False
    """Whether each sampled token's log-probability comes back."""

    @property
    def is_shaped(self) -> bool:
        """Whether tokens are sampled from another distribution than the model's own."""
        return (self.temperature, self.top_p, self.repetition_penalty) != (1.0, 1.0, 1.0) or self.top_k > 0

    def values(self) -> dict[str, Any]:
        """Those that vLLM has, too, by its names."""
        names = ("temperature", "top_p", "top_k", "repetition_penalty")
        return {name: getattr(self, name) for name in names}

    def as_dict(self) -> dict[str, object]:
        """Plain values, for the journal."""
        return asdict(self)


class RolloutBackend(ABC):
    """Requests in, rollouts out.

    ``generate`` keeps the order, returns ids exactly as sampled with the stop token trimmed, and never packs.
    ``push`` makes the weights of ``version`` the ones that every later rollout is written with. What has a default is
    for engines that an adapter can be sent to, that may lose their weights, or that are servers.
    """

    policy_version: int
    """Version of the weights it writes with; 0 before the first ``push``."""
    takes_adapters = False
    """Whether an adapter alone can be sent; one that has the policy itself needs none."""
    members: "ServerMembers | None" = None
    """The servers, and which of them take part; None where there are none."""

    @abstractmethod
    def push(self, weights: Iterable[tuple[str, Tensor]], *, version: int) -> None:
        """Take (checkpoint name, tensor) of every weight; none is kept waiting on disk."""

    @abstractmethod
    def generate(self, requests: Sequence[RolloutRequest], decoding: Decoding) -> list[Rollout]:
        """One rollout per request, in order. Errors: ``rollouts-missing``, ``rollout-before-sync``."""

    def open_turns(self, num_episodes: int, decoding: Decoding) -> "TurnWriter | None":
        """What writes single turns of so many episodes at the same time; None: they are played in waves."""
        return None

    def push_adapter(self, adapter: "Adapter", *, version: int) -> None:
        """As ``push``, for an adapter."""
        raise NotImplementedError

    def is_current(self) -> bool:
        """Whether its engines still are those that took the last push."""
        return True

    def may_push_again(self, error: "RollmatchError") -> bool:
        """Whether a push that failed may succeed now, after waiting for servers."""
        return False

    def rest(self) -> None:  # noqa: B027
        """Give the learner the memory that only rollouts need, until the next ``push`` or ``generate``."""

    def close(self) -> None:  # noqa: B027
        """Free what it holds."""


def make_rollout(  # noqa: PLR0913  # what an engine returns of a request
    request: RolloutRequest,
    prompt_token_ids: Sequence[int],
    sampled: Sequence[int],
    logprobs: Sequence[float] | None,
    *,
    stop_ids: Container[int],
    version: int,
    runs: Sequence[tuple[int, int]] = (),
) -> Rollout:
    """The rollout of a response as an engine sampled it; ``logprobs`` is None where none were requested.

    ``runs``: of (version, number of tokens), in place of ``version``; empty where the engine names none. The end is the
    first stop token, whatever the engine says. Nothing is left of what was sampled behind that.
    """
    response, stop_id = split_at_stop(sampled, stop_ids)
    num_sampled = len(response) + (stop_id is not None)
    runs = cut_runs(runs, num_sampled)
    return Rollout(
        request_id=request.request_id,
        prompt_token_ids=tuple(prompt_token_ids),
        response_token_ids=response,
        stop_id=stop_id,
        policy_version=min((each for each, _ in runs), default=version),
        response_logprobs=None if logprobs is None else tuple(logprobs[:num_sampled]),
        version_runs=runs if len(runs) > 1 else (),
    )


def check_answers(requests: Sequence[RolloutRequest], rollouts: Sequence[Rollout]) -> None:
    """Raise ``rollouts-missing`` unless request ids and rollout ids agree one by one."""
    requested, answered = ([item.request_id for item in items] for items in (requests, rollouts))
    if requested != answered:
        raise RolloutError(
            f"{len(answered)} answers for {len(requested)} requests, or in another order",
            code="rollouts-missing",
            key=next(
                (a for a, b in zip(requested, answered, strict=False) if a != b), requested[-1] if requested else ""
            ),
        )


def derive_seed(run_seed: int, *, step: int, rank: int, index: int) -> int:
    """One seed per request from (``training.seed``, ``global_step``, rank, within-step sample index).

    In 1 .. 2**31 - 1: never 0, which ms-swift reads as unset. Uses numpy's SeedSequence, whose mixing is stable
    across versions and machines.

    >>> derive_seed(42, step=3, rank=0, index=5) == derive_seed(42, step=3, rank=0, index=5)
    True
    >>> len({derive_seed(42, step=3, rank=rank, index=index) for rank in range(2) for index in range(50)})
    100
    """
    word = np.random.SeedSequence([run_seed, step, rank, index]).generate_state(1, np.uint32)[0]
    return (int(word) & 0x7FFFFFFF) or 1


def make_requests(
    samples: Sequence[Sample],
    *,
    prompt_of: Callable[[Sample], tuple[int, ...]],
    run_seed: int,
    step: int,
    rank: int,
) -> list[RolloutRequest]:
    """One request per sample, in order; the id reads ``<optimizer step>.<rank>.<index>``.

    A sample that is to be answered several times stands there as often: each place has a seed of its own.
    """
    return [
        RolloutRequest(
            request_id=f"{step}.{rank}.{index}",
            sample=sample,
            prompt_token_ids=prompt_of(sample),
            seed=derive_seed(run_seed, step=step, rank=rank, index=index),
        )
        for index, sample in enumerate(samples)
    ]
