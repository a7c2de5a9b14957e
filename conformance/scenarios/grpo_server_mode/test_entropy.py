"""Options of GRPO that look at the policy's entropy; ``test_policy_loss_of_trl`` compares them with TRL."""

import pytest
import torch

from conformance.doubles.configs import GRPO, config_with, refusal_of
from conformance.doubles.loss_cases import supervision_of
from conformance.doubles.records import segment_with
from rollmatch.learn.head import HeadStates
from rollmatch.objectives.grpo.loss import PolicyRules, count_policy_totals, policy_loss
from rollmatch.records import PolicyTarget

SECTION = "custom.extra.grpo."
LOGITS = torch.tensor([[9.0, 0, 0, 0], [0.3, 0.1, 0, 0], [0, 0, 9.0, 0], [0, 0.2, 0, 0.4]])
SURE, UNSURE = [0, 2], [1, 3]


def terms_of(logits, *, excluded_ids=(), **fields):
    """Of one completion of four tokens, each of them the last id but one."""
    policy = PolicyTarget(advantages=(1.0,) * 4)
    supervision = supervision_of(segment_with((1, 2, 2, 2, 2), prompt_len=1, prefix_len=4, policy=policy))
    rules = PolicyRules(correction=None, max_new_tokens=8, temperature=1.0, excluded_ids=excluded_ids, **fields)
    totals = count_policy_totals([supervision], list)
    return policy_loss(logits, supervision=supervision, rules=rules, totals=totals, is_kept=True)


def gradient_of(logits=LOGITS, **fields):
    logits = logits.clone().requires_grad_()
    terms_of(logits, **fields).total.backward()
    return logits.grad


@pytest.mark.scenario(
    "grpo-server-mode/half-of-the-tokens", clauses=["grpo-server-mode/the-policy-s-entropy-may-count#2"]
)
def test_half_of_the_tokens_have_a_gradient():
    whole, half = gradient_of(), gradient_of(top_entropy_share=0.5)
    assert half[SURE].abs().max() == 0
    torch.testing.assert_close(half[UNSURE], whole[UNSURE])
    assert whole[SURE].abs().max() > 0


@pytest.mark.scenario(clauses=["grpo-server-mode/the-policy-s-entropy-may-count#1,2,4"])
@pytest.mark.parametrize("share", [1.0, 0.5])
def test_the_mean_entropy_is_taken_off_the_loss(share):
    logits = LOGITS.clone().requires_grad_()
    entropies = torch.distributions.Categorical(logits=logits).entropy()
    bonus = 0.1 * (entropies.mean() if share == 1 else entropies[UNSURE].mean())
    bonus.backward()
    difference = gradient_of(top_entropy_share=share) - gradient_of(top_entropy_share=share, entropy_coef=0.1)
    torch.testing.assert_close(difference, logits.grad)
    figures = terms_of(LOGITS, entropy_coef=0.1).figures
    assert figures["entropy"] == pytest.approx(entropies.mean().item())


def test_ids_that_rollouts_may_not_contain_have_no_entropy():
    grad = gradient_of(entropy_coef=0.1, excluded_ids=(3,))
    assert torch.isfinite(grad).all()
    torch.testing.assert_close(grad[:, :3], gradient_of(LOGITS[:, :3], entropy_coef=0.1))


def test_a_head_that_makes_no_logits_gives_the_same():
    head = torch.nn.Linear(4, 4, bias=False)
    torch.nn.init.eye_(head.weight)
    hidden = LOGITS.clone().requires_grad_()
    terms_of(HeadStates.of(hidden, head), entropy_coef=0.1, top_entropy_share=0.5).total.backward()
    torch.testing.assert_close(hidden.grad, gradient_of(entropy_coef=0.1, top_entropy_share=0.5))


DISTILL = ("custom.trainer_variant=distill", "custom.extra.distill.teachers=[{model: a}]", "~.decoding.temperature=1")


@pytest.mark.scenario(clauses=["grpo-server-mode/the-policy-s-entropy-may-count#3"])
@pytest.mark.parametrize(
    ("bad", "key", "good"),
    [
        ((*GRPO, f"{SECTION}importance=sequence", "share"), "top_entropy_share", (*GRPO, "share")),
        (
            (*GRPO, f"{SECTION}clip=cispo", f"{SECTION}epsilon_high=4", "share"),
            "top_entropy_share",
            (*GRPO, f"{SECTION}clip=cispo", f"{SECTION}epsilon_high=4", "bonus"),
        ),
        ((*DISTILL, "share"), "top_entropy_share", DISTILL),
        ((*DISTILL, "bonus"), "entropy_coef", (*GRPO, "bonus")),
    ],
)
def test_pairs_that_no_paper_defines_are_refused(bad, key, good):
    named = {"share": f"{SECTION}top_entropy_share=0.2", "bonus": f"{SECTION}entropy_coef=0.01"}
    bad, good = ([named.get(one, one) for one in overrides] for overrides in (bad, good))
    assert refusal_of(*bad) == ("entropy-undefined", SECTION + key)
    assert config_with(*good)
