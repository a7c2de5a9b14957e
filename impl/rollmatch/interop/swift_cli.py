"""ms-swift's command lines from our configuration: ``swift rollout`` and ``swift rlhf`` (ms-swift 4.6).

``rollmatch train --engine swift`` writes the samples in ms-swift's format; ``swift_rewards`` passes it our rewards.
"""

import json
import os
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path

from rollmatch.config import RunConfig, effective, load_config
from rollmatch.config.custom import GrpoConfig
from rollmatch.config.files import check_model
from rollmatch.config.servers import (
    disables_custom_all_reduce,
    max_model_len,
    memory_share,
    pair_servers,
    prefix_caching,
    server_section,
    uses_servers,
)
from rollmatch.config.servers_file import SERVERS_FILE
from rollmatch.config.training import TRAINER_KEYS
from rollmatch.data.chat import tagged_messages
from rollmatch.data.content import IMAGE_TAG
from rollmatch.errors import ConfigError, LaunchError
from rollmatch.launch.processes import Command, become, visible
from rollmatch.launch.rollout_server import devices_of, port_of, server_environment, start
from rollmatch.model.source import with_local_model
from rollmatch.records import Sample
from rollmatch.run.machine import has_gpu
from rollmatch.run.preflight import load_checked
from rollmatch.run.server_checks import WaitPolicy, wait_for_servers

SWIFT = "custom.extra.swift"


def rollout_command(config: RunConfig, *, port: int, replicas: int, on_gpu: bool) -> list[str]:
    """``swift rollout`` with the settings of the rollout server. Errors: ``argument-has-own-key``."""
    section, vllm = config.custom.extra.rollout_server, config.custom.extra.rollout_matching.vllm
    options = model_options(config) | {
        "host": section.host,
        "port": port,
        "vllm_tensor_parallel_size": section.vllm_tensor_parallel_size,
        "vllm_data_parallel_size": replicas,
        "vllm_gpu_memory_utilization": memory_share(config),
        "vllm_max_model_len": max_model_len(config),
        "vllm_enable_lora": False,
        "vllm_enable_prefix_caching": prefix_caching(config),
        "vllm_enforce_eager": effective.enforce_eager(config, on_gpu=on_gpu),
        "vllm_max_num_seqs": vllm.max_num_seqs,
        "vllm_disable_custom_all_reduce": disables_custom_all_reduce(config),
        "vllm_limit_mm_per_prompt": vllm.limit_mm_per_prompt,
        "vllm_engine_kwargs": _engine_kwargs(config, on_gpu=on_gpu) or None,
    }
    extra = config.custom.extra.swift.rollout_options
    return ["swift", "rollout", *command_line(options, extra, key=f"{SWIFT}.rollout_options")]


def serve_by_swift(
    path: str, *, overrides: Sequence[str], gpus: Sequence[str] | None, server_index: int | None, dry_run: bool
) -> int:
    """Start ms-swift's server of a YAML, as ``rollmatch.launch.rollout_server.serve`` starts ours.

    Errors: those of the configuration, ``gpu-count-mismatch``, ``server-not-named``, ``port-in-use``,
    ``swift-missing``.
    """
    config = with_local_model(load_config(path, overrides))
    check_model(config)
    command = server_command(config, gpus=gpus, server_index=server_index, on_gpu=has_gpu())
    return start(command, config, server_index, dry_run=dry_run)


def server_command(config: RunConfig, *, gpus: Sequence[str] | None, server_index: int | None, on_gpu: bool) -> Command:
    """The command line and environment of ms-swift's server. Errors: ``gpu-count-mismatch``, ``server-not-named``."""
    devices, replicas = devices_of(config, gpus)
    environment = server_environment(on_gpu=on_gpu, eager=effective.enforce_eager(config, on_gpu=on_gpu))
    environment.pop("VLLM_ENABLE_V1_MULTIPROCESSING")  # its engine lives where it likes
    environment |= {"CUDA_VISIBLE_DEVICES": ",".join(devices)} if on_gpu else {}
    words = rollout_command(config, port=port_of(config, server_index), replicas=replicas, on_gpu=on_gpu)
    return Command(words=tuple(words), environment=environment)


