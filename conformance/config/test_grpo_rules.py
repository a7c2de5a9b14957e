"""What GRPO's section must hold, and only for GRPO."""

import pytest

from conformance.scenarios.configs import config_with, problems_of, refusal_of

SECTION = "custom.extra.grpo."
VARIANT, SAMPLED = "custom.trainer_variant=grpo", "~.decoding.temperature=1"
REWARDS = f"{SECTION}rewards=[{{function: builtins:len}}]"
GRPO = (VARIANT, SAMPLED, REWARDS)


@pytest.mark.parametrize(
    ("bad", "code", "key", "good"),
    [
        ((VARIANT, SAMPLED), "rewards-missing", "rewards", GRPO),
        (
            (VARIANT, SAMPLED, f"{SECTION}rewards=[{{function: a:f}}, {{function: b:f}}]"),
            "reward-named-twice",
            "rewards",
            (VARIANT, SAMPLED, f"{SECTION}rewards=[{{function: a:f}}, {{function: b:f, name: g}}]"),
        ),
        ((*GRPO, f"{SECTION}ratio_cap=1.2"), "ratio-cap-under-clip", "ratio_cap", (*GRPO, f"{SECTION}ratio_cap=1.3")),
        (
            (*GRPO, f"{SECTION}ratio_cap=1.25", f"{SECTION}epsilon_high=0.28"),
            "ratio-cap-under-clip",
            "ratio_cap",
            (*GRPO, f"{SECTION}ratio_cap=1.29", f"{SECTION}epsilon_high=0.28"),
        ),
        (
            (*GRPO, f"{SECTION}num_generations=1"),
            "out-of-range",
            "num_generations",
            (*GRPO, f"{SECTION}num_generations=2"),
        ),
        ((*GRPO, f"{SECTION}normalize=mean"), "not-a-choice", "normalize", (*GRPO, f"{SECTION}normalize=constant")),
        ((*GRPO, f"{SECTION}beta=-0.1"), "out-of-range", "beta", (*GRPO, f"{SECTION}beta=0")),
        (
            (VARIANT, SAMPLED, f"{SECTION}rewards=[{{function: len}}]"),
            "reward-malformed",
            "rewards.0.function",
            GRPO,
        ),
    ],
)
def test_a_wrong_section_is_refused_and_a_right_one_taken(bad, code, key, good):
    assert refusal_of(*bad) == (code, SECTION + key)
    assert config_with(*good).custom.trainer_variant == "grpo"


@pytest.mark.parametrize("greedy", ["~.decoding.temperature=0", "~.num_beams=4"])
def test_a_group_is_sampled(greedy):
    beam = ("~.decode_mode=beam", "~.rollout_backend=hf") if "beams" in greedy else ()
    codes = {code for code, _ in (refusals_of(VARIANT, REWARDS, greedy, *beam))}
    assert codes == {"group-not-sampled"}
    assert config_with(*GRPO)


def refusals_of(*overrides):
    return [(error.code, error.key) for error in problems_of(*overrides)]


def test_other_variants_need_no_rewards():
    assert config_with("custom.trainer_variant=rollout_matching_sft").custom.extra.grpo.rewards == ()


def test_a_reward_is_called_by_its_function_or_by_its_own_name():
    rewards = config_with(
        VARIANT, SAMPLED, f"{SECTION}rewards=[{{function: 'a.b:form'}}, {{function: 'a:f', name: g, weight: -2}}]"
    ).custom.extra.grpo.rewards
    assert [(reward.shown_name, reward.weight) for reward in rewards] == [("form", 1.0), ("g", -2.0)]
