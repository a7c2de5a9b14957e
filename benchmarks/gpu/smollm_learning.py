"""What SmolLM2-135M-Instruct learns of sums by our GRPO and by TRL's: same data, rewards, optimizer and seeds.

    python -m benchmarks.gpu.smollm_learning --seeds 42 1 2 --steps 40

Needs ``build/real/smollm2`` and ``build/smollm`` (``make smollm`` makes both). Greedy accuracy on the 256 held-out sums
of ``test.jsonl`` every ``--every`` steps, and the mean reward of each step's completions. Runs of all seeds and both
sides share one GPU at once, so seconds say nothing here. Other configurations of ours join with ``--ours NAME=YAML``.
"""

import argparse
import json
import subprocess
import sys
from pathlib import Path

from benchmarks.gpu.report import RESULTS, Report
from conformance.doubles.digits import ROOT
from conformance.doubles.started import journal_of
from rollmatch.records import Sample

MODEL, DATA = ROOT / "build/real/smollm2", ROOT / "build/smollm"
PROMPTS, GENERATIONS, MICRO_BATCH, TOKENS, RATE = 8, 8, 16, 20, 2e-5
"""Of ``fixtures/smollm/grpo.yaml``: prompts of a step, completions of each and of a pass, tokens, learning rate."""


def lines_of(name):
    return [json.loads(line) for line in (DATA / f"{name}.jsonl").read_text().splitlines()]


def our_command(yaml, out, seed, options):
    words = {
        "training.output_dir": out, "training.seed": seed, "training.max_steps": options.steps,
        "training.eval_steps": options.every, "training.report_to": "none", "training.save_steps": 10**6,
        "custom.val_jsonl": DATA / "test.jsonl",
    }  # fmt: skip
    sets = [word for name, value in words.items() for word in ("--set", f"{name}={value}")]
    return [sys.executable, "-m", "rollmatch", "train", str(yaml), *sets]


def our_curve(out):
    """[[step, accuracy]] and the mean reward of each step."""
    events = journal_of(out, None)
    evaluated = {event["step"]: event["metrics"]["reward/right"] for event in events if event["event"] == "evaluated"}
    rewarded = [event["rewards"] for event in events if event["event"] == "rewarded"]
    tokens = [event["num_tokens"] for event in events if event["event"] == "generated" and event["purpose"] == "train"]
    means = [sum(rewards) / len(rewards) for rewards in rewarded]
    return {"accuracy": sorted(map(list, evaluated.items())), "rewards": means, "generated_tokens": sum(tokens)}