def model_options(config: RunConfig) -> dict[str, object]:
    """The policy, for both commands."""
    dtype, swift = effective.engine_dtype(config), config.custom.extra.swift
    return {
        "model": config.model.model,
        "model_type": swift.model_type,
        "template": swift.template,
        "torch_dtype": None if dtype == "auto" else dtype,  # ms-swift's own default reads config.json, too
    }


def _engine_kwargs(config: RunConfig, *, on_gpu: bool) -> dict[str, object]:
    """Engine arguments that have no option of their own."""
    vllm, cache_mib = config.custom.extra.rollout_matching.vllm, effective.kv_cache_memory_mib(config, on_gpu=on_gpu)
    arguments = {
        "kv_cache_memory_bytes": cache_mib * 2**20 if cache_mib else None,
        "max_num_batched_tokens": vllm.max_num_batched_tokens,
        "enable_chunked_prefill": _chunked_prefill(config, on_gpu=on_gpu),
        "load_format": None if vllm.load_format == "auto" else vllm.load_format,
    }
    given = {name: value for name, value in arguments.items() if value is not None}
    return given | config.custom.extra.rollout_server.vllm_engine_kwargs


def _chunked_prefill(config: RunConfig, *, on_gpu: bool) -> bool | None:
    """Whether prompts are split over several engine steps; None leaves it to vLLM.

    On a CPU they are not split, unless a step is shorter than a sequence: vLLM's engine dies where a seeded prompt is
    (``weights.worker.partial_prompts`` mends it in our own engines).
    """
    vllm = config.custom.extra.rollout_matching.vllm
    fits = vllm.max_num_batched_tokens is None or vllm.max_num_batched_tokens >= max_model_len(config)
    return False if vllm.enable_chunked_prefill is None and fits and not on_gpu else vllm.enable_chunked_prefill


def command_line(options: Mapping[str, object], extra: Mapping[str, object], *, key: str) -> list[str]:
    """Options as words; those without a value are left out. Errors: ``argument-has-own-key``."""
    if twice := sorted(options.keys() & extra.keys()):
        problem = "another section of the configuration sets this option"
        raise ConfigError(
            problem, code="argument-has-own-key", key=f"{key}.{twice[0]}", remedy="Set it there, and remove it here."
        )
    given = {name: value for name, value in {**options, **extra}.items() if value is not None}
    return [word for name, value in given.items() for word in (f"--{name}", *_value_words(value))]


def _value_words(value: object) -> Sequence[str]:
    """A value as ms-swift's parser reads it.

    >>> _value_words(False), _value_words(["a", 1]), _value_words({"image": 1}), _value_words(0.6)
    (('false',), ('a', '1'), ('{"image": 1}',), ('0.6',))
    """
    if isinstance(value, list | tuple):
        return tuple(word for item in value for word in _value_words(item))
    if isinstance(value, dict):
        return (json.dumps(value),)
    return (str(value).lower() if isinstance(value, bool) else str(value),)


CONFIG_VARIABLE = "ROLLMATCH_CONFIG"
"""Names the YAML for ``swift_rewards``, as a JSON list of its path and what ``--set`` laid over it."""
REWARDS = Path(__file__).with_name("swift_rewards.py")
LOSS_TYPES = {"token": "dapo", "sequence": "grpo", "constant": "dr_grpo"}
"""Our ``normalize`` -> ms-swift's name for the same mean."""
TRUNCATION = {"skip": "delete", "truncate_left": "left"}
"""Our ``overlong`` -> ms-swift's ``truncation_strategy``; error leaves it to ms-swift."""


def train_by_swift(path: str, *, overrides: Sequence[str], gpus: Sequence[str], wait: WaitPolicy, dry_run: bool) -> int:
    """Become ms-swift's learner; returns only from a dry run, which prints the command.

    Errors: the configuration's and the samples', ``swift-trains-otherwise``, those of waiting, ``swift-missing``.
    """
    config = load_config(path, overrides)
    command = learner_command(config, path, overrides=overrides, gpus=gpus)
    if not dry_run:
        train, val = load_checked(config)
        wait_for_servers(config, wait, gpus=gpus)
        for name, samples in (("train", train), ("val", val)):
            _write(_data_path(config, name), swift_rows(samples, config))
        become(command)
    print(command)
    return 0


