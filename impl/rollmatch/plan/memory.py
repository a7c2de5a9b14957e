"""Bytes per GPU: of a learner rank, and of a rollout engine.

A learner holds weights, what learns (gradients and two moments of Adam), activations, the head's chunk, and a copy of
the policy before training where full fine-tuning measures the distance to it; where it distils, frozen teachers and
float32 averages of what learns. With activations computed again, each layer keeps its input, and one layer at a time
keeps everything. What a layer keeps for backward, per token, in numbers of two bytes: 8 hidden states, queries and
outputs 3 times, keys and values 4 times, the inner width 4 times; as transformers' decoders with a flash kernel do.
Each completion has keys and values of a prompt that it shares once more.
"""

from collections.abc import Sequence
from dataclasses import astuple, dataclass

from rollmatch.config import RunConfig
from rollmatch.config.strategy import read_strategy
from rollmatch.plan.shape import ModelShape
from rollmatch.plan.workload import Workload

HEAD_BYTES = 0.5e9
"""The chunk of logits."""
OVERHEAD_BYTES = 2.5e9
"""CUDA context, libraries, workspaces, holes."""
ENGINE_BYTES = 4.0e9
"""Graphs, activations and sampling of an engine, in addition to weights and cache."""
ADAM_BYTES = 8
"""Per trained float32 weight, in addition to its gradient."""


@dataclass(frozen=True, slots=True, kw_only=True)
class LearnerMemory:
    """Bytes of one learner rank."""

    weights: float
    learning: float
    """Adapters (or what learns of the weights), gradients, moments."""
    activations: float
    reference: float
    """The policy before training, where a copy of it is kept."""
    teachers: float = 0.0
    """Frozen models that teach."""
    averages: float = 0.0
    """Of what learns, in float32, that teach."""
    head: float = HEAD_BYTES
    overhead: float = OVERHEAD_BYTES

    @property
    def total(self) -> float:
        """All of it."""
        return float(sum(astuple(self)))


@dataclass(frozen=True, slots=True, kw_only=True)
class ServerMemory:
    """Bytes of one engine's GPU, and what fits into its cache."""

    weights: float
    cache: float
    """Negative: the weights alone do not fit."""
    num_requests: int
    """That run at once."""


def learner_memory(
    config: RunConfig, shape: ModelShape, work: Workload, *, num_learners: int, teachers: Sequence[ModelShape] = ()
) -> LearnerMemory:
    """Of one rank. Ranks that hold all of the policy keep a second copy of gradients, to exchange them; others hold a
    part of weights and of what learns, and whole what ``gathered_bytes`` counts. ``teachers``: models beside it.
    """
    size, strategy = shape.weight_bytes, read_strategy(config.training.strategy)
    shares = 1 if strategy.engine == "ddp" else num_learners
    copies = 1 + (num_learners > 1 and shares == 1)
    if config.tuner.train_type == "lora":
        learning = learning_weights(config, shape) * (4 + 4 * copies + ADAM_BYTES)
    else:
        learning = learning_weights(config, shape) * size * (copies + 2)
    weights = float(shape.num_weights * size)
    frozen_shares = num_learners if strategy.stage == 3 else 1
    reference = weights * config.keeps_reference / frozen_shares
    if strategy.splits_weights and num_learners > 1:
        weights = weights / num_learners + gathered_bytes(config, shape)
    return LearnerMemory(
        weights=weights,
        learning=learning / shares,
        reference=reference,
        teachers=teacher_bytes(teachers) / frozen_shares,
        averages=float(average_bytes(config, shape)),
        activations=_activations(config, shape, work),
    )


def gathered_bytes(config: RunConfig, shape: ModelShape) -> int:
    """What a rank gathers at a time: two decoder layers with their gradients, and embedding, head and vision tower."""
    size = 2 if config.training.bf16 else shape.weight_bytes
    layer = (shape.text_weights - shape.embedding_weights) // shape.num_layers
    return size * (2 * 2 * layer + shape.embedding_weights + shape.vision_weights)


def learning_weights(config: RunConfig, shape: ModelShape) -> int:
    """Weights that learn: adapters, or what is not frozen."""
    tuner = config.tuner
    if tuner.train_type == "lora":
        with_vision = not tuner.freeze_vit
        return shape.adapter_weights(rank=tuner.lora_rank, is_dora=tuner.use_dora, with_vision=with_vision)
    return shape.text_weights * (not tuner.freeze_llm) + shape.vision_weights * (not tuner.freeze_vit)


def teacher_bytes(teachers: Sequence[ModelShape]) -> int:
    """Of frozen models that teach."""
    return sum(one.num_weights * one.weight_bytes for one in teachers)


def average_bytes(config: RunConfig, shape: ModelShape) -> int:
    """Of all exponential averages of what learns."""
    entries = config.custom.extra.distill.teachers
    return 4 * learning_weights(config, shape) * sum(one.average is not None for one in entries)


def _activations(config: RunConfig, shape: ModelShape, work: Workload) -> float:
    num_tokens = work.row_len
    width = 8 * shape.hidden_len + 4 * shape.inner_len
    width += (3 * shape.num_heads + 4 * shape.num_groups) * shape.head_len
    size = 2 if config.training.bf16 or shape.dtype != "float32" else 4
    layer = size * (num_tokens * width + 2 * shape.num_groups * shape.head_len * work.row_repeated)
    if not config.training.gradient_checkpointing:
        return layer * shape.num_layers
    return size * num_tokens * shape.hidden_len * shape.num_layers + 2 * layer


def server_memory(shape: ModelShape, work: Workload, *, budget: float, tp: int, max_num_seqs: int) -> ServerMemory:
    """Of each GPU of an engine of ``tp``, which may take ``budget`` bytes."""
    matrices = (shape.num_weights - shape.embedding_weights) * (1 if shape.is_quantized else shape.weight_bytes)
    weights = (shape.embedding_weights * shape.weight_bytes + matrices) / tp
    cache = budget - weights - ENGINE_BYTES
    per_request = work.segment_len * shape.kv_bytes_per_token / min(tp, shape.num_groups)
    num_requests = min(max_num_seqs, int(max(0.0, cache) // per_request))
    return ServerMemory(weights=weights, cache=cache, num_requests=num_requests)
