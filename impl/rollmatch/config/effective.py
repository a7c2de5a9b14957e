"""What the nulls of a tree mean on the machine at hand."""

from typing import Literal

from rollmatch.config.findings import ROLLOUT_MATCHING
from rollmatch.config.schema import RunConfig
from rollmatch.config.strategy import read_strategy
from rollmatch.errors import ConfigError

Dtype = Literal["auto", "float32", "bfloat16", "float16"]
RANKS_OF_ONE_ENGINE = 4
"""Learner ranks that share one engine by default."""
CPU_KV_CACHE_MIB = 512


def tensor_parallel_size(config: RunConfig, *, learner_world_size: int) -> int:
    """Learner ranks that share one engine. Errors: ``tensor-parallel-mismatch``."""
    configured = config.custom.extra.rollout_matching.vllm.tensor_parallel_size
    size = configured or (RANKS_OF_ONE_ENGINE if learner_world_size == RANKS_OF_ONE_ENGINE else 1)
    if learner_world_size % size:
        raise ConfigError(
            f"is {size}, which does not divide the learner's {learner_world_size} ranks",
            code="tensor-parallel-mismatch",
            key=f"{ROLLOUT_MATCHING}.vllm.tensor_parallel_size",
            remedy="Choose a divisor of the number of learner ranks.",
        )
    return size


def tensor_parallel_rule(config: RunConfig) -> str:
    """The same in words, for ``check``."""
    configured = config.custom.extra.rollout_matching.vllm.tensor_parallel_size
    if configured is not None:
        return f"{configured}, as set"
    return f"{RANKS_OF_ONE_ENGINE} with {RANKS_OF_ONE_ENGINE} learner ranks, else 1"


def learner_dtype(config: RunConfig) -> Dtype:
    """Precision of the learner's weights: float32 where they are all trained, unless half precision is named."""
    named = config.model.torch_dtype
    is_full = config.tuner.train_type == "full"
    return "float32" if is_full and (config.training.bf16 or named == "auto") else named


def engine_dtype(config: RunConfig) -> Dtype:
    """Precision of the engine's weights; auto is that of config.json."""
    named = config.custom.extra.rollout_matching.vllm.dtype
    if named != "auto":
        return named
    return "bfloat16" if config.training.bf16 else config.model.torch_dtype


def quantization(config: RunConfig) -> str | None:
    """How the engine's weights are held in fewer bits, as vLLM names it; None: they are not."""
    return "fp8_per_channel" if config.custom.extra.rollout_matching.vllm.quantization == "fp8" else None


def compute_dtype(config: RunConfig) -> Literal["bfloat16", "float16"] | None:
    """Precision of the learner's autocast; None: it computes in that of its weights."""
    if config.training.bf16:
        return "bfloat16"
    return "float16" if config.training.extra_arguments.get("fp16") else None


def rollout_backend(config: RunConfig) -> Literal["vllm", "hf"]:
    """Where responses are generated: evaluations of stage 1 need no server."""
    rules = config.custom.extra.rollout_matching
    needs_server = rules.rollout_backend == "vllm" and rules.vllm.mode == "server"
    return "hf" if needs_server and not config.custom.learns_from_rollouts else rules.rollout_backend


def max_model_len(config: RunConfig) -> int:
    """Most tokens of prompt and response together."""
    return config.custom.extra.rollout_matching.vllm.max_model_len or config.global_max_length


def max_prompt_len(config: RunConfig) -> int:
    """Longest prompt in tokens, images expanded: behind it, the longest response or episode fits."""
    extra = config.custom.extra
    environment = extra.environment
    return max_model_len(config) - (
        environment.max_response_tokens if environment.is_set else extra.rollout_matching.max_new_tokens
    )


def enforce_eager(config: RunConfig, *, on_gpu: bool) -> bool:
    """Whether the engine runs without graph capture."""
    configured = config.custom.extra.rollout_matching.vllm.enforce_eager
    return not on_gpu if configured is None else configured


COMPILED_FROM = 1_000_000_000
"""Parameters from which compilation is worth its minutes."""


def compiles_engine(config: RunConfig, *, on_gpu: bool, num_parameters: int) -> bool:
    """Whether a colocated engine compiles its model; graphs of decoding steps are captured either way, unless eager.

    A model of 135M decodes as fast without, and starts 12 to 18 s earlier. Not measured with adapters.
    """
    vllm = config.custom.extra.rollout_matching.vllm
    is_small = num_parameters < COMPILED_FROM and not vllm.enable_lora
    return on_gpu and not vllm.enforce_eager and not (is_small and vllm.enforce_eager is None)


def compiles_layers(config: RunConfig, *, on_gpu: bool, num_parameters: int) -> bool:
    """Whether decoder layers are compiled.

    peft's dropout does not compile under checkpointing, nor FSDP2's DoRA in one graph; not measured under DeepSpeed.
    """
    configured = config.training.compile_layers
    if configured != "auto":
        return configured
    engine, tuner = read_strategy(config.training.strategy).engine, config.tuner
    works = engine == "ddp" or (engine == "fsdp2" and not tuner.use_dora)
    return on_gpu and num_parameters >= COMPILED_FROM and not tuner.lora_dropout and works


