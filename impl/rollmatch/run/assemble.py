"""From the configuration to the parts and the arguments of the trainer."""

import json
import os
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import NamedTuple, cast

import torch
from transformers import TrainingArguments

from rollmatch.config import RunConfig, effective
from rollmatch.config.rollout_matching import RolloutMatchingConfig
from rollmatch.config.servers import sync_mode, uses_servers
from rollmatch.config.strategy import read_strategy
from rollmatch.config.training import TRAINER_KEYS, TunerConfig
from rollmatch.journal import Journal
from rollmatch.learn.attention import PACKED_ATTENTION, check_packable
from rollmatch.learn.balance import RowBalancer
from rollmatch.learn.batch import Batcher
from rollmatch.learn.pack import Packer
from rollmatch.model.overlong import LengthRules
from rollmatch.model.policy import count_weights, load_policy, unwrap
from rollmatch.model.sharding import gather_in_passes
from rollmatch.model.source import dtype_of
from rollmatch.model.template import Template, TemplateOptions
from rollmatch.objectives.distill.objective import DistillObjective
from rollmatch.objectives.protocol import Objective
from rollmatch.objectives.vineppo.objective import VinePpoObjective
from rollmatch.ranks import Ranks
from rollmatch.rollout.backend import Decoding, RolloutBackend
from rollmatch.rollout.episodes import MAX_EPISODES, EpisodeRunner
from rollmatch.rollout.fence import Fence, SyncMode
from rollmatch.rollout.hf import HfBackend
from rollmatch.rollout.overlap import Ahead, Lockstep, Mixed, Overlap, WithoutRollouts, run_ahead, work_early
from rollmatch.rollout.prefetch_rules import PrefetchRules, ServerBackend
from rollmatch.rollout.source import RolloutSource
from rollmatch.rollout.work_items import first_server
from rollmatch.run.computing import is_padding_free, recomputes, shares_prompts
from rollmatch.run.connect import (
    check_versions_known,
    connect_servers,
    try_out,
    try_out_adapters,
)
from rollmatch.run.objectives import make_objective
from rollmatch.run.plugins import needs_coord_tokens
from rollmatch.run.preflight import check_training_arguments
from rollmatch.run.strategy import complete, strategy_arguments
from rollmatch.run.strategy_check import LAUNCHER_FIELDS
from rollmatch.run.teachers import answer_of, averages_of, make_teachers
from rollmatch.run.vineppo_objective import make_world
from rollmatch.training.learner import Learner
from rollmatch.weights.named_weights import largest_rank


def make_arguments(config: RunConfig) -> TrainingArguments:
    """``training.*`` as transformers wants it."""
    training = config.training
    named: dict[str, object] = {
        name: getattr(training, name) for name in (*TRAINER_KEYS, "per_device_train_batch_size")
    }
    named |= {
        "report_to": list(training.report_to),
        "eval_strategy": "steps" if training.eval_steps else "no",
        "eval_steps": training.eval_steps,
        "save_strategy": "steps",
        "gradient_checkpointing": recomputes(config),
        # A rank whose batch has no image does not use the vision tower: DDP would wait for its gradients for ever.
        "ddp_find_unused_parameters": True if _trains_vision(config) else None,
        "remove_unused_columns": False,
        "disable_tqdm": True,
        "use_cpu": not torch.cuda.is_available(),
    }
    if (stopping := training.early_stopping) is not None:
        named |= {"metric_for_best_model": stopping.metric, "greater_is_better": stopping.greater_is_better}
        named["restore_callback_states_from_checkpoint"] = True  # how long nothing has got better
    check_training_arguments(training)
    os.environ.setdefault("TENSORBOARD_LOGGING_DIR", str(Path(training.output_dir) / "tensorboard"))
    strategy = read_strategy(training.strategy)
    os.environ.pop(LAUNCHER_FIELDS, None)  # compared in check_strategy; accelerate raises wherever both say something
    arguments = TrainingArguments(**(named | strategy_arguments(strategy) | training.extra_arguments))
    return complete(arguments, strategy)


def attention_of(config: RunConfig) -> str | dict[str, str]:
    """transformers' name of ``model.attn_impl``; packed attention is for the language model only."""
    if config.model.attn_impl != "packed":
        return config.model.attn_impl
    return {"text_config": PACKED_ATTENTION} if takes_images(config) else PACKED_ATTENTION


def takes_images(config: RunConfig) -> bool:
    """Whether the model's config.json describes a vision tower."""
    return "vision_config" in json.loads((Path(config.model.model) / "config.json").read_text(encoding="utf-8"))