def learner_command(config: RunConfig, path: str, *, overrides: Sequence[str], gpus: Sequence[str]) -> Command:
    """``swift rlhf --rlhf_type grpo``. Errors: ``swift-trains-otherwise``, ``argument-has-own-key``."""
    _check(config)
    options = model_options(config) | _connection(config) | _algorithm(config) | _training(config) | _tuner(config)
    words = command_line(options, config.custom.extra.swift.rlhf_options, key=f"{SWIFT}.rlhf_options")
    environment = dict(visible(gpus)) if gpus else {}
    environment |= {"NPROC_PER_NODE": str(max(1, len(gpus)))}
    environment |= {CONFIG_VARIABLE: json.dumps([str(Path(path).resolve()), *overrides])}
    return Command(words=("swift", "rlhf", *words), environment=environment)


def swift_rows(samples: Iterable[Sample], config: RunConfig) -> Iterable[dict[str, object]]:
    """Samples as ms-swift reads them: a chat, its images, and which sample it is."""
    prompts = config.custom.prompts
    for sample in samples:
        question = ("user", IMAGE_TAG * len(sample.images) + prompts.user)
        prompt = tagged_messages(sample) if sample.messages else (*_system(prompts.system), question)
        messages = [{"role": role, "content": text} for role, text in prompt]
        yield {"messages": messages, "images": list(sample.images), "origin": sample.origin}


def _check(config: RunConfig) -> None:
    if config.custom.trainer_variant != "grpo":
        problem = f"is {config.custom.trainer_variant}, which ms-swift's learner does not know"
        raise LaunchError(
            problem, code="swift-trains-otherwise", key="custom.trainer_variant", remedy="Train without --engine swift."
        )
    if config.custom.extra.environment.is_set:
        problem = "is set, and ms-swift's learner cannot use it"
        raise LaunchError(
            problem,
            code="swift-trains-otherwise",
            key="custom.extra.environment.name",
            remedy="Train without --engine swift.",
        )
    rules = config.custom.extra.grpo
    if rules.clip != "ppo":
        problem, key = "is cispo, whose bounds ms-swift's learner has no key for", "custom.extra.grpo.clip"
        raise LaunchError(problem, code="swift-trains-otherwise", key=key, remedy="Set it to ppo.")
    if rules.correction is not None:
        problem, key = "is set, and ms-swift's learner truncates weights of tokens", "custom.extra.grpo.correction"
        raise LaunchError(problem, code="swift-trains-otherwise", key=key, remedy="Use correction_cap.")
    if rules.entropy_coef:
        problem, key = "is set, and ms-swift's learner has no bonus for entropy", "custom.extra.grpo.entropy_coef"
        raise LaunchError(problem, code="swift-trains-otherwise", key=key, remedy="Remove it.")
    if config.training.tokens_per_micro_batch is not None:
        problem, key = "is set, and ms-swift's learner makes passes by samples", "training.tokens_per_micro_batch"
        raise LaunchError(problem, code="swift-trains-otherwise", key=key, remedy="Remove it.")
    if config.training.share_prompts is True:
        problem, key = "is true, and ms-swift's learner computes each prompt again", "training.share_prompts"
        raise LaunchError(problem, code="swift-trains-otherwise", key=key, remedy="Remove it.")
    if not uses_servers(config):
        remedy = "Name the server under rlhf, and start it with rollmatch serve."
        raise LaunchError("no server is named", code="swift-trains-otherwise", key="rlhf.vllm_mode", remedy=remedy)
    if server_section(config).servers_file is not None:
        problem, remedy = "is set, and ms-swift's learner reads no list again", "Name the servers under rlhf."
        raise LaunchError(problem, code="swift-trains-otherwise", key=SERVERS_FILE, remedy=remedy)


def _connection(config: RunConfig) -> dict[str, object]:
    servers = pair_servers(server_section(config))
    return {
        "rlhf_type": "grpo",
        "use_vllm": True,
        "vllm_mode": "server",
        "vllm_server_base_url": None if config.rlhf.vllm_server_host else [server.base_url for server in servers],
        "vllm_server_host": config.rlhf.vllm_server_host,
        "vllm_server_port": config.rlhf.vllm_server_port,
        "vllm_server_group_port": [server.group_port for server in servers],
        "vllm_server_timeout": server_section(config).timeout_s,
    }


