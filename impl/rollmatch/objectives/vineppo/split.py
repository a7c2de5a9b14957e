"""Where a response is cut into steps; every way of it tiles the sampled ids exactly."""

from bisect import bisect_left
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from itertools import accumulate
from math import log
from typing import Protocol

from rollmatch.environments.trajectory import Cuts, Trajectory
from rollmatch.errors import TargetError
from rollmatch.model.vocabulary import Vocabulary
from rollmatch.objectives.vineppo.prose import LINE_START, sentence_starts


class Splitter(Protocol):
    """A way to cut a trajectory into steps."""

    def cuts(self, trajectory: Trajectory) -> Cuts:
        """[S + 1] step bounds, from 0 to the number of ids."""


@dataclass(frozen=True, slots=True, kw_only=True)
class FixedTokens:
    """Steps of equally many tokens; the last one may be shorter.

    >>> FixedTokens(num_tokens=2).starts(5)
    (2, 4)
    """

    num_tokens: int

    def starts(self, length: int) -> tuple[int, ...]:
        return tuple(range(self.num_tokens, length, self.num_tokens))

    def cuts(self, trajectory: Trajectory) -> Cuts:
        """As the protocol."""
        return close(self.starts(len(trajectory.token_ids)), trajectory)


@dataclass(frozen=True, slots=True, kw_only=True)
class LowProbability:
    """A step starts at every ``every``-th token that the policy was unsure of: there the response could have forked.

    Source: SPO, arXiv 2505.23564, whose values are 0.9 and 5. Errors: ``logprobs-missing``.
    """

    threshold: float
    every: int

    def cuts(self, trajectory: Trajectory) -> Cuts:
        """As the protocol."""
        if trajectory.logprobs is None:
            raise TargetError(
                "the rollout has none",
                code="logprobs-missing",
                key=trajectory.sample.origin,
                remedy="Choose another splitter.",
            )
        return close(self.starts(trajectory.logprobs), trajectory)

    def starts(self, logprobs: Sequence[float]) -> tuple[int, ...]:
        """Positions of the chosen tokens.

        >>> LowProbability(threshold=0.9, every=2).starts((-1.0, -2.0, -0.01, -0.5, -0.7))
        (1, 4)
        """
        unsure = [place for place, logprob in enumerate(logprobs) if logprob < log(self.threshold)]
        return tuple(unsure[self.every - 1 :: self.every])


@dataclass(frozen=True, slots=True, kw_only=True)
class Turns:
    """One step per turn of the policy; what the environment answered belongs to the turn before it."""

    def cuts(self, trajectory: Trajectory) -> Cuts:
        """As the protocol."""
        return close((turn.start for turn in trajectory.turns), trajectory)


@dataclass(frozen=True, slots=True, kw_only=True)
class Lines:
    """One step per line; a line feed belongs to the line after it, empty lines make no step of their own.

    ``answer_mark`` begins a last line that belongs to the step before it, as ``#### `` in GSM8K.
    """

    vocabulary: Vocabulary
    answer_mark: str = ""

    def cuts(self, trajectory: Trajectory) -> Cuts:
        """As the protocol."""
        pieces = self.vocabulary.pieces(trajectory.token_ids)
        return close(tokens_at(line_starts(b"".join(pieces), self.answer_mark.encode()), pieces), trajectory)


@dataclass(frozen=True, slots=True, kw_only=True)
class Sentences:
    """One step per line or sentence of a text with LaTeX in it; see ``prose``."""

    vocabulary: Vocabulary

    def cuts(self, trajectory: Trajectory) -> Cuts:
        """As the protocol."""
        pieces = self.vocabulary.pieces(trajectory.token_ids)
        return close(tokens_at(sentence_starts(b"".join(pieces)), pieces), trajectory)


@dataclass(frozen=True, slots=True, kw_only=True)
class AtMost:
    """Another splitter's steps, neighbours joined until there are no more than ``num_steps``."""

    splitter: Splitter
    num_steps: int

    def cuts(self, trajectory: Trajectory) -> Cuts:
        """As the protocol."""
        return join_steps(self.splitter.cuts(trajectory), self.num_steps)


def join_steps(cuts: Cuts, most: int) -> Cuts:
    """Evenly fewer steps.

    >>> join_steps((0, 1, 2, 3, 4, 9), 2), join_steps((0, 3, 9), 2)
    ((0, 2, 9), (0, 3, 9))
    """
    num = len(cuts) - 1
    return cuts if num <= most else tuple(cuts[place * num // most] for place in range(most + 1))


def line_starts(text: bytes, answer_mark: bytes = b"") -> list[int]:
    r"""Bytes at which lines begin, the first line left out.

    >>> line_starts(b"\n\na\nb\n\nc\n"), line_starts(b"a\nb\n#### 5", b"#### ")
    ([3, 5], [1])
    """
    first = len(text) - len(text.lstrip())
    starts = [found.start() for found in LINE_START.finditer(text) if found.start() > first]
    if answer_mark and starts and text[starts[-1] :].lstrip().startswith(answer_mark):
        starts.pop()
    return starts


def tokens_at(starts: Iterable[int], pieces: Sequence[bytes]) -> tuple[int, ...]:
    """Byte positions -> the first tokens that begin there or later; a token that a cut falls into stays before it.

    >>> tokens_at([0, 2, 3], [b"ab", b"cd", b"e"])
    (0, 1, 2)
    """
    begins = [0, *accumulate(map(len, pieces))][: len(pieces)]
    return tuple(bisect_left(begins, start) for start in starts)


def close(starts: Iterable[int], trajectory: Trajectory) -> Cuts:
    """Starts of steps, in any order and number -> cuts of the whole trajectory; no step starts in an observation."""
    length = len(trajectory.token_ids)
    places = (own_place(start, trajectory) for start in starts if 0 < start < length)
    return (0, *sorted({place for place in places if 0 < place < length}), length)


def own_place(start: int, trajectory: Trajectory) -> int:
    """The place itself where the policy wrote, else where its next turn starts, or the end.

    >>> from rollmatch.records import Sample
    >>> from rollmatch.environments.trajectory import Turn
    >>> whole = Trajectory(sample=Sample(sample_id=0, origin="x:1", images=()), prompt_token_ids=(1,), rewards=(),
    ...                    token_ids=(5, 6, 7, 8), policy_version=1, is_finished=True,
    ...                    turns=(Turn(start=0, stop=1, number=0), Turn(start=3, stop=4, number=1)))
    >>> [own_place(start, whole) for start in range(4)]
    [0, 3, 3, 3]
    """
    if trajectory.is_written(start):
        return start
    return next((turn.start for turn in trajectory.turns if turn.start >= start), len(trajectory.token_ids))
