"""Which fields of an OpenAI call are served, and within which bounds; what they mean is vLLM's business."""

from collections.abc import Iterable, Iterator
from typing import Annotated, ClassVar, Literal

from PIL import Image
from pydantic import Field

from rollmatch.data.ids import PackedIds
from rollmatch.server.payloads import Int64, Payload
from rollmatch.server.sampling import GivenVllmSampling, StopTexts
from rollmatch.server.unserved import Unserved

TokenId = Annotated[int, Field(ge=0, lt=2**31)]
Longest = Annotated[int, Field(ge=1, lt=2**31)]
NumLogprobs = Annotated[int, Field(ge=0, le=20)]
NumPromptLogprobs = Annotated[int, Field(ge=0, le=100_000)]
"""Likeliest tokens at each place of a prompt, beside its own: by the model's own distribution."""
JsonObject = dict[str, object]
Structure = Annotated[str, Field(max_length=65_536)]
"""What a response looks like."""


SAMPLED = (*GivenVllmSampling.model_fields, "logit_bias")
"""Fields whose ranges are those of every other dialect: ``Sampling``."""


class OpenAIStreamOptions(Payload):
    """``stream_options``."""

    include_usage: bool | None = None
    continuous_usage_stats: bool | None = None
    include_obfuscation: Unserved = None


class StructuredOutputs(Payload):
    """vLLM's ``structured_outputs``."""

    schema_: str | JsonObject | None = Field(default=None, alias="json")
    regex: Annotated[str, Field(max_length=4096)] | None = None
    choice: Annotated[list[Annotated[str, Field(max_length=4096)]], Field(max_length=1024)] | None = None
    grammar: Structure | None = None
    json_object: bool | None = None
    structural_tag: Structure | None = None


class OpenAIBody(GivenVllmSampling):
    """What both kinds of calls have; None leaves a value to the model's generation config."""

    no_matter: ClassVar = frozenset(
        ["user", "metadata", "store", "service_tier", "safety_identifier", "prompt_cache_key", "modalities", "best_of"]
    )
    """Fields of OpenAI's clients that change no response here; vLLM does not get them."""

    model: str | None = None
    request_id: Annotated[str, Field(max_length=1024)] | None = None
    """Part of the reply's ``id``."""
    n: Annotated[Int64, Field(ge=1)] | None = None
    seed: Int64 | None = None
    max_tokens: Longest | None = None
    stop: StopTexts | Annotated[str, Field(min_length=1, max_length=1024)] | None = None
    stream: bool | None = None
    stream_options: OpenAIStreamOptions | None = None
    logit_bias: dict[str, float] | None = None
    allowed_token_ids: list[TokenId] | None = None
    bad_words: Annotated[list[str], Field(max_length=1024)] | None = None
    response_format: JsonObject | None = None
    structured_outputs: StructuredOutputs | None = None
    include_stop_str_in_output: bool | None = None
    skip_special_tokens: bool | None = None
    spaces_between_special_tokens: bool | None = None
    add_special_tokens: bool | None = None
    return_token_ids: bool | None = None
    return_tokens_as_token_ids: bool | None = None
    user: str | None = None
    metadata: JsonObject | None = None
    store: bool | None = None
    service_tier: str | None = None
    safety_identifier: str | None = None
    prompt_cache_key: str | None = None
    echo: Literal[False] | None = None
    use_beam_search: Literal[False] | None = None
    best_of: Literal[1] | None = None
    length_penalty: Annotated[float, Field(ge=1, le=1)] | None = None
    priority: Literal[0] | None = None
    truncate_prompt_tokens: None = None

    def sampling(self) -> dict[str, object]:
        """The values whose ranges are checked by ``Sampling``."""
        return self.model_dump(include=set(SAMPLED), exclude_none=True)

    def longest(self) -> int | None:
        """Most tokens of a response, where the call says so."""
        return self.max_tokens

    def num_top(self) -> int:
        """Likeliest tokens at each place whose log-probabilities are returned, the sampled one among them."""
        return 0

    def for_vllm(self) -> JsonObject:
        """What the caller gave, without what changes nothing; None counts as not given."""
        return self.model_dump(exclude_none=True, by_alias=True, exclude=set(self.no_matter))


