"""Stage 1: no rollouts. Every response is empty, so the whole true answer is appended to it."""

from collections.abc import Iterator, Sequence

from rollmatch.records import Rollout
from rollmatch.rollout.phase import RequestedWindow, RolloutPart
from rollmatch.rollout.source import RolloutSource


class WithoutRollouts:
    """An ``Overlap`` without a rollout side: weights are sent for evaluations only.

    The images of the next window are prepared while this one is learnt.
    """

    prefetch, lead, streams, needs_weights = None, 1, False, False

    def __init__(self, source: RolloutSource) -> None:
        self.source = source

    def rollout(self, windows: Sequence[RequestedWindow]) -> Iterator[RolloutPart]:
        """As ``Overlap``: one part, of empty responses."""
        window, template = windows[0], self.source.template
        features = template.preparation.collect(window.samples)
        for coming in windows[1:]:
            template.preparation.begin(coming.samples)
        rollouts = []
        for index, sample in enumerate(window.samples):
            prompt = template.expand(template.prompt_token_ids(sample), features[sample.sample_id])
            rollouts.append(
                Rollout(
                    request_id=f"{window.step}.{self.source.ranks.rank}.{index}",
                    prompt_token_ids=prompt,
                    response_token_ids=(),
                    finish_reason="stop",
                    policy_version=self.source.policy_version,
                )
            )
        yield RolloutPart(index=0, rollouts=rollouts, features=features)

    def has_part(self) -> bool:
        """As ``Overlap``."""
        return True

    def is_complete(self) -> bool:
        """As ``Overlap``."""
        return True

    def wait_for_part(self) -> None:
        """As ``Overlap``."""