def _algorithm(config: RunConfig) -> dict[str, object]:
    rules, rollout = config.custom.extra.grpo, config.custom.extra.rollout_matching
    return {
        "num_generations": rules.num_generations,
        "num_iterations": rules.num_iterations,
        "steps_per_generation": rules.steps_per_generation * config.training.gradient_accumulation_steps,
        "advantage_estimator": "rloo" if rules.baseline == "leave_one_out" else "grpo",
        "kl_in_reward": False,
        "scale_rewards": rules.scale_rewards,
        "dynamic_sample": rules.dynamic_sampling is not None,
        "max_resample_times": rules.dynamic_sampling.max_rounds if rules.dynamic_sampling else None,
        "overlong_filter": rules.mask_truncated_completions,
        "loss_type": LOSS_TYPES[rules.normalize],
        "importance_sampling_level": rules.importance,
        "epsilon": rules.epsilon,
        "epsilon_high": rules.epsilon_high,
        "delta": rules.ratio_cap,
        "beta": rules.beta,
        "top_entropy_quantile": rules.top_entropy_share,
        "rollout_importance_sampling_mode": "token_truncate" if rules.corrects else None,
        "rollout_importance_sampling_threshold": rules.corrects.high if rules.corrects else None,
        "max_completion_length": rollout.max_new_tokens,
        "temperature": rollout.decoding.temperature,
        "top_p": rollout.decoding.top_p,
        "top_k": rollout.decoding.top_k,
        "repetition_penalty": rollout.repetition_penalty,
    } | _rewards(rules)


def _rewards(rules: GrpoConfig) -> dict[str, object]:
    return {
        "external_plugins": [str(REWARDS)],
        "reward_funcs": [reward.shown_name for reward in rules.rewards],
        "reward_weights": [reward.weight for reward in rules.rewards],
    }


def _training(config: RunConfig) -> dict[str, object]:
    """ms-swift counts completions where we count samples."""
    training, size = config.training, config.custom.extra.grpo.num_generations
    given: dict[str, object] = {name: getattr(training, name) for name in TRAINER_KEYS}
    if effective.engine_dtype(config) == "float32":
        given["fp16"] = False  # ms-swift's default computes in float16 where the model is float32
    return given | {
        "gradient_checkpointing": training.gradient_checkpointing is not False,
        "per_device_train_batch_size": training.per_device_train_batch_size * size,
        "per_device_eval_batch_size": training.per_device_train_batch_size * size,
        "eval_strategy": "steps" if training.eval_steps else "no",
        "eval_steps": training.eval_steps or None,
        "report_to": training.report_to,
        "max_length": config.global_max_length,
        "truncation_strategy": TRUNCATION.get(config.overlong),
        "dataset": [str(_data_path(config, "train"))],
        "val_dataset": [str(_data_path(config, "val"))],
        "split_dataset_ratio": 0,
        "remove_unused_columns": False,
    }


def _tuner(config: RunConfig) -> dict[str, object]:
    tuner, attention = config.tuner, config.model.attn_impl
    options: dict[str, object] = {
        "tuner_type": tuner.train_type,
        "freeze_llm": tuner.freeze_llm,
        "freeze_vit": tuner.freeze_vit,
        "freeze_aligner": tuner.freeze_aligner,
        "attn_impl": None if attention == "packed" else attention,  # ours alone
    }
    if tuner.train_type == "lora":
        options |= {
            "use_dora": tuner.use_dora,
            "lora_rank": tuner.lora_rank,
            "lora_alpha": tuner.lora_alpha,
            "lora_dropout": tuner.lora_dropout,
            "target_regex": tuner.target_regex,
        }
    return options


def _data_path(config: RunConfig, name: str) -> Path:
    return Path(config.training.output_dir).resolve() / f"swift-{name}.jsonl"


def _system(text: str) -> tuple[tuple[str, str], ...]:
    return (("system", text),) if text else ()


def _write(path: Path, rows: Iterable[dict[str, object]]) -> None:
    os.makedirs(path.parent, exist_ok=True)
    path.write_text("".join(json.dumps(row) + "\n" for row in rows), encoding="utf-8")
