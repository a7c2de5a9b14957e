"""``rollmatch export``: a run's policy as a model directory that transformers and ``vllm serve`` load.

Weights have the names and bytes that rollout servers receive: adapters merged in float32, rounded once. Tokenizer,
processor and chat template are the files of the model that was trained, the processor with the run's settings.
"""

import argparse
import json
import re
import shutil
import tempfile
from collections.abc import Mapping
from pathlib import Path
from typing import TYPE_CHECKING

import yaml

from rollmatch.config import RunConfig, effective, load_config
from rollmatch.errors import LaunchError
from rollmatch.journal import read_journal
from rollmatch.run.directory import JOURNAL, RESOLVED, last_checkpoint
from rollmatch.run.push import check_name, push

if TYPE_CHECKING:
    from torch import nn

WEIGHTS = re.compile(r".*\.(safetensors|bin|pt|pth|gguf|h5|msgpack)(\.index\.json)?")
"""Files of a model directory that hold weights, or say where they are."""
OF_TRAINING = re.compile(r"README\.md|manifest\.json|trainer_state\.json|learner\.json|packer-rank\d+\.json")
"""Files of a checkpoint, or of the model that a run began with, that say nothing about this one."""
PROCESSOR_FILES = ("processor_config.json", "preprocessor_config.json", "video_preprocessor_config.json")
DTYPES = ("float32", "bfloat16", "float16")


def export(options: argparse.Namespace) -> None:
    """Write the model directory. Errors: ``checkpoint-missing``, ``output-exists``, ``not-a-run``, those of a push."""
    run, out = options.run, options.out
    if options.push is not None:
        check_name(options.push)
    checkpoint = _check(run, out, options.checkpoint or last_checkpoint(run))
    config = load_config(str(run / RESOLVED))
    base = _directory_of(config)
    partial = out.with_name(f"{out.name}.partial")
    shutil.rmtree(partial, ignore_errors=True)
    partial.mkdir(parents=True)
    copy_described(base, partial)
    if config.model.processor_kwargs:
        write_processor(base, partial, config.model.processor_kwargs)
    dtype = options.dtype or dtype_of(base)
    num_tensors = write_weights(load_trained(config, checkpoint), partial, dtype)
    _write_config(partial, dtype)
    name = options.push.rpartition("/")[2] if options.push else out.resolve().name
    precision = f"{config.tuner.train_type} fine-tuning, {checkpoint.name}, {dtype}"
    (partial / "README.md").write_text(card(name, run, precision), encoding="utf-8")
    partial.rename(out)
    print(f"{out}: {num_tensors} tensors in {dtype} from {checkpoint.name}")
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
    if out.exists():
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

    processor = AutoProcessor.from_pretrained(base, **settings)
    with tempfile.TemporaryDirectory() as folder:
        processor.save_pretrained(folder)
        for name in PROCESSOR_FILES:
            (out / name).unlink(missing_ok=True)
            if (Path(folder) / name).is_file():
                shutil.copy(Path(folder) / name, out / name)


def load_trained(config: RunConfig, checkpoint: Path) -> "nn.Module":
    """The policy as it was saved, in the precision that it was trained in."""
    from transformers import AutoConfig, AutoModelForCausalLM, AutoModelForImageTextToText
    from transformers.utils.logging import disable_progress_bar

    from rollmatch.model.split_checkpoint import is_split, read_split

    disable_progress_bar()  # reading takes no longer than writing, which has none
    if is_split(checkpoint):
        from rollmatch.model.policy import load_policy

        trained = config.model.model_copy(update={"torch_dtype": effective.learner_dtype(config)})
        return read_split(load_policy(trained, config.tuner), checkpoint)
    adapted = (checkpoint / "adapter_config.json").is_file()
    source = config.model.model if adapted else str(checkpoint)
    architecture = AutoConfig.from_pretrained(source)
    kind = AutoModelForImageTextToText if hasattr(architecture, "vision_config") else AutoModelForCausalLM
    model: nn.Module = kind.from_pretrained(source, dtype=config.model.torch_dtype if adapted else "auto")
    if not adapted:
        return model
    from rollmatch.model.policy import load_adapters

    return load_adapters(model, checkpoint, config.model, config.tuner)


def write_weights(model: "nn.Module", out: Path, dtype: str) -> int:
    """Weights by the names of a checkpoint, adapters merged; returns the number of tensors."""
    import torch
    from huggingface_hub import save_torch_state_dict

    from rollmatch.model.checkpoint import merged_weights

    target = getattr(torch, dtype)
    state = {
        name: tensor.to(target).contiguous() if tensor.is_floating_point() else tensor.contiguous()
        for name, tensor in merged_weights(model)
    }
    save_torch_state_dict(state, out)
    return len(state)


def dtype_of(base: Path) -> str:
    """The dtype that config.json names; float32 where it names none."""
    described = json.loads((base / "config.json").read_text(encoding="utf-8"))
    for part in (described, described.get("text_config", {})):
        found = str(part.get("dtype") or part.get("torch_dtype") or "")
        if found in DTYPES:
            return found
    return "float32"


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
    words = [f"* System: {prompts['system']}"] if prompts["system"] else []
    words.append(f"* User, after the image: {prompts['user']}")
    return ["Trained with this prompt:", "", *words, "", f"Answers have the form `{answer_format}`.", ""]


def _is_shown(name: str) -> bool:
    """Parts of a reward, and what the evaluation cost, are left out."""
    return "/" not in name and name not in ("num_scenes", "seconds", "tokens_per_s")


def _shown(metrics: Mapping[str, float], name: str) -> str:
    return f"{metrics[name]:.4g}" if name in metrics else "-"
