"""The digits model and its scenes, as the tests of rollouts and of the trainer take them."""

import copy
import shutil
from collections.abc import Iterable
from dataclasses import replace
from functools import cache
from pathlib import Path

import torch

from rollmatch.config import RunConfig, load_config
from rollmatch.config.training import ModelConfig, TunerConfig
from rollmatch.data import load_samples
from rollmatch.learn.attention import PACKED_ATTENTION
from rollmatch.model.checkpoint import merged_weights
from rollmatch.model.policy import load_policy, unwrap
from rollmatch.model.template import Template
from rollmatch.records import RolloutRequest, Sample
from rollmatch.rollout.backend import Decoding, make_requests

ROOT = Path(__file__).parents[2]
CONFIG = ROOT / "fixtures/digits/digits.yaml"
MODEL = ROOT / "fixtures/models/digits"
PACKED = {"text_config": PACKED_ATTENTION}
GREEDY = Decoding(max_new_tokens=96)
BRIEF = Decoding(max_new_tokens=40)
"""Greedy, too: some responses end, others are cut."""
LONG_QUESTION = "List every digit with its box, from top to bottom. " * 20
"""A prompt over more than one block of the engine's attention cache (128 tokens on a CPU)."""
_READ: dict[str, torch.nn.Module] = {}


def absolute(*overrides: str) -> list[str]:
    """Overrides that make ``digits.yaml`` independent of the working directory, then the given ones."""
    fixtures = ROOT / "fixtures"
    return [
        f"model.model={MODEL}",
        f"custom.train_jsonl={fixtures}/digits/train.jsonl",
        f"custom.val_jsonl={fixtures}/digits/val.jsonl",
        *overrides,
    ]


def load_digits(*overrides: str) -> RunConfig:
    return load_config(CONFIG, absolute(*overrides))


@cache
def scenes(split: str = "val") -> tuple[Sample, ...]:
    return tuple(load_samples(ROOT / f"fixtures/digits/{split}.jsonl"))


def unseen(samples: Iterable[Sample]) -> list[Sample]:
    """The samples with a short question in place of their picture: a third of the work, where nobody looks."""
    return [replace(sample, images=(), messages=(("user", f"What is {sample.sample_id} + 1?"),)) for sample in samples]


@cache
def template_of(user: str | None = None) -> Template:
    prompts = load_digits().custom.prompts
    return Template(MODEL, system=prompts.system, user=user or prompts.user)


def load_model(tuner: TunerConfig | None = None, *, attention: str | dict[str, str] = "sdpa") -> torch.nn.Module:
    """A copy: each kind is read from its files once."""
    config, tuner = ModelConfig(model=str(MODEL), torch_dtype="float32"), tuner or TunerConfig()
    if (kind := repr((tuner, attention))) not in _READ:
        _READ[kind] = load_policy(config, tuner, attn_implementation=attention).eval()
    return copy.deepcopy(_READ[kind])


def cut(model: torch.nn.Module) -> torch.nn.Module:
    """Leave one layer of five, and two of four that see: a policy that writes nothing sensible, in a third of the time.

    The tower's second layer stays, as the language model hears of it, too."""
    text, tower = unwrap(model).model.language_model, unwrap(model).model.visual
    text.layers, tower.blocks = text.layers[:1], tower.blocks[:2]
    text.config.num_hidden_layers, tower.config.depth = len(text.layers), len(tower.blocks)
    return model


def write_cut(folder: Path) -> Path:
    """Its directory."""
    shutil.copytree(MODEL, folder, ignore=shutil.ignore_patterns("*.safetensors", "config.json"))
    cut(load_model()).save_pretrained(folder)
    return folder


def requests_for(
    samples, *, template: Template | None = None, run_seed: int = 7, step: int = 0, rank: int = 0
) -> list[RolloutRequest]:
    prompt_of = (template or template_of()).prompt_token_ids
    return make_requests(samples, prompt_of=prompt_of, run_seed=run_seed, step=step, rank=rank)


@torch.no_grad()
def perturb(model: torch.nn.Module, *, seed: int, scale: float) -> None:
    """Move every weight, the vision tower's too, by ``scale`` of its spread (of its size where it has none)."""
    generator = torch.Generator().manual_seed(seed)
    for weight in model.parameters():
        spread = weight.std() if weight.numel() > 1 and weight.std() > 0 else weight.abs().mean() + 1e-2
        weight += scale * spread * torch.randn(weight.shape, generator=generator)


def policy_weights(seed: int, device: torch.device, *, scale: float) -> dict[str, torch.Tensor]:
    """What a learner sends of the digits model, moved by ``scale``; as it is for seed 0."""
    model = load_model()
    if seed:
        perturb(model, seed=seed, scale=scale)
    return {name: tensor.to(device) for name, tensor in merged_weights(model)}


def tokens_of(rollouts) -> list[tuple[int, ...]]:
    return [rollout.response_token_ids for rollout in rollouts]
