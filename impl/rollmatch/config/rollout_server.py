"""The section ``custom.extra.rollout_server``: what ``rollmatch serve`` starts."""

from typing import Annotated, Any, Literal

from pydantic import BeforeValidator, Field

from rollmatch.config.section import Count, PositiveShare, Section, Text, Weight, as_tuple


class RolloutServerConfig(Section):
    """What rollmatch serve starts, by ms-swift's key names where it has them."""

    engine: Literal["rollmatch", "swift"] = "rollmatch"
    """rollmatch starts this package's server; swift starts ms-swift's swift rollout."""
    host: Text = "127.0.0.1"
    """Listen address. The port is the port of the server's base_url."""
    vllm_tensor_parallel_size: Count = 1
    """GPUs per engine. Unit: GPUs."""
    vllm_data_parallel_size: Count | None = None
    """Engines (replicas); null is GPUs / vllm_tensor_parallel_size. Unit: engines."""
    vllm_gpu_memory_utilization: PositiveShare | None = None
    """Share of a GPU's memory for the engine; null is 0.9, or 0.6 with trainer_variant: grpo. Unit: share."""
    vllm_max_model_len: Count | None = None
    """Longest request (prompt and response); null uses rollout_matching.vllm.max_model_len, with grpo
    global_max_length. Unit: tokens."""
    vllm_enable_lora: bool = False
    """Must be false: adapters are merged before or on arrival."""
    vllm_enable_prefix_caching: bool | None = None
    """Reuse the KV cache of equal prompt prefixes; null uses rollout_matching.vllm.enable_prefix_caching."""
    vllm_engine_kwargs: dict[str, Any] = Field(default_factory=dict)
    """Further vLLM engine arguments, by vLLM's names."""
    image_roots: Annotated[tuple[Text, ...], BeforeValidator(as_tuple, json_schema_input_type=list[Text])] = ()
    """Directories from which requests may name image files by path. Empty: requests must contain the image."""
    drain_s: Weight = 5.0
    """Time for running requests to finish before a sync; unfinished ones are generated again with the new weights.
    Unit: seconds."""
