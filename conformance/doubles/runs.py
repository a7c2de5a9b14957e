"""Run directories made up for the tests: every journal event, evaluations, images."""

import json
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any

from PIL import Image, ImageDraw

Event = dict[str, Any]
START_S = 1_750_000_000.0
STEP_S = 3.75


def run_event(*, max_steps=60, resumed_from=None, time=START_S) -> Event:
    return {
        "event": "run", "time": time, "rank": 0, "config_path": "configs/digits.yaml", "model": "models/tiny-qwen3-vl",
        "num_parameters": 4_213_760, "num_trainable": 1_053_440, "device": "cpu", "learner_world_size": 2,
        "versions": {"torch": "2.13.0", "vllm": "0.32.0"}, "num_train_samples": 1200, "num_val_samples": 64,
        "num_eval_samples": 16, "resumed_from": resumed_from, "max_steps": max_steps,
    }  # fmt: skip


def step_events(step: int, *, of: int = 60, time: float | None = None) -> list[Event]:
    """Everything one optimizer step writes; the figures get better towards the end."""
    done = step / max(of, 1)
    time = START_S + STEP_S * step if time is None else time
    head = {"time": time, "rank": 0, "step": step}
    f1 = round(0.1 + 0.7 * done + 0.05 * ((step * 7) % 5 - 2) / 2, 4)
    return [
        {"event": "requested", **head, "num_requests": 16, "seeds": [7 * step + 1], "sample_ids": [step],
         "decoding": {"temperature": 0.7, "top_p": 1.0}},
        {"event": "generated", **head, "seconds": 1.1, "num_rollouts": 16, "num_tokens": 2541, "policy_version": step},
        {"event": "synced", **head, "version": step, "mode": "full", "num_tensors": 310, "num_bytes": 16_855_040,
         "seconds": 0.12},
        {"event": "packed", **head, "rows": 4, "segments": 16, "tokens": 3809, "fill": 0.93, "carried": 0},
        {"event": "step", **head, "loss": round(4.0 - 3.1 * done, 4), "loss_ce": round(1.5 - 1.2 * done, 4),
         "loss_coord": round(2.5 - 1.9 * done, 4), "f1": f1, "f1_desc": f1, "precision": f1, "recall": f1,
         "mean_iou": f1, "invalid_rate": round(0.4 * (1 - done), 4), "truncated_rate": round(0.1 * (1 - done), 4),
         "drops": {"bad-geometry": 3 if done < 0.5 else 1, "unknown-key": int(done < 0.2)}, "appended": 20,
         "fill": 0.93, "rollout_tokens": 2541, "rollout_tok_s": 2310.0 + 10 * step, "learn_tokens": 3809,
         "phase_s": {"sync": 0.12, "rollout": 1.1, "target": 0.02, "pack": 0.01, "learn": 2.4}, "step_s": STEP_S,
         "learning_rate": 1e-4, "grad_norm": round(2.0 - done, 4), "policy_version": step},
    ]  # fmt: skip


def evaluated_event(step: int, *, of: int = 60, **metrics: float) -> Event:
    done = step / max(of, 1)
    figures = {
        "f1": 0.12 + 0.7 * done, "f1_desc": 0.05 + 0.6 * done, "precision": 0.2 + 0.6 * done,
        "recall": 0.1 + 0.7 * done, "mean_iou": 0.55 + 0.3 * done,
        "invalid_rate": 0.42 * (1 - done), "truncated_rate": 0.1 * (1 - done),
        "num_scenes": 8, "tokens_per_s": 2400.0, "seconds": 5.0,
    }  # fmt: skip
    file = f"evaluations/step-{step:06d}.json"
    head = {"event": "evaluated", "time": START_S + STEP_S * step, "rank": 0, "step": step, "file": file}
    return {**head, "metrics": figures | metrics}


def scene(sample_id=0, *, truth=(), predicted=(), image="", response_text='{"objects": []}', **changes) -> Event:
    return {
        "sample_id": sample_id, "image": image, "width": 96, "height": 64, "truth": list(truth),
        "predicted": list(predicted), "response_text": response_text, "invalid": False, **changes,
    }  # fmt: skip


def box(desc="seven", bins=(100, 200, 400, 600), **changes) -> Event:
    return {"desc": desc, "geometry": "bbox_2d", "bins": list(bins), **changes}


def found(desc="seven", bins=(110, 210, 390, 610), *, partner=0, iou=0.87, **changes) -> Event:
    return box(desc, bins, partner=partner, iou=iou, **changes)


def write_image(path: Path, *, size=(96, 64)) -> Path:
    path.parent.mkdir(parents=True, exist_ok=True)
    image = Image.new("L", size, 20)
    ImageDraw.Draw(image).rectangle((10, 12, 38, 38), fill=220)
    image.save(path)
    return path


def write_journal(run_dir: Path, events: Iterable[Mapping[str, Any]]) -> Path:
    run_dir.mkdir(parents=True, exist_ok=True)
    path = run_dir / "journal.jsonl"
    path.write_text("".join(json.dumps(event) + "\n" for event in events), encoding="utf-8")
    return run_dir


def write_evaluation(run_dir: Path, step: int, scenes: Iterable[Mapping[str, Any]]) -> Path:
    path = run_dir / f"evaluations/step-{step:06d}.json"
    path.parent.mkdir(parents=True, exist_ok=True)
    content = {"step": step, "iou_threshold": 0.5, "metrics": {}, "scenes": list(scenes)}
    path.write_text(json.dumps(content), encoding="utf-8")
    return path


def write_run(run_dir: Path, *, num_steps=60, num_scenes=3) -> Path:
    """A finished run with two evaluations: the model finds nothing before and everything after."""
    image = str(write_image(run_dir / "images/scene.png"))
    steps = [event for step in range(1, num_steps + 1) for event in step_events(step, of=num_steps)]
    write_journal(
        run_dir,
        [
            run_event(max_steps=num_steps),
            evaluated_event(0, of=num_steps),
            *steps,
            evaluated_event(num_steps, of=num_steps),
            {"event": "saved", "time": START_S + 300, "rank": 0, "step": num_steps, "path": "checkpoint-60"},
            {"event": "finished", "time": START_S + 300, "rank": 0, "step": num_steps, "seconds": 300.0},
        ],
    )
    write_evaluation(run_dir, 0, [scene(place, truth=[box()], image=image) for place in range(num_scenes)])
    after = [scene(place, truth=[box()], predicted=[found()], image=image) for place in range(num_scenes)]
    write_evaluation(run_dir, num_steps, after)
    (run_dir / "resolved.yaml").write_text("training:\n  seed: 7\n", encoding="utf-8")
    return run_dir
