"""A source of rollouts: it sends weights and requests and returns responses, on all learner ranks together.

Where a server is restarted meanwhile, every rank learns the outcome. ``overlap`` says when a step asks for rollouts.
"""

import logging
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from threading import Lock
from typing import Generic, NamedTuple, TypeVar, cast

import torch

from rollmatch.environments.episode import Episode
from rollmatch.errors import RolloutError
from rollmatch.journal import Journal
from rollmatch.model.images import ImageFeatures
from rollmatch.model.template import Template
from rollmatch.ranks import Ranks
from rollmatch.records import Rollout, RolloutRequest, Sample
from rollmatch.rollout.backend import Decoding, make_requests
from rollmatch.rollout.episodes import EpisodeRunner, begin_all, play_apart, play_in_waves
from rollmatch.rollout.fence import Fence
from rollmatch.rollout.retry import ServerRestarted, shared_failure
from rollmatch.weights.named_weights import NamedWeights

LOG = logging.getLogger("rollmatch.rollout")
MAX_RESTARTS = 3
"""Restarts of servers during one attempt that are answered by another sync."""

Result = TypeVar("Result")


@dataclass(frozen=True, slots=True, kw_only=True)
class RolloutSource:
    """Weights and requests out, rollouts back. Made by ``run.assemble``."""

    template: Template
    fence: Fence
    decoding: Decoding
    eval_decoding: Decoding
    journal: Journal
    ranks: Ranks
    run_seed: int
    world: EpisodeRunner | None = None
    """Where responses have several turns: a rollout is a whole episode then."""
    precision: str = ""
    """In which responses are computed, for people."""
    num_threads: int | None = None
    """torch's CPU threads during sync and generation; None: unchanged."""
    gate: "Lock | None" = None
    """Of a source beside learning: held by each of its calls, and by syncs. None: calls are the main thread's."""

    def sync(self, step: int, weights: Callable[[], NamedWeights]) -> float:
        """Send the weights if the learner has moved since the last sync; returns seconds. Errors: ``PushFailed``."""
        with Threads(self.num_threads):
            return self.fence.sync_if_due(step, weights)

    def generate(self, requests: Sequence[RolloutRequest], decoding: Decoding) -> list[Rollout]:
        """Rollouts by the weights of the last sync, one per request, in order. All ranks call it, equally often.

        A rollout that continues a prefix names the version of its prefix, also where a restarted server got the same
        weights again, as a newer version. Errors: as ``settle``.
        """
        rollouts = self._generate(requests, decoding)
        return [self._as_begun(*pair) for pair in zip(requests, rollouts, strict=True)]

    def _as_begun(self, request: RolloutRequest, rollout: Rollout) -> Rollout:
        begun, step_of = request.policy_version, self.fence.step_of
        is_same = begun in step_of and step_of[begun] == step_of.get(rollout.policy_version)
        return replace(rollout, policy_version=begun) if begun is not None and is_same else rollout

    def play(self, episodes: Sequence[Episode], decoding: Decoding) -> None:
        """Play episodes to their ends by the weights of the last sync. All ranks call it, equally often.

        Each goes at its own pace where the backend writes single turns: a server that is restarted costs the turns
        under way, which are written after the next sync. Errors: as ``settle``, those of ``Episode.take``.
        """
        turns = self.fence.backend.open_turns(len(episodes), decoding)
        with Threads(self.num_threads):
            if turns is None:
                play_in_waves(episodes, decoding, generate=self.generate, ranks=self.ranks)
            else:
                self.settle(lambda: play_apart(episodes, turns.write, as_begun=self._as_begun, drive=turns.drive))

    def settle(self, attempt: Callable[[], Result], *, step: int | None = None) -> list[Result]:
        """``attempt`` on all ranks together, again after a restart of a server. Errors: as the function ``settle``.

        Beside learning nothing is sent, so that a restart is an error there: ``ServerRestarted``, on all ranks.
        """
        if (gate := self.gate) is not None:

            def gated() -> Result:
                with gate:
                    return attempt()

            return together(gated, ranks=self.ranks)
        return settle(attempt, ranks=self.ranks, fence=self.fence, journal=self.journal, step=step)

    def roll_out(self, samples: Sequence[Sample], step: int, *, purpose: str, round_index: int = 0) -> list[Rollout]:
        """One rollout per sample, in order, by all ranks together.

        ``purpose`` is train, eval, again (segments that became too old), or further (in place of groups without
        spread; ``round_index``: rounds of the step before this one). Errors: as ``settle``.
        """
        requests = self.make_requests(samples, step, purpose=purpose, round_index=round_index)
        decoding = self.decoding_of(purpose)
        if self.world is None:
            return self._generate(requests, decoding, step=step)
        episodes = begin_all(self.world, requests, decoding)
        self.play(episodes, decoding)
        return [episode.rollout() for episode in episodes]

    def _generate(
        self, requests: Sequence[RolloutRequest], decoding: Decoding, *, step: int | None = None
    ) -> list[Rollout]:
        """One rollout per request; on all ranks together, which keep their own."""
        rollouts: list[Rollout] = []

        def attempt() -> None:
            rollouts[:] = self.fence.backend.generate(requests, decoding)

        with Threads(self.num_threads):
            self.settle(attempt, step=step)
        return rollouts

    def make_requests(
        self, samples: Sequence[Sample], step: int, *, purpose: str = "train", round_index: int = 0
    ) -> list[RolloutRequest]:
        """The requests of an optimizer step, written to the journal.

        Requests made again, those of an evaluation and further ones have ids and seeds of ranks that do not exist: with
        2 ranks, rank 1 trains as 1, asks again as 3, evaluates as 5, and asks for further samples as 7, 9, and so on.
        So no two requests of a step have the same seed.
        """
        block = ("train", "again", "eval", "further").index(purpose) + round_index
        requests = make_requests(
            samples,
            prompt_of=self.template.prompt_token_ids,
            run_seed=self.run_seed,
            step=step,
            rank=self.ranks.rank + block * self.ranks.learner_world_size,
        )
        self.journal.write(
            "requested",
            step=step,
            purpose=purpose,
            num_requests=len(requests),
            seeds=[request.seed for request in requests],
            sample_ids=[sample.sample_id for sample in samples],
            decoding=self.decoding_of(purpose).as_dict(),
        )
        return requests

    def decoding_of(self, purpose: str) -> Decoding:
        """How training rollouts, or those of an evaluation, are sampled."""
        return self.eval_decoding if purpose == "eval" else self.decoding

    def check_alignment(self, samples: Sequence[Sample], rollouts: Sequence[Rollout]) -> dict[int, ImageFeatures]:
        """Features of each sample's images, by sample id, after checking that the engine saw the learner's prompt."""
        template = self.template
        features = template.preparation.collect(samples)
        for sample, rollout in zip(samples, rollouts, strict=True):
            prompt = template.expand(template.prompt_token_ids(sample), features[sample.sample_id])
            template.check_alignment(sample, prompt, rollout)
        return features

    @property
    def policy_version(self) -> int:
        """Version of the weights that rollouts are generated with now."""
        return self.fence.backend.policy_version


