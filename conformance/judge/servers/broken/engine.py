"""Generation by ``transformers``, one prompt at a time, token by token, so that calls share the processor."""

import copy
import io
import random
import threading
from bisect import bisect_right
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import cached_property
from typing import Any

import torch
from PIL import Image
from torch import Tensor
from transformers import (
    AutoConfig,
    AutoModelForCausalLM,
    AutoModelForImageTextToText,
    AutoProcessor,
    DynamicCache,
)

from conformance.judge.servers.broken.switches import Switches
from conformance.judge.servers.held import HeldWeights
from conformance.judge.servers.scoring import penalised
from rollmatch.model.checkpoint import base_weights

LONGEST, CAP = 512, 250
BLOCK = 128
"""Ids of a prompt from which on its attention is cached."""


class Unserved(Exception):
    """A request can be served; otherwise the reply is a 4xx that says so."""


@dataclass(frozen=True, slots=True, kw_only=True)
class TinyPrompt:
    """Ids with a placeholder per picture, as sent; or a chat."""

    ids: tuple[int, ...]
    picture: bytes | None = None
    name: str = ""


@dataclass(frozen=True, slots=True, kw_only=True)
class TinySampling:
    """As vLLM has it."""

    max_tokens: int
    temperature: float = 0.0
    top_k: int = -1
    top_p: float = 1.0
    min_p: float = 0.0
    repetition_penalty: float = 1.0
    stop: tuple[str, ...] = ()
    logprobs: bool = False
    n: int = 1
    bias: tuple[tuple[int, float], ...] = ()
    """(id, what is added to its logit)."""


@dataclass(slots=True, kw_only=True)
class TinyResponse:
    """``prompt_ids``: with one placeholder for each part of a picture."""

    prompt: TinyPrompt
    prompt_ids: list[int]
    ids: list[int] = field(default_factory=list)
    logprobs: list[float] = field(default_factory=list)
    finish_reason: str = "length"