def _trains_vision(config: RunConfig) -> bool:
    return takes_images(config) and not (config.tuner.freeze_vit and config.tuner.freeze_aligner)


def read_policy(config: RunConfig) -> torch.nn.Module:
    """The policy, frozen and adapted as configured; new adapters are drawn from ``training.seed``.

    Errors: those of ``load_policy``.
    """
    model = config.model.model_copy(update={"torch_dtype": effective.learner_dtype(config)})
    with torch.random.fork_rng():
        torch.manual_seed(config.training.seed)
        return load_policy(model, config.tuner, attn_implementation=attention_of(config))


def make_template(config: RunConfig) -> Template:
    """The model directory's template with the configured prompts."""
    prompts = config.custom.prompts
    any_chat = not config.custom.detects
    options = TemplateOptions(
        chat=config.model.chat_template_kwargs,
        processor=config.model.processor_kwargs,
        coordinates=needs_coord_tokens(config),
        stop_token=config.model.stop_token,
        images=takes_images(config),
        max_prompt_len=effective.max_prompt_len(config) if config.overlong == "truncate_left" else None,
    )
    return Template(config.model.model, system=prompts.system, user=prompts.user, any_chat=any_chat, options=options)


class TrainerParts(NamedTuple):
    """What a ``RolloutTrainer`` is made of."""

    source: RolloutSource
    overlap: Overlap
    learner: Learner
    logged_completions: int


def make_parts(
    config: RunConfig, model: torch.nn.Module, template: Template, *, journal: Journal, ranks: Ranks
) -> TrainerParts:
    """All parts, ready. Starts the rollout engine or connects to the servers, the slowest part."""
    world = make_world(config, template)
    objective = make_taught_objective(config, template, policy=model, world=world)
    decoding = replace(make_train_decoding(config), logprobs=objective.wants_logprobs)
    source = make_source(config, model, template, journal=journal, ranks=ranks)
    try_out(source.fence.backend, decoding)
    if source.fence.mode.mode == "adapter" and source.fence.backend.takes_adapters:
        source.fence.mode.attempt(partial(try_out_adapters, source.fence.backend, model), ranks)
    source = replace(source, decoding=decoding, eval_decoding=make_eval_decoding(config), world=world)
    learner = Learner(
        objective=objective,
        batcher=_make_batcher(config, model, objective, pad_id=template.pad_id, ranks=ranks),
        reference=_load_reference(config, model),
        reference_in_batch=effective.reference_in_batch(config),
        scores_waiting=config.custom.learns_from_completions and effective.old_logprobs(config) == "current",
        lengths=LengthRules(
            max_len=config.global_max_length,
            overlong=config.overlong,
            is_kept=template.vocabulary.is_control,
            image_id=template.image_id,
        ),
        averages=averages_of(objective),
    )
    logged_completions = config.training.logged_completions if config.custom.learns_from_rollouts else 0
    overlap = make_overlap(config, source)
    if overlap.prefetch is not None and isinstance(objective, DistillObjective):
        overlap.prefetch.arrived = objective.arrived
    if isinstance(overlap, Ahead) and isinstance(objective, VinePpoObjective):
        work_early(overlap, objective.judge_early)
    return TrainerParts(source, overlap, learner, logged_completions)


def make_taught_objective(
    config: RunConfig, template: Template, *, world: EpisodeRunner | None, policy: torch.nn.Module | None = None
) -> Objective:
    """The objective, with the teachers that it has; ``policy``: as ``make_teachers``, ``world``: as ``make_objective``.

    Errors: those of ``make_objective`` and ``make_teachers``.
    """
    teachers = make_teachers(config, template, partial(_load_teacher, config), policy=policy)
    return make_objective(config, template, teachers, world=world)


def make_source(
    config: RunConfig, model: torch.nn.Module, template: Template, *, journal: Journal, ranks: Ranks
) -> RolloutSource:
    """Backend and fence; both decodings are as configured for training, and no environment. Sets torch's threads."""
    rules = config.custom.extra.rollout_matching
    on_gpu = torch.cuda.is_available()
    threads = config.training.learner_threads or (None if on_gpu else _threads_per_rank())
    if threads:
        torch.set_num_threads(threads)
    configured = sync_mode(config, learner_world_size=ranks.learner_world_size)
    mode = SyncMode(configured, fallback_to_full=rules.vllm.sync.fallback_to_full)
    backend = make_backend(config, model, template, ranks=ranks, journal=journal)
    return RolloutSource(
        template=template,
        fence=Fence(backend, ranks, journal, mode=mode),
        decoding=make_decoding(rules),
        eval_decoding=make_decoding(rules),
        journal=journal,
        ranks=ranks,
        run_seed=config.training.seed,
        precision=rollout_precision(config, model),
        num_threads=effective.rollout_threads(config, on_gpu=on_gpu),
    )


