"""Fields of bodies, and values of theirs that are not neutral."""

import copy
import typing

from pydantic import BaseModel

SAMPLED = {
    "temperature": 0.75, "top_p": 0.5, "top_k": 7, "min_p": 0.25, "repetition_penalty": 1.5, "presence_penalty": 0.75,
    "frequency_penalty": -0.75, "min_tokens": 2, "ignore_eos": True, "max_tokens": 5, "stop_token_ids": [8, 9],
    "logit_bias": {"11": -100.0, "12": 5.0},
}  # fmt: skip
"""vLLM's names."""


def given(name, value):
    """As an engine gets it."""
    if name == "logit_bias":
        return {int(token_id): bias for token_id, bias in value.items()}
    return tuple(value) if name == "stop_token_ids" else value


def models_in(annotation):
    if isinstance(annotation, type) and issubclass(annotation, BaseModel):
        yield annotation
    for argument in typing.get_args(annotation):
        yield from models_in(argument)


def fields_of(kind, above=""):
    """Dotted name of every field of a body -> whether it is accepted at neutral values only."""
    for name, field in kind.model_fields.items():
        name = field.alias or name
        yield above + name, field.annotation is type(None)
        for inner in models_in(field.annotation):
            yield from fields_of(inner, f"{above}{name}.")


def with_field(body, name, value):
    """A copy of a body with a field set, in the last entry of every list on the way there."""
    changed = copy.deepcopy(body)
    node, (*above, below) = changed, name.split(".")
    for each_name in above:
        node = node.setdefault(each_name, {})
        node = node[-1] if isinstance(node, list) else node
    node[below] = value
    return changed
