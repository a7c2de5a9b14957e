"""Images of a prompt, as the model's own processor prepares them: tensors for the tower, tokens for the text.

Nothing here knows a family. The processor is run, and its placeholder tokens are counted. Images of coming samples are
prepared by threads while the learner waits for rollouts or learns. Threads, not processes: decoding and the processor's
arithmetic release the interpreter's lock, and the tensors of a large image (30 MB at 1280 x 960) need no way back.
"""

import json
import os
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass
from functools import cached_property, lru_cache, partial
from inspect import signature
from itertools import groupby
from pathlib import Path
from typing import Any, TypeVar

import torch
from PIL import Image
from torch import Tensor, nn
from torch.nn import functional
from transformers import PreTrainedConfig, PreTrainedModel, ProcessorMixin

from rollmatch.errors import ConfigError
from rollmatch.records import Sample

TOKEN_TYPES = ("mm_token_type_ids", "token_type_ids")
"""Names under which models take the kind of each token."""
_OF_TEXT = ("input_ids", "attention_mask", *TOKEN_TYPES)
_BLANK_SIZE = (64, 48)
MOST_THREADS = 8
Prepared = TypeVar("Prepared")


@dataclass(frozen=True, slots=True, kw_only=True)
class ImageFeatures:
    """Images of one segment. Made by ``ImageProcessing``, read by ``rollout.backend`` and ``learn.batch``."""

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

    def __init__(self, processor: ProcessorMixin, directory: str | Path) -> None:
        self.processor = processor
        self.tokenizer = processor.tokenizer
        self.image_id = _image_id_of(directory, processor)
        self._mark = self.tokenizer.eos_token or self.tokenizer.pad_token
        self._placeholder = self._find_placeholder()
        self.placeholder_id = int(self.tokenizer.convert_tokens_to_ids(self._placeholder))
        self.expansions = lru_cache(maxsize=1024)(self._expansions)
        """Sizes (width, height) of a prompt's images -> ``ImageFeatures.expansions``, which depend on nothing else."""

        self.resized = lru_cache(maxsize=1024)(self._resized)
        """Size (width, height) of an image -> size in pixels at which the model gets it."""

    def process(self, images: Sequence[Image.Image]) -> ImageFeatures:
        """Tensors and tokens of a prompt's images, together: some processors cut a single image finer than several."""
        if not images:
            return NO_IMAGES
        return self._process(images, self._placeholder)

    def growth(self, sizes: tuple[tuple[int, int], ...]) -> int:
        """Tokens that the placeholders of images of these sizes (width, height) gain when they are expanded."""
        return sum(len(ids) - 1 for ids in self.expansions(sizes))

    def _expansions(self, sizes: tuple[tuple[int, int], ...]) -> tuple[tuple[int, ...], ...]:
        return self.process([Image.new("RGB", size) for size in sizes]).expansions

    def _resized(self, size: tuple[int, int]) -> tuple[int, int]:
        grid = self.process([Image.new("RGB", size)]).tensors.get("image_grid_thw")
        if grid is None:
            name = type(self.processor).__name__
            raise ConfigError(
                f"{name} does not say at which size the model gets an image",
                code="image-size-unknown",
                key="custom.extra.rollout_matching.answer_format",
                remedy="Use a format whose coordinates do not depend on it, such as qwen3_vl.",
            )
        _, rows, columns = grid[0].tolist()
        patch = int(self.processor.image_processor.patch_size)
        return columns * patch, rows * patch

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


class ImagePreparation:
    """Features of samples' images, each prepared once; ``prepare`` makes those of one sample."""

    def __init__(self, prepare: Callable[[Sample], ImageFeatures]) -> None:
        self._prepare = prepare
        self._begun: dict[tuple[str, ...], Future[ImageFeatures]] = {}

    def begin(self, samples: Iterable[Sample]) -> None:
        """Prepare in the background what is not under way; samples without images cost nothing."""
        for sample in samples:
            if sample.images and sample.images not in self._begun:
                self._begun[sample.images] = self._pool.submit(self._prepare, sample)

    def of(self, sample: Sample) -> ImageFeatures:
        """Features of one sample: those under way, which stay to be collected, or made now. Errors: as ``collect``."""
        begun = self._begun.get(sample.images)
        return begun.result() if begun else self._prepare(sample)

    def collect(self, samples: Iterable[Sample]) -> dict[int, ImageFeatures]:
        """Features by sample id; they are not kept. Errors: those of ``prepare``."""
        by_id = {sample.sample_id: sample for sample in samples}
        self.begin(by_id.values())
        features = {
            sample_id: self._begun[sample.images].result() if sample.images else self._prepare(sample)
            for sample_id, sample in by_id.items()
        }
        for sample in by_id.values():
            self._begun.pop(sample.images, None)
        return features

    def close(self) -> None:
        """Drop what nobody will collect."""
        for future in self._begun.values():
            future.cancel()
        self._begun.clear()

    @cached_property
    def _pool(self) -> ThreadPoolExecutor:
        # torch's own threads, which are counted per thread, would only get in each other's way.
        return ThreadPoolExecutor(num_threads(), "images", initializer=partial(torch.set_num_threads, 1))


