"""``python -m benchmarks.objectives.boxes TASK FOLDER``: four objectives with one budget of responses.

Each begins with the task's model, makes as many optimizer steps of as many responses, and learns all weights with one
learning rate. Plain SFT generates nothing and reads as many true answers. All are evaluated alike: boxes of greedy
answers to held-out images. A run that is in FOLDER already is not made again; FOLDER/data holds what it learns from.

TASK is ``digits``, which are drawn when asked for, or ``detector``, whose images, model and first stage
``docs/guides/detector.md`` makes in ``runs/detector``.
"""

import argparse
import json
import subprocess
import sys
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

ROOT = Path(__file__).parents[2]
SEEDS, RESPONSES, GROUP = (42, 1, 2), 16, 8
FIGURES = ("f1@0.5", "f1_desc@0.5", "AP50")
REWARD = "rollmatch.rewards.detection"
SAMPLED = {"custom.extra.rollout_matching.decoding.temperature": 1.0}
TEACHER = {"self": True, "prompt": "{question} {answer}", "average": 1.0}
"""The model before training, with the true answer in its prompt."""


@dataclass(frozen=True)
class Task:
    """What is learnt, from where on."""

    config: Path
    data: Path
    """The directory of ``train.jsonl`` and ``val.jsonl``."""
    image_root: Path
    start: Path
    """A model, or a run."""
    steps: int
    held_out: int
    """Unit: images."""


TASKS = {
    "digits": Task(
        config=ROOT / "fixtures/digits/digits.yaml",
        data=ROOT / "fixtures/digits",
        image_root=ROOT / "fixtures/digits",
        start=ROOT / "fixtures/models/digits",
        steps=30,
        held_out=128,
    ),
    "detector": Task(
        config=ROOT / "fixtures/detector/coord_tokens-2.yaml",
        data=ROOT / "runs/detector/data",
        image_root=ROOT / "runs/detector/raw",
        start=ROOT / "runs/detector/coord_tokens-1",
        steps=20,
        held_out=80,
    ),
}
VARIANTS: Mapping[str, Mapping[str, object]] = {
    "sft": {"custom.trainer_variant": "sft"},
    "rollout matching": {"custom.trainer_variant": "rollout_matching_sft"},
    "grpo": SAMPLED
    | {
        "custom.trainer_variant": "grpo",
        "custom.extra.grpo.num_generations": GROUP,
        "custom.extra.grpo.rewards": [{"function": f"{REWARD}:f1"}, {"function": f"{REWARD}:mean_iou"}],
        "training.per_device_train_batch_size": RESPONSES // GROUP,
    },
    "self-distillation": SAMPLED
    | {
        "custom.trainer_variant": "distill",
        "custom.extra.grpo.num_generations": 1,
        "custom.extra.distill.loss": "divergence",
        "custom.extra.distill.beta": 0.5,
        "custom.extra.distill.top_k": 32,
        "custom.extra.distill.teachers": [TEACHER],
    },
}
AS_BOXES = {
    "custom.trainer_variant": "rollout_matching_sft",
    "custom.extra.grpo.rewards": [],
    "custom.extra.distill.teachers": [],
    "custom.extra.rollout_matching.decoding.temperature": 0.0,
    "custom.extra.distill.loss": "sampled",
    "custom.extra.distill.beta": None,
    "custom.extra.distill.top_k": None,
}
"""An evaluation by boxes, whatever the run was."""


def answer_of(objects: Sequence[Mapping[str, Any]]) -> str:
    """As the model writes it, from top to bottom.

    >>> answer_of([{"desc": "one", "bbox_2d": [1, 2, 3, 4]}])
    '{"objects": [{"desc": "one", "bbox_2d": ["<|coord_1|>", "<|coord_2|>", "<|coord_3|>", "<|coord_4|>"]}]}'
    """
    downwards = sorted(objects, key=lambda one: (one["bbox_2d"][1], one["bbox_2d"][0]))
    listed = [{"desc": one["desc"], "bbox_2d": [f"<|coord_{x}|>" for x in one["bbox_2d"]]} for one in downwards]
    return json.dumps({"objects": listed})


