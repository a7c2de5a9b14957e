"""Samples -> prompt token ids and image features; the door to the tokenizer's chat template and the image processor.

The learner and every rollout engine must see the same prompt. Two forms of it exist: as the chat template writes it,
with one placeholder per image (sent to engines), and *expanded*, with as many placeholders as the image has
embeddings (what a model's forward pass takes and what an engine reports back as ``prompt_token_ids``).
"""

import json
import re
import warnings
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from functools import cached_property
from itertools import accumulate, pairwise
from pathlib import Path
from typing import Any

from PIL import Image

from rollmatch.data.image import read_header, rgb_of, unreadable
from rollmatch.errors import ConfigError, DataError, first_line, kind_and_text
from rollmatch.model.images import (
    NO_IMAGES,
    ImageFeatures,
    ImagePreparation,
    ImageProcessing,
    check_placeholders,
    collapse_placeholders,
    expand_placeholders,
    placeholder_ids,
)
from rollmatch.model.overlong import cut_left
from rollmatch.model.sample_prompts import as_taken, describe_mismatch, left_out_of, own_messages, processing
from rollmatch.model.stops import TEMPLATE_FAILURES, WRITTEN
from rollmatch.model.tool_texts import called_message
from rollmatch.model.vocabulary import Vocabulary, load_tokenizer
from rollmatch.records import Rollout, Sample


class PromptUncuttable(ConfigError):
    """A prompt that is to be cut has not enough text beside its framing and images."""

    code = "prompt-too-long"


_SHORTEST_MARKER = 5
"""Characters; <s> is also HTML."""
_END_OF_THOUGHT = "</think>"
"""As Qwen3, DeepSeek R1 and others write it; templates that know it mostly take thoughts out of earlier turns."""
_NO_THOUGHT = r"(<think>\s*</think>\s*)?"
"""What templates of the Qwen3 kind begin a turn with where thinking is off, and leave out once the turn is over."""
_AS_TEXT = "Set custom.extra.environment.observations to text, or give the model another chat template."
NO_ID = -1
"""An id that no token has."""


@dataclass(frozen=True, slots=True, kw_only=True)
class AnsweredChat:
    """A chat with the assistant's turns. Made by ``Template``, taught by ``objectives.chat``."""

    token_ids: tuple[int, ...]
    """[L] the chat up to the end of its last turn, images expanded."""
    turns: tuple[tuple[int, int], ...]
    """First token of each turn of the assistant, and the one behind its stop token; ascending."""


