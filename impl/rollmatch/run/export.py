"""``rollmatch export``: a run's policy as a model directory that transformers and ``vllm serve`` load.

Weights have the names and bytes that rollout servers receive: adapters merged in float32, rounded once; the card says
how many of the changes survive that. An adapter alone is as exact as the checkpoint. Tokenizer, processor and chat
template are the files of the model that was trained, the processor with the run's settings.
"""

import argparse
import json
import re
import shutil
import tempfile
from collections.abc import Callable, Mapping
from contextlib import ExitStack
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

import yaml

from rollmatch.config import RunConfig, effective, load_config
from rollmatch.config.rollout_matching import TEXT
from rollmatch.errors import LaunchError
from rollmatch.journal import read_journal
from rollmatch.model.source import ADAPTER_FILE, dtype_of
from rollmatch.run.directory import JOURNAL, RESOLVED, last_checkpoint
from rollmatch.run.push import check_links, check_name, push
from rollmatch.run.verify import stored_answers, verify
from rollmatch.training.checkpoint import reading

if TYPE_CHECKING:
    from torch import Tensor, nn

WEIGHTS = re.compile(r".*\.(safetensors|bin|pt|pth|gguf|h5|msgpack)(\.index\.json)?")
"""Files of a model directory that hold weights, or say where they are."""
OF_TRAINING = re.compile(r"README\.md|manifest\.json|trainer_state\.json|learner\.json|packer-rank\d+\.json")
"""Files of a checkpoint, or of the model that a run began with, that say nothing about this one."""
PROCESSOR_FILES = ("processor_config.json", "preprocessor_config.json", "video_preprocessor_config.json")


def export(options: argparse.Namespace) -> None:
    """Write the model directory. Errors: ``checkpoint-missing``, ``output-exists``, ``not-a-run``, ``no-adapter``,
    those of a push and of ``verify``."""
    run, out = options.run, options.out
    if options.push is not None:
        check_name(options.push)
    checkpoint = _check(run, out, options.checkpoint or last_checkpoint(run))
    config = load_config(str(run / RESOLVED))
    stored = stored_answers(config, run, checkpoint) if options.verify else None
    base = _directory_of(config)
    if options.push is not None:
        check_links(base, checkpoint)
    partial = out.with_name(f"{out.name}.partial")
    shutil.rmtree(partial, ignore_errors=True)
    partial.mkdir(parents=True)
    copy_described(base, partial)
    if config.model.processor_kwargs:
        write_processor(base, partial, config.model.processor_kwargs)
    dtype = options.dtype or dtype_of(base)
    if options.adapter:
        (partial / "config.json").unlink()
        write_adapter(config, checkpoint, partial)
        of_base = dtype_of(base) if config.model.torch_dtype == "auto" else config.model.torch_dtype
        made = [f"{config.tuner.train_type} fine-tuning, {checkpoint.name}, adapter as trained on a base in {of_base}"]
    else:
        trained = load_trained(config, checkpoint)
        if config.tuner.train_type == "lora":
            trained = trained.float()  # sums of the weights as they were trained and adapters, rounded once
        kept = write_weights(trained, partial, dtype, base=base)
        _write_config(partial, dtype)
        made = [f"{config.tuner.train_type} fine-tuning, {checkpoint.name}, {dtype}", *kept.sentences(dtype)]
        if config.tuner.train_type == "lora":
            made.append("Merging rounds: answers near a tie may differ from those of the adapter")
    if (compute := autocast_of(config, dtype, adapter=options.adapter)) is not None:
        made.append(f"It was evaluated under autocast to {compute}; without, answers may differ")
    name = options.push.rpartition("/")[2] if options.push else out.resolve().name
    (partial / "README.md").write_text(card(name, run, ". ".join(made)), encoding="utf-8")
    if out.exists():  # the run's own, where transformers' trainer saves a model, too
        for path in partial.iterdir():
            path.replace(out / path.name)
        partial.rmdir()
    else:
        partial.rename(out)
    print(f"{out}: {'. '.join(made)}.")
    if stored is not None:
        print(verify(stored, config, out, compute_dtype=compute))
    if options.push:
        print(push(out, options.push))


def _check(run: Path, out: Path, checkpoint: Path | None) -> Path:
    """The checkpoint, if it and the directories can be used."""
    if not (run / RESOLVED).is_file():
        problem, remedy = f"{run} has no {RESOLVED}", "Name the training.output_dir of a run."
        raise LaunchError(problem, code="not-a-run", key="RUN", remedy=remedy)
    if checkpoint is None or not checkpoint.is_dir():
        problem = f"{checkpoint or run} holds no whole checkpoint"
        raise LaunchError(problem, code="checkpoint-missing", key="--checkpoint", remedy="Name a checkpoint directory.")
    if out.exists() and out.resolve() != run.resolve():
        raise LaunchError(f"{out} exists", code="output-exists", key="OUT", remedy="Remove it, or name another one.")
    return checkpoint


