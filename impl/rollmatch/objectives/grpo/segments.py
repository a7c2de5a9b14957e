"""Groups of completions that compete with themselves: rollouts in, segments with advantages out. Needs no torch."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from statistics import fmean

from rollmatch.data.order import Reuse
from rollmatch.errors import TargetError
from rollmatch.objectives.grpo.advantage import is_flat
from rollmatch.objectives.grpo.reward import Judgement
from rollmatch.records import PolicyTarget, Rollout, Sample, Segment


@dataclass(frozen=True, slots=True, kw_only=True)
class CompletionReport:
    """What one completion was worth. Made here, used by ``summarize_completions``."""

    judgement: Judgement
    response_len: int
    """Tokens as sampled, without the stop token."""
    is_truncated: bool
    is_flat: bool
    """All completions of its group got the same, so that none teaches anything."""
    is_further: bool = False
    """Its group took the place of one that was flat."""

    @property
    def columns(self) -> Mapping[str, object]:
        """What reward functions wrote down of it, by ``log_extra``."""
        return self.judgement.columns


def policy_segment(sample: Sample, rollout: Rollout, policy: PolicyTarget) -> Segment:
    """A response as a segment that a policy gradient learns from, the stop token that ended it included."""
    return Segment(
        sample=sample,
        policy_version=rollout.policy_version,
        token_ids=(*rollout.prompt_token_ids, *rollout.sampled_ids),
        prompt_len=len(rollout.prompt_token_ids),
        prefix_len=len(rollout.sampled_ids),
        policy=policy,
    )


def sampled_logprobs(sample: Sample, rollout: Rollout) -> tuple[float, ...]:
    """The engine's log-probabilities of the target's tokens. Errors: ``logprobs-misfit``."""
    logprobs, wanted = rollout.response_logprobs, len(rollout.sampled_ids)
    if logprobs is None or len(logprobs) != wanted:
        raise TargetError(
            f"{'no' if logprobs is None else len(logprobs)} log-probabilities for {wanted} tokens",
            code="logprobs-misfit",
            key=sample.origin,
            remedy="The engine must return the log-probability of every sampled token; or set old_logprobs: recomputed "
            "and correction_cap: null, which need none.",
        )
    return logprobs


def make_reports(
    rollouts: Sequence[Rollout], judged: Sequence[Judgement], *, group_size: int
) -> list[CompletionReport]:
    """One per rollout, in order."""
    groups = Reuse(num_rollouts=group_size).group([judgement.total for judgement in judged])
    flat = [is_flat(group) for group in groups for _ in group]
    return [
        CompletionReport(
            judgement=judgement,
            response_len=len(rollout.response_token_ids),
            is_truncated=rollout.stop_id is None,
            is_flat=alike,
        )
        for rollout, judgement, alike in zip(rollouts, judged, flat, strict=True)
    ]


def summarize_completions(reports: Sequence[CompletionReport], names: Sequence[str]) -> dict[str, float]:
    """Means over completions; ``reward`` is the weighted sum, ``metric/`` what reward functions log.

    Empty where nothing was rolled out.

    >>> judged = [Judgement(values=(value,), total=value) for value in (None, 1.0, 3.0)]
    >>> flags = {"is_truncated": False, "is_flat": False, "response_len": 2}
    >>> reports = [CompletionReport(judgement=judgement, **flags) for judgement in judged]
    >>> means = summarize_completions(reports, ["r"])
    >>> means["reward"], means["reward_std"], means["reward/r"], round(means["reward_failed_rate"], 2)
    (2.0, 1.0, 2.0, 0.33)
    >>> [summarize_completions(reports[:1], ["r"])[name] for name in ("reward", "reward_std")]
    [0.0, 0.0]
    """
    if not reports:
        return {}
    rewards = [report.judgement.total for report in reports if report.judgement.total is not None]
    figures: dict[str, list[float]] = {
        "truncated_rate": [report.is_truncated for report in reports],
        "flat_group_rate": [report.is_flat for report in reports],
        "reward_failed_rate": [report.judgement.total is None for report in reports],
        "response_len": [report.response_len for report in reports],
    }
    values = {
        f"reward/{name}": [each for report in reports if (each := report.judgement.values[place]) is not None]
        for place, name in enumerate(names)
    }
    logged = dict.fromkeys(name for report in reports for name in report.judgement.metrics)
    metrics = {
        f"metric/{name}": [report.judgement.metrics[name] for report in reports if name in report.judgement.metrics]
        for name in logged
    }
    means = {name: fmean(column) for name, column in (figures | values | metrics).items() if column}
    mean = fmean(rewards) if rewards else 0.0
    spread = fmean((reward - mean) ** 2 for reward in rewards) ** 0.5 if rewards else 0.0
    return {"reward": mean, "reward_std": spread, **means}


def parts_of(reports: Sequence[CompletionReport], names: Sequence[str]) -> dict[str, list[tuple[float, float]]]:
    """Figure -> what each completion adds to its numerator and to its denominator: of ``summarize_completions``."""
    columns: dict[str, list[float | None]] = {
        "reward": [report.judgement.total for report in reports],
        "truncated_rate": [report.is_truncated for report in reports],
        "reward_failed_rate": [report.judgement.total is None for report in reports],
        **{
            f"reward/{name}": [report.judgement.values[place] for report in reports] for place, name in enumerate(names)
        },
    }
    return {
        name: [(0.0, 0.0) if value is None else (float(value), 1.0) for value in column]
        for name, column in columns.items()
    }