def num_threads() -> int:
    """Threads of this learner rank: its share of the machine's cores, at most ``MOST_THREADS``."""
    num_ranks = int(os.environ.get("LOCAL_WORLD_SIZE", "1"))
    return max(1, min(MOST_THREADS, (os.cpu_count() or 1) // num_ranks))


def once_per_images(prepare: Callable[[Sample], Prepared], *, kept: int | None = None) -> Callable[[Sample], Prepared]:
    """``prepare``, run once for the requests that share their images; ``kept``: results at a time, None: all."""
    samples: dict[tuple[str, ...], Sample] = {}
    known = lru_cache(kept)(lambda images: prepare(samples[images]))

    def of(sample: Sample) -> Prepared:
        samples[sample.images] = sample
        prepared: Prepared = known(sample.images)
        return prepared

    return of


def read_config(directory: str | Path) -> dict[str, Any]:
    """``config.json`` of a model directory; empty where there is none."""
    path = Path(directory) / "config.json"
    described: dict[str, object] = json.loads(path.read_text(encoding="utf-8")) if path.is_file() else {}
    return described


def _image_id_of(directory: str | Path, processor: ProcessorMixin) -> int:
    """As the model reads it: a processor may mean the token of prompts instead (Gemma 3)."""
    described = read_config(directory)
    token_id = described.get("image_token_id", described.get("image_token_index"))
    return int(processor.image_token_id if token_id is None else token_id)


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


def multimodal_part(model: nn.Module) -> PreTrainedModel | None:
    """The module that puts images into the text, inside any adapters and wrappers; None in a text model."""
    models = (part for part in model.modules() if isinstance(part, PreTrainedModel))  # peft's wrapper has a config, too
    return next((part for part in models if getattr(part.config, "vision_config", None)), None)


def token_types(token_ids: Tensor, config: PreTrainedConfig) -> Tensor:
    """0 text, 1 image, 2 video; the same shape."""
    types = torch.zeros_like(token_ids, dtype=torch.int32)
    for kind, token_id in enumerate(_placeholders_of(config), start=1):
        if token_id is not None:
            types[token_ids == token_id] = kind
    return types


def _placeholders_of(config: PreTrainedConfig) -> Iterator[int | None]:
    for kind in ("image", "video"):
        token_id = getattr(config, f"{kind}_token_id", None)
        yield getattr(config, f"{kind}_token_index", None) if token_id is None else token_id


def _joined(tensors: Sequence[Tensor]) -> Tensor:
    """Along the first dimension; the others are padded with zeros, as processors pad images of several sizes.

    >>> _joined([torch.ones(1, 2), torch.ones(1, 1)]).tolist()
    [[1.0, 1.0], [1.0, 0.0]]
    """
    shape = [max(sizes) for sizes in zip(*(tensor.shape[1:] for tensor in tensors))]
    padded = []
    for tensor in tensors:
        missing = [size - own for size, own in zip(shape, tensor.shape[1:])]
        padded.append(functional.pad(tensor, [part for size in reversed(missing) for part in (0, size)]))
    return torch.cat(padded)


def placeholder_ids(directory: str | Path, processor: Any) -> tuple[int, ...]:
    """Ids of a model's image, video and audio placeholders, ascending; none of a text model.

    Source: the processor's own attributes, and ``config.json``. Ids are never assumed: 151667 is ``<think>`` in one
    family and an image placeholder in another.
    """
    described = read_config(directory)
    names = [f"{kind}_token_{suffix}" for kind in ("image", "video", "audio") for suffix in ("id", "index")]
    found = {described.get(name) for name in names} | {getattr(processor, name, None) for name in names}
    found.add(described.get("boi_token_index"))  # Gemma 3 reads it as an image when a prompt holds it
    rows = described.get("vocab_size", described.get("text_config", {}).get("vocab_size"))
    return tuple(sorted(i for i in found if isinstance(i, int) and 0 <= i < (rows or i + 1)))


def expand_placeholders(
    prompt_token_ids: Sequence[int], expansions: Sequence[Sequence[int]], *, placeholder_id: int
) -> tuple[int, ...]:
    """Replace the i-th placeholder by ``expansions[i]``. Errors: ``placeholders-misfit``.

    >>> expand_placeholders([5, 99, 6, 99, 7], [(99, 99), (1, 99, 2)], placeholder_id=99)
    (5, 99, 99, 6, 1, 99, 2, 7)
    """
    check_placeholders(prompt_token_ids, len(expansions), placeholder_id=placeholder_id)
    remaining = iter(expansions)
    expanded: list[int] = []
    for token_id in prompt_token_ids:
        expanded.extend(next(remaining) if token_id == placeholder_id else (token_id,))
    return tuple(expanded)


def collapse_placeholders(
    prompt_token_ids: Sequence[int], expansions: Sequence[Sequence[int]], *, placeholder_id: int
) -> tuple[int, ...]:
    """The reverse of ``expand_placeholders``: ``prompt_token_ids`` holds the ``expansions``, in order.

    >>> collapse_placeholders([5, 99, 99, 6, 1, 99, 2, 7], [(99, 99), (1, 99, 2)], placeholder_id=99)
    (5, 99, 6, 99, 7)
    """
    rest, collapsed = tuple(prompt_token_ids), list[int]()
    for expansion in map(tuple, expansions):
        start = next(at for at in range(len(rest)) if rest[at : at + len(expansion)] == expansion)
        collapsed += [*rest[:start], placeholder_id]
        rest = rest[start + len(expansion) :]
    return (*collapsed, *rest)


def check_placeholders(prompt_token_ids: Sequence[int], num_images: int, *, placeholder_id: int) -> None:
    """One placeholder per image. Errors: ``placeholders-misfit``."""
    num_placeholders = sum(token_id == placeholder_id for token_id in prompt_token_ids)
    if num_placeholders != num_images:
        raise ConfigError(
            f"the prompt holds {num_placeholders} image placeholders for {num_images} images",
            code="placeholders-misfit",
            key="custom.prompts",
            remedy="Take the placeholder's literal out of the prompts: the chat template writes one per image.",
        )
