"""Rollouts by transformers' ``generate()``: the backend that needs no engine."""

from collections.abc import Iterable, Iterator, Sequence
from contextlib import contextmanager

import torch
from torch import Tensor, nn
from transformers import GenerationConfig, PreTrainedModel
from transformers.generation import LogitsProcessorList, RepetitionPenaltyLogitsProcessor

from rollmatch.model.images import ImageFeatures, image_arguments, once_per_images
from rollmatch.model.policy import unwrap
from rollmatch.model.sharding import is_sharded
from rollmatch.model.template import Template
from rollmatch.ranks import Ranks
from rollmatch.records import Rollout, RolloutRequest
from rollmatch.rollout.backend import Decoding, RolloutBackend, check_answers, make_rollout


class HfBackend(RolloutBackend):
    """Rollouts by the policy's own ``generate()``, in left-padded microbatches of ``batch_size`` prompts.

    Slow, and the yardstick for the others.
    The policy is what it is: ``push`` only counts the version. Padding side and packing never leak: the batch is
    built here, and the packed attention falls back to a masked one. Where ranks share the weights they generate
    together: each runs as many microbatches, and as many tokens, as the longest needs.
    """

    def __init__(
        self,
        model: nn.Module,
        template: Template,
        *,
        batch_size: int,
        ranks: Ranks | None = None,
        compute_dtype: torch.dtype | None = None,
    ) -> None:
        """``compute_dtype``: that of autocast, which the learner uses too, from its first step on; None: none."""
        self.compute_dtype = compute_dtype
        self.model, self._inner = model, unwrap(model)
        self.template = template
        self.batch_size = batch_size
        self.ranks = ranks or Ranks()
        self.policy_version = 0

    def push(self, weights: Iterable[tuple[str, Tensor]], *, version: int) -> None:
        """The policy already has these weights."""
        self.policy_version = version

    def generate(self, requests: Sequence[RolloutRequest], decoding: Decoding) -> list[Rollout]:
        """As the contract; a microbatch samples from its first request's seed."""
        rollouts: list[Rollout] = []
        features_of = once_per_images(self.template.preparation.of, kept=self.batch_size)
        starts = range(0, len(requests), self.batch_size)
        synced = self.ranks.learner_world_size > 1 and is_sharded(self.model)
        num_passes = max(self.ranks.gather(len(starts))) if synced else len(starts)
        with _inference(self.model, self._inner), self._autocast():
            for start in starts:
                part = requests[start : start + self.batch_size]
                features = [features_of(request.sample) for request in part]
                rollouts += self._generate_batch(part, features, decoding, synced=synced)
            for _ in range(len(starts), num_passes):
                ids = torch.full((1, 1), self.template.pad_id, device=next(self.model.parameters()).device)
                self.model.generate(ids, max_new_tokens=1, synced_gpus=True)  # type: ignore[operator]
        check_answers(requests, rollouts)
        return rollouts

    def _autocast(self) -> torch.autocast:
        """What is evaluated before the first step is computed as after the last one."""
        device = next(self.model.parameters()).device.type
        return torch.autocast(device, dtype=self.compute_dtype, enabled=self.compute_dtype is not None)

    def _generate_batch(
        self, requests: Sequence[RolloutRequest], features: list[ImageFeatures], decoding: Decoding, *, synced: bool
    ) -> list[Rollout]:
        """``synced``: whether ranks share the weights, so that all generate as many tokens."""
        prompts = [self.template.expand(r.token_ids, f) for r, f in zip(requests, features, strict=True)]
        inputs = self._padded_inputs(prompts, features)
        penalties = [RowPenalty(decoding.repetition_penalty, inputs["attention_mask"].bool())]
        with _seeded(requests[0].seed, sampling=decoding.temperature > 0):
            output = self.model.generate(  # type: ignore[operator]
                **inputs,
                generation_config=self._settings(requests, decoding),
                logits_processor=LogitsProcessorList(penalties if decoding.repetition_penalty != 1 else ()),
                synced_gpus=synced,
            )
        sampled = output.sequences[:, inputs["input_ids"].shape[1] :]
        logprobs = _logprobs_of(sampled, output.scores) if decoding.logprobs else [None] * len(requests)
        limits = [request.limit(decoding.max_new_tokens) for request in requests]
        rows = [row[:limit] for row, limit in zip(sampled.tolist(), limits, strict=True)]
        stop_ids, version = self.template.vocabulary.stop_ids, self.policy_version
        fours = zip(requests, prompts, rows, logprobs, strict=True)
        return [make_rollout(*four, stop_ids=stop_ids, version=version) for four in fours]

    def _padded_inputs(self, prompts: list[tuple[int, ...]], features: list[ImageFeatures]) -> dict[str, Tensor]:
        device = next(self.model.parameters()).device
        longest = max(map(len, prompts))
        ids = torch.tensor([[self.template.pad_id] * (longest - len(prompt)) + list(prompt) for prompt in prompts])
        mask = torch.tensor([[0] * (longest - len(prompt)) + [1] * len(prompt) for prompt in prompts])
        inputs = {"input_ids": ids, "attention_mask": mask}
        inputs |= image_arguments(ids, features, self.model)
        return {name: part.to(device) for name, part in inputs.items()}

    def _settings(self, requests: Sequence[RolloutRequest], decoding: Decoding) -> GenerationConfig:
        """Vision placeholders are banned, because they stand for images that are not there."""
        settings: dict[str, object] = {
            "max_new_tokens": max(request.limit(decoding.max_new_tokens) for request in requests),
            "num_beams": decoding.num_beams,
            "suppress_tokens": list(self.template.banned_ids),
            "eos_token_id": sorted(self.template.vocabulary.stop_ids),
            "pad_token_id": self.template.pad_id,
            "do_sample": decoding.temperature > 0,
            "return_dict_in_generate": True,
            "output_scores": decoding.logprobs,
        }
        if decoding.temperature > 0:
            top_k = max(decoding.top_k, 0)
            settings |= {"temperature": decoding.temperature, "top_p": decoding.top_p, "top_k": top_k}
        return GenerationConfig(**settings)


