"""The section ``custom.extra.rollout_matching.vllm``: the rollout engine and how weights get there."""

from typing import Literal

from rollmatch.config.connection import ServerConfig
from rollmatch.config.section import Count, Index, PositiveShare, Section


class SyncConfig(Section):
    """How new weights reach the rollout engine."""

    mode: Literal["full", "adapter", "auto"] = "full"
    """full sends all weights, adapters merged. adapter sends adapters only. auto is adapter with enable_lora, else
    full."""
    fallback_to_full: bool = True
    """After a failed adapter sync, send all weights from then on. false stops the run."""


class VllmConfig(Section):
    """The vLLM engine."""

    mode: Literal["colocate", "server"] = "colocate"
    """colocate runs the engine in the learner's process and on its devices; server uses rollout servers that are
    already running."""
    max_model_len: Count | None = None
    """Longest prompt and response together; null uses global_max_length. Unit: tokens."""
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
    """Split long prompts over several engine steps; null uses vLLM's default on a GPU and false on a CPU."""
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
        """Whether a sync is to carry adapters alone: auto does exactly with enable_lora."""
        return self.sync.mode == "adapter" or (self.sync.mode == "auto" and self.enable_lora)
