"""Requests of any dialect as engine prompts: ids with one placeholder per image, and the decoded images."""

import inspect
import json
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from functools import cached_property
from itertools import groupby
from typing import Any

from jinja2 import TemplateError
from PIL import Image
from transformers import PreTrainedTokenizerBase

from rollmatch.data.content import IMAGE_TAG
from rollmatch.data.ids import unpack_ids
from rollmatch.errors import kind_and_text
from rollmatch.model.images import ImageProcessing
from rollmatch.model.stops import find_stops
from rollmatch.model.template import load_processor
from rollmatch.model.vocabulary import load_tokenizer
from rollmatch.server.failures import Refusal
from rollmatch.server.images import ImageReader, PixelBudget
from rollmatch.server.payloads import Sampling

_NOT_OF_TEMPLATES = set(inspect.signature(PreTrainedTokenizerBase.apply_chat_template).parameters)
"""What would change more than the template's variables."""


@dataclass(frozen=True, slots=True, kw_only=True)
class GenerateRequest:
    """One prompt of a call, as the caller wrote it, and how its responses are sampled."""

    token_ids: bytes | None = None
    """int32 bytes, one placeholder per image; exactly one of this, ``text`` and ``messages`` is set."""
    text: str | None = None
    messages: Sequence[Mapping[str, object]] | None = None
    tools: Sequence[Mapping[str, object]] = ()
    """JSON schemas of functions, for the chat template."""
    template_values: Mapping[str, object] = field(default_factory=dict)
    """Further variables of the chat template."""
    images: Sequence[str | bytes] = ()
    """Paths, data URLs, base64 text or encoded bytes."""
    may_be_expanded: bool = False
    """Whether ``token_ids`` may have as many placeholders for an image as the model's processor writes."""
    sampling: Sampling
    seeds: tuple[int | None, ...] = (None,)
    """One per response; None leaves the seed to the engine."""
    stop: tuple[str, ...] = ()
    """Texts that end a response."""
    regex: str | None = None
    """What the whole text of a response matches."""
    num_top: int = 0
    """Likeliest tokens whose log-probabilities are returned, at every place, beside the sampled one's."""
    num_prompt_top: int | None = None
    """As many likeliest tokens at every place of the prompt, beside its own; None: no log-probabilities of it."""
    may_move: bool = False
    """Whether newer weights may write the rest of a response, which then names all its versions."""


@dataclass(frozen=True, slots=True, kw_only=True)
class EnginePrompt:
    """The prompt that the engine gets."""

    token_ids: list[int]
    """With one placeholder per image."""
    images: list[Image.Image]
    expanded_len: int
    """Tokens once placeholders are expanded."""
    stop_ids: frozenset[int] = frozenset()
    """What ends a response, whatever the caller names."""


