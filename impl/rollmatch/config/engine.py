"""The section ``custom.extra.rollout_matching.vllm``: the rollout engine and how weights get there."""

from typing import Literal

from rollmatch.config.connection import ServerConfig
from rollmatch.config.section import Count, Index, PositiveShare, Section


class SyncConfig(Section):
    """How new weights reach the rollout engine."""

    mode: Literal["full", "adapter", "auto"] = "full"
    """full carries all weights, adapters merged; adapter carries adapters only; auto is adapter with enable_lora."""
    fallback_to_full: bool = True
    """Carry all weights from then on when an adapter sync fails; false stops the run instead."""


class VllmConfig(Section):
    """The vLLM engine."""

    mode: Literal["colocate", "server"] = "colocate"
    """colocate runs the engine on the learner's own devices, server asks rollout servers that are already running."""
    max_model_len: Count | None = None
    """Most tokens of prompt and response together; null takes global_max_length."""
    tensor_parallel_size: Count | None = None
    """Learner ranks that share one engine; null takes 4 when there are 4 learner ranks, else 1."""
    gpu_memory_utilization: PositiveShare = 0.45
    """Share of a GPU's memory the engine may take; the learner needs the rest."""
    enable_lora: bool = False
    """Reserve memory for adapters in the engine; full sync does not need it."""
    load_format: Literal["auto", "dummy"] = "auto"
    """auto reads the model's weights at start, dummy leaves them to the first sync."""
    enable_prefix_caching: bool = True
    """Keep attention caches of equal prompt beginnings; emptied at each sync."""
    enforce_eager: bool | None = None
    """Run without graph capture; null does so on CPU only."""
    max_num_seqs: Count = 256
    """Most responses decoded at the same time."""
    max_num_batched_tokens: Count | None = None
    """Most tokens of one engine step; null leaves it to vLLM."""
    enable_chunked_prefill: bool | None = None
    """Split prompts over several engine steps; null leaves it to vLLM, and on a CPU keeps them whole."""
    kv_cache_memory_mib: Count | None = None
    """Attention cache in MiB; null takes 512 on CPU and gpu_memory_utilization on GPU."""
    limit_mm_per_prompt: dict[str, Index] | None = None
    """Most items of each modality in a prompt, such as {image: 1}; null leaves it to vLLM."""
    disable_custom_all_reduce: bool = True
    """Use NCCL instead of vLLM's own all-reduce between tensor parallel ranks."""
    sleep_level: Literal[0, 1] = 0
    """1 gives a colocated engine's GPU memory to the learner while it works, 0 keeps it; a CPU has nothing to give."""
    sync: SyncConfig = SyncConfig()
    """How new weights reach the engine."""
    server: ServerConfig = ServerConfig()
    """Where the rollout servers of mode server are."""

    @property
    def carries_adapter(self) -> bool:
        """Whether a sync is to carry adapters alone: auto does exactly with enable_lora."""
        return self.sync.mode == "adapter" or (self.sync.mode == "auto" and self.enable_lora)
