"""The section ``custom.extra.rollout_matching``: how rollouts are made, matched and learnt from."""

from typing import Annotated, Literal

from pydantic import BeforeValidator, Field

from rollmatch.config.engine import VllmConfig
from rollmatch.config.section import (
    Count,
    CountOrMinusOne,
    Positive,
    PositiveShare,
    Section,
    Share,
    Weight,
    lower_case,
)

_InAnyCase = Literal["vllm", "hf"] | Annotated[str, Field(pattern="^([vV][lL][lL][mM]|[hH][fF])$")]


class DecodingConfig(Section):
    """Sampling parameters of a response."""

    temperature: Weight = 0.0
    """Sampling temperature; 0 is greedy. Unit: divisor of the logits."""
    top_p: PositiveShare = 1.0
    """Nucleus sampling: sample from the most probable tokens that together have this probability. Unit: probability."""
    top_k: CountOrMinusOne = -1
    """Sample from this many most probable tokens; -1 samples from all. Unit: tokens."""


class RolloutMatchingConfig(Section):
    """Generation (for every trainer_variant), and matching and losses of rollout_matching_sft."""

    rollout_backend: Annotated[
        Literal["vllm", "hf"], BeforeValidator(lower_case, json_schema_input_type=_InAnyCase)
    ] = "vllm"
    """Where rollouts are generated: vllm (an engine in the process, or servers) or hf (the learner's generate()). Not
    case-sensitive."""
    rollout_generate_batch_size: Count = 1
    """Prompts per generate() call of the hf backend. Unit: prompts."""
    decode_mode: Literal["greedy", "beam"] = "greedy"
    """greedy decodes one response, sampled if decoding.temperature > 0; beam searches with num_beams (hf only)."""
    num_beams: Count = 1
    """Beams of decode_mode: beam. Unit: beams."""
    max_new_tokens: Count = 512
    """Longest response; in an environment, longest turn. Unit: tokens."""
    repetition_penalty: Positive = 1.0
    """Values above 1 make tokens that already occurred less probable. Unit: ratio."""
    decoding: DecodingConfig = DecodingConfig()
    """Sampling parameters of a response."""
    overlap: Literal["off", "stream", "ahead"] = "off"
    """Generate while the learner learns. off: one after the other. stream: learn from each rollout of the step on
    arrival, on-policy. ahead: request the rollouts of later steps early, off-policy by up to max_staleness."""
    max_staleness: Count = 1
    """overlap: ahead only. Largest age of a rollout when it is learned from, counted between the weights that generated
    it and the current ones. Older rollouts are generated again, never learned from. 1 is fastest; higher values
    lengthen each sync. Unit: optimizer steps."""
    graphs_kept: Count = 1
    """overlap: stream only. Autograd graphs kept until the step is complete; each one costs the memory of a micro-batch
    and saves a second backward pass. Unit: micro-batches."""
    pieces_per_server: Count = 1
    """overlap only. Calls into which a server's share of a step is divided; calls that have not started move to an idle
    server. 1 disables work stealing. Unit: calls."""
    candidate_top_k: Count = 10
    """Ground-truth objects considered as a match of each predicted object, by box IoU. Unit: objects."""
    maskiou_gate: Share = 0.3
    """Smallest mask IoU of a match. Unit: IoU."""
    maskiou_resolution: Count = 256
    """Side of the square canvas on which masks are compared. Unit: cells."""
    fp_cost: Weight = 1.0
    """Matching cost of a predicted object without a match; a match costs 1 - IoU. Unit: cost."""
    fn_cost: Weight = 1.0
    """Matching cost of a ground-truth object without a match. Unit: cost."""
    ot_cost: Literal["l2", "l1"] = "l2"
    """Distance between polygon vertices in the optimal transport that pairs them."""
    ot_epsilon: Positive = 10.0
    """Entropic regularization of the transport. Unit: bins."""
    ot_iters: Count = 30
    """Sinkhorn iterations of the transport. Unit: iterations."""
    target_sigma: Positive = 2.0
    """Standard deviation of the soft target around a true coordinate. Unit: bins."""
    target_truncate: Count | None = None
    """The soft target is 0 beyond this distance; null never truncates. Unit: bins."""
    temperature_coord: Positive = 1.0
    """Temperature of the coordinate loss. Unit: divisor of the logits."""
    soft_ce_weight: Weight = 1.0
    """Weight of the cross-entropy with the soft target. Unit: loss weight."""
    w1_weight: Weight = 1.0
    """Weight of the Wasserstein-1 distance between predicted and soft-target bins. Unit: loss weight."""
    gate_weight: Weight = 0.0
    """Weight of the loss that moves probability to coordinate tokens at coordinate positions. Unit: loss weight."""
    desc_ce_weight: Weight = 1.0
    """Weight of the cross-entropy on the desc values of appended objects; 0 ignores them. Unit: loss weight."""
    eval_iou: Share = 0.5
    """Smallest IoU that counts as a true positive in evaluation. Unit: IoU."""
    vllm: VllmConfig = VllmConfig()
    """The rollout engine of rollout_backend: vllm."""