class TextPart(Payload):
    """Text within a message."""

    type: Literal["text"]
    text: str


class ImageUrl(Payload):
    """An image: a data URL, or a path below an image root."""

    url: str
    detail: Literal["auto"] | None = None
    """Other values would promise a resolution that the model's own processor chooses."""


class ImagePart(Payload):
    """An image within a message."""

    type: Literal["image_url"]
    image_url: ImageUrl


class ChatMessage(Payload):
    """One message; the last fields are in what OpenAI's client returns, and so in what callers send back."""

    role: Literal["system", "developer", "user", "assistant", "tool"]
    content: str | list[Annotated[TextPart | ImagePart, Field(discriminator="type")]] | None = None
    name: str | None = None
    tool_calls: list[JsonObject] | None = None
    tool_call_id: str | None = None
    reasoning: str | None = None
    reasoning_content: str | None = None
    refusal: Unserved = None
    audio: Unserved = None
    function_call: Unserved = None
    annotations: Unserved = None

    def images(self) -> Iterator[str]:
        """URLs of its images, in order."""
        parts = self.content if isinstance(self.content, list) else []
        return (part.image_url.url for part in parts if isinstance(part, ImagePart))

    def parts(self, images: Iterator[Image.Image]) -> list[JsonObject]:
        """Its content as vLLM renders it, with the next of ``images`` in place of each URL."""
        return [
            {"type": "image_pil", "image_pil": next(images)} if isinstance(part, ImagePart) else part.model_dump()
            for part in (self.content if isinstance(self.content, list) else [])
        ]


class ChatBody(OpenAIBody):
    """A call of ``/v1/chat/completions``."""

    messages: Annotated[list[ChatMessage], Field(min_length=1)]
    max_completion_tokens: Longest | None = None
    logprobs: bool | None = None
    top_logprobs: NumLogprobs | None = None
    tools: list[JsonObject] | None = None
    tool_choice: str | JsonObject | None = None
    parallel_tool_calls: bool | None = None
    reasoning_effort: str | None = None
    include_reasoning: bool | None = None
    add_generation_prompt: bool | None = None
    continue_final_message: bool | None = None
    chat_template_kwargs: JsonObject | None = None
    prompt_logprobs: None = None
    chat_template: Unserved = None
    documents: Unserved = None
    mm_processor_kwargs: Unserved = None
    media_io_kwargs: Unserved = None
    modalities: list[Literal["text"]] | None = None
    audio: Unserved = None
    prediction: Unserved = None
    functions: Unserved = None
    function_call: Unserved = None
    web_search_options: Unserved = None
    verbosity: Unserved = None

    def longest(self) -> int | None:
        """Most tokens of a response, where the call says so."""
        return self.max_completion_tokens or self.max_tokens

    def num_top(self) -> int:
        """As above."""
        return (self.top_logprobs or 0) + 1 if self.logprobs else 0

    def parts(self, images: Iterable[Image.Image]) -> list[list[JsonObject]]:
        """``ChatMessage.parts`` of each message; ``images`` are those of all, in order."""
        left = iter(images)
        return [message.parts(left) for message in self.messages]


class CompletionBody(OpenAIBody):
    """A call of ``/v1/completions``."""

    prompt: str | list[str] | list[TokenId] | list[list[TokenId]]
    logprobs: NumLogprobs | None = None
    prompt_logprobs: NumPromptLogprobs | None = None
    suffix: Unserved = None
    prompt_embeds: Unserved = None

    def num_top(self) -> int:
        """As above."""
        return 0 if self.logprobs is None else self.logprobs + 1

    def prompts(self) -> list[str | list[int]]:
        """One entry per prompt."""
        if isinstance(self.prompt, str):
            return [self.prompt]
        ids = [token_id for token_id in self.prompt if isinstance(token_id, int)]
        return [ids] if ids else [prompt for prompt in self.prompt if not isinstance(prompt, int)]


