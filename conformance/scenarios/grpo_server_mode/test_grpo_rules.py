"""What GRPO's section and that of an environment must hold."""

import pytest
import yaml

from conformance.doubles.configs import GRPO, config_with, problems_of, refusal_of
from rollmatch.config import effective, make, resolved_yaml

SECTION = "custom.extra.grpo."
VARIANT, REWARDS, SAMPLED = GRPO


TWO = f"{SECTION}rewards=[{{function: a:f}}, {{function: b:f"
HIGH = (*GRPO, f"{SECTION}epsilon_high=0.28")


def pair(code, key, bad, good):
    """A wrong value of a key and a right one."""
    return ((*GRPO, f"{SECTION}{key}={bad}"), code, key, (*GRPO, f"{SECTION}{key}={good}"))


@pytest.mark.scenario(
    clauses=[
        "grpo-server-mode/the-options-of-the-policy-gradient-are-checked#1,4,5,6,7,9,11",
        "grpo-server-mode/the-options-of-the-policy-gradient-enter-the-loss#5,7",
    ]
)
@pytest.mark.parametrize(
    ("bad", "code", "key", "good"),
    [
        ((VARIANT, SAMPLED), "rewards-missing", "rewards", GRPO),
        ((VARIANT, SAMPLED, f"{TWO}}}]"), "reward-named-twice", "rewards", (VARIANT, SAMPLED, f"{TWO}, name: g}}]")),
        ((VARIANT, SAMPLED, f"{SECTION}rewards=[{{function: len}}]"), "reward-malformed", "rewards.0.function", GRPO),
        ((*HIGH, f"{SECTION}ratio_cap=1.25"), "ratio-cap-under-clip", "ratio_cap", (*HIGH, f"{SECTION}ratio_cap=1.29")),
        pair("ratio-cap-under-clip", "ratio_cap", 1.2, 1.3),
        pair("out-of-range", "num_generations", 0, 2),
        pair("group-too-small", "num_generations", 1, 2),
        pair("out-of-range", "steps_per_generation", 0, 1),
        pair("out-of-range", "num_iterations", 0, 1),
        pair("out-of-range", "epsilon", -0.1, 0),
        pair("out-of-range", "epsilon", 1, 0.99),
        pair("out-of-range", "epsilon_high", 0, 0.01),
        pair("not-a-choice", "normalize", "mean", "constant"),
        pair("out-of-range", "beta", -0.1, 0),
        pair("out-of-range", "eval_temperature", -0.1, 0),
        pair("not-a-choice", "old_logprobs", "engine", "server"),
        pair("not-a-choice", "baseline", "median", "leave_one_out"),
        pair("not-a-choice", "scale_rewards", "true", "batch"),
    ],
)
def test_a_wrong_section_is_refused_and_a_right_one_taken(bad, code, key, good):
    assert refusal_of(*bad) == (code, SECTION + key)
    assert config_with(*good).custom.trainer_variant == "grpo"


def options(*keys):
    return (*GRPO, *(SECTION + key for key in keys))


SEQUENCE, CISPO = "importance=sequence", ("clip=cispo", "epsilon_high=4")
GEOMETRIC = ("correction.level=geometric", "correction.mode=mask")


@pytest.mark.scenario(
    clauses=[
        "grpo-server-mode/the-ratio-and-the-correction-are-of-tokens-or-of-responses#1,3,6,8",
    ]
)
@pytest.mark.parametrize(
    ("bad", "code", "key", "good"),
    [
        (options("importance=group"), "not-a-choice", "importance", options(SEQUENCE)),
        (options(SEQUENCE, *CISPO), "importance-undefined", "importance", options(*CISPO)),
        (options(SEQUENCE, "ratio_cap=3"), "importance-undefined", "importance", options("ratio_cap=3")),
        (
            (*options(SEQUENCE), "custom.trainer_variant=vineppo"),
            "importance-undefined",
            "importance",
            (*options(*CISPO), "custom.trainer_variant=vineppo"),
        ),
        (options("clip=none"), "not-a-choice", "clip", options("clip=ppo")),
        (options("clip=cispo"), "cispo-bounds", "epsilon_high", options(*CISPO)),
        (options(*CISPO, "epsilon=0.1"), "cispo-bounds", "epsilon", options("epsilon=0.1")),
        (options(*CISPO, "ratio_cap=6"), "cispo-bounds", "ratio_cap", options(*CISPO, "ratio_cap=null")),
        (
            options("correction.high=3", "correction_cap=2"),
            "correction-twice",
            "correction_cap",
            options("correction.high=3", "correction_cap=null"),
        ),
        (
            options("correction.high=3", "old_logprobs=server"),
            "correction-not-used",
            "correction",
            options("old_logprobs=server"),
        ),
        (options("correction.level=geometric"), "correction-undefined", "correction.mode", options(*GEOMETRIC)),
        (options("correction.low=3"), "correction-bounds", "correction.low", options("correction.low=2")),
        (options("correction.high=0"), "out-of-range", "correction.high", options("correction.high=0.1")),
    ],
)
def test_a_pair_without_a_definition_is_refused_and_its_parts_are_taken(bad, code, key, good):
    assert refusal_of(*bad) == (code, SECTION + key)
    config_with(*good)


