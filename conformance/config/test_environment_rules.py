"""What the section of the environment must hold."""

import pytest

from conformance.scenarios.configs import config_with, refusal_of

SECTION = "custom.extra.environment."
NAMED = (
    f"{SECTION}name=a.b:C",
    "~.decoding.temperature=1",
    f"{SECTION}max_response_tokens=600",
    "global_max_length=700",
)
VINE = ("custom.trainer_variant=vineppo", *NAMED)


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
        ((*VINE, "custom.extra.grpo.rewards=[{function: builtins:len}]"), "environment-beside-rewards", "name"),
        ((*VINE, "global_max_length=600"), "episode-length-misfit", "max_response_tokens"),
        ((*VINE, "~.max_new_tokens=601"), "episode-length-misfit", "max_response_tokens"),
        ((*VINE, f"{SECTION}max_turns=0"), "out-of-range", "max_turns"),
        ((*VINE, f"{SECTION}observations=images"), "not-a-choice", "observations"),
    ],
)
def test_a_wrong_environment_is_refused_and_a_right_one_taken(bad, code, key):
    assert refusal_of(*bad) == (code, SECTION + key)
    assert config_with(*VINE).custom.extra.environment.name == "a.b:C"


@pytest.mark.parametrize("variant", ["grpo", "vineppo", "vineppo_mcts"])
def test_an_environment_pays_in_place_of_rewards(variant):
    assert config_with(*VINE, f"custom.trainer_variant={variant}").custom.extra.grpo.rewards == ()
    assert refusal_of(f"custom.trainer_variant={variant}", "~.decoding.temperature=1")[0] == "rewards-missing"
