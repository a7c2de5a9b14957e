"""What all objectives with a clipped policy gradient learn alike; they differ in their advantages."""

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from typing import ClassVar, Literal

from rollmatch.learn.batch import MicroBatch
from rollmatch.learn.head import Logits
from rollmatch.model.vocabulary import Vocabulary
from rollmatch.objectives.grpo.loss import (
    TERM_NAMES,
    PolicyRules,
    PolicySupervision,
    PolicyTerms,
    PolicyTotals,
    count_policy_totals,
    policy_logit_indices,
    policy_loss,
    supervise_policy,
)
from rollmatch.objectives.grpo.segments import sampled_logprobs
from rollmatch.objectives.protocol import ObjectiveContext
from rollmatch.records import Rollout, Segment


@dataclass(frozen=True, slots=True, kw_only=True)
class LogprobRules:
    """Which log-probabilities the ratio starts from."""

    old: Literal["server", "recomputed", "current"] = "current"
    """As the engine sampled; by a forward pass of the learner's own before it learns; or those of the step that learns,
    which are the same where that step is the only one and no segment waits for a row."""
    corrects: bool
    """Whether the engine's log-probabilities are wanted besides, to correct for its differing from the learner."""

    @property
    def wants_sampled(self) -> bool:
        """Whether the engine returns log-probabilities at all."""
        return self.corrects or self.old == "server"


class PolicyGradient:
    """What every objective with a policy gradient learns alike: its ``make_segments`` sets ``Segment.policy``."""

    policy_rules: PolicyRules
    logprob_rules: LogprobRules
    vocabulary: Vocabulary
    term_names: ClassVar[tuple[str, ...]] = TERM_NAMES

    @property
    def wants_logprobs(self) -> bool:
        """Whether the engine returns each sampled token's log-probability."""
        return self.logprob_rules.wants_sampled

    def supervise(self, segments: Sequence[Segment], *, starts: Sequence[int], num_tokens: int) -> PolicySupervision:
        """Every target token that is not masked. Errors: ``PolicyTargetMisfit``."""
        return supervise_policy(segments, starts=starts, num_tokens=num_tokens)

    def logit_indices(self, supervision: PolicySupervision) -> tuple[int, ...]:
        """Before each target token."""
        return policy_logit_indices(supervision)

    def total_of(
        self, supervisions: Sequence[PolicySupervision], sum_over_ranks: Callable[[Sequence[float]], list[float]]
    ) -> PolicyTotals:
        """Tokens and segments."""
        return count_policy_totals(supervisions, sum_over_ranks)

    def loss(self, logits: Logits, batch: MicroBatch, *, totals: PolicyTotals) -> PolicyTerms:
        """The clipped loss. Errors: as ``policy_loss``."""
        return policy_loss(
            logits, supervision=batch.supervision, rules=self.policy_rules, totals=totals, is_kept=batch.is_packed
        )

    def with_logprobs(
        self, segments: Sequence[Segment], rollouts: Sequence[Rollout], context: ObjectiveContext
    ) -> list[Segment]:
        """The segments, each of its rollout, with what the ratio, the correction and the distance need.

        Errors: ``LogprobsMisfit``, ``ReferenceMissing``.
        """
        rules = self.logprob_rules
        nothing = [None] * len(segments)
        sampled = self._sampled(segments, rollouts) if rules.wants_sampled else nothing
        old = {"server": sampled, "current": nothing}.get(rules.old)
        old = context.score(segments) if old is None else old
        reference = context.score(segments, reference=True) if self.policy_rules.beta else nothing
        engine_logprobs = sampled if rules.corrects else nothing
        return [
            replace(
                segment,
                policy=replace(
                    segment.policy,  # type: ignore[type-var]
                    old_logprobs=before,
                    sampler_logprobs=engine,
                    reference_logprobs=far,
                ),
            )
            for segment, before, engine, far in zip(segments, old, engine_logprobs, reference, strict=True)
        ]

    def _sampled(self, segments: Sequence[Segment], rollouts: Sequence[Rollout]) -> list[tuple[float, ...]]:
        stop_id = self.vocabulary.stop_id
        return [
            sampled_logprobs(segment.sample, rollout, stop_id=stop_id)
            for segment, rollout in zip(segments, rollouts, strict=True)
        ]
