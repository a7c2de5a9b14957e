"""Sampling values as bodies of other servers give them, checked by the ranges of ``Sampling``."""

import json
from collections.abc import Mapping
from pathlib import Path
from typing import Annotated

from pydantic import Field, ValidationError

from rollmatch.errors import first_fault
from rollmatch.server.failures import Refusal
from rollmatch.server.payloads import Int64, Payload, Sampling

_FROM_GENERATION_CONFIG = ("temperature", "top_p", "top_k", "min_p", "repetition_penalty")
MAX_SEED, LONGEST = 2**63 - 1, 2**31 - 1
StopTexts = Annotated[list[Annotated[str, Field(min_length=1, max_length=1024)]], Field(max_length=64)]
"""Texts that end a response."""


class GivenSampling(Payload):
    """Fields that bodies of all dialects have, by vLLM's names; None leaves a value to the server."""

    temperature: float | None = None
    top_p: float | None = None
    top_k: Int64 | None = None
    min_p: float | None = None
    repetition_penalty: float | None = None
    presence_penalty: float | None = None
    frequency_penalty: float | None = None


class GivenVllmSampling(GivenSampling):
    """Those that bodies have which name vLLM's sampling parameters."""

    min_tokens: Int64 | None = None
    ignore_eos: bool | None = None
    stop_token_ids: list[Int64] | None = None


def make_sampling(fields: Mapping[str, object], *, defaults: Mapping[str, object]) -> Sampling:
    """Given values over ``defaults``; None counts as not given. Fields that ``Sampling`` does not have are left out.

    Errors: ``Refusal``, with the field as its key.
    """
    given = {name: value for name, value in fields.items() if value is not None and name in Sampling.model_fields}
    try:
        return Sampling.model_validate({**defaults, **given})
    except ValidationError as error:
        first = first_fault(error)
        key = str(first["loc"][0]) if first["loc"] else "sampling"
        remedy = "See vLLM's sampling parameters."
        raise Refusal(first["msg"], code="sampling-value-invalid", key=key, remedy=remedy) from error


def model_defaults(directory: str | Path) -> dict[str, float]:
    """vLLM's defaults for a model: its ``generation_config.json`` over temperature 1."""
    path = Path(directory) / "generation_config.json"
    known = json.loads(path.read_text()) if path.exists() else {}
    given = {name: known[name] for name in _FROM_GENERATION_CONFIG if known.get(name) is not None}
    return {"temperature": 1.0} | given


def seeds_of(first: int | None, count: int, *, item: int = 0) -> tuple[int | None, ...]:
    """Seeds of the ``count`` responses to prompt ``item``: they count up from the call's first one.

    >>> seeds_of(5, 2, item=1), seeds_of(None, 2)
    ((7, 8), (None, None))
    """
    if first is None:
        return (None,) * count
    return tuple(min(MAX_SEED, first + item * count + copy) for copy in range(count))
