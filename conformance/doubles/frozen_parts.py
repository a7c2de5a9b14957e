"""What is frozen and what is trained, by transformers' own accessors."""

from conformance.doubles.refusals import refused
from rollmatch.config.training import ModelConfig, TunerConfig
from rollmatch.model.parts import NAMES, Part, count_parts, parts_of
from rollmatch.model.policy import load_policy


def load(directory, *, attention="sdpa", **tuner):
    config = ModelConfig(model=directory, torch_dtype="float32")
    return load_policy(config, TunerConfig(**tuner), attn_implementation=attention)


def check_a_frozen_part(directory, part, *, attention="sdpa"):
    """That part and no other keeps its weights, and the counts say so."""
    model = load(directory, attention=attention, **{part: True})
    trained = {which for key, which in parts_of(model) if model.get_parameter(key).requires_grad}
    assert trained == set(Part) - {part}
    counts = count_parts(model, model)
    assert counts[NAMES[part]].num_trained == 0 < counts[NAMES[part]].num_tensors
    assert sum(count.num_tensors for count in counts.values()) == len(list(model.parameters()))


def check_freezing_nothing(directory, part, *, attention="sdpa"):
    """Freezing a part that the model does not have is refused."""
    with refused("nothing-frozen", f"tuner.{part}") as caught:
        load(directory, attention=attention, **{part: True})
    assert NAMES[part] in caught.value.problem
