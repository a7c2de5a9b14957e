"""Ids and texts of a tokenizer with one token a byte, and the naive forward pass of a model directory in float64."""

import json
import re
import tempfile
from collections.abc import Mapping
from functools import cache
from pathlib import Path
from types import MappingProxyType
from typing import Any

import torch
from PIL import Image
from safetensors.torch import load_file
from torch.distributed.checkpoint.format_utils import dcp_to_torch_save
from transformers import AutoModelForCausalLM, AutoModelForImageTextToText, AutoProcessor

PICTURE, SIDE = "<|vision_start|><|image_pad|><|vision_end|>", 32
"""What stands for a picture in a prompt; the side of the square that one token is for."""


class Words:
    """Texts and ids of a tokenizer with one token a byte, from ``tokenizer.json``.

    ``stop``: what ends a turn; responses end at the model's own end, too. ``mark``: what the template writes first.
    """

    def __init__(self, directory: Path, stop: str = "<|im_end|>", mark: str = "") -> None:
        tree = json.loads((directory / "tokenizer.json").read_text())
        printable = [*range(33, 127), *range(161, 173), *range(174, 256)]
        table = {chr(byte): byte for byte in printable}
        table |= {chr(256 + i): byte for i, byte in enumerate(b for b in range(256) if b not in printable)}
        self.bytes_of = {i: bytes(table[c] for c in text) for text, i in tree["model"]["vocab"].items()}
        self.added = {one["content"]: one["id"] for one in tree["added_tokens"]}
        written = [one for one in tree["added_tokens"] if not one["special"]]  # special ones are no text
        self.bytes_of |= {one["id"]: one["content"].encode() for one in written}
        self.special = {one["id"] for one in tree["added_tokens"] if one["special"]}
        self.id_of = {raw: i for i, raw in self.bytes_of.items() if i not in self.added.values()}
        self.stop, self.pad, self.mark = self.added[stop], self.added.get("<|image_pad|>"), mark
        self.stops = {self.stop, self.added["<|im_end|>"]}
        self.banned = [self.added[w] for w in ("<|image_pad|>", "<|video_pad|>") if w in self.added]
        """Placeholders of pictures that are not there."""

    def text(self, ids) -> str:
        return b"".join(self.bytes_of.get(i, b"") for i in ids).decode("utf-8", errors="replace")

    def ids(self, text: str) -> list[int]:
        """One id a byte; added tokens stand for themselves."""
        parts = re.split(r"(<\|[^|]*\|>)", text)
        return [i for part in parts for i in self._ids_of(part)]

    def _ids_of(self, part: str) -> list[int]:
        return [self.added[part]] if part in self.added else [self.id_of[bytes([byte])] for byte in part.encode()]

    def chat(self, messages: list[tuple[str, str]], mark: str | None = None) -> list[int]:
        """The prompt's ids, by the template of ``conformance.draws.models``; ``mark``: None is the run's."""
        lines = "".join(f"<|im_start|>{role}\n{text}<|im_end|>\n" for role, text in messages)
        return self.ids(f"{self.mark if mark is None else mark}{lines}<|im_start|>assistant\n")

    def expanded(self, ids, sizes) -> list[int]:
        """With as many placeholders as each picture has tokens."""
        numbers = iter(width * height // SIDE**2 for width, height in sizes)
        return [i for token in ids for i in ([token] * next(numbers) if token == self.pad else [token])]

    def without_first(self, ids, number: int) -> list[int]:
        """Without so many text ids from the left; those between pictures and the last stay. Empty: there are fewer."""
        pictures = [i for i, token in enumerate(ids) if token == self.pad] or [0]
        free = [i for i, token in enumerate(ids[:-1]) if token not in self.special]
        free = [i for i in free if not pictures[0] <= i < pictures[-1]]
        return [token for i, token in enumerate(ids) if i not in free[:number]] if len(free) >= number else []


_words = cache(Words)


def words_of(directory: Path, keys: Mapping[str, Any] = MappingProxyType({})) -> Words:
    """Those of a run."""
    stop = keys.get("model.stop_token") or "<|im_end|>"
    return _words(directory, stop, keys.get("model.chat_template_kwargs", {}).get("mark", ""))


def saved(checkpoint: Path, *, adapts: bool) -> dict:
    """Weights in a checkpoint, also where FSDP2 has written each rank's part of them."""
    if not (parts := checkpoint / "pytorch_model_fsdp_0").exists():
        return load_file(checkpoint / f"{'adapter_model' if adapts else 'model'}.safetensors")
    with tempfile.TemporaryDirectory() as folder:
        dcp_to_torch_save(parts, whole := Path(folder) / "whole.pt")
        return torch.load(whole)["model"]


class Policy:
    """A model with eager attention, one sequence at a time. ``weights``: what learns, by its name in a checkpoint."""

    def __init__(self, directory: Path, tuner: dict, *, dtype=torch.float64) -> None:
        self.takes_images = "vision_config" in json.loads((directory / "config.json").read_text())
        kind = AutoModelForImageTextToText if self.takes_images else AutoModelForCausalLM
        self.model = kind.from_pretrained(directory, dtype=dtype, attn_implementation="eager").eval()
        self.processor = AutoProcessor.from_pretrained(directory).image_processor if self.takes_images else None
        self.tuner, self.dtype, self.adapts = tuner, dtype, tuner["train_type"] == "lora"
        own = dict(self.model.named_parameters())
        self.weights = {} if self.adapts else {name: w for name, w in own.items() if not self._is_frozen(name)}

    def _is_frozen(self, name: str) -> bool:
        part = "aligner" if "merger" in name else "vit" if "visual." in name else "llm"
        return self.tuner[f"freeze_{part}"]

    def take(self, checkpoint: Path) -> None:
        """The weights of a checkpoint."""
        own = dict(self.model.named_parameters())
        for name, tensor in saved(checkpoint, adapts=self.adapts).items():
            if self.adapts:
                self.weights[name] = tensor.to(self.dtype).requires_grad_()
            elif name in own:
                own[name].data.copy_(tensor)

    def merged(self) -> dict:
        """What adapters make of the weights they are on, by the names of these."""
        rules, made = self.tuner, {}
        for name, a in self.weights.items():
            if "lora_A" not in name:
                continue
            module = name.removeprefix("base_model.model.").removesuffix(".lora_A.weight")
            whole = self.model.get_parameter(f"{module}.weight").detach()
            alpha, rank = (
                next(
                    (v for end, v in self.tuner[f"{one}_pattern"].items() if module.endswith(f".{end}")),
                    rules[f"lora_{one}"],
                )
                for one in ("alpha", "rank")
            )
            assert len(a) == rank, f"{name} has rank {len(a)}"
            share = alpha / (rank**0.5 if rules["use_rslora"] else rank)
            share *= 1 - rules["lora_dropout"] if self.model.training else 1
            whole = whole + share * self.weights[name.replace("lora_A", "lora_B")] @ a
            if rules["use_dora"]:
                size = self.weights[name.replace("lora_A.weight", "lora_magnitude_vector")]
                whole = size.reshape(-1, 1) / whole.norm(dim=1, keepdim=True).detach() * whole
            made[f"{module}.weight"] = whole
        return made

    def logits(self, ids, images=(), *, adapted=True) -> torch.Tensor:
        """[L, V] for one sequence; ``ids`` hold as many placeholders as the images have tokens."""
        inputs = {"input_ids": torch.tensor([list(ids)]), "use_cache": False}
        if self.takes_images:
            pad = self.model.config.image_token_id
            inputs["mm_token_type_ids"] = (inputs["input_ids"] == pad).long()
        if images:
            pictures = self.processor([Image.open(path).convert("RGB") for path in images], return_tensors="pt")
            inputs |= {"pixel_values": pictures["pixel_values"].to(self.dtype)}
            inputs |= {"image_grid_thw": pictures["image_grid_thw"]}
        changed = self.merged() if self.adapts and adapted else {}
        return torch.func.functional_call(self.model, changed, (), inputs).logits[0]

    def logprobs(self, one: dict, *, temperature, banned, adapted=True) -> torch.Tensor:
        """[T] of a completion's target."""
        rows = self.distribution(one, temperature=temperature, banned=banned, adapted=adapted)
        return torch.stack([row[token] for row, token in zip(rows, one["target"], strict=True)])

    def distribution(self, one: dict, *, temperature, banned, adapted=True) -> torch.Tensor:
        """[T, V] of all ids at a completion's target, by softmax(logits / temperature) without the banned ids."""
        logits = self.logits([*one["expanded"], *one["target"]], one["images"], adapted=adapted).double()
        logits = logits[len(one["expanded"]) - 1 : -1] / temperature
        if banned:
            logits = logits.index_fill(1, torch.tensor(list(banned)), -torch.inf)
        return torch.log_softmax(logits, -1)