class TinyEngine:
    """A model's weights are replaced as a whole; a response is written by those it began with."""

    def __init__(self, directory: str, broken: Switches, *, dtype: torch.dtype = torch.float32) -> None:
        """``dtype``: in which it computes; weights arrive in float32."""
        self.directory, self.broken = directory, broken
        self._sees = hasattr(AutoConfig.from_pretrained(directory), "vision_config")
        kind = AutoModelForImageTextToText if self._sees else AutoModelForCausalLM
        self._first = kind.from_pretrained(directory, dtype=dtype).eval()
        self._written: dict[Any, tuple[TinyResponse | None, set[str]]] = {}
        """Repeatable responses, with the mistake that changed them, and the switches that were asked for each."""
        self._read: dict[Any, Tensor] = {}
        """Logits behind what was read already: a mistake changes what is chosen from them."""
        self._turn = threading.Lock()
        self._ready: dict[int, Any] = {}
        self.reset()

    def reset(self) -> None:
        """As at the start."""
        self.model, self._stamp = self._first, 0
        self._cached: dict[Any, tuple[Any, int]] = {}
        self.answered: set[Any] = set()
        """Greedy requests since the last update."""

    @cached_property
    def processor(self) -> Any:
        return AutoProcessor.from_pretrained(self.directory)

    @property
    def tokenizer(self) -> Any:
        """Of a model without pictures, its processor is the tokenizer."""
        return getattr(self.processor, "tokenizer", self.processor)

    @property
    def weights(self) -> dict[str, Tensor]:
        """By the names of the checkpoint."""
        return dict(base_weights(self.model))

    def load(self, weights: Mapping[str, Tensor]) -> None:
        """Calls that run keep the model they began with."""
        stamp = hash(tuple((name, tensor.sum().item(), tensor.abs().sum().item()) for name, tensor in weights.items()))
        if stamp not in self._ready:
            made = copy.deepcopy(self._first)
            HeldWeights(made).write(weights)
            self._ready[stamp] = made
        self.model, self._stamp = self._ready[stamp], stamp
        has_long, has_picture = (any(find(key) for key in self._cached) for find in (_is_long, _is_picture))
        if has_long and self.broken("prefix cache is kept"):
            self._cached = {key: kept for key, kept in self._cached.items() if _is_long(key)}
        elif has_picture and self.broken("encoder cache is kept"):
            self._cached = {key: kept for key, kept in self._cached.items() if _is_picture(key)}
        else:
            self._cached = {}
        self.answered = set()

    def forget(self) -> None:
        """Models of earlier updates, and what they wrote; where there are many updates."""
        self._ready, self._read, self._written = {}, {}, {}

    def write(
        self, prompt: TinyPrompt, sampling: TinySampling, seed: int | None, *, is_left: Callable[[], bool]
    ) -> TinyResponse:
        """Stops early where the caller ``is_left``."""
        model, stamp = self._cached.setdefault((prompt.ids, prompt.picture), (self.model, self._stamp))
        key = (stamp, prompt.ids, prompt.picture, sampling, seed)
        for on in ("", self.broken.on):
            made, asked = self._written.get((key, on), (None, {self.broken.on}))
            if made is not None and (on or self.broken.on not in asked):
                break
        else:
            with self.broken.noted() as asked:
                made = self._write(model, prompt, sampling, seed, is_left)
            if (seed is not None or sampling.temperature == 0) and not is_left():
                self._written[key, self.broken.on if self.broken.on in asked else ""] = made, asked
        self.broken.asked |= asked
        return replace(made, prompt=prompt, ids=[*made.ids], logprobs=[*made.logprobs])

    def _write(self, model: Any, prompt: TinyPrompt, sampling: TinySampling, seed: Any, is_left: Any) -> TinyResponse:
        inputs, delta = self._inputs(model, prompt)
        made, draw = TinyResponse(prompt=prompt, prompt_ids=inputs["input_ids"][0].tolist()), random.Random(seed)
        if len(made.prompt_ids) + 1 > LONGEST:
            raise Unserved(f"prompt of {len(made.prompt_ids)} ids is too long")
        limit = min(sampling.max_tokens, LONGEST - len(made.prompt_ids))
        if limit > CAP and self.broken("responses are capped"):
            limit = CAP
        if sampling.temperature == 0 and limit == 1 and self.broken("max_tokens 1 gives two"):
            limit = 2
        cache, is_repeatable = DynamicCache(), seed is not None or sampling.temperature == 0
        read = id(model), tuple(made.prompt_ids), float(inputs.get("pixel_values", torch.zeros(1)).sum())
        while len(made.ids) < limit and not is_left():
            key = *read, tuple(made.ids)
            if (logits := self._read.get(key)) is None:
                logits = self._logits(model, _behind(inputs, made.ids, delta, cache.get_seq_length()), cache)
                if is_repeatable or len(made.ids) < 2:  # places that are drawn from again and again
                    self._read[key] = logits
            for token, value in sampling.bias:
                logits = logits.index_add(0, torch.tensor([token]), torch.tensor([float(value)]))
            seen = [*made.prompt_ids, *made.ids]
            chosen, logprob = self._choose(logits, sampling, draw, len(made.ids), seen)
            made.ids.append(chosen)
            made.logprobs.append(logprob)
            if self._ends(made, sampling):
                break
        return made

    def _logits(self, model: Any, inputs: Mapping[str, Tensor], cache: Any) -> Tensor:
        """[V] of the next id."""
        with self._turn, torch.no_grad():
            output = model(**inputs, past_key_values=cache, use_cache=True, logits_to_keep=1)
        return output.logits[0, -1].float()

    def _ends(self, made: TinyResponse, sampling: TinySampling) -> bool:
        if made.ids[-1] == self.stop_id:
            if sampling.bias and self.broken("a stop token that is forced is passed over"):
                return False
            made.finish_reason = "stop"
            return not (sampling.temperature > 0 and self.broken("goes on after the stop token"))
        if sampling.stop and not self.broken("stop texts are ignored"):
            text = self.decode(made.ids)
            if any(stop in text for stop in sampling.stop):
                made.finish_reason = "stop"
                return True
        return False

    def _choose(
        self, logits: Tensor, sampling: TinySampling, draw: Any, place: int, seen: Sequence[int]
    ) -> tuple[int, float]:
        """``seen``: ids that the penalty is for."""
        logprobs = logits.log_softmax(-1)
        if sampling.repetition_penalty != 1:
            logits = penalised(logits, seen, sampling.repetition_penalty)
            if self.broken("log-probabilities fit what a penalty leaves"):
                logprobs = logits.log_softmax(-1)
        if sampling.temperature == 0:
            rank = 1 if place >= 20 and self.broken("wrong greedy id from position 20") else 0
            chosen = int(logits.topk(2).indices[rank])
            return chosen, float(logprobs[chosen])
        probabilities = self._limited(logits, sampling)
        shares = probabilities.cumsum(0).tolist()
        drawn = draw.random() * shares[-1]
        chosen = bisect_right(shares, drawn)
        if sampling.logprobs and sampling.top_p < 1 and self.broken("log-probabilities fit what top_p leaves"):
            return chosen, float((probabilities[chosen] / probabilities.sum()).log())
        if sampling.logprobs and sampling.top_k > 1 and self.broken("log-probabilities fit what top_k leaves"):
            return chosen, float((probabilities[chosen] / probabilities.sum()).log())
        if sampling.logprobs and sampling.temperature < 1 and self.broken("log-probabilities are of a hot model"):
            return chosen, float((logits * sampling.temperature).log_softmax(-1)[chosen])
        if sampling.logprobs and self.broken("log-probability of the likeliest id"):
            return chosen, float(logprobs.max())
        return chosen, float(logprobs[chosen])

    def _limited(self, logits: Tensor, sampling: TinySampling) -> Tensor:
        temperature, top_k, min_p = sampling.temperature, sampling.top_k, sampling.min_p
        if temperature != 1 and sampling.max_tokens < 100 and self.broken("temperature is ignored"):
            temperature = 1.0
        if temperature < 1 and self.broken("temperature is inverted"):
            temperature = 1 / temperature
        probabilities = (logits / temperature).softmax(-1)
        if min_p and not self.broken("min_p is ignored"):
            probabilities[probabilities < min_p * probabilities.max()] = 0
        if top_k > 0:
            top_k += self.broken("top_k keeps one too many") - self.broken("top_k keeps one too few")
            top_k = probabilities.numel() if self.broken("top_k is ignored") else top_k
        elif sampling.max_tokens == 1 and self.broken("top_k has a hidden default"):
            top_k = 50
        if top_k > 0:
            probabilities[probabilities < probabilities.topk(top_k).values[-1]] = 0
        if sampling.top_p < 1 and not self.broken("top_p is ignored"):
            ordered, order = probabilities.sort(descending=True)
            before = ordered.cumsum(0) - ordered * (not self.broken("top_p leaves out the last one"))
            probabilities[order[before >= sampling.top_p]] = 0
        return probabilities

    def _inputs(self, model: Any, prompt: TinyPrompt) -> tuple[dict[str, Tensor], int]:
        """What the first forward pass takes, and how far the positions behind lie from their places."""
        if prompt.picture is None:
            ids = torch.tensor([prompt.ids])
            places = torch.arange(ids.shape[1])[None]
            places = places.expand(3, 1, -1) if self._sees else places
            return {"input_ids": ids, "position_ids": places}, 0
        shown = Image.open(io.BytesIO(prompt.picture)).convert("RGB")
        if self.broken("pictures are blank"):
            shown = Image.new("RGB", shown.size)
        seen = self.processor.image_processor(images=[shown], return_tensors="pt")
        count = int(seen["image_grid_thw"].prod()) // self.processor.image_processor.merge_size**2
        at = prompt.ids.index(self.picture_id)
        ids = torch.tensor([[*prompt.ids[:at], *[self.picture_id] * count, *prompt.ids[at + 1 :]]])
        kinds = (ids == self.picture_id).int()
        places, delta = model.model.get_rope_index(ids, kinds, image_grid_thw=seen["image_grid_thw"])
        return {"input_ids": ids, "position_ids": places, "mm_token_type_ids": kinds, **seen}, int(delta)

    def encode(self, messages: Sequence[Mapping[str, Any]]) -> tuple[int, ...]:
        """By the chat template."""
        tokenizer = self.tokenizer
        text = tokenizer.apply_chat_template(messages, tokenize=False, add_generation_prompt=True)
        return tuple(tokenizer.encode(text, add_special_tokens=False))

    def decode(self, ids: Sequence[int]) -> str:
        return str(self.tokenizer.decode(ids, skip_special_tokens=True))

    def any_prompt(self) -> TinyPrompt:
        """A placeholder."""
        return TinyPrompt(ids=self.encode([{"role": "user", "content": "?"}]))

    @property
    def stop_id(self) -> int:
        known = self._first.generation_config.eos_token_id
        return int(known[0] if isinstance(known, list) else known)

    @property
    def num_ids(self) -> int:
        return int(self._first.get_input_embeddings().num_embeddings)

    @property
    def picture_id(self) -> int:
        return int(self._first.config.image_token_id)


def _behind(inputs: Mapping[str, Tensor], ids: Sequence[int], delta: int, num_read: int) -> dict[str, Tensor]:
    """What a forward pass takes behind the first ``num_read`` places of a prompt and the ids of its response."""
    count, new = inputs["input_ids"].shape[1], torch.tensor([ids], dtype=torch.long)
    places = (torch.arange(count, count + len(ids)) + delta).expand(*inputs["position_ids"].shape[:-1], -1)
    whole = {
        "input_ids": torch.cat([inputs["input_ids"], new], dim=-1)[:, num_read:],
        "position_ids": torch.cat([inputs["position_ids"], places], dim=-1)[..., num_read:],
    }
    if num_read:
        return whole
    kinds = inputs.get("mm_token_type_ids")
    return {**inputs, **whole} | ({} if kinds is None else {"mm_token_type_ids": torch.cat([kinds, 0 * new], dim=-1)})


def _is_long(key: tuple[tuple[int, ...], bytes | None]) -> bool:
    return len(key[0]) >= BLOCK


def _is_picture(key: tuple[tuple[int, ...], bytes | None]) -> bool:
    return key[1] is not None
