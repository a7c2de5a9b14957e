"""Images of a prompt, as the model's own processor prepares them: tensors for the tower, tokens for the text.

Nothing here knows a family. The processor is run, and its placeholder tokens are counted.
"""

import json
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import lru_cache
from inspect import signature
from itertools import groupby
from pathlib import Path
from typing import Any

import torch
from PIL import Image
from torch import Tensor, nn
from torch.nn import functional
from transformers import PreTrainedModel

from rollmatch.errors import ConfigError

TOKEN_TYPES = ("mm_token_type_ids", "token_type_ids")
"""Names under which models take the kind of each token."""
_OF_TEXT = ("input_ids", "attention_mask", *TOKEN_TYPES)
_BLANK_SIZE = (64, 48)


@dataclass(frozen=True, slots=True, kw_only=True)
class ImageFeatures:
    """Images of one segment. Made by ``ImageProcessing``, read by ``rollout.hf`` and ``learn.batch``."""

    tensors: Mapping[str, Tensor]
    """The processor's, by the names of the model's arguments; empty without images."""
    expansions: tuple[tuple[int, ...], ...]
    """Token ids that stand for each image: its placeholders, and what the processor writes around and between them."""
    num_placeholders: tuple[int, ...]
    """Of each image: its embeddings."""


NO_IMAGES = ImageFeatures(tensors={}, expansions=(), num_placeholders=())
"""Images of a sample of text alone."""


class ImageProcessing:
    """Images through the processor of one model.

    ``placeholder_id`` stands for one image in a prompt; ``image_id`` for each of its embeddings, once expanded.
    Errors: ``images-not-countable``, where the processor does not say which tokens an image becomes.
    """

    def __init__(self, processor: Any, directory: str | Path) -> None:
        self.processor = processor
        self.tokenizer = processor.tokenizer
        self.image_id = _image_id_of(directory, processor)
        self._mark = self.tokenizer.eos_token or self.tokenizer.pad_token
        self._placeholder = self._find_placeholder()
        self.placeholder_id = int(self.tokenizer.convert_tokens_to_ids(self._placeholder))
        self.growth = lru_cache(maxsize=1024)(self._growth)
        """Sizes (width, height) of a prompt's images -> tokens that its placeholders gain when they are expanded."""

    def process(self, images: Sequence[Image.Image]) -> ImageFeatures:
        """Tensors and tokens of a prompt's images, together: some processors cut a single image finer than several."""
        if not images:
            return NO_IMAGES
        return self._process(images, self._placeholder)

    def _growth(self, sizes: tuple[tuple[int, int], ...]) -> int:
        features = self.process([Image.new("RGB", size) for size in sizes])
        return sum(len(ids) - 1 for ids in features.expansions)

    def _process(self, images: Sequence[Image.Image], placeholder: str) -> ImageFeatures:
        text = self._mark + "".join(placeholder + self._mark for _ in images)
        made = self.processor(text=[text], images=[list(images)], return_tensors="pt")
        mark = self.tokenizer.convert_tokens_to_ids(self._mark)
        ids = made["input_ids"][0].tolist()
        parts = [tuple(part) for is_mark, part in groupby(ids[ids.index(mark) :], lambda i: i == mark) if not is_mark]
        if len(parts) != len(images) or any(self.image_id not in part for part in parts):
            raise ValueError(f"{len(parts)} texts for {len(images)} images")
        tensors = {k: v for k, v in made.items() if k not in _OF_TEXT and isinstance(v, Tensor)}
        counts = tuple(part.count(self.image_id) for part in parts)
        return ImageFeatures(tensors=tensors, expansions=tuple(parts), num_placeholders=counts)

    def _find_placeholder(self) -> str:
        """What a prompt holds for an image: mostly the image token, with Gemma 3 the begin of an image."""
        names = ("image_token", "boi_token")
        found = [token for name in names if isinstance(token := getattr(self.processor, name, None), str)]
        problems = []
        for token in found:
            try:
                self._process([Image.new("RGB", _BLANK_SIZE)], token)
            except (ValueError, TypeError, KeyError, IndexError, AttributeError, StopIteration) as error:
                problems.append(f"{token}: {error}")
            else:
                return token
        name = type(self.processor).__name__
        raise ConfigError(
            f"{name} does not say which tokens an image becomes ({'; '.join(problems) or 'it names no image token'})",
            code="images-not-countable",
            key="model.model",
            remedy="Use a model whose processor replaces one placeholder per image, or samples without images.",
        )


def read_config(directory: str | Path) -> dict[str, Any]:
    """``config.json`` of a model directory; empty where there is none."""
    path = Path(directory) / "config.json"
    described: dict[str, Any] = json.loads(path.read_text(encoding="utf-8")) if path.is_file() else {}
    return described


def _image_id_of(directory: str | Path, processor: Any) -> int:
    """As the model reads it: a processor may mean the token of prompts instead (Gemma 3)."""
    described = read_config(directory)
    told = described.get("image_token_id", described.get("image_token_index"))
    return int(processor.image_token_id if told is None else told)


def image_arguments(token_ids: Tensor, images: Sequence[ImageFeatures], model: nn.Module) -> dict[str, Tensor]:
    """Arguments of a model's forward pass for the images in ``token_ids`` [B, L]; nothing for a text model."""
    part = multimodal_part(model)
    if part is None:
        return {}
    names = [name for name in TOKEN_TYPES if name in signature(type(part).forward).parameters]
    inputs = {name: token_types(token_ids, part.config) for name in names}
    present = [some.tensors for some in images if some.tensors]
    if present:
        inputs |= {name: _joined([tensors[name] for tensors in present]) for name in present[0]}
    return inputs


def multimodal_part(model: nn.Module) -> Any:
    """The module that puts images into the text, inside any adapters and wrappers; None in a text model."""
    models = (part for part in model.modules() if isinstance(part, PreTrainedModel))  # peft's wrapper has a config, too
    return next((part for part in models if getattr(part.config, "vision_config", None)), None)


def token_types(token_ids: Tensor, config: Any) -> Tensor:
    """0 text, 1 image, 2 video; the same shape."""
    types = torch.zeros_like(token_ids, dtype=torch.int32)
    for kind, token_id in enumerate(_placeholders_of(config), start=1):
        if token_id is not None:
            types[token_ids == token_id] = kind
    return types


def _placeholders_of(config: Any) -> Iterator[int | None]:
    for kind in ("image", "video"):
        told = getattr(config, f"{kind}_token_id", None)
        yield getattr(config, f"{kind}_token_index", None) if told is None else told


def _joined(tensors: Sequence[Tensor]) -> Tensor:
    """Along the first dimension; the others are padded with zeros, as processors pad images of several sizes.

    >>> _joined([torch.ones(1, 2), torch.ones(1, 1)]).tolist()
    [[1.0, 1.0], [1.0, 0.0]]
    """
    shape = [max(sizes) for sizes in zip(*(tensor.shape[1:] for tensor in tensors), strict=True)]
    padded = []
    for tensor in tensors:
        missing = [size - own for size, own in zip(shape, tensor.shape[1:], strict=True)]
        padded.append(functional.pad(tensor, [part for size in reversed(missing) for part in (0, size)]))
    return torch.cat(padded)
