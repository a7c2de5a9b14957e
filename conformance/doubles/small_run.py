"""A trainer on the digits in this process, with the hf backend: what ``run.assemble`` assembles, less its console."""

import copy
from itertools import chain
from pathlib import Path

import torch
from torch.distributed.tensor import DTensor
from transformers import TrainerCallback

from conformance.doubles.digits import cut, load_digits, scenes
from rollmatch.config import RunConfig
from rollmatch.config.effective import learner_dtype
from rollmatch.journal import Journal, read_journal
from rollmatch.model.template import Template
from rollmatch.ranks import Ranks
from rollmatch.run.assemble import make_arguments, make_parts, make_template, read_policy
from rollmatch.run.directory import JOURNAL
from rollmatch.training.trainer import RolloutTrainer

SMALL = (
    "custom.extra.rollout_matching.rollout_backend=hf",
    "custom.extra.rollout_matching.rollout_generate_batch_size=8",
    "custom.extra.rollout_matching.max_new_tokens=32",
    "custom.extra.rollout_matching.vllm.max_model_len=null",
    "training.max_steps=1",
    "training.per_device_train_batch_size=4",
    "training.optim=sgd",
    "training.lr_scheduler_type=constant",
    "training.warmup_steps=0",
    "training.learning_rate=0.01",
    "training.report_to=none",
    "training.learner_threads=1",
)
"""Plain SGD: a step is proportional to its gradient, so that rounding stays rounding (Adam would blow it up)."""
KEPT = "training.save_steps=1000"
"""The run ends with a checkpoint; so does any with a rule of when to write them, and no other."""
_READ: dict[str, tuple[torch.nn.Module, Template]] = {}


class KeepsNothing(TrainerCallback):
    """No checkpoint, not even at the end."""

    def on_step_end(self, args, state, control, **kwargs):
        control.should_save = False


def make_trainer(folder: Path, *overrides: str, samples=None, eval_samples=None, **more) -> RolloutTrainer:
    """Writes below ``folder``; ``samples`` default to the first 8 train scenes, ``eval_samples`` to 4 of val."""
    config = load_digits(f"training.output_dir={folder}", *SMALL, KEPT, *overrides)
    samples = scenes("train")[:8] if samples is None else samples
    eval_samples = scenes()[:4] if eval_samples is None else eval_samples
    is_kept = any(override.startswith("training.save_steps=") for override in overrides)
    unkept = () if is_kept else (KeepsNothing(),)
    callbacks = [*(more.pop("callbacks", None) or ()), *unkept]
    return assembled(config, samples, eval_samples, callbacks=callbacks, **more)


def assembled(config: RunConfig, samples, eval_samples, *, callbacks=None, is_shallow=False) -> RolloutTrainer:
    """With a journal below the run's directory; a shallow policy has two layers."""
    folder, arguments = Path(config.training.output_dir), make_arguments(config)
    ranks = Ranks.from_environment()
    journal = Journal(folder / (JOURNAL if ranks.is_primary else f"journal-rank{ranks.rank}.jsonl"), rank=ranks.rank)
    model, template = read(config)
    if is_shallow:
        cut(model)
    parts = make_parts(config, model, template, journal=journal, ranks=ranks)
    return RolloutTrainer(
        **parts._asdict(),
        model=model,
        args=arguments,
        train_dataset=list(samples),
        eval_dataset=list(eval_samples),
        processing_class=template.processor,
        callbacks=callbacks,
    )


def read(config: RunConfig) -> tuple[torch.nn.Module, Template]:
    """A copy of the policy, and its template: each is read from its files once."""
    custom = config.custom
    key = (config.model, config.tuner, learner_dtype(config), custom.prompts, custom.learns_from_completions)
    if (kind := repr(key)) not in _READ:
        with torch.random.fork_rng():
            torch.manual_seed(config.training.seed)  # adapters of all kinds begin alike
            model = read_policy(config)
        _READ[kind] = model, make_template(config)
    model, template = _READ[kind]
    return copy.deepcopy(model), template


def trained(folder: Path, *overrides: str, **arguments) -> tuple[RolloutTrainer, torch.Tensor]:
    """The trainer after its run, and the change of its weights in one vector."""
    trainer = make_trainer(folder, *overrides, **arguments)
    before = weights_of(trainer.model)
    trainer.train()
    return trainer, step_between(before, weights_of(trainer.model))


def requested(trainer: RolloutTrainer) -> list[int]:
    """Ids of all samples that were rolled out to learn from."""
    return list(chain(*(event["sample_ids"] for event in events(trainer, "requested") if event["purpose"] == "train")))


def events(trainer: RolloutTrainer, name: str) -> list[dict]:
    return [event for event in read_journal(trainer.source.journal.path) if event["event"] == name]


def weights_of(model: torch.nn.Module) -> dict[str, torch.Tensor]:
    """A copy, whole also where ranks share the weights; then all ranks call it."""
    return {name: whole(weight.detach()) for name, weight in model.named_parameters()}


def whole(weight: torch.Tensor) -> torch.Tensor:
    return weight.full_tensor() if isinstance(weight, DTensor) else weight.clone()


def step_between(before: dict[str, torch.Tensor], after: dict[str, torch.Tensor]) -> torch.Tensor:
    """All changes, in one vector."""
    return torch.cat([(after[name] - weight).flatten() for name, weight in before.items()])
