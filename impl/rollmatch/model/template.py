"""Samples -> prompt token ids and image features; the door to the tokenizer's chat template and the image processor.

The learner and every rollout engine must see the same prompt. Two forms of it exist: as the chat template writes it,
with one placeholder per image (sent to engines), and *expanded*, with as many placeholders as the image has
embeddings (what a model's forward pass takes and what an engine reports back as ``prompt_token_ids``).
"""

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from PIL import Image

from rollmatch.data.chat import IMAGE_TAG, tagged_messages
from rollmatch.errors import ConfigError, RolloutError
from rollmatch.model.images import NO_IMAGES, ImageFeatures, ImageProcessing, read_config
from rollmatch.model.vocabulary import Vocabulary
from rollmatch.records import Rollout, Sample


class ImagesNotSupported(ConfigError):
    """The model directory says how images are prepared."""

    code = "images-not-supported"


class PlaceholdersMisfit(ConfigError):
    """A prompt holds one image placeholder per image."""

    code = "placeholders-misfit"


class TurnsNotRendered(ConfigError):
    """The chat template writes a message of the user's behind one of the assistant's, both as they are."""

    code = "turns-not-rendered"


class PromptMismatch(RolloutError):
    """The engine saw another prompt than the one the learner would teach on."""

    code = "prompt-mismatch"


NO_ID = -1
"""An id that no token has."""
WRITTEN = "rollmatch-writes-here"
"""Stands for a turn of the assistant's where a chat is rendered around it."""


@dataclass(frozen=True, slots=True, kw_only=True)
class TemplateOptions:
    """Settings of the model's own chat template and processor."""

    chat: Mapping[str, Any] = field(default_factory=dict)
    processor: Mapping[str, Any] = field(default_factory=dict)