@dataclass(frozen=True, slots=True, kw_only=True)
class TemplateOptions:
    """Settings of the model's own chat template and processor."""

    chat: Mapping[str, object] = field(default_factory=dict)
    processor: Mapping[str, object] = field(default_factory=dict)
    stop_token: str | None = None
    """Token that ends a turn; None: the model says."""
    coordinates: bool = True
    """Whether the vocabulary must hold the coordinate tokens."""
    images: bool = True
    """Whether the model must take images."""
    max_prompt_len: int | None = None
    """Longer prompts are cut at the left, images expanded; None: never. Unit: tokens."""


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
        needs_images = self.options.images and not any_chat
        self.processor = load_processor(directory, self.options.processor, needs_images=needs_images)
        self.tokenizer = getattr(self.processor, "tokenizer", self.processor)
        self.vocabulary = Vocabulary.of(
            self.tokenizer,
            directory,
            stop_token=self.options.stop_token,
            coordinates=not any_chat and self.options.coordinates,
        )
        self.system, self.user = system, user
        has_images = hasattr(self.processor, "image_processor")
        self.images = ImageProcessing(self.processor, directory) if has_images else None
        self.preparation = ImagePreparation(self.image_features)
        self.image_id, self.placeholder_id = NO_ID, NO_ID
        if self.images is not None:
            self.image_id, self.placeholder_id = self.images.image_id, self.images.placeholder_id
        self.pad_id: int = self._find_pad_id()
        self._has_warned = False
        self.banned_ids = placeholder_ids(directory, self.processor)
        """Tokens that no response may contain: each stands for an image or a video that is not there."""

    def messages(self, sample: Sample) -> list[dict[str, Any]]:
        """Chat messages of a sample's prompt: its own, or system (unless empty), then images and the question."""
        if sample.messages:
            return own_messages(sample)
        content = [{"type": "image", "image": path} for path in sample.images] + [{"type": "text", "text": self.user}]
        question = {"role": "user", "content": content}
        system = self.system if sample.system is None else sample.system
        return [{"role": "system", "content": system}, question] if system else [question]

    def prompt_token_ids(self, sample: Sample) -> tuple[int, ...]:
        """[P'] the prompt with one placeholder per image, ready for the assistant's first token.

        Errors: ``PromptUncuttable``, where ``max_prompt_len`` is less than framing and images need;
        ``prompt-not-rendered``, ``image-not-processed``, ``ImageUnreadable``.
        """
        ids, limit = self.vocabulary.encode(self._render(sample)), self.options.max_prompt_len
        num_excess = 0 if limit is None else len(ids) + self._growth_of(sample, ids) - limit
        if num_excess <= 0:
            return ids
        cut = cut_left(ids, num_excess, is_kept=self.vocabulary.is_control, image_id=self.placeholder_id)
        if cut is None:
            problem = f"framing and images leave no {num_excess} tokens to cut"
            raise PromptUncuttable(problem, key=sample.origin, remedy="Set overlong to skip, or shorten the prompt.")
        return cut

    def is_plain_chat(self, sample: Sample) -> bool:
        """Whether a server's chat template writes this prompt: it is neither rendered already, nor cut."""
        return not (self._is_rendered(sample) or self.is_cut(sample))

    def _is_rendered(self, sample: Sample) -> bool:
        return sample.has_text_prompt and any(marker in sample.messages[-1][1] for marker in self._markers)

    def _render(self, sample: Sample) -> str:
        """The prompt's text. Errors: ``prompt-not-rendered``."""
        if self._is_rendered(sample):
            if not self._has_warned:
                warnings.warn(
                    f"{sample.origin}: the prompt holds markers of the chat template, and is taken as it is, without "
                    "a system message; take them out to have it rendered",
                    stacklevel=2,
                )
            self._has_warned = True
            return sample.messages[-1][1]
        return self._rendered(sample, self.messages(sample))

    def _rendered(self, sample: Sample, messages: list[dict[str, Any]], *, is_over: bool = False) -> str:
        """A chat's text; with ``is_over`` no turn of the assistant is begun. Errors: ``prompt-not-rendered``."""
        remedy = "Correct its messages and tools, or give the model another template."
        try:
            text = self._chat_text(messages, tools=sample.tools, is_over=is_over)
        except Exception as error:  # a template may do anything to what it is given
            problem = (
                f"the chat template fails: {kind_and_text(error)}"
                if self.tokenizer.chat_template
                else "a chat needs a template, and the model has none"
            )
            raise DataError(problem, code="prompt-not-rendered", key=sample.origin, remedy=remedy) from error
        if dropped := left_out_of(text, messages, sample.tools):
            raise DataError(
                f"the chat template leaves out {dropped}", code="prompt-not-rendered", key=sample.origin, remedy=remedy
            )
        return text

    @cached_property
    def _markers(self) -> tuple[str, ...]:
        """What only a rendered chat holds: the special tokens of one, and what it writes behind the question."""
        try:
            whole = self._chat_text([{"role": "user", "content": WRITTEN}])
        except TEMPLATE_FAILURES:
            return ()
        ids = {i for i in self.vocabulary.encode(whole) if i in self.vocabulary.control_ids}
        special = [self.vocabulary.decode([token_id]).decode() for token_id in sorted(ids)]
        after = whole.partition(WRITTEN)[2].strip()
        return tuple(marker for marker in (*special, after) if len(marker) >= _SHORTEST_MARKER)

    def answered_chat(self, sample: Sample) -> AnsweredChat:
        """A sample's chat with its answer. Each turn of the assistant begins where the template would let the model
        begin it, and ends with the model's stop token. Needs ``sample.answer``.

        Errors: ``prompt-not-rendered``, ``answer-not-rendered``.
        """
        ids, turns = self.answered_ids(sample)
        if not sample.images:
            return AnsweredChat(token_ids=ids, turns=turns)
        features = self.image_features(sample)
        sizes = iter(map(len, features.expansions))
        starts = list(accumulate((next(sizes) if i == self.placeholder_id else 1 for i in ids), initial=0))
        return AnsweredChat(
            token_ids=self.expand(ids, features), turns=tuple((starts[first], starts[end]) for first, end in turns)
        )

    def answered_ids(self, sample: Sample) -> tuple[tuple[int, ...], tuple[tuple[int, int], ...]]:
        """Fields of ``AnsweredChat`` with one placeholder per image. Errors: as ``answered_chat``."""
        assert sample.answer is not None
        chat = [*self.messages(sample), {"content": "", **sample.answer}]
        text = self._rendered(sample, chat, is_over=True)
        if "".join(str(sample.answer.get("content") or "").split()) not in "".join(text.split()):
            raise _answer_not_rendered(sample, "leaves out some of the answer")
        borders = []
        for place in [place for place, message in enumerate(chat) if message["role"] == "assistant"]:
            asked = self._rendered(sample, chat[:place])
            if not text.startswith(asked):
                raise _answer_not_rendered(sample, f"writes what comes before messages[{place}] otherwise in a prompt")
            borders.append(len(asked))
        ids, turns = list(self.vocabulary.encode(text[: borders[0]])), list[tuple[int, int]]()
        for start, end in pairwise([*borders, len(text)]):  # apart: the model begins a turn behind a prompt's own ids
            written = self.vocabulary.encode_bytes(text[start:end].encode())
            stop = next((at for at, token_id in enumerate(written, 1) if token_id in self.vocabulary.stop_ids), None)
            if stop is None:
                raise _answer_not_rendered(sample, f"writes no {self.vocabulary.stop_texts[0]} behind a turn")
            turns.append((len(ids), len(ids) + stop))
            ids += written
        return tuple(ids[: turns[-1][1]]), tuple(turns)

    def _chat_text(
        self, messages: list[dict[str, Any]], *, tools: Sequence[Mapping[str, Any]] = (), is_over: bool = False
    ) -> str:
        taken = [as_taken(message, takes_text=self._takes_text) for message in messages]
        return self._apply(taken, tools, is_over=is_over)

    def _apply(
        self, messages: list[dict[str, Any]], tools: Sequence[Mapping[str, Any]] = (), *, is_over: bool = False
    ) -> str:
        text: str = self.tokenizer.apply_chat_template(
            messages, tools=list(tools) or None, tokenize=False, add_generation_prompt=not is_over, **self.options.chat
        )
        return text

    @cached_property
    def _takes_text(self) -> bool:
        """Whether the chat template writes messages that are texts; those of some vision models write parts only."""
        try:
            return WRITTEN in self._apply([{"role": "user", "content": WRITTEN}])
        except TEMPLATE_FAILURES:
            return False

    def reply_token_ids(self, text: str, is_stopped: bool) -> tuple[int, ...]:
        """What a chat holds between two turns of the assistant where the user says ``text``; ids of turns stay theirs.

        ``is_stopped``: the stop token ended the turn before, and is not written again. Errors: ``turns-not-rendered``.
        """
        roles = (("user", "?"), ("assistant", WRITTEN), ("user", text))
        chat = [{"role": role, "content": content} for role, content in roles]
        try:
            whole, prompt = self._chat_text(chat), self._chat_text(chat[:1])
        except TEMPLATE_FAILURES as error:
            raise _turns_not_rendered(f"fails: {error}") from error
        before, mark, after = whole.partition(WRITTEN)
        if not mark or text.strip() not in after:
            raise _turns_not_rendered("does not write a second message of the user's behind the assistant's")
        if not _begins(prompt, before):
            raise _turns_not_rendered(f"writes {before!r} before a turn that is over, and {prompt!r} before a new one")
        if _END_OF_THOUGHT in str(self.tokenizer.chat_template) and before == prompt:
            self._check_thoughts(prompt, text or "?")
        ids = self.vocabulary.encode_bytes(after.encode())
        if ids[:1] != (self.vocabulary.stop_id,):
            stop = self.vocabulary.stop_texts[0]
            raise _turns_not_rendered(f"writes {after[:40]!r} behind a turn, and the model ends it with {stop}")
        return ids[1:] if is_stopped else ids

    def _check_thoughts(self, prompt: str, reply: str) -> None:
        """Raise ``turns-not-rendered`` where a turn with a thought is written otherwise before a further message."""
        turn = f"<think>\n{WRITTEN}\n{_END_OF_THOUGHT}\n\n{WRITTEN}"
        chat = [{"role": role, "content": text} for role, text in (("user", "?"), ("assistant", turn), ("user", reply))]
        if not self._chat_text(chat).startswith(prompt + turn):
            raise _turns_not_rendered("takes thoughts out of turns that are over")

    def check_turns(self, sample: Sample) -> None:
        """Compare a sample's prompt with what stands before the first turn once there is a second message of the
        user's. Errors: ``turns-not-rendered``, with the sample's origin; ``prompt-not-rendered``.
        """
        asked, turn = self.messages(sample), {"role": "assistant", "content": WRITTEN}
        whole = self._rendered(sample, [*asked, turn, {"role": "user", "content": "?"}])
        before, prompt = whole.partition(WRITTEN)[0], self._rendered(sample, asked)
        if not _begins(prompt, before):
            moved = "system text or tools" if sample.tools or asked[0]["role"] == "system" else "text"
            problem = f"moves {moved} of the prompt once there is a second message of the user's"
            raise DataError(
                f"the chat template {problem}", code="turns-not-rendered", key=sample.origin, remedy=_AS_TEXT
            )

    def check_tools(self, tools: Sequence[Mapping[str, Any]]) -> None:
        """Whether the chat template shows these tools, and writes and reads calls as environments do: in Hermes' form.

        Errors: ``tools-not-rendered``.
        """
        chat: list[dict[str, Any]] = [{"role": "user", "content": "?"}]
        for tool in tools:
            function = tool["function"]
            wanted = dict.fromkeys(function["parameters"].get("properties", {}), WRITTEN)
            called = {"type": "function", "function": {"name": function["name"], "arguments": wanted}}
            turns: list[dict[str, Any]] = [
                {"role": "assistant", "content": "", "tool_calls": [called]},
                {"role": "tool", "content": "4"},
            ]
            try:
                prompt, whole = self._chat_text(chat, tools=tools), self._chat_text([*chat, *turns], tools=tools)
                before = self._chat_text(
                    chat, tools=tools, is_over=True
                )  # prompts may begin a turn with an empty thought
            except Exception as error:  # a template may do anything to what it is given
                raise _tools_not_rendered(f"fails: {kind_and_text(error)}") from error
            if dropped := left_out_of(prompt, chat, tools):
                raise _tools_not_rendered(f"leaves out {dropped}")
            written = whole[len(before) :] if whole.startswith(before) else whole
            read = called_message(self.vocabulary.text(self.vocabulary.encode(written))).get("tool_calls", [])
            if [call["function"] for call in read] != [{"name": function["name"], "arguments": json.dumps(wanted)}]:
                raise _tools_not_rendered(f"writes a call as {written.strip()!r}; turns are read for <tool_call>")

    def text_token_ids(self, text: str, is_stopped: bool) -> tuple[int, ...]:
        """What stands between two turns where nothing but ``text`` does."""
        return self.vocabulary.encode_bytes(text.encode())

    def load_images(self, sample: Sample) -> list[Image.Image]:
        """The sample's images in RGB, as every backend gets them. Errors: ``ImageUnreadable``."""
        images = []
        for path in sample.images:
            try:
                with Image.open(path) as image:
                    images.append(rgb_of(image))
            except Exception as error:  # Pillow's decoders raise whatever damaged bytes make them
                raise unreadable(path, error, key=sample.origin) from error
        return images

    def prompt_length(self, sample: Sample) -> int:
        """Tokens of a sample's prompt before any cut, images expanded; reads only the headers of image files."""
        ids = self.vocabulary.encode(self._render(sample))
        return len(ids) + self._growth_of(sample, ids)

    def is_cut(self, sample: Sample) -> bool:
        """Whether a sample's prompt is longer than ``max_prompt_len``."""
        limit = self.options.max_prompt_len
        return limit is not None and self.prompt_length(sample) > limit

    def image_size(self, sample: Sample) -> tuple[int, int]:
        """Width and height in pixels of a sample's first image as the model gets it.

        Errors: ``images-not-supported``.
        """
        if self.images is None or not sample.images:
            raise ConfigError(
                "there is no image to measure",
                code="images-not-supported",
                key=sample.origin,
                remedy="Take a vision model.",
            )
        with processing(sample):
            return self.images.resized(read_header(sample.images[0])[0])

    def image_features(self, sample: Sample) -> ImageFeatures:
        """Tensors and tokens of a sample's images.

        Errors: ``images-not-supported``, ``ImageUnreadable``, ``image-not-processed``.
        """
        if not sample.images:
            return NO_IMAGES
        if self.images is None:
            raise ConfigError(
                "the model takes no images",
                code="images-not-supported",
                key=sample.origin,
                remedy="Take a vision model.",
            )
        with processing(sample):
            return self.images.process(self.load_images(sample))

    def num_added_tokens(self, images: Sequence[Image.Image]) -> int:
        """Tokens that a prompt gains when the placeholders of its images are expanded."""
        return self.images.growth(tuple(image.size for image in images)) if self.images and images else 0

    def expand(self, prompt_token_ids: Sequence[int], features: ImageFeatures) -> tuple[int, ...]:
        """[P] replace each image placeholder by the tokens of its image. Errors: ``placeholders-misfit``."""
        return expand_placeholders(prompt_token_ids, features.expansions, placeholder_id=self.placeholder_id)

    def expansions(self, sample: Sample) -> tuple[tuple[int, ...], ...]:
        """``ImageFeatures.expansions`` of a sample; reads only the headers of its files.

        Errors: ``image-not-processed``, ``ImageUnreadable``.
        """
        if self.images is None or not sample.images:
            return ()
        with processing(sample):
            return self.images.expansions(tuple(read_header(path)[0] for path in sample.images))

    def unexpanded(self, sample: Sample, token_ids: Sequence[int]) -> tuple[int, ...]:
        """Token ids that begin with a sample's prompt, with one placeholder per image. Errors: as ``expansions``."""
        return collapse_placeholders(token_ids, self.expansions(sample), placeholder_id=self.placeholder_id)

    def check_expansion(self, sample: Sample) -> None:
        """Compare an expanded prompt with the processor's, of the whole text. Errors: ``placeholders-misfit``."""
        text = self._render(sample)
        ours = self.expand(self.vocabulary.encode(text), self.image_features(sample))
        with processing(sample):
            made = self.processor(text=[text], images=[self.load_images(sample)], add_special_tokens=False)
        if list(ours) != list(made["input_ids"][0]):
            raise ConfigError(
                f"{type(self.processor).__name__} tokenizes the text around an image together with it",
                code="placeholders-misfit",
                key=sample.origin,
                remedy="Put text that ends and begins with words around images, or use another model.",
            )

    def check_alignment(self, sample: Sample, prompt_token_ids: Sequence[int], rollout: Rollout) -> None:
        """Raise ``PromptMismatch`` unless the engine saw exactly ``prompt_token_ids`` (expanded)."""
        if tuple(prompt_token_ids) != rollout.prompt_token_ids:
            raise describe_mismatch(sample, prompt_token_ids, rollout.prompt_token_ids, self.image_id)

    def _growth_of(self, sample: Sample, prompt_token_ids: Sequence[int]) -> int:
        """Tokens that a prompt gains by its images. Errors: ``placeholders-misfit``, as ``image_features``."""
        if self.images is None or not sample.images:
            return 0
        check_placeholders(prompt_token_ids, len(sample.images), placeholder_id=self.placeholder_id)
        return sum(len(ids) - 1 for ids in self.expansions(sample))

    def _find_pad_id(self) -> int:
        """The tokenizer's, or the stop token where it has none: what is padded is masked."""
        pad_id = self.tokenizer.pad_token_id
        return self.vocabulary.stop_id if pad_id is None else int(pad_id)


