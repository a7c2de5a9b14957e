"""Requests -> what the engine takes: ids with one placeholder per image, and the images."""

from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any

from jinja2 import TemplateError
from PIL import Image
from transformers import AutoProcessor, AutoTokenizer

from rollmatch.data.chat import IMAGE_TAG
from rollmatch.data.ids import unpack_ids
from rollmatch.server.failures import BadItem
from rollmatch.server.images import ImageReader
from rollmatch.server.payloads import InferRequest


class PromptMissing(BadItem):
    """A request holds either ids or messages."""

    code = "prompt-missing"


class MessagesInvalid(BadItem):
    """Messages are what the chat template takes."""

    code = "messages-invalid"


class ImagesMisfit(BadItem):
    """A prompt has one placeholder per image."""

    code = "images-misfit"


class TokenIdInvalid(BadItem):
    """Every id of a prompt is in the vocabulary."""

    code = "token-id-invalid"


class PromptTooLong(BadItem):
    """A prompt and its longest response fit into ``max_model_len``."""

    code = "prompt-too-long"


@dataclass(frozen=True, slots=True, kw_only=True)
class EnginePrompt:
    """What the engine gets."""

    token_ids: list[int]
    """With one placeholder per image."""
    images: list[Image.Image]
    expanded_len: int
    """Tokens once placeholders are expanded."""


