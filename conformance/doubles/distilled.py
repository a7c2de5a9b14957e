"""Distillation of the arithmetic model in this process, and its loss computed outside the trainer."""

from functools import cache

import torch

from conformance.doubles.digits import ROOT
from conformance.doubles.small_run import assembled
from rollmatch.config import load_config
from rollmatch.data.splits import load_split
from rollmatch.errors import ErrorList, RollmatchError
from rollmatch.model.source import with_local_model
from rollmatch.records import Sample
from rollmatch.run.preflight import load_checked
from rollmatch.run.prompts import read_prompts
from rollmatch.training.trainer import RolloutTrainer

CONFIG, MODEL = ROOT / "fixtures/arithmetic/grpo.yaml", ROOT / "fixtures/models/arithmetic"
DISTILL = (
    f"model.model={MODEL}",
    f"custom.train_jsonl={ROOT}/fixtures/arithmetic/train.jsonl",
    f"custom.val_jsonl={ROOT}/fixtures/arithmetic/val.jsonl",
    "custom.trainer_variant=distill",
    "custom.extra.grpo.rewards=[]",
    "custom.extra.grpo.num_generations=2",
    "custom.extra.rollout_matching.rollout_backend=hf",
    "custom.extra.rollout_matching.rollout_generate_batch_size=32",
    "custom.extra.rollout_matching.vllm.kv_cache_memory_mib=null",
    "training.per_device_train_batch_size=8",
    "training.warmup_steps=0",
    "training.max_steps=1",
    "training.save_steps=1000",
    "training.report_to=none",
    "training.learner_threads=1",
)
ITSELF = f"custom.extra.distill.teachers=[{{model: {MODEL}}}]"
PROMPTED = f'custom.extra.distill.teachers=[{{model: {MODEL}, prompt: "{{question}} {{sum}}"}}]'
DIVERGENCE = tuple(f"custom.extra.distill.{pair}" for pair in ("loss=divergence", "beta=0.5", "top_k=8"))


def config_of(*overrides: str):
    return load_config(CONFIG, [*DISTILL, *overrides])


@cache
def samples() -> tuple[Sample, ...]:
    return tuple(load_split(config_of(ITSELF).custom, "train"))[:16]


def make_trainer(folder, *overrides: str) -> RolloutTrainer:
    """``rollmatch train`` of the configuration on 16 samples, less its console; 8 of them are evaluated."""
    return assembled(config_of(f"training.output_dir={folder}", *overrides), samples(), samples()[:8])


def checked(*overrides):
    """What ``rollmatch check`` says: all problems, or none."""
    try:
        config = with_local_model(config_of("training.output_dir=runs/never-written", *overrides))
        train, val = load_checked(config)
        read_prompts(config, train, val)
    except RollmatchError as error:
        return error.errors if isinstance(error, ErrorList) else [error]
    return []


def steps_of(trainer):
    """Figures of each optimizer step."""
    return [entry for entry in trainer.state.log_history if "loss" in entry]


def asked(template, sample, text):
    """[P] ids of a prompt in place of the sample's question."""
    content = text.format(question=sample.messages[-1][1], **sample.metadata)
    chat = [{"role": "user", "content": content}]
    return template.tokenizer.apply_chat_template(chat, add_generation_prompt=True, return_dict=True)["input_ids"]


def logprobs_of(model, prompt, response):
    """[R, V] of a response behind a prompt, ids in, by one plain forward pass."""
    return model(torch.tensor([[*prompt, *response]])).logits[0, len(prompt) - 1 : -1].log_softmax(-1)


def jensen_shannon(policy, teacher, *, beta, top_k):
    """[R] as the definition has it: probabilities of the teacher's likeliest tokens, and of all others together."""
    top = teacher.topk(top_k, dim=-1).indices

    def buckets(logprobs):
        probs = logprobs.exp().gather(-1, top)
        return torch.cat([probs, 1 - probs.sum(-1, keepdim=True)], dim=-1)

    p, q = buckets(policy), buckets(teacher)
    mixture = (1 - beta) * p + beta * q
    return (beta * q * (q / mixture).log() + (1 - beta) * p * (p / mixture).log()).sum(-1)
