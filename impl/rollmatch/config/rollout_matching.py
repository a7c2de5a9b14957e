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
    """How a response is sampled."""

    temperature: Weight = 0.0
    """0 always takes the likeliest token; above 0 samples."""
    top_p: PositiveShare = 1.0
    """Sample from the likeliest tokens that hold this share of the probability."""
    top_k: CountOrMinusOne = -1
    """Sample from this many likeliest tokens; -1 from all."""


class RolloutMatchingConfig(Section):
    """Rollout, match, append, learn."""

    rollout_backend: Annotated[
        Literal["vllm", "hf"], BeforeValidator(lower_case, json_schema_input_type=_InAnyCase)
    ] = "vllm"
    """vllm, or hf for the learner's own generate(); in any case."""
    rollout_generate_batch_size: Count = 1
    """Prompts per generate() call of the hf backend."""
    decode_mode: Literal["greedy", "beam"] = "greedy"
    """greedy decodes one response (sampled when decoding.temperature is above 0), beam searches with num_beams."""
    num_beams: Count = 1
    """Beams of decode_mode beam."""
    max_new_tokens: Count = 512
    """Longest response in tokens."""
    repetition_penalty: Positive = 1.0
    """Above 1 makes tokens that were already written less likely."""
    decoding: DecodingConfig = DecodingConfig()
    """How a response is sampled."""
    overlap: Literal["off", "stream", "ahead"] = "off"
    """off learns once all rollouts of a step are back, stream from each as it comes, ahead asks for later steps too."""
    max_staleness: Count = 1
    """Optimizer steps that a rollout may be old under overlap ahead, and that are asked for in advance."""
    graphs_kept: Count = 1
    """Micro-batches that overlap stream holds in memory until their step is whole; more save second backward passes."""
    pieces_per_server: Count = 1
    """Calls of a server's share of a step under overlap; what has not begun goes to an idle server; 1 moves nothing."""
    candidate_top_k: Count = 10
    """True objects considered as partners of each predicted one, best boxes first."""
    maskiou_gate: Share = 0.3
    """Least mask IoU of a pair."""
    maskiou_resolution: Count = 256
    """Side of the canvas, in cells, on which masks are compared."""
    fp_cost: Weight = 1.0
    """Cost of leaving a predicted object without partner."""
    fn_cost: Weight = 1.0
    """Cost of leaving a true object without partner."""
    ot_cost: Literal["l2", "l1"] = "l2"
    """Distance between polygon vertices when they are transported onto each other."""
    ot_epsilon: Positive = 10.0
    """Entropic smoothing of that transport, in bins."""
    ot_iters: Count = 30
    """Sinkhorn iterations of that transport."""
    target_sigma: Positive = 2.0
    """Width, in bins, of the soft target around a true coordinate."""
    target_truncate: Count | None = None
    """Distance, in bins, beyond which the soft target is zero; null never cuts."""
    temperature_coord: Positive = 1.0
    """Divides the coordinate logits before the coordinate loss."""
    soft_ce_weight: Weight = 1.0
    """Weight of the cross-entropy with the soft target."""
    w1_weight: Weight = 1.0
    """Weight of the distance between predicted and soft-target distributions."""
    gate_weight: Weight = 0.0
    """Weight of the loss that moves probability onto coordinate tokens at coordinate slots."""
    desc_ce_weight: Weight = 1.0
    """Weight of the cross-entropy on the desc values of appended objects; 0 leaves them out."""
    eval_iou: Share = 0.5
    """Least IoU that counts as a hit in evaluation."""
    vllm: VllmConfig = VllmConfig()
    """The rollout engine of rollout_backend vllm."""