class PromptMaker:
    """Chat template, tokenizer and image sizes of one model directory, without code that it names.

    Errors: ``processor-unreadable``, ``tokenizer-unreadable``, ``stop-token-missing``.
    """

    def __init__(
        self, directory: str, *, vocabulary_size: int, reader: ImageReader, stop_token: str | None = None
    ) -> None:
        self.reader = reader
        self.vocabulary_size = vocabulary_size
        tokenizer = load_tokenizer(directory)
        processor = load_processor(directory, {}, needs_images=False)
        self._images = ImageProcessing(processor, directory) if hasattr(processor, "image_processor") else None
        video_id = getattr(processor, "video_token_id", None)
        self._unservable: frozenset[int] = frozenset() if video_id is None else frozenset({video_id})
        self.tokenizer: Any = getattr(processor, "tokenizer", tokenizer)
        self.stop_ids = find_stops(self.tokenizer, directory, stop_token=stop_token).ids

    @cached_property
    def special_ids(self) -> Mapping[str, int]:
        """Special token -> its id."""
        added = self.tokenizer.added_tokens_decoder
        return {token.content: token_id for token_id, token in added.items() if token.special}

    @property
    def image_id(self) -> int | None:
        """The id of each embedding of an image in an expanded prompt; None of a model without images."""
        return None if self._images is None else self._images.image_id

    @property
    def placeholder_id(self) -> int | None:
        """The id that stands for an image before a prompt is expanded; None of a model without images."""
        return None if self._images is None else self._images.placeholder_id

    def make(
        self, request: GenerateRequest, budget: PixelBudget, *, item: int, where: str = "requests"
    ) -> EnginePrompt:
        """Render messages, tokenise, decode images. Errors: ``Refusal``."""
        key = f"{where}[{item}]"
        if sum(given is not None for given in (request.token_ids, request.text, request.messages)) != 1:
            problem = "holds no prompt, or more than one"
            raise Refusal(problem, code="prompt-missing", key=key, remedy="Send ids or messages, not both.", item=item)
        values: Sequence[str | bytes] = request.images
        if request.messages is not None:
            text, values = self._render(request, item=item, key=f"{key}.messages")
            token_ids = self._tokenise(text, item=item, key=key, add_special_tokens=False)
        elif request.text is not None:
            token_ids = self._tokenise(request.text, item=item, key=key, add_special_tokens=True)
        else:
            token_ids = unpack_ids(request.token_ids or b"").tolist()
            if request.may_be_expanded:
                token_ids = self._unexpanded(token_ids, num_images=len(values))
        self.reader.count_images(len(values), budget, item=item, key=f"{key}.images")
        self.check(token_ids, len(values), item=item, key=key)
        images = [
            self.reader.read(value, budget, item=item, key=f"{key}.images[{i}]") for i, value in enumerate(values)
        ]
        return self.measure(token_ids, images, item=item, key=key)

    def check(self, token_ids: list[int], num_images: int, *, item: int, key: str) -> None:
        """Raise ``Refusal`` unless every id is one of the vocabulary's, and there is a placeholder for each image."""
        self._check_ids(token_ids, item=item, key=f"{key}.prompt_token_ids")
        self._check_placeholders(token_ids, num_images, item=item, key=f"{key}.images")

    def measure(self, token_ids: list[int], images: list[Image.Image], *, item: int, key: str) -> EnginePrompt:
        """The engine's prompt, and how long it gets. Errors: ``Refusal``."""
        growth = self._growth(images, item=item, key=f"{key}.images") if images else 0
        return EnginePrompt(
            token_ids=token_ids, images=images, expanded_len=len(token_ids) + growth, stop_ids=self.stop_ids
        )

    def _unexpanded(self, token_ids: list[int], *, num_images: int) -> list[int]:
        """One placeholder in place of each run of them, where there are as many runs as images."""
        if self._images is None:
            return token_ids
        runs = [(is_image, list(ids)) for is_image, ids in groupby(token_ids, self._images.placeholder_id.__eq__)]
        if sum(is_image for is_image, _ in runs) != num_images:
            return token_ids
        return [token_id for is_image, ids in runs for token_id in (ids[:1] if is_image else ids)]

    def _growth(self, images: Sequence[Image.Image], *, item: int, key: str) -> int:
        """Tokens that placeholders gain when they are expanded. Errors: ``Refusal``."""
        try:
            return self._images.growth(tuple(image.size for image in images)) if self._images else 0
        except (ValueError, ArithmeticError, RuntimeError) as error:  # processors have limits of their own
            problem = f"the model's processor takes no image of such a size: {error}"
            remedy = "Send images whose sides are closer to each other."
            raise Refusal(problem, code="image-unreadable", key=key, remedy=remedy, item=item) from error

    def _tokenise(self, text: str, *, item: int, key: str, add_special_tokens: bool) -> list[int]:
        limit = self.reader.limits.max_text_bytes
        if len(text) > limit or len(text.encode()) > limit:
            remedy = "Shorten the prompt, or raise custom.extra.rollout_server.limits.max_text_bytes."
            raise Refusal(f"has more than {limit} bytes", code="prompt-too-long", key=key, remedy=remedy, item=item)
        ids: list[int] = self.tokenizer.encode(text, add_special_tokens=add_special_tokens)
        return ids

    def decode(self, token_ids: Sequence[int]) -> str:
        """Text of a response, without control tokens."""
        text: str = self.tokenizer.decode(token_ids, skip_special_tokens=True)
        return text

    def _render(self, request: GenerateRequest, *, item: int, key: str) -> tuple[str, list[str | bytes]]:
        bare = iter(request.images)
        values: list[str | bytes] = []
        try:
            messages = [_with_images(_with_calls(message), bare, values) for message in request.messages or ()]
            if left := list(bare):
                messages = _lead_with_images(messages, num_images=len(left))
                values = left + values
            rendered: str = self.tokenizer.apply_chat_template(
                messages,
                tools=list(request.tools) or None,
                tokenize=False,
                add_generation_prompt=True,
                **_template_values(request.template_values),
            )
        except (
            TemplateError,
            ArithmeticError,
            LookupError,
            TypeError,
            ValueError,
            AttributeError,
            StopIteration,
        ) as error:
            problem = f"the chat template fails: {kind_and_text(error)}"
            remedy = "Send a list of role and content."
            raise Refusal(problem, code="messages-invalid", key=key, remedy=remedy, item=item) from error
        if not all(isinstance(value, str | bytes) for value in values):
            raise Refusal("an image is neither text nor bytes", code="messages-invalid", key=key, item=item)
        return rendered, values

    def _check_ids(self, token_ids: list[int], *, item: int, key: str) -> None:
        if not token_ids:
            raise Refusal("is empty", code="prompt-missing", key=key, remedy="Send at least one token.", item=item)
        if max(token_ids) >= self.vocabulary_size:  # bodies hold none below 0
            problem = f"holds {max(token_ids)}, the vocabulary has {self.vocabulary_size} tokens"
            remedy = "Use the tokenizer of the served model."
            raise Refusal(problem, code="token-id-invalid", key=key, remedy=remedy, item=item)
        unplaced = sorted(self._unservable & set(token_ids))
        if unplaced:
            problem = f"holds the video placeholder {unplaced[0]}"
            raise Refusal(
                problem, code="token-id-invalid", key=key, remedy="Send images; videos are not served.", item=item
            )

    def _check_placeholders(self, token_ids: list[int], num_images: int, *, item: int, key: str) -> None:
        placeholders = 0 if self._images is None else token_ids.count(self._images.placeholder_id)
        if placeholders != num_images:
            problem = f"the prompt has {placeholders} image placeholders for {num_images} images"
            remedy = "Send one image per placeholder, unexpanded."
            raise Refusal(problem, code="images-misfit", key=key, remedy=remedy, item=item)


