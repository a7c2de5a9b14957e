"""The section ``custom.extra.rollout_matching``: generation, the engine, matching and losses."""

from typing import Annotated, Literal

from pydantic import BeforeValidator, Field
from pydantic_core import PydanticCustomError

from rollmatch.config.connection import ServerConfig
from rollmatch.config.section import (
    Count,
    CountOrMinusOne,
    Index,
    Positive,
    PositiveShare,
    Section,
    Share,
    Text,
    Weight,
    lower_case,
)

Cost = Annotated[float, Field(ge=0, le=1000)]
"""Of an object without a match; up to 1000, costs are exact when they are added."""


class SyncConfig(Section):
    """How new weights reach the rollout engine."""

    mode: Literal["full", "adapter", "auto"] = "full"
    """full sends all weights, adapters merged. adapter sends adapters only. auto is adapter with enable_lora, else
    full."""
    fallback_to_full: bool = True
    """After a failed adapter sync, send all weights from then on. false stops the run."""
    stage: bool = False
    """Servers keep the weights of a full sync beside those that they serve until all servers have proven them, over
    NCCL as over gloo: they generate meanwhile, and a sync that breaks changes nothing. Needs room for the weights once
    more on each server's GPU, outside vllm_gpu_memory_utilization, and servers of rollmatch with one GPU per engine."""
    in_flight: Literal["wait", "keep", "restart"] = "wait"
    """What a sync does with responses and episodes that are under way (overlap: ahead). wait lets them end first. keep
    updates the weights within responses: newer weights write the rest, also of an episode, and the age is that of the
    oldest token. restart plays unfinished episodes of an environment again, by the new weights. keep and
    restart need servers of rollmatch serve."""


class VllmConfig(Section):
    """The vLLM engine."""

    mode: Literal["colocate", "server"] = "colocate"
    """colocate runs the engine in the learner's process and on its devices; server uses rollout servers that are
    already running."""
    max_model_len: Count | None = None
    """Longest prompt and response together; null uses global_max_length. Unit: tokens."""
    dtype: Literal["auto", "float32", "bfloat16", "float16"] = "auto"
    """Precision of the engine's weights, and of weights on their way there. auto is bfloat16 with training.bf16, else
    model.torch_dtype (where that is auto, the one of config.json)."""
    quantization: Literal["fp8"] | None = None
    """fp8: the engine holds linear weights in 8 bits, a scale for each row, made of each sync's weights; needs dtype
    bfloat16 or float16 and full syncs. null: as dtype says."""
    tensor_parallel_size: Count | None = None
    """Learner ranks that share one colocated engine; null is 4 with 4 learner ranks, else 1. Unit: ranks."""
    gpu_memory_utilization: PositiveShare = 0.45
    """Share of a GPU's memory for a colocated engine; the learner uses the rest. Unit: share."""
    enable_lora: bool = False
    """Reserve engine memory for adapters. Not needed by sync.mode: full."""
    load_format: Literal["auto", "dummy"] = "auto"
    """auto reads the weights from disk at start; dummy waits for the first sync."""
    enable_prefix_caching: bool = True
    """Reuse the KV cache of equal prompt prefixes; the cache is cleared at each sync."""
    enforce_eager: bool | None = None
    """Run without CUDA graphs and compilation; null is true on a CPU only."""
    max_num_seqs: Count = 256
    """Responses that an engine decodes at once. Unit: sequences."""
    max_num_batched_tokens: Count | None = None
    """Tokens of one engine step; null uses vLLM's default. Unit: tokens."""
    enable_chunked_prefill: bool | None = None
    """Split long prompts over several engine steps; null uses vLLM's default."""
    kv_cache_memory_mib: Count | None = None
    """Size of the KV cache; null is 512 on a CPU and follows gpu_memory_utilization on a GPU. Unit: MiB."""
    limit_mm_per_prompt: dict[str, Index] | None = None
    """Items of each modality in one prompt, such as {image: 1}; null uses vLLM's default. Unit: items."""
    disable_custom_all_reduce: bool = True
    """Use NCCL instead of vLLM's own all-reduce between tensor parallel ranks."""
    sleep_level: Literal[0, 1] = 0
    """1 frees a colocated engine's GPU memory while the learner learns; 0 keeps it. No effect on a CPU. Unit: level."""
    sync: SyncConfig = SyncConfig()
    """How new weights reach the rollout engine."""
    server: ServerConfig = ServerConfig()
    """Addresses of the rollout servers of mode: server."""

    @property
    def carries_adapter(self) -> bool:
        """Whether a sync sends adapters alone: auto does exactly with enable_lora."""
        return self.sync.mode == "adapter" or (self.sync.mode == "auto" and self.enable_lora)


