"""A rule that a caller leaves out is the default of its configuration key."""

from dataclasses import MISSING, fields, is_dataclass

import pytest

from conformance.doubles.configs import config_with
from conformance.doubles.objectives import GRPO, VINEPPO, AsTemplate
from rollmatch.config.limits import LimitsConfig
from rollmatch.launch.rollout_server import make_settings
from rollmatch.rollout.backend import Decoding
from rollmatch.run.assemble import make_decoding
from rollmatch.run.objectives import make_objective

VARIANTS = {
    "rollout_matching": (),
    "grpo": GRPO,
    "vineppo": VINEPPO,
    "low_probability": (*VINEPPO, "custom.extra.vineppo.steps=low_probability"),
    "vineppo_mcts": ("custom.trainer_variant=vineppo_mcts", *VINEPPO[1:]),
}
OF_OTHER_KEYS = {"num_rollouts", "maskiou_gate", "weight", "reads_logprobs", "wants_logprobs"}


def with_defaults(thing):
    """(class and field, value, default) of the dataclasses that an object consists of."""
    for field in fields(thing) if is_dataclass(thing) else ():
        if field.default is not MISSING:
            yield f"{type(thing).__name__}.{field.name}", getattr(thing, field.name), field.default
    if type(thing).__module__.startswith("rollmatch.objectives"):
        names = [field.name for field in fields(thing)] if is_dataclass(thing) else vars(thing)
        for name in names:
            yield from with_defaults(getattr(thing, name))


@pytest.mark.parametrize("variant", VARIANTS)
def test_what_is_left_out_is_the_default_of_its_key(variant):
    objective = make_objective(config_with(*VARIANTS[variant]), AsTemplate())
    found = [each for each in with_defaults(objective) if each[0].partition(".")[2] not in OF_OTHER_KEYS]
    assert len(found) >= 5
    assert [each for each in found if each[1] != each[2]] == []


def test_servers_and_decoding_have_the_same_defaults_without_a_configuration():
    config = config_with("~.max_new_tokens=9")
    settings = make_settings(config, port=8000, replicas=1, on_gpu=False)
    made = make_decoding(config.custom.extra.rollout_matching)
    for found in map(list, map(with_defaults, (settings, made))):
        assert len(found) >= 5
        assert [each for each in found if each[1] != each[2]] == []
    assert made == Decoding(max_new_tokens=9)
    assert settings.limits == LimitsConfig()
