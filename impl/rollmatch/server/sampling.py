"""Sampling values of the swift and trl dialects -> ours, checked by the same ranges."""

import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from pydantic import ValidationError

from rollmatch.server.failures import SamplingValueInvalid
from rollmatch.server.payloads import Sampling

_TAKEN = ("temperature", "top_p", "top_k", "min_p", "repetition_penalty")


def make_sampling(fields: Mapping[str, Any], *, defaults: Mapping[str, Any]) -> Sampling:
    """Values that are given, else the defaults. Errors: ``SamplingValueInvalid``, with the field as its key."""
    given = {name: value for name, value in fields.items() if value is not None}
    try:
        return Sampling.model_validate({**defaults, **given})
    except ValidationError as error:
        first = error.errors(include_url=False, include_input=False)[0]
        key = str(first["loc"][0]) if first["loc"] else "sampling"
        raise SamplingValueInvalid(first["msg"], key=key, remedy="See vLLM's sampling parameters.") from error


def model_defaults(directory: str | Path) -> dict[str, Any]:
    """What vLLM samples with where a caller says nothing: the model's ``generation_config.json`` over temperature 1."""
    path = Path(directory) / "generation_config.json"
    told = json.loads(path.read_text()) if path.exists() else {}
    return {"temperature": 1.0} | {name: told[name] for name in _TAKEN if told.get(name) is not None}


def check_count(value: int, *, name: str = "n") -> int:
    """Responses per prompt. Errors: ``SamplingValueInvalid``."""
    if value < 1:
        raise SamplingValueInvalid(f"is {value}, must be at least 1", key=name, remedy="Ask for at least one.")
    return value
