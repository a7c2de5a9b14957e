"""The whole tree, and its JSON Schema for editors."""

from collections.abc import Callable, Iterator
from dataclasses import dataclass
from functools import cache
from typing import Annotated, Any, Literal

from pydantic import Field
from pydantic.fields import FieldInfo

from rollmatch.config.connection import RlhfConfig
from rollmatch.config.custom import CustomConfig
from rollmatch.config.layers import EXTENDS, SHORT
from rollmatch.config.secrets import without_secrets
from rollmatch.config.section import Section
from rollmatch.config.training import ModelConfig, TrainingConfig, TunerConfig
from rollmatch.config.yaml_dialect import Tree, dump
from rollmatch.errors import ConfigError


class RunConfig(Section):
    """The configuration of a run."""

    model: ModelConfig
    """The policy that is trained."""
    tuner: TunerConfig = TunerConfig()
    """Which weights are trained."""
    rlhf: RlhfConfig = RlhfConfig()
    """Rollout servers by ms-swift's key names (not for rollout_matching_sft)."""
    custom: CustomConfig
    """Objective, data and prompts."""
    global_max_length: Annotated[int, Field(gt=0, examples=[4096])]
    """Longest segment (prompt and target), and capacity of a packed row. Unit: tokens."""
    overlong: Literal["error", "skip", "truncate_left"] = "error"
    """What happens to a prompt that leaves less than max_new_tokens of the longest sequence, and to a segment longer
    than global_max_length. error: the run stops (for prompts: before it starts). skip: the sample, or the segment, is
    left out. truncate_left: the prompt loses its first words, but no framing and no image; what is still too long is
    left out."""
    training: TrainingConfig
    """Optimizer, run and packing."""

    @property
    def keeps_reference(self) -> bool:
        """Whether a second copy of the policy stays as it was: the distance to it counts, and no adapter can be left
        out to get it back. One that is trained further was there before.
        """
        counts = self.custom.learns_from_completions and self.custom.extra.grpo.beta != 0
        continues = self.model.adapter is not None and self.model.adapter_start == "continue"
        return counts and (self.tuner.train_type != "lora" or continues)


@dataclass(frozen=True, slots=True, kw_only=True)
class Rule:
    """One rule; not applied when one of the keys it reads is already known to be wrong."""

    reads: tuple[str, ...]
    check: Callable[[RunConfig], Iterator[ConfigError]]


@cache
def fields() -> dict[str, FieldInfo]:
    """Every key of the tree, sections included, as a dotted path; in order of definition."""
    return dict(_fields_of(RunConfig, ()))


def section_of(field: FieldInfo) -> type[Section] | None:
    """The section class of a field, None for a plain value."""
    kind = field.annotation
    return kind if isinstance(kind, type) and issubclass(kind, Section) else None


def resolved_yaml(config: RunConfig) -> str:
    """The tree with every default written out and secrets hidden; without secrets it loads back to an equal tree."""
    return dump(without_secrets(config.model_dump(mode="json")))


def set_yaml(config: RunConfig) -> str:
    """The tree without what has its default, secrets hidden; without secrets it loads back to an equal tree."""
    return dump(without_secrets(config.model_dump(mode="json", exclude_defaults=True)))


def json_schema() -> dict[str, Any]:
    """JSON Schema (draft 7) of a YAML file, for editors and yaml-language-server.

    The schema requires no key, because a file may be the base of another; missing keys are reported after merging.
    """
    schema: dict[str, Any] = _without_required(RunConfig.model_json_schema(mode="validation"))
    paths = {"anyOf": [{"type": "string", "minLength": 1}, {"type": "array", "items": {"type": "string"}}]}
    about = "YAML files this one is laid over, by paths relative to it; later ones win, this file wins over all."
    schema["properties"] = {EXTENDS: {**paths, "description": about}, **schema["properties"], **_short(schema["$defs"])}
    return {"$schema": "http://json-schema.org/draft-07/schema#", **schema, "title": "rollmatch run"}


def _short(parts: Tree) -> Tree:
    """The top-level names of sections, as what they stand for."""
    known = fields()
    kinds = {short: section_of(known[key]) for short, key in SHORT.items()}
    return {short: {"$ref": f"#/$defs/{kind.__name__}"} for short, kind in kinds.items() if kind is not None}


def _fields_of(section: type[Section], path: tuple[str, ...]) -> list[tuple[str, FieldInfo]]:
    found: list[tuple[str, FieldInfo]] = []
    for name, field in section.model_fields.items():
        found.append((".".join((*path, name)), field))
        if (below := section_of(field)) is not None:
            found += _fields_of(below, (*path, name))
    return found


def _without_required(node: Any) -> Any:
    if isinstance(node, list):
        return [_without_required(item) for item in node]
    if not isinstance(node, dict):
        return node
    return {key: _without_required(value) for key, value in node.items() if not _asks_for_keys(key, value)}


def _asks_for_keys(key: str, value: Tree | list[str]) -> bool:
    return key == "required" and isinstance(value, list)
