"""What is frozen and what is trained, by transformers' own accessors."""

from conformance.doubles.refusals import refused
from rollmatch.config.training import ModelConfig, TunerConfig
from rollmatch.model.parts import NAMES, Part, count_parts, parts_of
from rollmatch.model.policy import load_policy


def load(directory, **tuner):
    return load_policy(ModelConfig(model=directory, torch_dtype="float32"), TunerConfig(**tuner))


def check_a_frozen_part(directory, part):
    """That part and no other keeps its weights, and the counts say so."""
    model = load(directory, **{part: True})
    trained = {which for key, which in parts_of(model) if model.get_parameter(key).requires_grad}
    assert trained == set(Part) - {part}
    counts = count_parts(model, model)
    assert counts[NAMES[part]].num_trained == 0 < counts[NAMES[part]].num_tensors
    assert sum(count.num_tensors for count in counts.values()) == len(list(model.parameters()))


def check_freezing_nothing(directory, part):
    """Freezing a part that the model does not have is refused."""
    with refused("nothing-frozen", f"tuner.{part}") as caught:
        load(directory, **{part: True})
    assert NAMES[part] in caught.value.problem
