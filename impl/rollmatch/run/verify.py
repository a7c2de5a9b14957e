"""Whether an exported model gives the answers that were stored when its run was evaluated."""

import json
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

from rollmatch.config import RunConfig
from rollmatch.data.splits import load_split
from rollmatch.errors import LaunchError
from rollmatch.model.source import ADAPTER_FILE, step_of
from rollmatch.records import Sample

if TYPE_CHECKING:
    from torch import nn

KEY = "--verify"


@dataclass(frozen=True, slots=True, kw_only=True)
class StoredAnswers:
    """Answers of an evaluation, and the samples that they answer."""

    step: int
    precision: str
    samples: Sequence[Sample]
    texts: Sequence[str]


def stored_answers(config: RunConfig, run: Path, checkpoint: Path) -> StoredAnswers:
    """Of the evaluation at the checkpoint's step. Errors: ``nothing-to-verify``."""
    from rollmatch.training.evaluation import evaluation_file

    step, remedy = step_of(checkpoint), "Name a checkpoint of a step that was evaluated, or leave --verify out."
    path = run / evaluation_file(step)
    if not path.is_file():
        problem = f"{run} was not evaluated at step {step}"
        raise LaunchError(problem, code="nothing-to-verify", key=KEY, remedy=remedy)
    if _is_sampled(config):
        problem, remedy = "answers were sampled, which no other engine repeats", "Evaluate greedily: temperature 0."
        raise LaunchError(problem, code="nothing-to-verify", key=KEY, remedy=remedy)
    if config.custom.extra.environment.is_set:
        problem = "answers have several turns with an environment"
        raise LaunchError(problem, code="nothing-to-verify", key=KEY, remedy="Leave --verify out.")
    stored = json.loads(path.read_text(encoding="utf-8"))
    texts = {one["sample_id"]: one["response_text"] for one in (*stored["scenes"], *stored.get("answers", ()))}
    samples = [sample for sample in load_split(config.custom, "val") if sample.sample_id in texts]
    return StoredAnswers(
        step=step,
        precision=stored.get("precision", ""),
        samples=samples,
        texts=[texts[sample.sample_id] for sample in samples],
    )


def _is_sampled(config: RunConfig) -> bool:
    if config.custom.learns_from_completions:
        return config.custom.extra.grpo.eval_temperature > 0
    return config.custom.extra.rollout_matching.decoding.temperature > 0


def verify(stored: StoredAnswers, config: RunConfig, out: Path, *, compute_dtype: str | None) -> str:
    """Generate them by transformers, from ``out``; a sentence if all are equal. Errors: ``export-differs``."""
    texts = _generate(stored.samples, config, out, compute_dtype)
    num_equal = sum(one == other for one, other in zip(texts, stored.texts, strict=True))
    found = f"{num_equal} of {len(texts)} answers equal those of step {stored.step}"
    if num_equal == len(texts):
        return found
    problem = f"{found}, which were computed in {stored.precision or 'another precision'}"
    exact = "--dtype float32" if config.tuner.train_type == "full" else "--adapter"  # merging rounds in any precision
    remedy = f"Export with {exact}; other kernels, as vLLM's, differ in near ties all the same."
    raise LaunchError(problem, code="export-differs", key=str(out), remedy=remedy)


def _generate(samples: Sequence[Sample], config: RunConfig, out: Path, compute_dtype: str | None) -> list[str]:
    import torch

    from rollmatch.model.source import with_local_model
    from rollmatch.rollout.backend import make_requests
    from rollmatch.rollout.hf import HfBackend
    from rollmatch.run.assemble import make_decoding, make_template

    is_adapter = (out / ADAPTER_FILE).is_file()
    described = (
        config
        if is_adapter
        else config.model_copy(update={"model": config.model.model_copy(update={"model": str(out), "adapter": None})})
    )
    described = with_local_model(described)
    template, model = make_template(described), _load(described, out if is_adapter else None)
    backend = HfBackend(
        model.eval().to("cuda" if torch.cuda.is_available() else "cpu"),
        template,
        batch_size=config.custom.extra.rollout_matching.rollout_generate_batch_size,
        compute_dtype=None if compute_dtype is None else getattr(torch, compute_dtype),
    )
    requests = make_requests(
        samples, prompt_of=template.prompt_token_ids, run_seed=config.training.seed, step=0, rank=0
    )
    rollouts = backend.generate(requests, make_decoding(config.custom.extra.rollout_matching, temperature=0.0))
    return [template.vocabulary.text(rollout.response_token_ids) for rollout in rollouts]


def _load(config: RunConfig, adapter: Path | None) -> "nn.Module":
    """As whoever downloads it would."""
    from rollmatch.model.policy import auto_class, load_adapters, load_architecture

    kind = auto_class(load_architecture(config.model.model))
    if adapter is None:
        plain: nn.Module = kind.from_pretrained(config.model.model, dtype="auto", trust_remote_code=False)
        return plain
    base = kind.from_pretrained(config.model.model, dtype=config.model.torch_dtype, trust_remote_code=False)
    return load_adapters(base, adapter, config.model, config.tuner)