class PromptMaker:
    """Chat template, tokenizer and image sizes of one model directory."""

    def __init__(self, directory: str, *, vocabulary_size: int, reader: ImageReader) -> None:
        self.reader = reader
        self.vocabulary_size = vocabulary_size
        processor = AutoProcessor.from_pretrained(directory)
        self._image_processor = getattr(processor, "image_processor", None)
        self._image_id: int | None = getattr(processor, "image_token_id", None)
        self.tokenizer: Any = getattr(processor, "tokenizer", None) or AutoTokenizer.from_pretrained(directory)

    def make(self, request: InferRequest, *, item: int, where: str = "requests") -> EnginePrompt:
        """Read images, render messages, check ids. Errors: the classes above, ``ImageReader``'s."""
        key = f"{where}[{item}]"
        if (request.prompt_token_ids is None) == (request.messages is None):
            problem = "holds both prompt_token_ids and messages" if request.messages else "holds no prompt"
            raise PromptMissing(problem, key=key, remedy="Send prompt_token_ids or messages.", item=item)
        if request.messages is not None:
            token_ids, values = self._render(request, item=item, key=f"{key}.messages")
        else:
            assert request.prompt_token_ids is not None
            token_ids, values = unpack_ids(request.prompt_token_ids).tolist(), list(request.images)
        self._check_ids(token_ids, item=item, key=f"{key}.prompt_token_ids")
        images = [self.reader.read(value, item=item, key=f"{key}.images[{i}]") for i, value in enumerate(values)]
        self._check_placeholders(token_ids, images, item=item, key=f"{key}.images")
        growth = sum(self.num_image_tokens(image) - 1 for image in images)
        return EnginePrompt(token_ids=token_ids, images=images, expanded_len=len(token_ids) + growth)

    def encode(self, text: str) -> list[int]:
        """Ids of a prompt that came as text."""
        ids: list[int] = self.tokenizer.encode(text)
        return ids

    def decode(self, token_ids: Sequence[int]) -> str:
        """Text of a response, without control tokens."""
        text: str = self.tokenizer.decode(token_ids, skip_special_tokens=True)
        return text

    def num_image_tokens(self, image: Image.Image) -> int:
        """Tokens an image takes; 1 where the model's processor cannot say so without processing it."""
        processor: Any = self._image_processor
        if not hasattr(processor, "get_number_of_image_patches"):
            return 1
        num_patches: int = processor.get_number_of_image_patches(image.height, image.width)
        return max(1, num_patches // int(getattr(processor, "merge_size", 1)) ** 2)

    def _render(self, request: InferRequest, *, item: int, key: str) -> tuple[list[int], list[str | bytes]]:
        bare = iter(request.images)
        values: list[str | bytes] = []
        try:
            messages = [_with_images(dict(message), bare, values) for message in request.messages or ()]
            if left := list(bare):
                messages = _lead_with_images(messages, num_images=len(left))
                values = left + values
            rendered: Any = self.tokenizer.apply_chat_template(messages, tokenize=False, add_generation_prompt=True)
        except (TemplateError, KeyError, TypeError, ValueError, AttributeError, StopIteration) as error:
            problem = f"the chat template does not take them: {type(error).__name__}: {error}"
            raise MessagesInvalid(problem, key=key, remedy="Send a list of role and content.", item=item) from error
        return self.tokenizer.encode(rendered, add_special_tokens=False), values

    def _check_ids(self, token_ids: list[int], *, item: int, key: str) -> None:
        if not token_ids:
            raise PromptMissing("is empty", key=key, remedy="Send at least one token.", item=item)
        if max(token_ids) >= self.vocabulary_size or min(token_ids) < 0:
            problem = f"holds {max(token_ids)}, the vocabulary has {self.vocabulary_size} tokens"
            raise TokenIdInvalid(problem, key=key, remedy="Use the tokenizer of the served model.", item=item)

    def _check_placeholders(self, token_ids: list[int], images: Sequence[Any], *, item: int, key: str) -> None:
        placeholders = 0 if self._image_id is None else token_ids.count(self._image_id)
        if placeholders != len(images):
            problem = f"the prompt has {placeholders} image placeholders for {len(images)} images"
            raise ImagesMisfit(problem, key=key, remedy="Send one image per placeholder, unexpanded.", item=item)


def check_room(prompt: EnginePrompt, max_tokens: int, *, max_model_len: int, item: int) -> None:
    """Raise ``PromptTooLong`` where the response might be cut short in silence."""
    if prompt.expanded_len + max_tokens > max_model_len:
        raise PromptTooLong(
            f"{prompt.expanded_len} prompt tokens and {max_tokens} new ones do not fit into {max_model_len}",
            key=f"requests[{item}]",
            remedy="Shorten the prompt, lower max_tokens or serve with a higher max_model_len.",
            item=item,
        )


def _with_images(message: dict[str, Any], bare: Iterator[str | bytes], values: list[str | bytes]) -> dict[str, Any]:
    """A message whose image parts are bare placeholders; their values are appended to ``values``, in order."""
    content = message["content"]
    parts = list(_parts_of(content)) if isinstance(content, str) else [dict(part) for part in content]
    for part in parts:
        if part.get("type") in ("image", "image_url"):
            told = part.pop("image", None) or part.pop("image_url", None) or part.pop("url", None)
            told = told.get("url") if isinstance(told, dict) else told
            values.append(next(bare) if told is None else told)
            part["type"] = "image"
    if all(part.get("type") == "text" for part in parts):
        return message
    return message | {"content": parts}


def _parts_of(text: str) -> Iterable[dict[str, Any]]:
    """Text around ``<image>`` tags, and the tags as parts.

    >>> list(_parts_of("a<image>b"))
    [{'type': 'text', 'text': 'a'}, {'type': 'image'}, {'type': 'text', 'text': 'b'}]
    """
    for place, piece in enumerate(text.split(IMAGE_TAG)):
        if place:
            yield {"type": "image"}
        if piece:
            yield {"type": "text", "text": piece}


def _lead_with_images(messages: list[dict[str, Any]], *, num_images: int) -> list[dict[str, Any]]:
    """Images nobody placed stand before the first user message's text, as in ms-swift."""
    place = next(i for i, message in enumerate(messages) if message["role"] == "user")
    content = messages[place]["content"]
    parts = [{"type": "text", "text": content}] if isinstance(content, str) else list(content)
    led = messages[place] | {"content": [{"type": "image"}] * num_images + parts}
    return [*messages[:place], led, *messages[place + 1 :]]