class RenderBody(Payload):
    """A call of ``/v1/chat/completions/render``."""

    messages: Annotated[list[ChatMessage], Field(min_length=1)]
    model: str | None = None
    tools: list[JsonObject] | None = None
    chat_template_kwargs: JsonObject | None = None
    max_tokens: Longest | None = None
    """Without effect: nothing is generated."""


class DetokenizeBody(Payload):
    """A call of ``/detokenize``."""

    tokens: list[TokenId]
    model: str | None = None


class TokenStructure(Payload):
    """``structured_outputs``."""

    regex: Annotated[str, Field(min_length=1, max_length=4096)]


class TokenSampling(GivenVllmSampling):
    """``sampling_params``, by vLLM's names; the last six concern texts, experts and parts, which are not returned."""

    n: Annotated[Int64, Field(ge=1)] = 1
    seed: Int64 | None = None
    max_tokens: Int64 | None = None
    stop: StopTexts | Annotated[str, Field(min_length=1, max_length=1024)] | None = None
    logprobs: NumLogprobs | None = None
    prompt_logprobs: NumPromptLogprobs | None = None
    logit_bias: dict[int, float] | None = None
    structured_outputs: TokenStructure | None = None
    skip_special_tokens: bool | None = None
    spaces_between_special_tokens: bool | None = None
    detokenize: bool | None = None
    include_stop_str_in_output: bool | None = None
    routed_experts_prompt_start: Int64 | None = None
    output_kind: Int64 | None = None


class MediaPart(Payload):
    """An image of the prompt, in the place of the next image placeholder."""

    type: Literal["image_url"]
    url: str
    uuid: str | None = None


class Features(Payload):
    """Images of a prompt, as ``/v1/chat/completions/render`` returned them, for any prompt with as many."""

    mm_hashes: dict[Literal["image"], list[str]]
    mm_placeholders: dict[Literal["image"], list[JsonObject]]
    """Without effect: the prompt's own placeholders say where images are."""
    kwargs_data: dict[Literal["image"], tuple[str, ...]]
    mm_metadata: Unserved = None


class TokenBody(Payload):
    """A call of ``/inference/v1/generate``."""

    token_ids: PackedIds
    """The prompt, one placeholder per image; with ``features``, it may be expanded."""
    sampling_params: TokenSampling = TokenSampling()
    model: str | None = None
    request_id: Annotated[str, Field(max_length=1024)] | None = None
    content_parts: tuple[MediaPart, ...] = ()
    return_token_ids: bool | None = None
    cache_salt: Annotated[str, Field(max_length=1024)] | None = None
    """Without effect: a policy's cache serves no later one."""
    priority: Literal[0] | None = None
    output_mode: Literal["tokens"] = "tokens"
    stream: Unserved = None
    stream_options: Unserved = None
    features: Features | None = None
    kv_transfer_params: Unserved = None
    ec_transfer_params: Unserved = None

    def images(self) -> tuple[str, ...]:
        """In the order of their placeholders; those of ``features`` come behind."""
        data = self.features.kwargs_data.get("image", ()) if self.features else ()
        return (*(part.url for part in self.content_parts), *data)


def text_size(value: object) -> int:
    """Bytes of all texts within a JSON value.

    >>> text_size({"a": ["bc", 1], "d": {"e": "f\u00e9"}})
    8
    """
    size, left = 0, [value]
    while left:
        match left.pop():
            case str(text):
                size += len(text.encode())
            case dict(entries):
                left += [*entries.keys(), *entries.values()]
            case list(entries):
                left += entries
    return size
