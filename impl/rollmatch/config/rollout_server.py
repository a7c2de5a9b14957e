"""The section ``custom.extra.rollout_server``: what ``rollmatch serve`` starts."""

from typing import Annotated, Any, Literal

from pydantic import BeforeValidator, Field

from rollmatch.config.section import Count, PositiveShare, Section, Text, Weight, as_tuple


class RolloutServerConfig(Section):
    """The rollout server's own settings, by ms-swift's names where it has them."""

    engine: Literal["rollmatch", "swift"] = "rollmatch"
    """rollmatch starts our server, swift starts ms-swift's swift rollout."""
    host: Text = "127.0.0.1"
    """Address to listen at; the port is that of the server's base_url."""
    vllm_tensor_parallel_size: Count = 1
    """GPUs that share one engine."""
    vllm_data_parallel_size: Count | None = None
    """Engines; null takes what the GPUs make."""
    vllm_gpu_memory_utilization: PositiveShare | None = None
    """Share of each GPU's memory the engines may take; null takes 0.9, and 0.6 with trainer_variant grpo."""
    vllm_max_model_len: Count | None = None
    """Most tokens of a request; null takes rollout_matching.vllm.max_model_len, with grpo global_max_length."""
    vllm_enable_lora: bool = False
    """Must stay false: adapters are merged into the weights, and the engines take none."""
    vllm_enable_prefix_caching: bool | None = None
    """Keep attention caches of equal prompt beginnings; null takes rollout_matching.vllm.enable_prefix_caching."""
    vllm_engine_kwargs: dict[str, Any] = Field(default_factory=dict)
    """Further vLLM engine arguments, by vLLM's names."""
    image_roots: Annotated[tuple[Text, ...], BeforeValidator(as_tuple, json_schema_input_type=list[Text])] = ()
    """Directories below which the paths of images in requests may lie; none: images must come along."""
    drain_s: Weight = 5.0
    """Seconds that running requests get to finish before new weights; the rest is generated anew after them."""