def kv_cache_memory_mib(config: RunConfig, *, on_gpu: bool) -> int | None:
    """The engine's attention cache in MiB; None leaves it to gpu_memory_utilization."""
    configured = config.custom.extra.rollout_matching.vllm.kv_cache_memory_mib
    return configured or (None if on_gpu else CPU_KV_CACHE_MIB)


def rollout_threads(config: RunConfig, *, on_gpu: bool) -> int | None:
    """CPU threads of the engine; None leaves it to vLLM."""
    return config.training.rollout_threads or (None if on_gpu else 1)


def packing_buffer(config: RunConfig) -> int:
    """Segments of a rank that may wait for a row of the next step."""
    return config.training.packing_buffer or _rollouts_per_step(config)


def steps_per_window(config: RunConfig) -> int:
    """Optimizer steps that learn from the rollouts of one generation phase."""
    rules = config.custom.extra.grpo
    return rules.steps_per_generation * rules.num_iterations if config.custom.learns_from_completions else 1


def num_windows_ahead(config: RunConfig) -> int:
    """Windows that overlap: ahead requests in advance without exceeding max_staleness, also where groups are late."""
    return windows_of_staleness(config) - config.custom.extra.rollout_matching.late_windows


def judges_ahead(config: RunConfig) -> bool:
    """Whether values of a window are made while the learner learns from another one."""
    is_judged = config.custom.trainer_variant.startswith("vineppo")
    return is_judged and config.custom.extra.rollout_matching.overlap == "ahead"


def windows_of_staleness(config: RunConfig) -> int:
    """Windows between a request and learning that max_staleness allows.

    The last step of a window finds it older by the steps before it; a segment may wait one step more for its row.
    """
    staleness = config.custom.extra.rollout_matching.max_staleness - int(config.training.packing)
    return (staleness + 1) // steps_per_window(config) - 1


def staleness_when_learning_begins(config: RunConfig) -> int:
    """Optimizer steps that rollouts may be old at the first step of their window; at its last one they are older."""
    return config.custom.extra.rollout_matching.max_staleness - (steps_per_window(config) - 1)


def calls_together(config: RunConfig, *, num_servers: int, learner_world_size: int = 1) -> int:
    """Calls of one step that a rank has under way at a server at a time: its whole share, unless late work moves.

    Then it is half of the share, or less where that fills the server's engines and leaves one call waiting there.
    """
    rules = config.custom.extra.rollout_matching
    if rules.pieces_per_server == 1:
        return 1
    share = -(-rollouts_per_window(config) // num_servers)
    pieces = min(share, rules.pieces_per_server)
    half, at_once = -(-pieces // 2), _requests_at_once(config)
    if at_once is None:
        return half
    return min(half, -(-pieces * at_once // (share * learner_world_size)) + 1)


def rollouts_per_window(config: RunConfig) -> int:
    """Of one rank."""
    num_steps = config.custom.extra.grpo.steps_per_generation if config.custom.learns_from_completions else 1
    return _rollouts_per_step(config) * num_steps


def _rollouts_per_step(config: RunConfig) -> int:
    """Of one rank."""
    training, rules = config.training, config.custom.extra.grpo
    samples = training.per_device_train_batch_size * training.gradient_accumulation_steps
    return samples * (rules.num_generations if config.custom.learns_from_completions else 1)


def _requests_at_once(config: RunConfig) -> int | None:
    """Requests that a server's engines run at once; None where the number of engines is not configured."""
    section = config.custom.extra.rollout_server
    if section.vllm_data_parallel_size is None:
        return None
    configured = section.vllm_engine_kwargs.get("max_num_seqs", config.custom.extra.rollout_matching.vllm.max_num_seqs)
    return section.vllm_data_parallel_size * int(configured)


def reference_in_batch(config: RunConfig) -> bool:
    """Whether the micro-batch that learns is scored by the reference, too: adapters off, its rows and its images as
    they are. Rollouts that are learnt from several times are scored once, before.
    """
    rules = config.custom.extra.grpo
    measures = config.custom.learns_from_completions and rules.beta != 0
    return measures and not config.keeps_reference and rules.num_iterations == 1


def has_policy_gradient(config: RunConfig) -> bool:
    """Whether completions are learnt from by ratios and advantages, and not by a divergence alone."""
    extra = config.custom.extra
    is_divergence = config.custom.trainer_variant == "distill" and extra.distill.loss == "divergence"
    return config.custom.learns_from_completions and (not is_divergence or compares_beside_teachers(config))


def compares_beside_teachers(config: RunConfig) -> bool:
    """Whether rewards or pay count beside teachers."""
    return config.custom.extra.grpo.compares or config.custom.extra.distill.environment_weight > 0


def corrects(config: RunConfig) -> bool:
    """Whether the engine's log-probabilities are wanted beside those that the ratio starts from."""
    rules = config.custom.extra.grpo
    return has_policy_gradient(config) and rules.corrects is not None and rules.old_logprobs == "recomputed"


def old_logprobs(config: RunConfig) -> Literal["server", "recomputed", "current"]:
    """Where the ratio starts.

    Rollouts used once need no forward pass of their own: the step computes the same values.
    """
    rules = config.custom.extra.grpo
    if rules.old_logprobs == "server":
        return "server"
    if not has_policy_gradient(config):
        return "current"
    return "current" if rules.steps_per_generation * rules.num_iterations == 1 else "recomputed"
