"""Which tokens end a response: the model says, in its chat template, its tokenizer and its generation_config.json."""

import json
from collections.abc import Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple

from jinja2 import TemplateError

from rollmatch.errors import ConfigError

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase


class StopTokens(NamedTuple):
    """What ends a response."""

    token: str
    """Ends a turn in the model's chat template; targets and turns of environments are written with it."""
    ids: frozenset[int]
    """Every id that ends a response, this one included."""
    is_generated: bool
    """Whether ``generation_config.json`` names it, so that engines stop there by themselves."""


TEMPLATE_FAILURES = (
    *(TemplateError, TypeError, ValueError, LookupError, AttributeError, ArithmeticError),
    *(RecursionError, MemoryError),
)
"""What a chat template of any origin may raise."""
WRITTEN = "rollmatch-writes-here"
"""Stands for a turn of the assistant's where a chat is rendered around it."""


def find_stops(
    tokenizer: "PreTrainedTokenizerBase", directory: str | Path, *, stop_token: str | None = None
) -> StopTokens:
    """The tokenizer's ``eos_token``, every id of ``generation_config.eos_token_id``, and what ends a turn of a chat.

    The last is ``stop_token`` where it is set; else the first special token behind the assistant's text in a rendered
    chat; else the ``eos_token``. Base models with a chat template, and some of others, name it nowhere else.

    Errors: ``stop-token-missing``.
    """
    generated = generated_stops(directory)
    eos = tokenizer.eos_token_id
    named = stop_token if stop_token is not None else _end_of_turn(tokenizer) or tokenizer.eos_token
    if named is None and generated:
        named = tokenizer.convert_ids_to_tokens(min(generated))
    if named is None:
        raise ConfigError(
            f"neither the chat template of {directory} nor its tokenizer says which token ends a turn",
            code="stop-token-missing",
            key="model.stop_token",
            remedy="Name the token that ends a turn of the model.",
        )
    primary = tokenizer.get_vocab().get(named)
    if primary is None:
        raise ConfigError(
            f"the tokenizer has no token {named}",
            code="stop-token-missing",
            key="model.stop_token",
            remedy="Name the token that ends a turn of the model.",
        )
    ids = {primary, *generated} | ({eos} if isinstance(eos, int) else set())
    return StopTokens(token=str(named), ids=frozenset(ids), is_generated=primary in generated)


def generated_stops(directory: str | Path) -> frozenset[int]:
    """``eos_token_id`` of generation_config.json, or of config.json where there is no such file, as engines read it.

    Errors: ``model-unreadable``.
    """
    for name in ("generation_config.json", "config.json"):
        path = Path(directory) / name
        if path.is_file():
            try:
                described: Mapping[str, Any] = json.loads(path.read_text(encoding="utf-8"))
                value = described.get("eos_token_id", described.get("text_config", {}).get("eos_token_id"))
                ids = [value] if isinstance(value, int) else list(value or ())
                if not all(isinstance(each, int) for each in ids):
                    raise ValueError(f"eos_token_id is {value!r}, and no ids")
            except (OSError, ValueError, TypeError, AttributeError, RecursionError) as error:
                problem, remedy = f"{path} cannot be read: {error}", "Save the model again."
                raise ConfigError(problem, code="model-unreadable", key="model.model", remedy=remedy) from error
            return frozenset(ids)
    return frozenset()


def _end_of_turn(tokenizer: "PreTrainedTokenizerBase") -> str | None:
    """The first special token behind the assistant's text in a rendered chat; None where the template has none."""
    if not tokenizer.chat_template:
        return None
    for as_parts in (False, True):
        turns = (("user", "?"), ("assistant", WRITTEN))
        chat: list[dict[str, Any]] = [
            {"role": role, "content": [{"type": "text", "text": text}] if as_parts else text} for role, text in turns
        ]
        try:
            whole = str(tokenizer.apply_chat_template(chat, tokenize=False))
        except TEMPLATE_FAILURES:
            continue  # some templates take only parts
        _, mark, after = whole.partition(WRITTEN)
        if mark:
            special = set(tokenizer.all_special_ids) | {
                token_id for token_id, token in tokenizer.added_tokens_decoder.items() if token.special
            }
            ids = tokenizer.encode(after, add_special_tokens=False)
            return next((tokenizer.convert_ids_to_tokens(each) for each in ids if each in special), None)
    return None