@pytest.mark.scenario(clauses=["grpo-server-mode/the-ratio-and-the-correction-are-of-tokens-or-of-responses#5"])
@pytest.mark.parametrize(
    ("keys", "level", "high"),
    [
        ((), "token", 2.0),
        (("correction_cap=5.0",), "token", 5.0),
        (("correction.level=sequence",), "sequence", 2.0),
        (("correction_cap=null", "correction.level=sequence"), "sequence", 2.0),
    ],
)
def test_either_key_says_the_correction_and_a_resolved_file_says_it_again(keys, level, high):
    config = config_with(*options(*keys))
    for read in (config, make(yaml.safe_load(resolved_yaml(config)))):
        assert (read.custom.extra.grpo.corrects.level, read.custom.extra.grpo.corrects.high) == (level, high)
    assert config_with(*options("correction_cap=null")).custom.extra.grpo.corrects is None


@pytest.mark.parametrize(
    "greedy", [("~.decoding.temperature=0",), ("~.num_beams=4", "~.decode_mode=beam", "~.rollout_backend=hf")]
)
def test_a_group_is_sampled(greedy):
    assert {error.code for error in problems_of(VARIANT, REWARDS, *greedy)} == {"group-not-sampled"}


def test_a_reward_is_called_by_its_function_or_by_its_own_name():
    rewards = config_with(
        VARIANT, SAMPLED, f"{SECTION}rewards=[{{function: 'a.b:form'}}, {{function: 'a:f', name: g, weight: -2}}]"
    ).custom.extra.grpo.rewards
    assert [(reward.shown_name, reward.weight) for reward in rewards] == [("form", 1.0), ("g", -2.0)]


@pytest.mark.scenario(clauses=["vineppo/other-responses-may-stand-in-for-continuations#1"])
def test_siblings_are_none_prompt_or_all():
    key, vineppo = "custom.extra.vineppo.siblings", ("custom.trainer_variant=vineppo", SAMPLED, REWARDS)
    assert config_with(*vineppo).custom.extra.vineppo.siblings == "none"
    assert refusal_of(*vineppo, f"{key}=some") == ("not-a-choice", key)
    for value in ("none", "prompt", "all"):
        assert config_with(*vineppo, f"{key}={value}").custom.extra.vineppo.siblings == value


PLAYED = "custom.extra.environment."
NAMED = (f"{PLAYED}name=a.b:C", "~.decoding.temperature=1", f"{PLAYED}max_response_tokens=600", "global_max_length=700")
PLAYING = ("custom.trainer_variant=vineppo", *NAMED)


@pytest.mark.scenario(
    clauses=[
        "environments/an-environment-is-a-class-that-answers-the-policy#5,6",
        "environments/an-episode-ends-by-its-environment-or-by-a-limit#3",
    ]
)
@pytest.mark.parametrize(
    ("bad", "code", "key"),
    [
        (NAMED, "environment-not-played", "name"),
        ((*PLAYING, "custom.extra.grpo.rewards=[{function: builtins:len}]"), "environment-beside-rewards", "name"),
        ((*PLAYING, "global_max_length=600"), "episode-length-misfit", "max_response_tokens"),
        ((*PLAYING, "~.max_new_tokens=601"), "episode-length-misfit", "max_response_tokens"),
        ((*PLAYING, f"{PLAYED}max_turns=0"), "out-of-range", "max_turns"),
        ((*PLAYING, f"{PLAYED}observations=images"), "not-a-choice", "observations"),
    ],
)
def test_a_wrong_environment_is_refused_and_a_right_one_taken(bad, code, key):
    assert refusal_of(*bad) == (code, PLAYED + key)
    assert config_with(*PLAYING).custom.extra.environment.name == "a.b:C"


@pytest.mark.parametrize("variant", ["grpo", "vineppo", "vineppo_mcts"])
def test_an_environment_pays_in_place_of_rewards(variant):
    assert config_with(*PLAYING, f"custom.trainer_variant={variant}").custom.extra.grpo.rewards == ()
    assert refusal_of(f"custom.trainer_variant={variant}", "~.decoding.temperature=1")[0] == "rewards-missing"


TOOLS = (f"{PLAYED}tools=[a.b:c]", *NAMED[1:], "custom.extra.grpo.rewards=[{function: builtins:len}]")


@pytest.mark.scenario(clauses=["environments/tools-are-functions-and-mcp-servers#9"])
@pytest.mark.parametrize("variant", ["grpo", "vineppo", "vineppo_mcts"])
def test_tools_are_paid_by_reward_functions(variant):
    called = (f"custom.trainer_variant={variant}", *TOOLS)
    assert config_with(*called).custom.extra.environment.is_set
    assert refusal_of(*called, f"{PLAYED}name=a.b:C") == ("tools-beside-environment", f"{PLAYED}tools")
    assert refusal_of(*called, f"{PLAYED}options={{size: 3}}") == ("tools-beside-environment", f"{PLAYED}options")
    assert refusal_of(*called, "custom.extra.grpo.rewards=[]") == ("rewards-missing", "custom.extra.grpo.rewards")
    assert refusal_of(*TOOLS) == ("environment-not-played", f"{PLAYED}tools")


LORA, MEASURED = "tuner.train_type=lora", f"{SECTION}beta=0.1"


BETA, LORA = "custom.extra.grpo.beta=0.1", "tuner.train_type=lora"


@pytest.mark.parametrize(
    ("overrides", "kept", "in_batch"),
    [
        ((BETA,), True, False),
        (("custom.extra.grpo.beta=0",), False, False),
        ((BETA, LORA), False, True),
        ((BETA, LORA, "model.adapter=runs/a"), False, True),
        ((BETA, LORA, "model.adapter=runs/a", "model.adapter_start=continue"), True, False),
    ],
)
def test_a_copy_of_the_policy_is_kept_where_no_adapter_can_be_off_instead(overrides, kept, in_batch):
    config = config_with(*GRPO, *overrides)
    assert (config.keeps_reference, effective.reference_in_batch(config)) == (kept, in_batch)
    assert config_with(*overrides).keeps_reference is False