def run_trl(out, seed, steps, every):
    """The same by TRL's trainer, which generates by transformers, too."""
    import torch
    from datasets import Dataset
    from transformers import AutoTokenizer, TrainerCallback
    from trl import GRPOConfig, GRPOTrainer

    from fixtures.smollm.scores import right

    def scored(texts, entries):
        return [
            right(text, Sample(sample_id=0, origin="", images=(), metadata=entry))
            for text, entry in zip(texts, entries, strict=True)
        ]

    def reward(completions, metadata, **_):
        return scored([completion[0]["content"] for completion in completions], map(json.loads, metadata))

    tokenizer = AutoTokenizer.from_pretrained(MODEL, padding_side="left")
    held_out = lines_of("test")

    @torch.no_grad()
    def accuracy(model):
        model.eval()
        right_ones = 0.0
        for start in range(0, len(held_out), 64):
            part = held_out[start : start + 64]
            chats = [[{"role": "user", "content": one["prompt"]}] for one in part]
            inputs = tokenizer.apply_chat_template(
                chats, add_generation_prompt=True, padding=True, return_dict=True, return_tensors="pt"
            ).to(model.device)
            found = model.generate(**inputs, max_new_tokens=TOKENS, do_sample=False)
            texts = tokenizer.batch_decode(found[:, inputs["input_ids"].shape[1] :], skip_special_tokens=True)
            right_ones += sum(scored(texts, [one["metadata"] for one in part]))
        model.train()
        return right_ones / len(held_out)

    class Curve(TrainerCallback):
        accuracy, rewards = [], []

        def on_train_begin(self, args, state, control, model, **_):
            self.accuracy.append([0, accuracy(model)])

        def on_step_end(self, args, state, control, model, **_):
            if state.global_step % every == 0 or state.global_step == steps:
                self.accuracy.append([state.global_step, accuracy(model)])

        def on_log(self, args, state, control, logs, **_):
            if "reward" in logs:
                self.rewards.append(logs["reward"])

    rows = lines_of("train")
    data = {
        "prompt": [[{"role": "user", "content": row["prompt"]}] for row in rows],
        "metadata": [json.dumps(row["metadata"]) for row in rows],
    }
    curve = Curve()
    trainer = GRPOTrainer(
        model=str(MODEL),
        args=GRPOConfig(
            output_dir=str(out), max_steps=steps, seed=seed, per_device_train_batch_size=MICRO_BATCH,
            gradient_accumulation_steps=PROMPTS * GENERATIONS // MICRO_BATCH, num_generations=GENERATIONS,
            max_completion_length=TOKENS, learning_rate=RATE, lr_scheduler_type="constant", adam_beta2=0.98,
            bf16=False, gradient_checkpointing=False, logging_steps=1, save_strategy="no", report_to="none",
            model_init_kwargs={"dtype": "float32"},
        ),
        reward_funcs=reward, train_dataset=Dataset.from_dict(data), processing_class=tokenizer, callbacks=[curve],
    )  # fmt: skip
    trainer.train()
    found = {"accuracy": curve.accuracy, "rewards": curve.rewards}
    (out / "curve.json").write_text(json.dumps(found))


def main():
    options = parse()
    if options.trl:
        return run_trl(options.out, options.seeds[0], options.steps, options.every)
    options.out.mkdir(parents=True, exist_ok=True)
    report = Report(options.results / "smollm_learning.json")
    sides = {"rollmatch": ROOT / "fixtures/smollm/grpo.yaml", **dict(options.ours)}
    children = {}
    for seed in options.seeds:
        for name, yaml in sides.items():
            out = options.out / f"{name}-{seed}"
            children[name, seed, out] = start(our_command(yaml, out, seed, options), out)
        out = options.out / f"trl-{seed}"
        words = ["--seeds", str(seed), "--steps", str(options.steps), "--every", str(options.every), "--out", str(out)]
        command = [sys.executable, "-m", "benchmarks.gpu.smollm_learning", "--trl", *words]
        children["trl", seed, out] = start(command, out)
    curves = {}
    for (name, seed, out), child in children.items():
        if child.wait():
            report.say(f"{name}, seed {seed}: ended with {child.returncode}\n{log_of(out).read_text()[-2000:]}")
            continue
        found = json.loads((out / "curve.json").read_text()) if name == "trl" else our_curve(out)
        curves.setdefault(name, {})[seed] = found
        report.write(curves=curves, steps=options.steps)
        report.say(f"{name}, seed {seed}: {[(step, round(value, 3)) for step, value in found['accuracy']]}")
    return None


def log_of(out):
    return out.with_suffix(".txt")


def start(command, out):
    out.mkdir(parents=True, exist_ok=True)
    with log_of(out).open("w") as log:
        return subprocess.Popen(command, stdout=log, stderr=subprocess.STDOUT, cwd=ROOT)


def parse():
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--seeds", nargs="+", type=int, default=[42, 1, 2])
    parser.add_argument("--steps", type=int, default=40)
    parser.add_argument("--every", type=int, default=10)
    parser.add_argument("--ours", nargs="*", default=[], type=lambda word: word.split("=", 1))
    parser.add_argument("--out", type=Path, default=ROOT / "build/smollm-learning")
    parser.add_argument("--results", type=Path, default=RESULTS)
    parser.add_argument("--trl", action="store_true", help=argparse.SUPPRESS)
    return parser.parse_args()


if __name__ == "__main__":
    main()
