"""``python -m benchmarks.objectives.digits FOLDER``: four objectives on the digits, with one budget of responses.

Each begins with the model of ``fixtures/digits``, makes as many optimizer steps of as many responses, and learns all
weights with one learning rate. Plain SFT generates nothing and reads as many true answers. All are evaluated alike:
boxes of greedy answers to held-out scenes. A run that is in FOLDER already is not made again.
"""

import json
import subprocess
import sys
import time
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

ROOT = Path(__file__).parents[2]
DIGITS = ROOT / "fixtures/digits"
SEEDS, STEPS, RESPONSES, HELD_OUT = (42, 1, 2), 30, 16, 128
GROUP = 8
FIGURES = ("f1@0.5", "f1_desc@0.5", "AP50")
REWARD = "rollmatch.rewards.detection"
SAMPLED = {"custom.extra.rollout_matching.decoding.temperature": 1.0}
TEACHER = {"self": True, "prompt": "{question} {answer}", "average": 1.0}
"""The model before training, with the true answer in its prompt."""
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
    """As the model writes it.

    >>> answer_of([{"desc": "one", "bbox_2d": [1, 2, 3, 4]}])
    '{"objects": [{"desc": "one", "bbox_2d": ["<|coord_1|>", "<|coord_2|>", "<|coord_3|>", "<|coord_4|>"]}]}'
    """
    listed = [{"desc": one["desc"], "bbox_2d": [f"<|coord_{x}|>" for x in one["bbox_2d"]]} for one in objects]
    return json.dumps({"objects": listed})


def main(folder: Path) -> None:
    """Make all runs that are missing, and print a table of all that are there."""
    folder.mkdir(parents=True, exist_ok=True)
    data = write_data(folder)
    say("before", "", "", evaluated(folder / "before", DIGITS / "digits.yaml", data))
    for seed in SEEDS:
        for name, keys in VARIANTS.items():
            figures = made(folder / f"{name.replace(' ', '-')}-{seed}", keys, seed, data)
            say(name, seed, figures["tokens"], figures)


def write_data(folder: Path) -> Mapping[str, object]:
    """The scenes with their true answers as metadata; the keys that name them."""
    for split in ("train", "val"):
        scenes = [json.loads(line) for line in (DIGITS / f"{split}.jsonl").read_text().splitlines()]
        lines = [json.dumps(scene | {"metadata": {"answer": answer_of(scene["objects"])}}) for scene in scenes]
        (folder / f"{split}.jsonl").write_text("".join(line + "\n" for line in lines))
    return {f"custom.{split}_jsonl": folder / f"{split}.jsonl" for split in ("train", "val")} | {
        "custom.image_root": DIGITS,
        "model.model": ROOT / "fixtures/models/digits",
        "custom.extra.rollout_matching.rollout_backend": "hf",
        "custom.extra.rollout_matching.rollout_generate_batch_size": 64,
        "training.packing": False,
        "training.report_to": "none",
        "training.learner_threads": 1,
    }


def made(run: Path, keys: Mapping[str, object], seed: int, data: Mapping[str, object]) -> dict[str, float]:
    """One run, evaluated."""
    if not (run / "figures.json").is_file():
        steps = {"training.max_steps": STEPS, "training.save_steps": STEPS, "training.eval_steps": 0}
        batch = {"training.per_device_train_batch_size": RESPONSES, "training.seed": seed}
        began = time.monotonic()
        call("train", DIGITS / "digits.yaml", {**data, **batch, **steps, **keys, "training.output_dir": run})
        seconds = time.monotonic() - began
        events = [json.loads(line) for line in (run / "journal.jsonl").read_text().splitlines()]
        generated = [one for one in events if one["event"] == "generated" and one.get("purpose") == "train"]
        figures = evaluated(run / "boxes", run, AS_BOXES)
        figures |= {"tokens": sum(one["num_tokens"] for one in generated), "seconds": seconds}
        (run / "figures.json").write_text(json.dumps(figures))
    found: dict[str, float] = json.loads((run / "figures.json").read_text())
    return found


def evaluated(out: Path, subject: Path, keys: Mapping[str, object]) -> dict[str, float]:
    """Figures of ``rollmatch eval``."""
    if not (out / "eval.json").is_file():
        call("eval", subject, keys, "--limit", str(HELD_OUT), "--out", str(out))
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
    main(Path(sys.argv[1]).resolve())