def _directory_of(config: RunConfig) -> Path:
    """The directory of the model that was trained; a hub id's is in the cache."""
    if Path(config.model.model).is_dir():
        return Path(config.model.model)
    from huggingface_hub import snapshot_download

    return Path(snapshot_download(config.model.model))


def copy_described(base: Path, out: Path) -> None:
    """Everything but weights: config, tokenizer, processor, chat template."""
    for path in base.iterdir():
        if path.is_file() and not WEIGHTS.fullmatch(path.name) and not OF_TRAINING.fullmatch(path.name):
            shutil.copy(path, out / path.name)


def write_processor(base: Path, out: Path, settings: Mapping[str, object]) -> None:
    """The processor with the settings that the run trained with: whoever serves the model does not know them."""
    from transformers import AutoProcessor

    processor = AutoProcessor.from_pretrained(base, trust_remote_code=False, **settings)
    with tempfile.TemporaryDirectory() as folder:
        processor.save_pretrained(folder)
        for name in PROCESSOR_FILES:
            (out / name).unlink(missing_ok=True)
            if (Path(folder) / name).is_file():
                shutil.copy(Path(folder) / name, out / name)


def load_trained(config: RunConfig, checkpoint: Path) -> "nn.Module":
    """The policy as it was saved, in the precision that it was trained in. Errors: ``checkpoint-unreadable``,
    ``model-unreadable``.
    """
    from transformers.utils.logging import disable_progress_bar

    from rollmatch.model.policy import auto_class, load_adapters, load_architecture, load_policy
    from rollmatch.model.split_checkpoint import is_split, read_split

    disable_progress_bar()  # reading takes no longer than writing, which has none
    if is_split(checkpoint):
        trained = config.model.model_copy(update={"torch_dtype": effective.learner_dtype(config)})
        policy = load_policy(trained, config.tuner)
        with reading(checkpoint, key="--checkpoint"):
            return read_split(policy, checkpoint)
    adapted = (checkpoint / "adapter_config.json").is_file()
    source = config.model.model if adapted else str(checkpoint)
    kind = auto_class(load_architecture(source))
    with reading(checkpoint, key="--checkpoint"):
        dtype = config.model.torch_dtype if adapted else "auto"
        model: nn.Module = kind.from_pretrained(source, dtype=dtype, trust_remote_code=False)
        return load_adapters(model, checkpoint, config.model, config.tuner) if adapted else model


@dataclass(slots=True)
class KeptChanges:
    """Weights that training has changed, and how many of them still differ from the base after rounding."""

    num_weights: int = 0
    num_changed: int = 0
    num_kept: int = 0

    def sentences(self, dtype: str) -> list[str]:
        """For the card and the terminal; none where all are kept.

        >>> KeptChanges(num_weights=1000, num_changed=999, num_kept=25).sentences("bfloat16")
        ['99.9% of the weights changed, bfloat16 keeps 2.5% of these changes; float32 keeps all']
        """
        if self.num_kept == self.num_changed:
            return []
        changed, kept = self.num_changed / self.num_weights, self.num_kept / self.num_changed
        remedy = "float32 keeps all"
        return [f"{changed:.1%} of the weights changed, {dtype} keeps {kept:.1%} of these changes; {remedy}"]


def autocast_of(config: RunConfig, dtype: str, *, adapter: bool) -> str | None:
    """The autocast under which the run's learner generated; None: it had none, or the weights have that precision."""
    compute = effective.compute_dtype(config) if effective.rollout_backend(config) == "hf" else None
    return compute if adapter or dtype != compute else None


def write_adapter(config: RunConfig, checkpoint: Path, out: Path) -> None:
    """The files of the adapter. Errors: ``no-adapter``."""
    if config.tuner.train_type != "lora":
        problem = f"{config.training.output_dir} trained all weights"
        raise LaunchError(problem, code="no-adapter", key="--adapter", remedy="Leave it out.")
    if config.model.adapter is not None and config.model.adapter_start == "merge":
        problem = f"the adapter lies on {config.model.model} with {config.model.adapter} merged"
        raise LaunchError(problem, code="no-adapter", key="--adapter", remedy="Leave it out: both are merged then.")
    if (checkpoint / ADAPTER_FILE).is_file():
        for name in (ADAPTER_FILE, "adapter_model.safetensors"):
            shutil.copy(checkpoint / name, out / name)
    else:
        load_trained(config, checkpoint).save_pretrained(str(out))  # type: ignore[operator]  # peft's