class RowPenalty(RepetitionPenaltyLogitsProcessor):  # type: ignore[misc]
    """A repetition penalty for which padding was not written: transformers counts its id as one of the row's.

    >>> penalty = RowPenalty(2.0, torch.tensor([[False, True], [True, True]]))
    >>> penalty(torch.tensor([[0, 1], [0, 1]]), torch.tensor([[4.0, 4.0, 4.0], [4.0, 4.0, 4.0]])).tolist()
    [[4.0, 2.0, 4.0], [2.0, 2.0, 4.0]]
    """

    def __init__(self, penalty: float, is_prompt: Tensor) -> None:
        """``is_prompt``: [B, P] of the left-padded prompts."""
        super().__init__(penalty)
        self._is_prompt = is_prompt

    def __call__(self, input_ids: Tensor, scores: Tensor) -> Tensor:
        """[B * beams, P + R] ids and [B * beams, V] scores -> scores. The last id of a prompt stands for padding."""
        is_own = self._is_prompt.repeat_interleave(len(input_ids) // len(self._is_prompt), 0)
        num_prompt = is_own.shape[1]
        prompts = torch.where(is_own, input_ids[:, :num_prompt], input_ids[:, num_prompt - 1 : num_prompt])
        penalized: Tensor = super().__call__(torch.cat([prompts, input_ids[:, num_prompt:]], 1), scores)
        return penalized


def _logprobs_of(sampled: Tensor, scores: Sequence[Tensor]) -> list[list[float] | None]:
    """[B, R] ids and R times [B, V] scores, as they were sampled from -> log-probabilities of the ids."""
    columns = [
        score.float().log_softmax(-1).gather(1, ids[:, None])
        for score, ids in zip(scores, sampled.unbind(1), strict=True)
    ]
    return [list(row) for row in torch.cat(columns, dim=1).tolist()]


@contextmanager
def _inference(model: nn.Module, inner: PreTrainedModel) -> Iterator[None]:
    """No gradients, evaluation mode, nothing of the model's own generation settings, and back to what it was.

    transformers takes what a call leaves open (``min_p``, ``no_repeat_ngram_size``) from ``generation_config.json``.
    """
    training, recommended = model.training, inner.generation_config
    inner.generation_config = GenerationConfig()
    model.eval()
    try:
        with torch.no_grad(), eager(model):
            yield
    finally:
        inner.generation_config = recommended
        model.train(training)


@contextmanager
def eager(model: nn.Module) -> Iterator[None]:
    """Run compiled layers eagerly, for instance in ``generate()``, whose cache would need a graph per length."""
    compiled = [module for module in model.modules() if module._compiled_call_impl is not None]
    calls = [module._compiled_call_impl for module in compiled]
    for module in compiled:
        module._compiled_call_impl = None
    try:
        yield
    finally:
        for module, call in zip(compiled, calls, strict=True):
            module._compiled_call_impl = call


@contextmanager
def _seeded(seed: int, *, sampling: bool) -> Iterator[None]:
    """Sample from ``seed`` and leave the learner's random state as it was."""
    if not sampling:
        yield
        return
    with torch.random.fork_rng():
        torch.manual_seed(seed)
        yield
