"""How good the policy is now: one rollout per held-out sample, parsed and matched, nothing learnt."""

import json
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from rollmatch.model.vocabulary import Vocabulary
from rollmatch.objectives.rollout_matching.match import MatchRules, match_objects
from rollmatch.objectives.rollout_matching.parse import parse_rollout
from rollmatch.objectives.rollout_matching.target import RolloutMatching, summarize
from rollmatch.records import Rollout, Sample


def describe_scene(sample: Sample, rollout: Rollout, *, vocabulary: Vocabulary, rules: MatchRules) -> dict[str, Any]:
    """One scene as the report draws it: truth, predictions with their partners, and the raw answer."""
    parsed = parse_rollout(rollout.response_token_ids, vocabulary)
    matching = match_objects(parsed.objects, sample.objects, rules)
    partners = {mine: (true, iou) for (mine, true), iou in zip(matching.pairs, matching.ious, strict=True)}
    truth = [{"desc": o.desc, "geometry": o.geometry.value, "bins": list(o.bins)} for o in sample.objects]
    predicted = []
    for index, found in enumerate(parsed.objects):
        partner, iou = partners.get(index, (None, None))
        shape = {"desc": found.desc, "geometry": found.geometry.value, "bins": list(found.bins)}
        predicted.append(shape | {"partner": partner, "iou": iou})
    return {
        "sample_id": sample.sample_id,
        "image": sample.images[0],
        "width": sample.width,
        "height": sample.height,
        "truth": truth,
        "predicted": predicted,
        "response_text": vocabulary.text(rollout.response_token_ids),
        "invalid": parsed.invalid,
    }


def describe_answers(
    samples: Sequence[Sample], rollouts: Sequence[Rollout], rewards: Sequence[float | None], *, vocabulary: Vocabulary
) -> dict[str, Any]:
    """The record of an evaluation by rewards: the first answers, as many as there are ``rewards``."""
    return {
        "scenes": [],
        "answers": [
            {
                "sample_id": sample.sample_id,
                "response_text": vocabulary.text(rollout.response_token_ids),
                "reward": reward,
            }
            for sample, rollout, reward in zip(samples, rollouts, rewards, strict=False)
        ],
    }


def score(samples: Sequence[Sample], rollouts: Sequence[Rollout], target: RolloutMatching) -> dict[str, float]:
    """Precision, recall, f1 and their like over all samples."""
    _, reports = target.make_segments(samples, rollouts)
    return summarize(reports) | {"num_scenes": float(len(samples))}


def write_evaluation(
    folder: Path, *, step: int, metrics: Mapping[str, float], record: Mapping[str, Any] | None = None
) -> str:
    """Write ``evaluations/step-<step>.json`` below ``folder``; returns its path relative to it.

    ``record`` is what the file holds besides: scenes, answers.
    """
    name = f"evaluations/step-{step:06d}.json"
    path = folder / name
    path.parent.mkdir(parents=True, exist_ok=True)
    whole = {"step": step, "metrics": dict(metrics), **(record or {})}
    part = path.with_suffix(".part")  # a kill leaves no half record behind under the name that readers look for
    part.write_text(json.dumps(whole), encoding="utf-8")
    part.replace(path)
    return name
