"""What a server must write with given weights: greedy decoding by ``transformers``, with the same tensors."""

import threading
from collections.abc import Sequence
from functools import cached_property
from pathlib import Path
from typing import TYPE_CHECKING

import torch
import transformers
from torch import Tensor

from conformance.judge.servers.held import HeldWeights
from conformance.judge.servers.numbers import TOLERANCE
from conformance.judge.servers.peers import BESIDE_EMBEDDINGS
from conformance.judge.servers.pictures import PROBED, picture
from conformance.judge.servers.question import Question
from rollmatch.config.training import ModelConfig, TunerConfig
from rollmatch.model.checkpoint import merged_weights
from rollmatch.model.policy import load_policy

if TYPE_CHECKING:
    from conformance.judge.servers.scoring import Scorer

TEXT = "List every digit with its box."
SPREAD = 0.05
"""How far each weight of a changed policy lies off, in standard deviations of its tensor."""


class Policies:
    """A model directory's weights as policy 0, changed ones as 1 and 2; all in float32. Several threads may ask."""

    def __init__(self, directory: str | Path, *, tolerance: float = TOLERANCE) -> None:
        """``tolerance``: how far a server's log-probabilities may lie off. Unit: nats."""
        self.directory, self.tolerance = str(directory), tolerance
        self._weights: dict[int, dict[str, Tensor]] = {}
        self._loaded = -1
        self._turn = threading.RLock()
        self._written: dict[tuple[object, ...], list[int]] = {}

    @cached_property
    def tokenizer(self):
        from transformers import AutoTokenizer

        return AutoTokenizer.from_pretrained(self.directory, trust_remote_code=False)

    def encode(self, text: str, *, has_picture: bool = False) -> list[int]:
        """A user's question, by the model's own chat template; a picture before it is one placeholder."""
        messages = [{"role": "user", "content": text}]
        if has_picture:
            messages = [{"role": "user", "content": [{"type": "image"}, {"type": "text", "text": text}]}]
        with self._turn:
            rendered = self.tokenizer.apply_chat_template(messages, tokenize=False, add_generation_prompt=True)
            return self.tokenizer.encode(rendered, add_special_tokens=False)

    def decode(self, ids: Sequence[int]) -> str:
        """Without control tokens, as servers return it."""
        with self._turn:
            return self.tokenizer.decode(ids, skip_special_tokens=True)

    @property
    def takes_pictures(self) -> bool:
        return (Path(self.directory) / "preprocessor_config.json").exists()

    @cached_property
    def scorer(self) -> "Scorer":
        from conformance.judge.servers.scoring import Scorer

        shown = PROBED if self.takes_pictures else ()
        return Scorer(self, [self.question(TEXT), *(self.question(TEXT, picture(number)) for number in shown)])

    def question(self, text: str, shown: bytes | None = None) -> Question:
        """As the dialects take one."""
        return Question(text=text, ids=self.encode(text, has_picture=shown is not None), picture=shown)

    @property
    def stop_ids(self) -> set[int]:
        """Any of them ends a response."""
        with self._turn:
            output = self.model.generation_config.eos_token_id
        return set(output if isinstance(output, list) else [output])

    def weights(self, number: int) -> dict[str, Tensor]:
        """By the names under which they lie in the model directory."""
        with self._turn:
            if not self._weights:
                self._weights[0] = {name: tensor.clone() for name, tensor in merged_weights(self.model)}
            if number not in self._weights:
                self._weights[number] = self._changed(number)
            return self._weights[number]

    def set_weights(self, number: int, weights: dict[str, Tensor]) -> None:
        """A further policy; of the names and shapes of policy 0."""
        with self._turn:
            self._weights[number], self._loaded = weights, -1

    def _changed(self, number: int) -> dict[str, Tensor]:
        generator = torch.Generator().manual_seed(number)
        return {
            name: tensor if number == BESIDE_EMBEDDINGS and "embed" in name else _moved(tensor, generator)
            for name, tensor in self._weights[0].items()
        }

    def writes(self, number: int, prompt_ids: Sequence[int], *, max_tokens: int) -> list[int]:
        """Greedily; a stop token is its last."""
        key = (number, tuple(prompt_ids), max_tokens)
        with self._turn:
            if key not in self._written:
                self._load(number)
                self._written[key] = self._write(list(prompt_ids), max_tokens)
            return self._written[key]

    def _write(self, prompt_ids: list[int], max_tokens: int) -> list[int]:
        ids = torch.tensor([prompt_ids])
        with torch.no_grad():
            output = self.model.generate(
                input_ids=ids, attention_mask=torch.ones_like(ids), do_sample=False, max_new_tokens=max_tokens
            )
        return output[0, len(prompt_ids) :].tolist()

    @cached_property
    def model(self):
        transformers.utils.logging.disable_progress_bar()  # it would stand between the verdicts
        return load_policy(ModelConfig(model=self.directory, torch_dtype="float32"), TunerConfig()).eval()

    @cached_property
    def _held(self) -> HeldWeights:
        return HeldWeights(self.model)

    def _load(self, number: int) -> None:
        if self._loaded != number:
            self._held.write(self.weights(number))
            self._loaded = number


def _moved(tensor: Tensor, generator: torch.Generator) -> Tensor:
    spread = tensor.std() if tensor.numel() > 1 and tensor.std() > 0 else tensor.abs().mean() + 1e-2
    return tensor + SPREAD * spread * torch.randn(tensor.shape, generator=generator)
