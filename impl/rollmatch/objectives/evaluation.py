"""How good the policy is now: one rollout per held-out sample, parsed and matched, nothing learnt."""

import json
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from rollmatch.model.vocabulary import Vocabulary
from rollmatch.records import Rollout, Sample


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
