"""Advantages and loss are TRL's, on a recorded batch, for every variant that both know (``fixtures/trl/record.py``)."""

import json
from pathlib import Path

import pytest
import torch

from conformance.doubles.loss_cases import supervision_of
from conformance.doubles.records import segment_with
from rollmatch.learn import head
from rollmatch.objectives.grpo.advantage import group_advantages
from rollmatch.objectives.grpo.loss import Correction, PolicyRules, count_policy_totals, policy_loss
from rollmatch.records import PolicyTarget

RECORDED = json.loads((Path(__file__).parents[3] / "fixtures/trl/grpo.json").read_text())
NORMALIZE = {"dapo": "token", "grpo": "sequence", "dr_grpo": "constant", "cispo": "token"}
TOLERANCE = 1e-6


def name_of(case):
    plain = RECORDED["cases"][0]["rules"]
    changed = [f"{name}={value}" for name, value in case["rules"].items() if value != plain[name]]
    return " ".join(changed) or "plain"


def correction_of(rules):
    level, mode = rules["vllm_importance_sampling_mode"].split("_")
    low, high = (rules[f"vllm_importance_sampling_clip_{side}"] for side in ("min", "max"))
    return Correction(level=level, mode=mode, low=low, high=high)


def rules_of(rules):
    is_cispo = rules["loss_type"] == "cispo"
    return PolicyRules(
        epsilon=rules["epsilon"],
        epsilon_high=rules["epsilon_high"] - is_cispo,  # TRL's bound of cispo is the ratio itself
        ratio_cap=rules["delta"],
        beta=rules["beta"],
        correction=correction_of(rules) if rules["vllm_importance_sampling_correction"] else None,
        importance=rules["importance_sampling_level"],
        clip="cispo" if is_cispo else "ppo",
        normalize=NORMALIZE[rules["loss_type"]],
        entropy_coef=rules["entropy_coef"],
        top_entropy_share=rules["top_entropy_quantile"],
        max_new_tokens=RECORDED["max_len"],
        temperature=rules["temperature"],
    )


def advantages_of(rules):
    size, rewards = RECORDED["group_size"], RECORDED["rewards"]
    groups = [rewards[start : start + size] for start in range(0, len(rewards), size)]
    return [advantage for group in group_advantages(groups, scale=rules["scale_rewards"]) for advantage in group]


def logprobs_of(name, place, temperature):
    ids, rows = RECORDED["completions"][place], RECORDED["logits"][name][place]
    return tuple(head.logprobs_of(torch.tensor(rows), torch.tensor(ids), temperature=temperature).tolist())


def segment_of(place, rules, advantage):
    ids, temperature = RECORDED["completions"][place], rules["temperature"]
    policy = PolicyTarget(
        advantages=(advantage,) * len(ids),
        old_logprobs=logprobs_of("old", place, temperature),
        sampler_logprobs=logprobs_of("sampler", place, temperature),
        reference_logprobs=logprobs_of("reference", place, temperature),
        is_masked=rules["mask_truncated_completions"] and ids[-1] != RECORDED["eos"],
    )
    prompt = tuple(RECORDED["prompt"])
    return segment_with((*prompt, *ids), prompt_len=len(prompt), prefix_len=len(ids), policy=policy)


def logits_of(segment, place):
    """[L, V]: those of the completion's tokens, one place early."""
    rows = torch.tensor(RECORDED["logits"]["now"][place])
    before, after = torch.zeros(segment.prompt_len - 1, rows.shape[1]), torch.zeros(1, rows.shape[1])
    return torch.cat([before, rows, after])


@pytest.mark.parametrize("case", RECORDED["cases"], ids=name_of)
def test_advantages_are_those_of_trl(case):
    assert advantages_of(case["rules"]) == pytest.approx(case["advantages"], abs=TOLERANCE)


def parts_of(case):
    """How often a step is cut; tokens of high entropy are chosen within a micro-batch, by TRL and by us."""
    return [1, 3] if case["rules"]["top_entropy_quantile"] == 1 else [1]


@pytest.mark.parametrize(
    ("case", "num_parts"),
    [pytest.param(case, num, id=f"{name_of(case)}-{num}") for case in RECORDED["cases"] for num in parts_of(case)],
)
def test_loss_and_gradient_are_those_of_trl(case, num_parts):
    rules = case["rules"]
    segments = [segment_of(place, rules, advantage) for place, advantage in enumerate(advantages_of(rules))]
    logits = torch.cat([logits_of(segment, place) for place, segment in enumerate(segments)]).requires_grad_()
    size = len(segments) // num_parts
    supervisions = [supervision_of(*segments[start : start + size]) for start in range(0, len(segments), size)]
    totals = count_policy_totals(supervisions, list)
    rows = logits.split([supervision.num_places for supervision in supervisions])
    terms = [
        policy_loss(part, supervision=supervision, rules=rules_of(rules), totals=totals, is_kept=False)
        for part, supervision in zip(rows, supervisions, strict=True)
    ]
    loss = sum(term.total for term in terms)
    loss.backward()
    share = totals.num_tokens / totals.num_target_tokens if rules_of(rules).normalize == "token" else 1
    assert loss.item() == pytest.approx(share * case["loss"], abs=TOLERANCE)  # TRL 1.10 counts no masked token
    assert logits.grad.norm().item() == pytest.approx(share * case["gradient"], abs=TOLERANCE)


def test_the_recorded_variants_differ():
    """Else a rule that has no effect would pass for one that is right."""
    assert len({round(case["loss"], 6) for case in RECORDED["cases"]}) == len(RECORDED["cases"])