def check_room(prompt: EnginePrompt, max_tokens: int, *, max_model_len: int, item: int) -> None:
    """Raise ``prompt-too-long`` where the response might be cut short in silence."""
    if prompt.expanded_len + max_tokens > max_model_len:
        raise Refusal(
            f"{prompt.expanded_len} prompt tokens and {max_tokens} new ones do not fit into {max_model_len}",
            code="prompt-too-long",
            key=f"requests[{item}]",
            remedy="Shorten the prompt, lower max_tokens or serve with a higher max_model_len.",
            item=item,
        )


def _template_values(values: Mapping[str, object]) -> Mapping[str, object]:
    """Variables for the template, none of which is an argument of the tokenizer. Errors: ``ValueError``."""
    if taken := sorted(_NOT_OF_TEMPLATES & set(values)):
        raise ValueError(f"{taken[0]} is no variable of a chat template")
    return values


def _with_calls(message: Mapping[str, Any]) -> dict[str, Any]:
    """A message whose tool calls have objects as arguments, as chat templates and vLLM's OpenAI routes have them.

    >>> call = {"type": "function", "function": {"name": "add", "arguments": '{"a": 1}'}}
    >>> _with_calls({"role": "assistant", "tool_calls": [call]})["tool_calls"][0]["function"]["arguments"]
    {'a': 1}
    """
    made, calls = dict(message), message.get("tool_calls")
    if message.get("role") != "assistant" or "tool_calls" not in made:
        return made
    del made["tool_calls"]
    if not calls:
        return made
    called = [
        call | {"function": call["function"] | {"arguments": _as_object(call["function"].get("arguments"))}}
        for call in calls
    ]
    return made | {"tool_calls": called}


def _as_object(arguments: object) -> dict[str, Any]:
    """Arguments of a call; what is no object counts as none, as in vLLM."""
    try:
        read = json.loads(arguments) if isinstance(arguments, str) else arguments
    except ValueError:
        return {}
    return read if isinstance(read, dict) else {}


def _with_images(message: dict[str, Any], bare: Iterator[str | bytes], values: list[str | bytes]) -> dict[str, Any]:
    """A message whose image parts are bare placeholders; their values are appended to ``values``, in order."""
    content = message.get("content")
    if content is None:
        if not message.get("tool_calls"):
            raise ValueError(f"a message of {message['role']} has no content")
        return message | {"content": ""}  # as vLLM's own chat routes render a message that only calls tools
    parts = list(_parts_of(content)) if isinstance(content, str) else [dict(part) for part in content]
    for part in parts:
        if part.get("type") in ("image", "image_url", "image_pil"):
            value = next(
                (part.pop(name) for name in ("image", "image_url", "url", "image_pil") if part.get(name)), None
            )
            value = value.get("url") if isinstance(value, dict) else value
            values.append(next(bare) if value is None else value)
            part["type"] = "image"
    if all(part.get("type") == "text" for part in parts):
        return message
    return message | {"content": parts}


def _parts_of(text: str) -> Iterable[dict[str, Any]]:
    """Text around ``<image>`` tags, and the tags as parts.

    >>> list(_parts_of("a<image>b"))
    [{'type': 'text', 'text': 'a'}, {'type': 'image'}, {'type': 'text', 'text': 'b'}]
    """
    for place, part in enumerate(text.split(IMAGE_TAG)):
        if place:
            yield {"type": "image"}
        if part:
            yield {"type": "text", "text": part}


def _lead_with_images(messages: list[dict[str, Any]], *, num_images: int) -> list[dict[str, Any]]:
    """Images without a place stand before the first user message's text, as in ms-swift.

    >>> chat = [{"role": role, "content": text} for role, text in (("system", "s"), ("user", "u"), ("assistant", "a"))]
    >>> [message["content"] for message in _lead_with_images(chat, num_images=1)]
    ['s', [{'type': 'image'}, {'type': 'text', 'text': 'u'}], 'a']
    """
    place = next(i for i, message in enumerate(messages) if message["role"] == "user")
    content = messages[place]["content"]
    parts = [{"type": "text", "text": content}] if isinstance(content, str) else list(content)
    led = messages[place] | {"content": [{"type": "image"}] * num_images + parts}
    return [*messages[:place], led, *messages[place + 1 :]]
