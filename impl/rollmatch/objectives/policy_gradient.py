"""What all objectives with a clipped policy gradient learn alike; they differ in their advantages."""

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from typing import ClassVar, Literal

from torch import Tensor

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
    policy_logprobs,
    policy_loss,
    supervise_policy,
)
from rollmatch.objectives.grpo.segments import sampled_logprobs
from rollmatch.objectives.protocol import ObjectiveContext, ScoreSegments
from rollmatch.records import Rollout, Segment


@dataclass(frozen=True, slots=True, kw_only=True)
class LogprobRules:
    """Which log-probabilities the ratio starts from."""

    old: Literal["server", "recomputed", "current"] = "current"
    """As the engine sampled; by a forward pass of the learner's own before it learns; or those of the step that learns,
    which are the same where that step is the only one. Segments that wait for a row of a later step are scored."""
    corrects: bool
    """Whether the engine's log-probabilities are wanted besides, to correct for its differing from the learner."""
    reference_in_batch: bool
    """Whether the micro-batch that learns brings the reference's; else they are computed with the targets."""

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
        """Every target token that is not masked. Errors: ``policy-target-misfit``."""
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

    def logprobs(self, logits: Logits, batch: MicroBatch) -> Tensor:
        """[K] of the micro-batch's target tokens. Errors: as ``policy_loss``."""
        return policy_logprobs(logits, supervision=batch.supervision, rules=self.policy_rules, is_kept=batch.is_packed)

    def with_reference(self, batch: MicroBatch, logprobs: Tensor) -> MicroBatch:
        """The micro-batch whose distance is to a policy with these log-probabilities, [K]."""
        return replace(batch, supervision=replace(batch.supervision, reference_logprobs=logprobs))

    def with_logprobs(
        self, segments: Sequence[Segment], rollouts: Sequence[Rollout], context: ObjectiveContext
    ) -> list[Segment]:
        """The segments, each of its rollout, with what the ratio, the correction and the distance need.

        Errors: ``logprobs-misfit``, ``reference-missing``.
        """
        rules = self.logprob_rules
        nothing = [None] * len(segments)
        sampled = self._sampled(segments, rollouts) if rules.wants_sampled else nothing
        old = {"server": sampled, "current": nothing}.get(rules.old)
        old = context.score(segments) if old is None else old
        wants_reference = self.policy_rules.beta != 0 and not rules.reference_in_batch
        reference = context.score(segments, reference=True) if wants_reference else nothing
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

    def with_old_logprobs(self, segments: Sequence[Segment], score: ScoreSegments) -> list[Segment]:
        """Segments that a later step learns from, with the log-probabilities of the weights as they are now.

        Those that have some keep them. Called by all ranks, also without segments.
        """
        fresh = [one for one in segments if one.policy is not None and one.policy.old_logprobs is None]
        scored = {id(one): old for one, old in zip(fresh, score(fresh), strict=True)}
        return [
            replace(one, policy=replace(one.policy, old_logprobs=scored[id(one)]))
            if one.policy is not None and id(one) in scored
            else one
            for one in segments
        ]

    def _sampled(self, segments: Sequence[Segment], rollouts: Sequence[Rollout]) -> list[tuple[float, ...]]:
        pairs = zip(segments, rollouts, strict=True)
        return [sampled_logprobs(segment.sample, rollout) for segment, rollout in pairs]