class Template:
    """Chat template, image processor and vocabulary of one model directory.

    ``any_chat`` takes every chat model: coordinate tokens and images are there where the model has them.
    """

    def __init__(
        self,
        directory: str | Path,
        *,
        system: str,
        user: str,
        any_chat: bool = False,
        options: TemplateOptions | None = None,
    ) -> None:
        self.options = options or TemplateOptions()
        self.vocabulary = Vocabulary.load(directory, coordinates=not any_chat)
        self.processor = _load_processor(directory, self.options.processor, needs_images=not any_chat)
        self.tokenizer = getattr(self.processor, "tokenizer", self.processor)
        self.system, self.user = system, user
        has_images = hasattr(self.processor, "image_processor")
        self.images = ImageProcessing(self.processor, directory) if has_images else None
        self.image_id = self.images.image_id if self.images else NO_ID
        self.pad_id: int = self._find_pad_id()
        self.banned_ids = placeholder_ids(directory, self.processor)
        """Tokens that no response may contain: each would ask for an image or a video that is not there."""

    def messages(self, sample: Sample) -> list[dict[str, Any]]:
        """Chat messages of a sample's prompt: its own, or system (unless empty), then images and the question."""
        if sample.messages:
            return own_messages(sample)
        content = [{"type": "image", "image": path} for path in sample.images] + [{"type": "text", "text": self.user}]
        question = {"role": "user", "content": content}
        return [{"role": "system", "content": self.system}, question] if self.system else [question]

    def prompt_token_ids(self, sample: Sample) -> tuple[int, ...]:
        """[P'] the prompt with one placeholder per image, ready for the assistant's first token."""
        return self.vocabulary.encode(self._render(sample))

    def _render(self, sample: Sample) -> str:
        return self._chat_text(self.messages(sample))

    def _chat_text(self, messages: list[dict[str, Any]]) -> str:
        text: str = self.tokenizer.apply_chat_template(
            messages, tokenize=False, add_generation_prompt=True, **self.options.chat
        )
        return text

    def reply_token_ids(self, text: str, is_stopped: bool) -> tuple[int, ...]:
        """What a chat holds between two turns of the assistant where the user says ``text``; ids of turns stay theirs.

        ``is_stopped``: the stop token ended the turn before, and is not written again. Errors: ``TurnsNotRendered``.
        """
        roles = (("user", "?"), ("assistant", WRITTEN), ("user", text))
        chat = [{"role": role, "content": content} for role, content in roles]
        whole = self._chat_text(chat)
        _, mark, after = whole.partition(WRITTEN)
        if not mark or text.strip() not in after:
            problem = "the chat template does not write a second message of the user's behind the assistant's"
            remedy = "Set custom.extra.environment.observations to text, or give the model another template."
            raise TurnsNotRendered(problem, key="model.model", remedy=remedy)
        ids = self.vocabulary.encode(after)
        return ids[1:] if is_stopped and ids[:1] == (self.vocabulary.stop_id,) else ids

    def text_token_ids(self, text: str, is_stopped: bool) -> tuple[int, ...]:
        """What stands between two turns where nothing but ``text`` does."""
        return self.vocabulary.encode(text)

    def load_images(self, sample: Sample) -> list[Image.Image]:
        """The sample's images in RGB, as every backend gets them."""
        images = []
        for path in sample.images:
            with Image.open(path) as image:
                images.append(image.convert("RGB"))
        return images

    def prompt_length(self, sample: Sample) -> int:
        """Tokens of a sample's prompt, images expanded; reads only the headers of image files."""
        ids, sizes = self.prompt_token_ids(sample), []
        for path in sample.images:
            with Image.open(path) as image:
                sizes.append(image.size)
        if self.images is None or not sizes:
            return len(ids)
        _check_placeholders(ids, len(sizes), placeholder_id=self.images.placeholder_id)
        return len(ids) + self.images.growth(tuple(sizes))

    def image_features(self, sample: Sample) -> ImageFeatures:
        """Tensors and tokens of a sample's images. Errors: ``ImagesNotSupported``."""
        if not sample.images:
            return NO_IMAGES
        if self.images is None:
            raise ImagesNotSupported("the model takes no images", key=sample.origin, remedy="Take a vision model.")
        return self.images.process(self.load_images(sample))

    def num_added_tokens(self, images: Sequence[Image.Image]) -> int:
        """Tokens that a prompt gains when the placeholders of its images are expanded."""
        return self.images.growth(tuple(image.size for image in images)) if self.images and images else 0

    def expand(self, prompt_token_ids: Sequence[int], features: ImageFeatures) -> tuple[int, ...]:
        """[P] replace each image placeholder by the tokens of its image. Errors: ``PlaceholdersMisfit``."""
        placeholder_id = self.images.placeholder_id if self.images else NO_ID
        return expand_placeholders(prompt_token_ids, features.expansions, placeholder_id=placeholder_id)

    def check_expansion(self, sample: Sample) -> None:
        """Compare an expanded prompt with the processor's, of the whole text. Errors: ``PlaceholdersMisfit``."""
        ours = self.expand(self.prompt_token_ids(sample), self.image_features(sample))
        text = self._render(sample)
        made = self.processor(text=[text], images=[self.load_images(sample)], add_special_tokens=False)
        if list(ours) != list(made["input_ids"][0]):
            raise PlaceholdersMisfit(
                f"{type(self.processor).__name__} tokenizes the text around an image together with it",
                key=sample.origin,
                remedy="Put text that ends and begins with words around images, or use another model.",
            )

    def check_alignment(self, sample: Sample, prompt_token_ids: Sequence[int], rollout: Rollout) -> None:
        """Raise ``PromptMismatch`` unless the engine saw exactly ``prompt_token_ids`` (expanded)."""
        if tuple(prompt_token_ids) != rollout.prompt_token_ids:
            raise _describe_mismatch(sample, prompt_token_ids, rollout.prompt_token_ids, self.image_id)

    def _find_pad_id(self) -> int:
        """The tokenizer's, or the stop token where it has none: what is padded is masked."""
        pad_id = self.tokenizer.pad_token_id
        return self.vocabulary.stop_id if pad_id is None else int(pad_id)


def placeholder_ids(directory: str | Path, processor: Any) -> tuple[int, ...]:
    """Ids of a model's image, video and audio placeholders, ascending; none of a text model.

    Source: the processor's own attributes, and ``config.json``. Ids are never assumed: 151667 is ``<think>`` in one
    family and an image placeholder in another.
    """
    described = read_config(directory)
    names = [f"{kind}_token_{suffix}" for kind in ("image", "video", "audio") for suffix in ("id", "index")]
    found = {described.get(name) for name in names} | {getattr(processor, name, None) for name in names}
    found.add(described.get("boi_token_index"))  # Gemma 3 reads it as an image when a prompt holds it
    return tuple(sorted(i for i in found if isinstance(i, int) and i >= 0))