_InAnyCase = Literal["vllm", "hf"] | Annotated[str, Field(pattern="^([vV][lL][lL][mM]|[hH][fF])$")]


class DecodingConfig(Section):
    """Sampling parameters of a response."""

    temperature: Weight = 0.0
    """Sampling temperature; 0 is greedy. Variants that learn from completions (grpo, vineppo, vineppo_mcts, distill)
    have 1.0 unless it is set. Unit: divisor of the logits."""
    top_p: PositiveShare = 1.0
    """Nucleus sampling: sample from the most probable tokens that together have this probability. Unit: probability."""
    top_k: CountOrMinusOne = -1
    """Sample from this many most probable tokens; -1 samples from all. Unit: tokens."""


ANSWER_FORMATS = ("coord_tokens", "integers", "qwen3_vl", "qwen2_5_vl")
"""Names of ``answer_format`` for objects with their places."""
TEXT = "text"
"""``answer_format`` of chats whose answer is any text."""


def _not_stream(value: object) -> object:
    if value == "stream":
        raise PydanticCustomError("stream_removed", "Input should be 'off' or 'ahead': stream is removed")
    return value


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
    answer_format: Text = "coord_tokens"
    """How an answer is written. coord_tokens: our JSON, one token per coordinate. integers: our JSON with numbers
    0..999. qwen3_vl: a fenced list of bbox_2d and label, 0..1000. qwen2_5_vl: the same in pixels of the resized image.
    A format of your own is named as module:Class and derives from rollmatch.AnswerFormat. text (sft only): any text;
    samples are chats that end with the assistant's message, or prompt and completion."""
    max_new_tokens: Count = 512
    """Longest response; in an environment, longest turn. Unit: tokens."""
    repetition_penalty: Positive = 1.0
    """Values above 1 make tokens that already occurred less probable. Unit: ratio."""
    decoding: DecodingConfig = DecodingConfig()
    """Sampling parameters of a response."""
    overlap: Annotated[
        Literal["off", "ahead"], BeforeValidator(_not_stream, json_schema_input_type=Literal["off", "ahead"])
    ] = "off"
    """Generate while the learner learns. off: one after the other. ahead: request the rollouts of later steps early,
    off-policy by up to max_staleness."""
    max_staleness: Count = 1
    """overlap: ahead only. Largest age of a rollout when it is learned from, counted between the weights that generated
    it and the current ones. Older rollouts are generated again, never learned from. 1 is fastest; higher values
    lengthen each sync. Unit: optimizer steps."""
    late_windows: Index = 0
    """overlap: ahead with an environment and sync.in_flight: keep only. Above 0, a step learns from the groups that are
    complete first, of any window under way, and a slow group is learned from up to this many windows later. These are
    taken from max_staleness. 0: a step waits for its own groups. Unit: windows."""
    pieces_per_server: Count = 1
    """overlap only. Calls into which a server's share of a step is divided; calls that have not started move to an idle
    server. 1 disables work stealing. Unit: calls."""
    candidate_top_k: Count = 10
    """Ground-truth objects considered as a match of each predicted object, by box IoU. Unit: objects."""
    maskiou_gate: Share = 0.3
    """Smallest mask IoU of a match. Unit: IoU."""
    maskiou_resolution: Annotated[int, Field(ge=2)] = 256
    """Side of the square canvas on which masks are compared. Unit: cells."""
    fp_cost: Cost = 1.0
    """Matching cost of a predicted object without a match; a match costs 1 - IoU. Unit: cost."""
    fn_cost: Cost = 1.0
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
    desc_ce_weight_matched: Weight = 0.0
    """Weight of the cross-entropy on the desc values of matched objects, which are taught the true desc up to where
    they leave it; 0 ignores them. Unit: loss weight."""
    eval_iou: Share = 0.5
    """Smallest IoU that counts as a true positive in evaluation. Unit: IoU."""
    vllm: VllmConfig = VllmConfig()
    """The rollout engine of rollout_backend: vllm."""

    @property
    def uses_coord_tokens(self) -> bool:
        """Whether coordinates are tokens of their own; a format of the user's may, so it is not refused by that."""
        return self.answer_format not in (*ANSWER_FORMATS[1:], TEXT)
