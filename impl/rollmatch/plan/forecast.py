"""Seconds of an optimizer step and bytes per GPU, for one way of splitting GPUs between servers and learners."""

import math
from dataclasses import dataclass, replace
from pathlib import Path

from rollmatch.config import RunConfig, effective
from rollmatch.config.servers import memory_share
from rollmatch.config.strategy import read_strategy
from rollmatch.model.source import with_local_model
from rollmatch.plan.layout import Layout, lay_out
from rollmatch.plan.memory import LearnerMemory, ServerMemory, learner_memory, learning_weights, server_memory
from rollmatch.plan.rates import GpuRates, Rates, decode_tok_s, gpu_of, load_rates
from rollmatch.plan.shape import ModelShape, read_shape, read_teachers
from rollmatch.plan.workload import Split, Workload, make_workload

SYNC_LATENCY_S = 0.05
"""Announcement, fence and commit of a sync."""


SHORTEST_STEP_S = 0.003
"""Of an engine, however small its model."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Site:
    """Where the run would be."""

    gpu: str
    nodes: tuple[int, ...]
    """GPUs of each node."""
    engines_per_server: int | None = None
    """None: one server per node holds all engines there."""

    @property
    def num_gpus(self) -> int:
        """Of all nodes."""
        return sum(self.nodes)


@dataclass(frozen=True, slots=True, kw_only=True)
class Forecast:
    """Of one split."""

    split: Split
    layout: Layout | None
    """None: the split cannot be put on the nodes."""
    server: ServerMemory
    learner: LearnerMemory
    gpu_bytes: float
    learner_bytes: float
    """That a learner's GPU has for it."""
    rollout_s: float
    score_s: float
    """Of forward passes for old and reference log-probabilities."""
    learn_s: float
    sync_s: float
    step_s: float
    num_rollouts: int
    """Of a step, all ranks."""

    @property
    def rollouts_per_s(self) -> float:
        """What splits are compared by: their steps differ in size."""
        return self.num_rollouts / self.step_s if self.step_s else 0.0

    @property
    def problem(self) -> str:
        """Why it cannot run; empty where it can."""
        if self.layout is None:
            return "ranks and servers do not divide over the nodes"
        if self.server.num_requests < 1:
            return "an engine's weights leave no memory for one request"
        if self.learner.total > self.learner_bytes:
            return f"the learner lacks {(self.learner.total - self.learner_bytes) / 1e9:.0f} GB"
        return ""


