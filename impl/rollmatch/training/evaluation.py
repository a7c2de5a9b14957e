"""How good the policy is now: one rollout per held-out sample, judged by the objective, nothing learnt."""

import json
import time
from collections.abc import Mapping, Sequence
from pathlib import Path

from rollmatch.objectives.protocol import Objective, ObjectiveContext
from rollmatch.records import Sample
from rollmatch.rollout.source import RolloutSource
from rollmatch.training.report import generated_fields


def evaluate_policy(
    source: RolloutSource, objective: Objective, samples: Sequence[Sample], context: ObjectiveContext
) -> tuple[Mapping[str, object], dict[str, float]]:
    """Each rank rolls out its part; record and metrics of all samples, the same on every rank."""
    ranks, began = source.ranks, time.perf_counter()
    mine = samples[ranks.rank :: ranks.learner_world_size]
    source.template.preparation.begin(mine)  # the hf backend takes them, and others leave time for it
    rollouts = source.roll_out(mine, context.step, purpose="eval")
    rollout_s = time.perf_counter() - began
    event = generated_fields(rollouts, step=context.step, seconds=rollout_s, policy_version=source.policy_version)
    source.journal.write("generated", purpose="eval", **event)
    parts = ranks.gather(list(zip(mine, rollouts, strict=True)))
    pairs = sorted((pair for part in parts for pair in part), key=lambda pair: pair[0].sample_id)
    evaluated = objective.evaluate([sample for sample, _ in pairs], [rollout for _, rollout in pairs], context)
    num_tokens = sum(rollout.num_tokens for _, rollout in pairs)
    of_samples = {"sample_ids": [sample.sample_id for sample, _ in pairs], "parts": dict(evaluated.parts)}
    metrics = dict(evaluated.metrics) | {"tokens_per_s": num_tokens / rollout_s}
    return {"precision": source.precision, **evaluated.record, **of_samples}, metrics


def evaluation_file(step: int) -> str:
    """Where an evaluation is kept, relative to the run directory."""
    return f"evaluations/step-{step:06d}.json"


def write_evaluation(
    folder: Path, *, step: int, metrics: Mapping[str, float], record: Mapping[str, object] | None = None
) -> str:
    """Write ``evaluations/step-<step>.json`` below ``folder``; returns its path relative to it.

    ``record`` is what the file holds besides: scenes, answers.
    """
    name = evaluation_file(step)
    path = folder / name
    path.parent.mkdir(parents=True, exist_ok=True)
    whole = {"step": step, "metrics": dict(metrics), **(record or {})}
    part = path.with_suffix(".part")  # a kill leaves no half record behind under the name that readers look for
    part.write_text(json.dumps(whole), encoding="utf-8")
    part.replace(path)
    return name


def keep_evaluation(
    source: RolloutSource, folder: Path, *, step: int, metrics: Mapping[str, float], record: Mapping[str, object]
) -> None:
    """Rank 0 writes the file, and its name and metrics into the journal."""
    if source.ranks.is_primary:
        file = write_evaluation(folder, step=step, metrics=metrics, record=record)
        source.journal.write("evaluated", step=step, file=file, metrics=metrics, precision=source.precision)