def rollout_precision(config: RunConfig, model: torch.nn.Module) -> str:
    """In which responses are computed: of the engine's weights, or of the learner's and its autocast."""
    if effective.rollout_backend(config) == "vllm":
        named = effective.engine_dtype(config)
        return dtype_of(Path(config.model.model)) if named == "auto" else named
    weights = str(next(unwrap(model).parameters()).dtype).removeprefix("torch.")
    compute = effective.compute_dtype(config)
    return weights if compute in (None, weights) else f"{weights} weights, {compute} autocast"


def make_overlap(config: RunConfig, source: RolloutSource) -> Overlap:
    """What ``rollout_matching.overlap`` names; calls beside learning make the fence wait for their end."""
    rules = config.custom.extra.rollout_matching
    if not config.custom.learns_from_rollouts:
        return WithoutRollouts(source)
    if config.custom.extra.distill.lmbda < 1:
        answers = answer_of(config, source.template)
        return Mixed(source, share=config.custom.extra.distill.lmbda, answer_of=answers)
    if rules.overlap == "off":
        return Lockstep(source)
    lead = effective.num_windows_ahead(config)
    servers = cast(ServerBackend, source.fence.backend)
    ranks, num_servers = source.ranks, servers.num_servers
    together = effective.calls_together(config, num_servers=num_servers, learner_world_size=ranks.learner_world_size)
    bounds = PrefetchRules(
        max_windows=lead + 1,
        callers_per_server=lead * together,
        pieces_per_server=rules.pieces_per_server,
        first_server=first_server(ranks.rank, ranks.learner_world_size, num_servers),
    )
    oldest = effective.staleness_when_learning_begins(config)
    if rules.late_windows:
        size = config.custom.extra.grpo.num_generations
        num_groups = (lead + 1) * effective.rollouts_per_window(config) // size
        bounds = replace(
            bounds,
            max_windows=lead + 1 + oldest,
            callers_per_server=min(-(-num_groups // num_servers), max(MAX_EPISODES // size, 1)),
            group_size=size,
        )
    in_flight = rules.vllm.sync.in_flight
    if in_flight != "wait":
        check_versions_known(source.fence.backend.members, in_flight)
    return run_ahead(source, bounds, max_staleness=oldest, lead=lead, in_flight=in_flight)


def make_backend(
    config: RunConfig, model: torch.nn.Module, template: Template, *, ranks: Ranks, journal: Journal
) -> RolloutBackend:
    """The configured rollout backend, ready."""
    rules = config.custom.extra.rollout_matching
    if effective.rollout_backend(config) == "hf":
        dtype = effective.compute_dtype(config)
        return HfBackend(
            model,
            template,
            batch_size=rules.rollout_generate_batch_size,
            ranks=ranks,
            compute_dtype=None if dtype is None else getattr(torch, dtype),
        )
    if uses_servers(config):
        return connect_servers(config, template, ranks=ranks, journal=journal, model=model)
    from rollmatch.rollout.vllm_colocate import EngineSettings, VllmColocateBackend

    settings = EngineSettings(
        model=config.model.model,
        dtype=effective.engine_dtype(config),
        max_model_len=effective.max_model_len(config),
        tensor_parallel_size=effective.tensor_parallel_size(config, learner_world_size=ranks.learner_world_size),
        sleeps=rules.vllm.sleep_level > 0 and torch.cuda.is_available(),
        lora_rank=largest_rank(model) if rules.vllm.enable_lora else None,
        engine_arguments=_engine_arguments(config) | _graphs_alone(config, model),
    )
    return VllmColocateBackend(settings, template, ranks)


def _engine_arguments(config: RunConfig) -> dict[str, object]:
    vllm = config.custom.extra.rollout_matching.vllm
    on_gpu = torch.cuda.is_available()
    cache_mib = effective.kv_cache_memory_mib(config, on_gpu=on_gpu)
    arguments: dict[str, object] = {
        "seed": config.training.seed,
        "gpu_memory_utilization": vllm.gpu_memory_utilization,
        "kv_cache_memory_bytes": cache_mib * 2**20 if cache_mib else None,
        "enforce_eager": effective.enforce_eager(config, on_gpu=on_gpu),
        "quantization": effective.quantization(config),
        "load_format": vllm.load_format,
        "enable_lora": vllm.enable_lora,
        "enable_prefix_caching": vllm.enable_prefix_caching,
        "max_num_seqs": vllm.max_num_seqs,
        "max_num_batched_tokens": vllm.max_num_batched_tokens,
        "enable_chunked_prefill": vllm.enable_chunked_prefill,
        "limit_mm_per_prompt": vllm.limit_mm_per_prompt,
        "mm_processor_kwargs": config.model.processor_kwargs or None,
        "disable_custom_all_reduce": vllm.disable_custom_all_reduce,
    }
    return {name: value for name, value in arguments.items() if value is not None}


def _graphs_alone(config: RunConfig, model: torch.nn.Module) -> dict[str, object]:
    """What keeps vLLM from compiling a small model, but not from capturing graphs of its decoding steps."""
    on_gpu, (num_parameters, _) = torch.cuda.is_available(), count_weights(unwrap(model))
    compiles = effective.compiles_engine(config, on_gpu=on_gpu, num_parameters=num_parameters)
    if compiles or effective.enforce_eager(config, on_gpu=on_gpu):
        return {}
    return {"compilation_config": {"mode": 0, "cudagraph_mode": "FULL_DECODE_ONLY"}}


def _make_batcher(
    config: RunConfig, model: torch.nn.Module, objective: Objective, *, pad_id: int, ranks: Ranks
) -> Batcher:
    training = config.training
    packer = None
    if training.packing:
        check_packable(model)
        packer = Packer(config.global_max_length)
    concatenates = is_padding_free(config, model)
    shares = (training.packing or concatenates) and shares_prompts(config, model)
    balancer = None
    if concatenates:
        balancer = RowBalancer(capacity=training.tokens_per_micro_batch, ranks=ranks)
    return Batcher(
        model,
        objective,
        packer=packer,
        pad_id=pad_id,
        balancer=balancer,
        shares_prompts=shares,
        max_waiting=effective.packing_buffer(config),
        drops_last=training.packing_drop_last,
        ranks=ranks,
    )


def make_decoding(rules: RolloutMatchingConfig, *, temperature: float | None = None) -> Decoding:
    """How training samples its rollouts, or by another temperature; log-probabilities are not requested."""
    return Decoding(
        max_new_tokens=rules.max_new_tokens,
        temperature=rules.decoding.temperature if temperature is None else temperature,
        top_p=rules.decoding.top_p,
        top_k=rules.decoding.top_k,
        repetition_penalty=rules.repetition_penalty,
        num_beams=rules.num_beams,
    )


def make_train_decoding(config: RunConfig) -> Decoding:
    """What training samples by; where it samples nothing, the temperature is that of its losses, 1."""
    temperature = None if config.custom.learns_from_rollouts else 1.0
    return make_decoding(config.custom.extra.rollout_matching, temperature=temperature)


def make_eval_decoding(config: RunConfig) -> Decoding:
    """Rollout matching measures what it trains by; the others sample to explore, which an evaluation need not."""
    rules, is_paid = config.custom.extra.rollout_matching, config.custom.learns_from_completions
    return make_decoding(rules, temperature=config.custom.extra.grpo.eval_temperature if is_paid else None)


def _load_reference(config: RunConfig, model: torch.nn.Module) -> torch.nn.Module | None:
    """A second copy of the policy before training, where one is kept.

    It lives where the policy will: transformers moves the policy to its device later.
    """
    if not config.keeps_reference:
        return None
    kept = read_policy(config).requires_grad_(False)
    return gather_in_passes(kept.to("cuda" if torch.cuda.is_available() else "cpu")).eval()


def _load_teacher(config: RunConfig, directory: str) -> torch.nn.Module:
    """A frozen model, in the dtype of its own files unless one is named; split over ranks where the policy is.

    Errors: those of ``load_policy``.
    """
    named = config.model.model_copy(update={"model": directory, "adapter": None})
    attention = attention_of(config.model_copy(update={"model": named}))
    teacher = load_policy(named, TunerConfig(), attn_implementation=attention).requires_grad_(False)
    return gather_in_passes(teacher.to("cuda" if torch.cuda.is_available() else "cpu")).eval()


def _threads_per_rank() -> int:
    local_ranks = int(os.environ.get("LOCAL_WORLD_SIZE", "1"))
    return max(1, (os.cpu_count() or 1) // local_ranks)