class _Outcome(NamedTuple, Generic[Result]):
    """Of one rank's attempt; both texts are empty for one that succeeded."""

    restarted: str = ""
    failed: str = ""
    result: Result | None = None


def settle(
    attempt: Callable[[], Result], *, ranks: Ranks, fence: Fence, journal: Journal, step: int | None = None
) -> list[Result]:
    """The results of ``attempt`` on all ranks, in their order. All ranks call it, at the same place.

    A server that was restarted under any rank gets the weights again, from all ranks together; then every rank
    attempts once more. ``step`` is for the journal. Errors: the rank's own; ``rank-failed`` on the other ranks.
    """
    for restarts_left in reversed(range(MAX_RESTARTS + 1)):
        try:
            return together(attempt, ranks=ranks)
        except ServerRestarted as error:
            if not restarts_left:
                raise
            journal.write("restarted", step=step, problem=error.problem)
            LOG.warning("%s; sending the weights again", error.problem)
        fence.sync_again()
    raise AssertionError("the last round returns or raises")


def together(attempt: Callable[[], Result], *, ranks: Ranks) -> list[Result]:
    """The results of ``attempt`` on all ranks, in their order. All ranks call it, at the same place.

    Errors, on all ranks: the rank's own, or ``rank-failed``; ``ServerRestarted`` where nothing else failed.
    """
    error, outcome = _attempt(attempt)
    outcomes = ranks.gather(outcome)
    restarted = next((each.restarted for each in outcomes if each.restarted), "")
    for rank, each in enumerate(outcomes):
        if each.failed:
            own = None if isinstance(error, ServerRestarted) else error
            raise shared_failure(own, rank=rank, problem=each.failed, key="rollout")
    if restarted:
        remedy = "Resume the run; the first sync gives the server its weights."
        own = error or ServerRestarted(restarted, key="rollout", remedy=remedy)
        own.is_shared = True
        raise own
    return [cast(Result, each.result) for each in outcomes]


def _attempt(attempt: Callable[[], Result]) -> tuple[RolloutError | None, _Outcome[Result]]:
    try:
        return None, _Outcome(result=attempt())
    except ServerRestarted as error:
        return error, _Outcome(restarted=error.problem)
    except RolloutError as error:
        return error, _Outcome(failed=str(error))


class Threads:
    """torch's CPU threads inside a phase, and back to what they were."""

    def __init__(self, num_threads: int | None) -> None:
        self.num_threads = num_threads
        self.before = torch.get_num_threads()

    def __enter__(self) -> None:
        if self.num_threads:
            torch.set_num_threads(self.num_threads)

    def __exit__(self, *exception: object) -> None:
        if self.num_threads:
            torch.set_num_threads(self.before)