def own_messages(sample: Sample) -> list[dict[str, Any]]:
    """A sample's own chat as a chat template takes it; images stand where tagged, else before the first question.

    >>> sample = Sample(sample_id=0, origin="x:1", images=("a.png",), messages=(("user", "Is <image> red?"),))
    >>> [part["type"] for part in own_messages(sample)[0]["content"]]
    ['text', 'image', 'text']
    """
    if not sample.images:
        return [{"role": role, "content": text} for role, text in sample.messages]
    images = iter(sample.images)
    return [{"role": role, "content": list(_parts_of(text, images))} for role, text in tagged_messages(sample)]


def _parts_of(text: str, images: Iterator[str]) -> Iterator[dict[str, Any]]:
    for place, piece in enumerate(text.split(IMAGE_TAG)):
        if place:
            yield {"type": "image", "image": next(images)}
        if piece:
            yield {"type": "text", "text": piece}


def expand_placeholders(
    prompt_token_ids: Sequence[int], expansions: Sequence[Sequence[int]], *, placeholder_id: int
) -> tuple[int, ...]:
    """Replace the i-th placeholder by ``expansions[i]``. Errors: ``PlaceholdersMisfit``.

    >>> expand_placeholders([5, 99, 6, 99, 7], [(99, 99), (1, 99, 2)], placeholder_id=99)
    (5, 99, 99, 6, 1, 99, 2, 7)
    """
    _check_placeholders(prompt_token_ids, len(expansions), placeholder_id=placeholder_id)
    remaining = iter(expansions)
    expanded: list[int] = []
    for token_id in prompt_token_ids:
        expanded.extend(next(remaining) if token_id == placeholder_id else (token_id,))
    return tuple(expanded)


def _check_placeholders(prompt_token_ids: Sequence[int], num_images: int, *, placeholder_id: int) -> None:
    num_placeholders = sum(token_id == placeholder_id for token_id in prompt_token_ids)
    if num_placeholders != num_images:
        raise PlaceholdersMisfit(
            f"the prompt holds {num_placeholders} image placeholders for {num_images} images",
            key="custom.prompts",
            remedy="Take the placeholder's literal out of the prompts: the chat template writes one per image.",
        )


def _load_processor(directory: str | Path, settings: Mapping[str, Any], *, needs_images: bool) -> Any:
    from transformers import AutoProcessor, AutoTokenizer  # a second to load

    remedy = "Save preprocessor_config.json and video_preprocessor_config.json beside the model."
    try:
        processor = AutoProcessor.from_pretrained(str(directory), **settings)
    except OSError as error:
        if not needs_images:
            return AutoTokenizer.from_pretrained(str(directory))
        told = str(error).partition(".")[0]
        raise ImagesNotSupported(f"{directory}: {told}", key="model.model", remedy=remedy) from error
    if needs_images and not hasattr(processor, "image_processor"):
        raise ImagesNotSupported(f"{directory} has no image processor", key="model.model", remedy=remedy)
    return processor


def _describe_mismatch(sample: Sample, learner: Sequence[int], engine: Sequence[int], image_id: int) -> PromptMismatch:
    """Name the first differing position, both ids, and what usually causes such a difference."""
    shorter = min(len(learner), len(engine))
    place = next((i for i in range(shorter) if learner[i] != engine[i]), shorter)
    ours, theirs = (ids[place] if place < len(ids) else None for ids in (learner, engine))
    if image_id in (ours, theirs):
        cause = "The two sides resize images differently: give both the same preprocessor_config.json."
    elif place == 0 or _ends_alike(learner, engine):
        cause = "A system message is missing on one side: pin the same chat template on both."
    else:
        cause = "The chat template or the tokenizer differs: serve the directory the learner trains."
    return PromptMismatch(
        f"prompts differ first at position {place}: learner {ours}, engine {theirs} "
        f"(lengths {len(learner)} and {len(engine)})",
        key=sample.origin,
        remedy=cause,
    )


def _ends_alike(one: Sequence[int], other: Sequence[int]) -> bool:
    """Whether the shorter list is the end of the longer one.

    >>> _ends_alike([1, 7, 1, 8], [1, 8]), _ends_alike([1, 8], [1, 7, 1, 8]), _ends_alike([1, 8], [1, 7, 1, 9])
    (True, True, False)
    """
    shorter, longer = sorted((tuple(one), tuple(other)), key=len)
    return longer[len(longer) - len(shorter) :] == shorter