def main(task: Task, folder: Path, seeds: Sequence[int]) -> None:
    """Make all runs that are missing, and print a table of all that are there."""
    data = write_data(task, folder / "data")
    limit = ("--limit", str(task.held_out))
    say("before", "", "", evaluated(folder / "before", task.config, data, *limit))
    for seed in seeds:
        for name, keys in VARIANTS.items():
            run = folder / f"{name.replace(' ', '-')}-{seed}"
            if not (run / "figures.json").is_file():
                batch = {"training.per_device_train_batch_size": RESPONSES, "training.seed": seed}
                figures = made(run, task, {**data, **batch, **keys}, *limit)
                (run / "figures.json").write_text(json.dumps(figures))
            figures = json.loads((run / "figures.json").read_text())
            say(name, seed, figures["tokens"], figures)


def write_data(task: Task, folder: Path) -> Mapping[str, object]:
    """The images with their true answers as metadata; the keys that name them."""
    folder.mkdir(parents=True, exist_ok=True)
    for split in ("train", "val"):
        images = [json.loads(line) for line in (task.data / f"{split}.jsonl").read_text().splitlines()]
        for image in images:
            image["metadata"] = image.get("metadata", {}) | {"answer": answer_of(image["objects"])}
        lines = map(json.dumps, images)
        (folder / f"{split}.jsonl").write_text("".join(line + "\n" for line in lines))
    return {f"custom.{split}_jsonl": folder / f"{split}.jsonl" for split in ("train", "val")} | {
        "custom.image_root": task.image_root,
        "model.model": task.start,
        "custom.extra.rollout_matching.rollout_backend": "hf",
        "custom.extra.rollout_matching.rollout_generate_batch_size": 64,
        "training.packing": False,
        "training.report_to": "none",
        "training.learner_threads": 1,
    }


def made(run: Path, task: Task, keys: Mapping[str, object], *limit: str) -> dict[str, float]:
    """One run, evaluated."""
    steps = {"training.max_steps": task.steps, "training.save_steps": task.steps, "training.eval_steps": 0}
    began = time.monotonic()
    call("train", task.config, {**steps, **keys, "training.output_dir": run})
    seconds = time.monotonic() - began
    events = [json.loads(line) for line in (run / "journal.jsonl").read_text().splitlines()]
    generated = [one for one in events if one["event"] == "generated" and one.get("purpose") == "train"]
    figures = evaluated(run / "boxes", run, AS_BOXES, *limit)
    return figures | {"tokens": sum(one["num_tokens"] for one in generated), "seconds": seconds}


def evaluated(out: Path, subject: Path, keys: Mapping[str, object], *limit: str) -> dict[str, float]:
    """Figures of ``rollmatch eval``."""
    if not (out / "eval.json").is_file():
        call("eval", subject, keys, *limit, "--out", str(out))
    metrics = json.loads((out / "eval.json").read_text())["metrics"]
    return {name: metrics[name] for name in FIGURES}


def call(command: str, subject: Path, keys: Mapping[str, object], *options: str) -> None:
    """``rollmatch COMMAND SUBJECT --set ...``."""
    sets = [part for name, value in keys.items() for part in ("--set", f"{name}={_value(value)}")]
    line = [sys.executable, "-m", "rollmatch", command, str(subject), *options, *sets]
    subprocess.run(line, check=True, cwd=ROOT, stdout=subprocess.DEVNULL)


def _value(value: object) -> str:
    return str(value) if isinstance(value, Path) else json.dumps(value)


def say(name: str, seed: object, tokens: object, figures: Mapping[str, float]) -> None:
    """A row of the table."""
    cells = [name, str(seed), str(tokens), *(f"{figures[name]:.3f}" for name in FIGURES)]
    sys.stdout.write(f"| {' | '.join(cells)} |\n")
    sys.stdout.flush()


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("task", choices=TASKS)
    parser.add_argument("folder", type=Path)
    parser.add_argument("--seeds", type=int, nargs="+", default=SEEDS)
    options = parser.parse_args()
    main(TASKS[options.task], options.folder.resolve(), options.seeds)