def write_weights(model: "nn.Module", out: Path, dtype: str, *, base: Path | None = None) -> KeptChanges:
    """Weights by the names of a checkpoint, adapters merged; compared with those of ``base``, read one by one."""
    import torch
    from huggingface_hub import save_torch_state_dict

    from rollmatch.model.checkpoint import merged_weights

    target, kept, state = getattr(torch, dtype), KeptChanges(), {}
    with ExitStack() as files:
        before = _tensors_of(base, files) if base is not None else {}
        for name, tensor in merged_weights(model):
            rounded = tensor.to(target).contiguous() if tensor.is_floating_point() else tensor.contiguous()
            state[name] = rounded
            if name in before and (old := before[name](name)).shape == tensor.shape:
                kept.num_weights += tensor.numel()
                kept.num_changed += int((tensor.cpu() != old.to(tensor.dtype)).sum())
                kept.num_kept += int((rounded.cpu() != old.to(rounded.dtype)).sum())
    save_torch_state_dict(state, out)
    return kept


def _tensors_of(base: Path, files: ExitStack) -> dict[str, "Callable[[str], Tensor]"]:
    """Name of each tensor in a directory's safetensors -> what reads it."""
    from safetensors import safe_open

    opened = [files.enter_context(safe_open(path, framework="pt")) for path in sorted(base.glob("*.safetensors"))]
    return {name: file.get_tensor for file in opened for name in file.keys()}  # noqa: SIM118  # no mapping


def _write_config(out: Path, dtype: str) -> None:
    """config.json says which dtype the weights have, in every part that says so."""
    path = out / "config.json"
    described = json.loads(path.read_text(encoding="utf-8"))
    for part in (described, *(part for name, part in described.items() if name.endswith("_config"))):
        for name in {"dtype", "torch_dtype"} & part.keys() if isinstance(part, dict) else ():
            part[name] = dtype
    path.write_text(json.dumps(described, indent=2) + "\n", encoding="utf-8")


def began_with(run: Path) -> tuple[str, list[str]]:
    """The model that a chain of runs began with, and the objectives of these runs, the first one first.

    Stage 2 begins with a checkpoint of stage 1, whose run lies around it.
    """
    described = yaml.safe_load((run / RESOLVED).read_text(encoding="utf-8"))
    model: str = described["model"]["model"]
    before = Path(model).parent
    model, objectives = began_with(before) if (before / RESOLVED).is_file() else (model, [])
    return model, [*objectives, described["custom"]["trainer_variant"]]


def card(name: str, run: Path, made: str) -> str:
    """The model card; ``made`` says how the weights were made."""
    model, objectives = began_with(run)
    stages = ", then ".join(f"`{each}`" for each in objectives)
    is_local = Path(model).exists()
    events = list(read_journal(run / JOURNAL))
    evaluated = [event for event in events if event["event"] == "evaluated"]
    first, last = (evaluated[0]["metrics"], evaluated[-1]["metrics"]) if evaluated else ({}, {})
    lines = [
        "---",
        "library_name: transformers",
        *([] if is_local else [f"base_model: {model}"]),  # the hub takes no paths
        "tags: [rollmatch]",
        "---",
        "",
        f"# {name}",
        "",
        f"`{Path(model).name if is_local else model}`, trained with rollmatch: {stages}; {made}.",
        "",
        *_prompt_of(run),
        "| held-out metric | before | last |",
        "|---|---|---|",
        *(f"| {name} | {_shown(first, name)} | {_shown(last, name)} |" for name in last if _is_shown(name)),
        "",
    ]
    return "\n".join(lines)


def _prompt_of(run: Path) -> list[str]:
    """How the model was asked, where all samples had one prompt: whoever serves it needs the same words."""
    custom = yaml.safe_load((run / RESOLVED).read_text(encoding="utf-8"))["custom"]
    if custom["trainer_variant"] not in ("sft", "rollout_matching_sft"):
        return []
    prompts, answer_format = custom["prompts"], custom["extra"]["rollout_matching"]["answer_format"]
    if answer_format == TEXT:
        return []
    words = [f"* System: {prompts['system']}"] if prompts["system"] else []
    words.append(f"* User, after the image: {prompts['user']}")
    return ["Trained with this prompt:", "", *words, "", f"Answers have the form `{answer_format}`.", ""]


def _is_shown(name: str) -> bool:
    """Parts of a reward, and what the evaluation cost, are left out."""
    return "/" not in name and name not in ("num_scenes", "seconds", "tokens_per_s")


def _shown(metrics: Mapping[str, float], name: str) -> str:
    return f"{metrics[name]:z.4g}" if name in metrics else "-"
