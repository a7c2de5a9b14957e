"""Tiny checkpoints of many families: ``architectures.yaml`` holds their settings, and those that several share."""

from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import yaml

Settings = dict[str, Any]


@dataclass(frozen=True, kw_only=True)
class Architecture:
    """How one family's checkpoint is made. A text in ``settings`` that is an added token stands for its id."""

    model: str
    config: str
    settings: Settings
    words: tuple[str, ...] = ()
    """Added tokens of the family."""
    image: str = ""
    """What its chat template writes for an image; empty for a text model."""
    named: dict[str, str] = field(default_factory=dict)
    """The tokenizer's names of its words, such as ``image_token``."""
    processor: str = ""
    parts: dict[str, tuple[str, Settings]] = field(default_factory=dict)
    """Argument of the processor -> (class, settings): its image and video processors."""
    options: Settings = field(default_factory=dict)
    """Further arguments of the processor."""
    published: dict[str, str] = field(default_factory=dict)
    """Beginning of a tensor's name -> what it is in published files, where transformers writes another one."""


_HELD = yaml.safe_load(Path(__file__).with_suffix(".yaml").read_text(encoding="utf-8"))
SHARED: dict[str, Settings] = _HELD["shared"]
ARCHITECTURES = {name: Architecture(**fields) for name, fields in _HELD["architectures"].items()}