def _answer_not_rendered(sample: Sample, problem: str) -> DataError:
    remedy = "Correct its messages, or give the model a template that writes turns that are over as it lets them begin."
    return DataError(f"the chat template {problem}", code="answer-not-rendered", key=sample.origin, remedy=remedy)


def _tools_not_rendered(problem: str) -> ConfigError:
    remedy = "Set show_tools to text, or give the model a template that shows tools and writes calls as Qwen's does."
    return ConfigError(
        f"the chat template {problem}", code="tools-not-rendered", key="custom.extra.environment.tools", remedy=remedy
    )


def _begins(prompt: str, before: str) -> bool:
    """Whether a prompt is what stands before a turn that is over, but for an empty thought, which a rollout keeps.

    >>> thought = "<think>\\n\\n</think>\\n\\n"
    >>> _begins(f"user: ? assistant: {thought}", "user: ? assistant: "), _begins("user: ?", "system: . user: ?")
    (True, False)
    """
    return prompt.startswith(before) and re.fullmatch(_NO_THOUGHT, prompt[len(before) :]) is not None


def _turns_not_rendered(problem: str) -> ConfigError:
    return ConfigError(f"the chat template {problem}", code="turns-not-rendered", key="model.model", remedy=_AS_TEXT)


def load_processor(directory: str | Path, settings: Mapping[str, Any], *, needs_images: bool) -> Any:
    """The processor of a model directory, or its tokenizer alone: a text model may name a processor whose image part it
    lacks. Errors: ``processor-unreadable``, ``images-not-supported``, those of ``load_tokenizer``.
    """
    from transformers import AutoProcessor  # a second to load

    remedy = "Save preprocessor_config.json and video_preprocessor_config.json beside the model."
    try:
        processor = AutoProcessor.from_pretrained(str(directory), trust_remote_code=False, **settings)
    except ValueError as error:  # also where it names code (auto_map), which transformers would offer to run
        problem, without = f"{directory}: {first_line(error)}", "Save the processor again, without code (auto_map)."
        raise ConfigError(problem, code="processor-unreadable", key="model.model", remedy=without) from error
    except OSError as error:
        if not needs_images:
            return load_tokenizer(directory)
        reason = str(error).partition(".")[0]
        raise ConfigError(
            f"{directory}: {reason}", code="images-not-supported", key="model.model", remedy=remedy
        ) from error
    if needs_images and not hasattr(processor, "image_processor"):
        raise ConfigError(
            f"{directory} has no image processor", code="images-not-supported", key="model.model", remedy=remedy
        )
    return processor
