"""Numbers that a server's responses must have, by ``transformers`` with the same weights."""

import copy
import io
import math
import threading
from collections.abc import Collection, Mapping, Sequence
from functools import cache, cached_property
from typing import Any

import torch
from PIL import Image
from torch import Tensor

from conformance.judge.servers.held import HeldWeights
from conformance.judge.servers.numbers import EVERY_TENSOR, needed, seen
from conformance.judge.servers.policy import Policies
from conformance.judge.servers.question import Question

NUM_ROUNDS, NUM_IDS = 6, 48
STEP, STEP_OF_VECTORS, LEAST_SIZE = 0.1, 0.2, 0.5
"""How far the first policy of ``weights_that_show`` lies off, by a tensor's size; the size of a vector is at least 0.5,
because many are zero or shift what a norm brings back.
"""


class Scorer:
    """Log-probabilities by the policies; several threads may ask."""

    def __init__(self, policies: Policies, probes: Sequence[Question]) -> None:
        """``probes`` are the prompts in whose responses every tensor must show."""
        self.policies, self.probes = policies, tuple(probes)
        self._turn = threading.RLock()
        self._loaded, self._has_shown = -1, False
        self._left_out: dict[object, list[float]] = {}
        self.hidden_names: list[str] = []
        """Tensors of ``weights_that_show`` that do not."""
        self._scored: dict[object, tuple[list[float], list[float]]] = {}

    def score(self, number: int, question: Question, ids: Sequence[int]) -> tuple[list[float], list[float]]:
        """Log-probability of each id of a response, and how far it lies below that of the likeliest id."""
        key = number, question.picture, tuple(question.ids), tuple(ids)
        with self._turn:
            if key not in self._scored:
                self._load(number)
                self._scored[key] = self._score(question, ids)
            return self._scored[key]

    def drawn_from(
        self, number: int, question: Question, ids: Sequence[int], *, temperature: float = 1.0, penalty: float = 1.0
    ) -> list[float]:
        """Log-probability of each id in the distribution that it is sampled from."""
        with self._turn:
            self._load(number)
            logits = self._logits(question, ids)
        for place, row in enumerate(logits):
            row.copy_(penalised(row, [*question.ids, *ids[:place]], penalty))
        chosen = (logits / temperature).log_softmax(-1).gather(-1, torch.tensor(ids)[:, None])
        return list(chosen[:, 0].tolist())

    def logits(self, number: int, question: Question) -> Tensor:
        """[V] those of a response's first id."""
        with self._turn:
            self._load(number)
            return self._logits(question, [0])[0]

    def write(self, number: int, question: Question, max_tokens: int) -> list[int]:
        """A greedy response; a stop id is its last."""
        with self._turn:
            self._load(number)
            inputs = self._inputs(question, [])
            with torch.no_grad():
                output = self._model.generate(**inputs, do_sample=False, max_new_tokens=max_tokens)
        return list(output[0, inputs["input_ids"].shape[1] :].tolist())

    def greedy(self, number: int, prompt_ids: Sequence[int], came: Sequence[int], max_tokens: int) -> list[int]:
        """A greedy response that takes the id of ``came`` where it is as likely as the likeliest, within the tolerance.

        With exact arithmetic on both sides it is the only one; a stop id is its last.
        """
        written = self.policies.writes(number, prompt_ids, max_tokens=max_tokens)
        while (place := _first_difference(came, written)) is not None:
            kept = [*came[: place + 1]]
            if not self.least(number, prompt_ids, kept) <= self.policies.tolerance:
                break
            left = max_tokens - len(kept)
            is_ended = not left or kept[-1] in self.policies.stop_ids
            written = kept + ([] if is_ended else self.policies.writes(number, [*prompt_ids, *kept], max_tokens=left))
        ends = [[*came, stop] for stop in sorted(self.policies.stop_ids)] if len(came) + 1 < len(written) else []
        is_near = (end for end in ends if self.least(number, prompt_ids, end) <= self.policies.tolerance)
        return next(is_near, written)

    def least(self, number: int, prompt_ids: Sequence[int], ids: Sequence[int]) -> float:
        """The least tolerance with which these ids are greedy. Unit: nats."""
        _, gaps = self.score(number, Question(text="", ids=list(prompt_ids)), ids)
        return needed([{"gaps": gaps}], wanted="gaps")

    def without(self, names: Collection[str], question: Question, ids: Sequence[int]) -> list[float]:
        """Log-probabilities of a response by ``weights_that_show`` with these tensors left as policy 0 has them."""
        key = tuple(names), question.picture, tuple(question.ids), tuple(ids)
        with self._turn:
            if key not in self._left_out:
                old, new = self.policies.weights(0), self.policies.weights(EVERY_TENSOR)
                self._load(EVERY_TENSOR)
                self._held.write({name: old[name] for name in names})
                self._left_out[key], _ = self._score(question, ids)
                self._held.write({name: new[name] for name in names})
            return self._left_out[key]

    def weights_that_show(self) -> Mapping[str, Tensor]:
        """Weights of which each tensor shows in a response to one of ``probes``; made once, policy ``EVERY_TENSOR``."""
        with self._turn:
            if not self._has_shown:
                self._has_shown = True
                old = self.policies.weights(0)
                generator = torch.Generator().manual_seed(EVERY_TENSOR)
                steps = {n: _step(old[n]) * torch.randn(old[n].shape, generator=generator) for n in old}
                rounds: list[tuple[list[str], dict[str, Tensor]]] = []
                while not rounds or (rounds[-1][0] and len(rounds) < NUM_ROUNDS):
                    made = {name: old[name] + steps[name] for name in old}
                    self.policies.set_weights(EVERY_TENSOR, made)
                    rounds.append((self.hidden(), made))
                    steps |= {name: 2 * steps[name] for name in rounds[-1][0]}
                self.hidden_names, made = min(rounds, key=lambda each: len(each[0]))
                if made is not rounds[-1][1]:
                    self.policies.set_weights(EVERY_TENSOR, made)
                    self._loaded, self._left_out = -1, {}
            return self.policies.weights(EVERY_TENSOR)

    def hidden(self) -> list[str]:
        """Tensors that could be left out of an update to policy ``EVERY_TENSOR`` without a visible difference."""
        self._loaded, self._left_out = -1, {}
        far, enough = dict.fromkeys(self.policies.weights(0), 0.0), seen(self.policies.tolerance)
        for question in self.probes:
            ids = self.write(EVERY_TENSOR, question, NUM_IDS)
            whole, _ = self._score(question, ids)
            for name in [name for name, moved in far.items() if not moved >= enough]:
                far[name] = math.hypot(far[name], math.dist(whole, self.without([name], question, ids)))
        return [name for name, moved in far.items() if not moved >= enough]

    @cached_property
    def _model(self) -> Any:
        return copy.deepcopy(self.policies.model)

    @cached_property
    def _processor(self) -> Any:
        from transformers import AutoProcessor

        return AutoProcessor.from_pretrained(self.policies.directory, trust_remote_code=False)

    def _load(self, number: int) -> None:
        if self._loaded != number:
            self._held.write(self.policies.weights(number))
            self._loaded = number

    @cached_property
    def _held(self) -> HeldWeights:
        return HeldWeights(self._model)

    def _score(self, question: Question, ids: Sequence[int]) -> tuple[list[float], list[float]]:
        if not ids or max(ids) >= self._model.get_input_embeddings().num_embeddings:
            return [-math.inf] * len(ids), [math.inf] * len(ids)
        logprobs = self._logits(question, ids).log_softmax(-1)
        chosen = logprobs.gather(-1, torch.tensor(ids)[:, None])[:, 0]
        return chosen.tolist(), (logprobs.amax(-1) - chosen).tolist()

    def _logits(self, question: Question, ids: Sequence[int]) -> Tensor:
        """[T, V] of each place of the response."""
        with torch.no_grad():
            return self._model(**self._inputs(question, ids)).logits[0, -len(ids) - 1 : -1]

    def _inputs(self, question: Question, ids: Sequence[int]) -> dict[str, Tensor]:
        if question.picture is None:
            made = {"input_ids": torch.tensor([question.ids])}
        else:
            made = dict(self._shown(question.picture, question.text))
        answer = torch.tensor([list(ids)], dtype=torch.long)
        made["input_ids"] = torch.cat([made["input_ids"], answer], dim=1)
        made["attention_mask"] = torch.ones_like(made["input_ids"])
        if "mm_token_type_ids" in made:
            made["mm_token_type_ids"] = torch.cat([made["mm_token_type_ids"], torch.zeros_like(answer)], dim=1)
        return made

    @cache  # noqa: B019  # a judge has one of these, and as many pictures as its checks
    def _shown(self, picture: bytes, text: str) -> Mapping[str, Tensor]:
        """A chat as the processor makes it; a picture takes as long as a pass."""
        image = Image.open(io.BytesIO(picture)).convert("RGB")
        chat = [{"role": "user", "content": [{"type": "image", "image": image}, {"type": "text", "text": text}]}]
        settings = {"tokenize": True, "add_generation_prompt": True, "return_dict": True, "return_tensors": "pt"}
        made: Mapping[str, Tensor] = self._processor.apply_chat_template(chat, **settings)
        return made


def penalised(logits: Tensor, ids: Sequence[int], penalty: float) -> Tensor:
    """[V] with the repetition penalty of these ids, of a prompt and what follows: less likely where it is above 1.

    >>> penalised(torch.tensor([2.0, -1.0, 1.0]), [0, 1], 2.0).tolist()
    [1.0, -2.0, 1.0]
    """
    seen = torch.tensor(sorted({*ids}), dtype=torch.long)
    values = logits[seen]
    return logits.index_copy(0, seen, torch.where(values > 0, values / penalty, values * penalty))


def _first_difference(came: Sequence[int], written: Sequence[int]) -> int | None:
    """Where both have an id, and not the same."""
    return next((place for place, (a, b) in enumerate(zip(came, written, strict=False)) if a != b), None)


def _step(tensor: Tensor) -> float:
    if tensor.dim() == 1:
        return STEP_OF_VECTORS * max(LEAST_SIZE, float(tensor.square().mean().sqrt()))
    return STEP * float(tensor.std())
