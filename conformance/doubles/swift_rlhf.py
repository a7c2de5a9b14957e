"""What a run of ms-swift's GRPO wrote down, and what must hold of it."""

import json

import pytest

STEPS = 3


def logged(out):
    """What ms-swift wrote down of each step."""
    (path,) = out.glob("*/logging.jsonl")
    return [line for line in map(json.loads, path.read_text().splitlines()) if "reward" in line]


def check_steps(out):
    """Rewards add up, every rollout came from the weights of the learner, and these changed."""
    steps = logged(out)
    assert len(steps) == STEPS
    for step in steps:
        parts = [step[f"rewards/{name}/mean"] for name in ("form", "count", "content")]
        assert step["reward"] == pytest.approx(0.3 * parts[0] + 0.3 * parts[1] + 0.4 * parts[2], abs=1e-4)
        assert step["rollout_correction/log_ppl_abs_diff"] < 1e-3, "the server wrote with other weights"
        assert step["rollout_correction/is_weight_mean"] == pytest.approx(1, abs=1e-3)
    assert steps[-1]["kl"] > 1e-3, "nothing was learnt, so that old weights would not be found out"
