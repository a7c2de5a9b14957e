"""Tiny random checkpoints of real architectures: transformers' own classes, a byte-level tokenizer, a processor.

Nothing is downloaded. float32; head_dim 32, the smallest that vLLM's CPU attention takes.
"""

import importlib
import shutil
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import save_file
from tokenizers import AddedToken, Tokenizer, decoders, models, pre_tokenizers
from transformers import (
    AutoModelForImageTextToText,
    AutoTokenizer,
    GenerationConfig,
    PreTrainedModel,
    PreTrainedTokenizerFast,
    set_seed,
)
from vllm import LLM, SamplingParams

from conformance.doubles.architectures import ARCHITECTURES
from rollmatch.model.checkpoint import merged_weights
from rollmatch.model.vocabulary import coord_token
from rollmatch.records import NUM_BINS

FRAMING = ("<|endoftext|>", "<|im_start|>", "<|im_end|>")
CHAT = (
    "{% for m in messages %}<|im_start|>{{ m.role }}\n{% if m.content is string %}{{ m.content }}{% else %}"
    "{% for c in m.content %}{% if c.type == 'image' %}IMAGE{% elif 'text' in c %}{{ c.text }}{% endif %}{% endfor %}"
    "{% endif %}<|im_end|>\n{% endfor %}{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}"
)


def make_tokenizer(*, words: tuple[str, ...], named: dict[str, str], image: str) -> PreTrainedTokenizerFast:
    """Bytes, framing, the family's words and the coordinates."""
    alphabet = sorted(pre_tokenizers.ByteLevel.alphabet())
    tokenizer = Tokenizer(models.BPE(vocab={character: i for i, character in enumerate(alphabet)}, merges=[]))
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)
    tokenizer.decoder = decoders.ByteLevel()
    tokenizer.add_special_tokens([AddedToken(text, normalized=False) for text in (*FRAMING, *words)])
    tokenizer.add_tokens([AddedToken(coord_token(k), normalized=False) for k in range(NUM_BINS)])
    wrapped = PreTrainedTokenizerFast(
        tokenizer_object=tokenizer,
        eos_token="<|im_end|>",
        pad_token="<|endoftext|>",
        extra_special_tokens=named,
        model_max_length=2048,
    )
    wrapped.chat_template = CHAT.replace("IMAGE", image)
    return wrapped


def make_checkpoint(
    name: str,
    directory: Path,
    *,
    words: tuple[str, ...] = (),
    real: Path | None = None,
    **further: Any,
) -> PreTrainedModel:
    """Write a checkpoint of the named architecture, and return its model; ``words`` are further added tokens.

    ``real``: a directory whose tokenizer, chat template and generation config it takes, in place of made ones.
    ``further``: settings of its language model.
    """
    known, library = ARCHITECTURES[name], importlib.import_module("transformers")
    if real is None:
        tokenizer = make_tokenizer(words=(*known.words, *words), named=known.named, image=known.image)
    else:
        tokenizer = AutoTokenizer.from_pretrained(real)
    added = tokenizer.get_added_vocab() if known.words or real is None else {}
    pad_id = tokenizer.eos_token_id if tokenizer.pad_token_id is None else tokenizer.pad_token_id
    ends = {"eos_token_id": tokenizer.eos_token_id, "pad_token_id": pad_id}
    settings = {
        key: added.get(value, value) if isinstance(value, str) else value for key, value in known.settings.items()
    }
    more = ends | {"bos_token_id": None} | further
    if "text_config" in settings:
        settings["text_config"] = settings["text_config"] | more
    else:
        settings |= more
    set_seed(0)
    model: PreTrainedModel = getattr(library, known.model)(getattr(library, known.config)(**settings)).float().eval()
    _fill_zeros(model)
    model.generation_config = GenerationConfig(do_sample=False, **ends)
    model.save_pretrained(directory)
    written = {_published(key, known.published): weight for key, weight in merged_weights(model)}
    save_file(written, directory / "model.safetensors", metadata={"format": "pt"})
    if real is None:
        tokenizer.save_pretrained(directory)
    if known.processor:
        parts: dict[str, Any] = {key: getattr(library, kind)(**fields) for key, (kind, fields) in known.parts.items()}
        options = known.options | {"chat_template": tokenizer.chat_template}
        getattr(library, known.processor)(tokenizer=tokenizer, **parts, **options).save_pretrained(directory)
    if real is not None:
        shutil.copytree(
            real, directory, dirs_exist_ok=True, ignore=shutil.ignore_patterns("config.json", "source.json")
        )
    return model


def _published(name: str, renamed: dict[str, str]) -> str:
    return next((name.replace(ours, theirs, 1) for ours, theirs in renamed.items() if name.startswith(ours)), name)


@torch.no_grad()
def _fill_zeros(model: PreTrainedModel) -> None:
    """Random values where a family begins at zero, so that every tensor shows in the logits."""
    generator = torch.Generator().manual_seed(1)
    for weight in model.parameters():
        if not weight.any():
            weight.copy_(0.1 * torch.randn(weight.shape, generator=generator))


def check_vllm_writes_as_transformers_does(directory, prompt):
    """Greedily, in float32."""

    small = {"max_model_len": 64, "enforce_eager": True, "kv_cache_memory_bytes": 2**26, "gpu_memory_utilization": 0.1}
    engine = LLM(str(directory), dtype="float32", limit_mm_per_prompt={"image": 0}, **small)
    greedy = SamplingParams(temperature=0, max_tokens=12, ignore_eos=True, detokenize=False)
    (answer,) = engine.generate([{"prompt_token_ids": prompt}], greedy, use_tqdm=False)
    model = AutoModelForImageTextToText.from_pretrained(directory, dtype=torch.float32)
    ids = model.generate(torch.tensor([prompt]), max_new_tokens=12, min_new_tokens=12, do_sample=False)
    assert list(answer.outputs[0].token_ids) == ids[0, len(prompt) :].tolist()