@dataclass(frozen=True, slots=True, kw_only=True)
class Forecaster:
    """Predicts splits of one run on one site."""

    config: RunConfig
    shape: ModelShape
    work: Workload
    rates: Rates
    site: Site
    teachers: tuple[ModelShape, ...] = ()
    """Models that are loaded beside the policy."""

    @property
    def gpu(self) -> GpuRates:
        """Rates of the site's GPUs."""
        return gpu_of(self.rates, self.site.gpu)

    @property
    def served(self) -> ModelShape:
        """The model as engines hold it, and as weights are sent: full fine-tuning keeps its own in float32."""
        named, is_quantized = effective.engine_dtype(self.config), effective.quantization(self.config) is not None
        dtype = self.shape.saved_dtype if named == "auto" else named
        return replace(self.shape, dtype=dtype, is_quantized=is_quantized)

    def forecast(self, split: Split) -> Forecast:
        """Memory and seconds. Errors: ``rates-invalid``."""
        server, num_rollouts = self._server(split), self.work.num_rollouts * split.num_learning
        learner = learner_memory(
            self.config, self.shape, self.work, num_learners=split.num_learning, teachers=self.teachers
        )
        rollout = self._rollout_s(split, server, num_rollouts)
        score, learn, sync = self._score_s(), self._learn_s(split), self._sync_s(split)
        return Forecast(
            split=split,
            layout=lay_out(split, self.site.nodes, engines_per_server=self.site.engines_per_server),
            server=server,
            learner=learner,
            gpu_bytes=self.gpu.memory_bytes,
            learner_bytes=self.gpu.memory_bytes - (self._resident(server) if split.is_colocated else 0.0),
            rollout_s=rollout,
            score_s=score,
            learn_s=learn,
            sync_s=sync,
            step_s=self._step_s(rollout, score + learn) + sync,
            num_rollouts=num_rollouts,
        )

    def _server(self, split: Split) -> ServerMemory:
        vllm = self.config.custom.extra.rollout_matching.vllm
        share = vllm.gpu_memory_utilization if split.is_colocated else memory_share(self.config)
        budget, seqs = share * self.gpu.memory_bytes, vllm.max_num_seqs
        return server_memory(self.served, self.work, budget=budget, tp=split.tp, max_num_seqs=seqs)

    def _resident(self, server: ServerMemory) -> float:
        """What a colocated engine keeps while the learner works."""
        vllm = self.config.custom.extra.rollout_matching.vllm
        return 0.0 if vllm.sleep_level else vllm.gpu_memory_utilization * self.gpu.memory_bytes

    def _rollout_s(self, split: Split, server: ServerMemory, num_rollouts: int) -> float:
        """Prompts by arithmetic, responses by the measured curve, waves of as many requests as run at once."""
        if server.num_requests < 1:
            return math.inf
        per_engine = math.ceil(num_rollouts / split.num_engines)
        at_once = min(per_engine, server.num_requests)
        tokens = per_engine * self.work.response_len
        prefill = per_engine * self.work.prompt_len * 2 * self.shape.active_weights / (self.flops_s * split.tp)
        return prefill + tokens / self._decode_tok_s(split, at_once)

    def _decode_tok_s(self, split: Split, at_once: int) -> float:
        """The measured rate, by the bytes that a step of this model reads instead of the measured one's."""
        measured = decode_tok_s(self.rates, self.site.gpu, num_requests=at_once)
        known = self.rates.decoded
        theirs = known.weight_bytes + at_once * known.context * known.kv_bytes_per_token
        context = self.work.prompt_len + self.work.response_len / 2
        active = (self.shape.active_weights + self.shape.num_ids * self.shape.hidden_len) * self.served.weight_bytes
        ours = active + at_once * context * self.shape.kv_bytes_per_token
        return min(measured * split.tp * theirs / ours, at_once / SHORTEST_STEP_S)

    def _learn_s(self, split: Split) -> float:
        """Two operations per weight and token forward, as many again for gradients of inputs and of weights."""
        passes = (
            1 + 1 + (self.config.tuner.train_type == "full") + (self.config.training.gradient_checkpointing is True)
        )
        return (passes * self._body_flops + 3 * self._head_flops) / self._policy_flops_s + self._exchange_s(split)

    def _score_s(self) -> float:
        """A forward pass of the policy for old log-probabilities, one of the reference for the distance to it, and
        those of teachers in the learner's process, which have as many samples each."""
        config, seconds = self.config, 0.0
        flops = self._body_flops + self._head_flops
        if not config.custom.learns_from_completions:
            return seconds
        if effective.old_logprobs(config) == "recomputed":
            seconds += flops / self._policy_flops_s
        if config.custom.extra.grpo.beta:
            seconds += flops / self.flops_s
        if entries := config.custom.extra.distill.teachers:
            passes = [self._flops_of(one) + self._head_flops_of(one) for one in self.teachers]
            passes += [flops for one in entries if one.self]
            seconds += sum(passes) / len(entries) / self.flops_s
        return seconds

    @property
    def _body_flops(self) -> float:
        """Of a forward pass of all tokens, but for logits."""
        return self._flops_of(self.shape)

    def _flops_of(self, shape: ModelShape) -> float:
        attention = 4 * self.work.num_pairs * shape.num_layers * shape.num_heads * shape.head_len
        return 2 * self.work.num_tokens * shape.active_weights + attention

    @property
    def _head_flops(self) -> float:
        """Of the logits of all responses."""
        return self._head_flops_of(self.shape)

    def _head_flops_of(self, shape: ModelShape) -> float:
        return 2 * self.work.num_rollouts * self.work.response_len * shape.num_ids * shape.hidden_len

    @property
    def _policy_flops_s(self) -> float:
        """Of forward and backward with its adapters."""
        tuner = self.config.tuner
        return self.flops_s * (self.rates.dora_share if tuner.train_type == "lora" and tuner.use_dora else 1.0)

    def _exchange_s(self, split: Split) -> float:
        """Gradients among learner ranks, in a ring; where weights are split, they are gathered twice a micro-batch."""
        if split.num_learning == 1:
            return 0.0
        size = 4 if self.config.tuner.train_type == "lora" else self.shape.weight_bytes
        carried = 2 * size * learning_weights(self.config, self.shape)
        if read_strategy(self.config.training.strategy).splits_weights:
            compute = 2 if self.config.training.bf16 else self.shape.weight_bytes
            carried += 2 * compute * self.shape.num_weights * self.work.num_passes
        return carried / self.link_bytes_s

    def _sync_s(self, split: Split) -> float:
        """Adapters are merged on either side; all weights, or the adapters, once through the slowest link."""
        carried = self.shape.num_weights * self.served.weight_bytes
        copy_s, merge_s, merges = 2 * carried / self.gpu.copy_bytes_s, 0.0, self.config.tuner.train_type == "lora"
        if merges:
            merge_s = copy_s / self.rates.merge_share
        if split.is_colocated:
            return SYNC_LATENCY_S + merge_s + copy_s
        if merges and self.config.custom.extra.rollout_matching.vllm.carries_adapter:
            carried = 4 * learning_weights(self.config, self.shape)
        return SYNC_LATENCY_S + merge_s + carried / self.link_bytes_s

    def _step_s(self, rollout: float, learn: float) -> float:
        overlap = self.config.custom.extra.rollout_matching.overlap
        if overlap == "ahead":
            return max(rollout, learn)
        return rollout + learn

    @property
    def link_bytes_s(self) -> float:
        """Of the slowest link that weights cross."""
        links = self.rates.links
        return links.inside_node_bytes_s if len(self.site.nodes) == 1 else links.between_nodes_bytes_s

    @property
    def flops_s(self) -> float:
        """Of forward and backward."""
        return self.gpu.learn_flops_s or self.rates.learn_share * self.gpu.matmul_flops_s


def make_forecaster(
    config: RunConfig, site: Site, *, rates_file: Path | None, prompt_tokens: int | None, response_tokens: int | None
) -> Forecaster:
    """The forecaster of a configuration's model and work on a site.

    None means the package's own rates, and the lengths that the configuration allows.
    Errors: ``shape-unknown``, ``rates-invalid``.
    """
    config, rates = with_local_model(config), load_rates(rates_file)
    gpu_of(rates, site.gpu)
    shape = read_shape(config.model.model, dtype=effective.learner_dtype(config))
    return Forecaster(
        config=config,
        shape=shape,
        teachers=read_teachers(config),
        work=make_workload(config, shape, prompt_len=prompt_tokens, response_len=response_tokens),
        rates=rates,
        site=site,
    )
