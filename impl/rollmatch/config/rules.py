"""Rules that need more than one key."""

import re
from collections.abc import Collection, Iterator

from rollmatch.config import effective
from rollmatch.config.batch_rules import BATCH_RULES
from rollmatch.config.distill_rules import DISTILL_RULES
from rollmatch.config.findings import INSTEAD, ROLLOUT_MATCHING
from rollmatch.config.objective_rules import ENVIRONMENT_RULES, GRPO_RULES, OVERLAP_RULES
from rollmatch.config.rollout_matching import ANSWER_FORMATS, TEXT, RolloutMatchingConfig
from rollmatch.config.schema import Rule, RunConfig
from rollmatch.config.server_rules import RLHF_RULES, SERVER_RULES
from rollmatch.config.servers import is_colocated
from rollmatch.config.strategy_rules import STRATEGY_RULES
from rollmatch.config.training import NOT_USED, TrainingConfig, TunerConfig
from rollmatch.errors import ConfigError

COORDINATE_LOSS = (
    "target_sigma",
    "target_truncate",
    "temperature_coord",
    "soft_ce_weight",
    "w1_weight",
    "gate_weight",
)
"""Keys of the loss of coordinate tokens."""
BESIDE_ADAPTERS = ("modules_to_save", "trainable_token_indices")
"""Keys of ``tuner`` that train weights beside the adapters."""


def check_rules(config: RunConfig, *, wrong_keys: Collection[str]) -> list[ConfigError]:
    """All broken rules, but for those that read a wrong key (or a key above or below one)."""

    def is_judgeable(rule: Rule) -> bool:
        return not any(_overlap(read, wrong) for read in rule.reads for wrong in wrong_keys)

    return [error for rule in RULES if is_judgeable(rule) for error in rule.check(config)]


def _overlap(one: str, other: str) -> bool:
    return f"{one}.".startswith(f"{other}.") or f"{other}.".startswith(f"{one}.")


def _rollout(config: RunConfig) -> RolloutMatchingConfig:
    return config.custom.extra.rollout_matching


def _dora(config: RunConfig) -> Iterator[ConfigError]:
    if config.tuner.use_dora and config.tuner.train_type != "lora":
        remedy = "Set tuner.train_type to lora, or use_dora to false."
        yield ConfigError(
            "is true, but tuner.train_type is full", code="dora-without-lora", key="tuner.use_dora", remedy=remedy
        )


def _adapter_options(config: RunConfig) -> Iterator[ConfigError]:
    """Keys that shape new adapters, where there are none, or where an adapter brings its own shape."""
    tuner = config.tuner
    beside = [name for name in BESIDE_ADAPTERS if getattr(tuner, name)]
    changed = [
        name
        for name, field in TunerConfig.model_fields.items()
        if name != "train_type" and getattr(tuner, name) != field.get_default(call_default_factory=True)
    ]
    continues = config.model.adapter_start == "continue"
    if tuner.train_type == "full":
        remedy = "Set tuner.train_type to lora, or remove it; --set tuner=null resets the whole section."
        ignored = [f"tuner.{name}" for name in changed if name != "use_dora" and not name.startswith("freeze_")]
        for key in (*ignored, *(["model.adapter_start"] if continues else ())):
            problem = "is set, but tuner.train_type is full"
            yield ConfigError(problem, code="adapter-option-without-lora", key=key, remedy=remedy)
        return
    for name in changed if continues else ():
        problem = "is set, but model.adapter_start is continue: the adapter's own shape is kept"
        remedy = "Remove it, or set model.adapter_start to merge."
        yield ConfigError(problem, code="adapter-option-not-used", key=f"tuner.{name}", remedy=remedy)
    for name in beside if _rollout(config).vllm.carries_adapter and not continues else ():
        problem, remedy = "trains weights that an adapter sync does not send", "Set sync.mode to full."
        yield ConfigError(problem, code="adapter-incomplete", key=f"tuner.{name}", remedy=remedy)


def _adapter_sync(config: RunConfig) -> Iterator[ConfigError]:
    """What an adapter that travels alone needs: that there is one, and an engine that applies it."""
    vllm, key = _rollout(config).vllm, f"{ROLLOUT_MATCHING}.vllm.sync.mode"
    if not vllm.carries_adapter:
        return
    if config.tuner.train_type == "full":
        problem = f"is {vllm.sync.mode}, which means adapter here, but tuner.train_type is full"
        remedy = "Set it to full, or tuner.train_type to lora."
        yield ConfigError(problem, code="adapter-option-without-lora", key=key, remedy=remedy)
    elif config.tuner.use_dora and is_colocated(config):
        problem, remedy = "is true, and a colocated engine applies no DoRA", "Set sync.mode to full."
        yield ConfigError(problem, code="adapter-incomplete", key="tuner.use_dora", remedy=remedy)


def _quantized_engine(config: RunConfig) -> Iterator[ConfigError]:
    vllm, code, key = _rollout(config).vllm, "cannot-quantize", f"{ROLLOUT_MATCHING}.vllm.quantization"
    if vllm.quantization is None:
        return
    if vllm.carries_adapter:
        problem = "is fp8, but adapters are sent alone, and merged where weights have all their bits"
        yield ConfigError(problem, code=code, key=key, remedy="Set sync.mode to full.")
    elif config.custom.extra.rollout_server.engine == "swift":
        problem = "is fp8, but ms-swift's server loads later weights as they come"
        yield ConfigError(problem, code=code, key=key, remedy="Set rollout_server.engine to rollmatch.")
    elif effective.engine_dtype(config) == "float32":
        problem = "is fp8, but the engine's other weights are float32"
        remedy = "Set vllm.dtype to bfloat16, or training.bf16 to true."
        yield ConfigError(problem, code=code, key=key, remedy=remedy)


def _half_weights(config: RunConfig) -> Iterator[ConfigError]:
    """Adam moves a weight by about the learning rate, which rounding to nearest undoes."""
    training, dtype = config.training, effective.learner_dtype(config)
    is_half = config.tuner.train_type == "full" and dtype in ("bfloat16", "float16")
    if is_half and "adam" in training.optim.lower() and not training.allow_half_weights:
        yield ConfigError(
            f"full fine-tuning of {dtype} weights with {training.optim} leaves most of them unchanged",
            code="half-weights",
            key="model.torch_dtype",
            remedy="Set training.bf16 to true (float32 weights, bfloat16 compute), or training.allow_half_weights.",
        )


def _one_precision(config: RunConfig) -> Iterator[ConfigError]:
    if config.training.bf16 and config.training.extra_arguments.get("fp16"):
        problem, remedy = "is true, and so is fp16", "Keep one of them; bf16 needs no scaling of the loss."
        yield ConfigError(problem, code="two-precisions", key="training.bf16", remedy=remedy)


def _frozen(config: RunConfig) -> Iterator[ConfigError]:
    if config.tuner.freeze_llm and config.tuner.freeze_vit and config.tuner.freeze_aligner:
        remedy = "Set one of freeze_llm, freeze_vit, freeze_aligner to false."
        yield ConfigError(
            "all three parts of the model are frozen", code="nothing-to-train", key="tuner.freeze_llm", remedy=remedy
        )


def _beam_backend(config: RunConfig) -> Iterator[ConfigError]:
    if _rollout(config).decode_mode == "beam" and _rollout(config).rollout_backend != "hf":
        key = f"{ROLLOUT_MATCHING}.decode_mode"
        yield ConfigError(
            "is beam, but rollout_backend is vllm",
            code="beam-needs-hf",
            key=key,
            remedy="Use rollout_backend hf, or greedy.",
        )


def _beam_count(config: RunConfig) -> Iterator[ConfigError]:
    mode, num_beams = _rollout(config).decode_mode, _rollout(config).num_beams
    if (mode == "beam") != (num_beams > 1):
        key = f"{ROLLOUT_MATCHING}.num_beams"
        remedy = "Use decode_mode beam with num_beams above 1, or greedy with 1."
        yield ConfigError(f"is {num_beams}, but decode_mode is {mode}", code="beams-disagree", key=key, remedy=remedy)


def _beam_temperature(config: RunConfig) -> Iterator[ConfigError]:
    temperature = _rollout(config).decoding.temperature
    if _rollout(config).decode_mode == "beam" and temperature > 0:
        key = f"{ROLLOUT_MATCHING}.decoding.temperature"
        yield ConfigError(
            f"is {temperature}, but decode_mode is beam",
            code="beam-sampled",
            key=key,
            remedy="Set it to 0, or use greedy.",
        )


def _segment_length(config: RunConfig) -> Iterator[ConfigError]:
    if config.global_max_length <= _rollout(config).max_new_tokens:
        problem = f"must be above {_longest_response(config)}, but is {config.global_max_length}"
        remedy = "Raise it by the length of a prompt and of appended objects, or lower max_new_tokens."
        yield ConfigError(problem, code="response-too-long", key="global_max_length", remedy=remedy)


def _engine_length(config: RunConfig) -> Iterator[ConfigError]:
    length, key = _rollout(config).vllm.max_model_len, f"{ROLLOUT_MATCHING}.vllm.max_model_len"
    if length is not None and length <= _rollout(config).max_new_tokens:
        problem = f"must be above {_longest_response(config)}, but is {length}"
        yield ConfigError(
            problem,
            code="response-too-long",
            key=key,
            remedy="Raise it by the length of a prompt, or lower max_new_tokens.",
        )


def _longest_response(config: RunConfig) -> str:
    """The key and its value, and whether anybody has set it."""
    rules = _rollout(config)
    by_default = "" if "max_new_tokens" in rules.model_fields_set else " (the default)"
    return f"{ROLLOUT_MATCHING}.max_new_tokens {rules.max_new_tokens}{by_default}"


def _engine_in_segment(config: RunConfig) -> Iterator[ConfigError]:
    length, key = _rollout(config).vllm.max_model_len, f"{ROLLOUT_MATCHING}.vllm.max_model_len"
    if length is not None and length > config.global_max_length:
        problem = f"must be at most global_max_length {config.global_max_length}, but is {length}"
        yield ConfigError(
            problem,
            code="engine-longer-than-segment",
            key=key,
            remedy="Lower it, leave it null, or raise global_max_length.",
        )


def _coordinate_loss(config: RunConfig) -> Iterator[ConfigError]:
    rollout = _rollout(config)
    if rollout.soft_ce_weight == rollout.w1_weight == rollout.gate_weight == 0:
        problem = "soft_ce_weight, w1_weight and gate_weight are all 0: coordinates would not be trained"
        key = f"{ROLLOUT_MATCHING}.soft_ce_weight"
        yield ConfigError(
            problem, code="coordinates-unsupervised", key=key, remedy="Give one of them a weight above 0."
        )


def _answer_format(config: RunConfig) -> Iterator[ConfigError]:
    name, key = _rollout(config).answer_format, f"{ROLLOUT_MATCHING}.answer_format"
    if config.custom.teaches_text:
        return
    if name == TEXT:
        problem = f"is {TEXT}, but {config.custom.trainer_variant} teaches no texts of the data"
        remedy = "Remove it, or set custom.trainer_variant to sft."
        yield ConfigError(problem, code="answer-format-unused", key=key, remedy=remedy)
    elif name not in ANSWER_FORMATS and not re.fullmatch(r"[\w.]+:\w+", name):
        remedy = f"Use one of {', '.join((*ANSWER_FORMATS, TEXT))}, or package.module:Class."
        yield ConfigError(f"is {name!r}", code="answer-format-unknown", key=key, remedy=remedy)


def _coordinate_loss_used(config: RunConfig) -> Iterator[ConfigError]:
    rollout = _rollout(config)
    for name in () if rollout.uses_coord_tokens else COORDINATE_LOSS:
        if getattr(rollout, name) != RolloutMatchingConfig.model_fields[name].default:
            yield ConfigError(
                f"is set, but answer_format {rollout.answer_format} has no coordinate tokens",
                code="coordinate-loss-unused",
                key=f"{ROLLOUT_MATCHING}.{name}",
                remedy="Remove it: numbers are learned as text. Or set answer_format to coord_tokens.",
            )


def _extra_arguments(config: RunConfig) -> Iterator[ConfigError]:
    for name in config.training.extra_arguments:
        key = f"training.extra_arguments.{name}"
        if name in TrainingConfig.model_fields:
            remedy = f"Move it to training.{name}."
            yield ConfigError("has a key of its own", code="argument-has-own-key", key=key, remedy=remedy)
        elif name in NOT_USED:
            remedy = INSTEAD.get(name, "Remove it: samples, losses and evaluations are not those of transformers.")
            yield ConfigError("does not apply here", code="argument-not-used", key=key, remedy=remedy)


def _early_stopping(config: RunConfig) -> Iterator[ConfigError]:
    if config.training.early_stopping is None:
        return
    if not config.training.eval_steps:
        problem, remedy = "is set, but nothing is evaluated while training", "Set training.eval_steps."
        yield ConfigError(problem, code="early-stopping-blind", key="training.early_stopping", remedy=remedy)
    for name in ("metric_for_best_model", "greater_is_better"):
        if name in config.training.extra_arguments:
            problem, key = "is set by training.early_stopping", f"training.extra_arguments.{name}"
            yield ConfigError(problem, code="argument-has-own-key", key=key, remedy="Remove it.")


def _evaluations(config: RunConfig) -> Iterator[ConfigError]:
    for name in ("eval_steps", "eval_scenes") if not config.custom.is_evaluated else ():
        if getattr(config.training, name):
            problem, key = "is set, but there are no samples to evaluate", f"training.{name}"
            remedy = "Name held-out samples (custom.val_jsonl, custom.dataset.val or eval_dataset), or remove it."
            yield ConfigError(problem, code="nothing-to-evaluate", key=key, remedy=remedy)


def _reporters(config: RunConfig) -> Iterator[ConfigError]:
    names = config.training.report_to
    if len(set(names)) != len(names) or ("none" in names and len(names) > 1):
        remedy = "Name each reporter once; use none alone."
        yield ConfigError(f"is {list(names)}", code="reporter-contradiction", key="training.report_to", remedy=remedy)


def _files_or_dataset(config: RunConfig) -> Iterator[ConfigError]:
    for name in ("train_jsonl", "val_jsonl"):
        is_set, key = getattr(config.custom, name) is not None, f"custom.{name}"
        if config.custom.dataset is None and not is_set and name == "train_jsonl":
            remedy = "Name a JSONL file, or describe a Hugging Face data set in custom.dataset."
            yield ConfigError("is missing", code="missing-key", key=key, remedy=remedy)
        if config.custom.dataset is not None and is_set:
            yield ConfigError(
                "is set, and custom.dataset is, too", code="two-data-sets", key=key, remedy="Keep one of them."
            )


def _box(config: RunConfig) -> Iterator[ConfigError]:
    dataset = config.custom.dataset
    if dataset is None or dataset.columns.has_questions or dataset.box is not None:
        return
    if not config.custom.detects:
        remedy = "Name the column of questions, or in columns.messages that of chats; of images with boxes, set box."
        yield ConfigError("is missing", code="missing-key", key="custom.dataset.columns.prompt", remedy=remedy)
    else:
        remedy = "Say what the four numbers are: xywh (COCO), xyxy or cxcywh; there is no standard."
        yield ConfigError("is missing", code="missing-key", key="custom.dataset.box", remedy=remedy)


def _questions(config: RunConfig) -> Iterator[ConfigError]:
    dataset = config.custom.dataset
    if dataset is not None and dataset.columns.has_questions and config.custom.detects:
        key = f"custom.dataset.columns.{'prompt' if dataset.columns.prompt else 'messages'}"
        problem = f"{config.custom.trainer_variant} uses custom.prompts for all samples"
        remedy = "Remove it, or use a variant with rewards, or sft with answer_format text."
        yield ConfigError(problem, code="question-not-used", key=key, remedy=remedy)


def _stream(config: RunConfig) -> Iterator[ConfigError]:
    dataset = config.custom.dataset
    if dataset is not None and dataset.streaming and dataset.take is None:
        problem = "a stream has no length, which the order of samples and an exact resume need"
        remedy = "Set take: so many records are read once and stored."
        yield ConfigError(problem, code="missing-key", key="custom.dataset.take", remedy=remedy)


def _of_rollout(*names: str) -> tuple[str, ...]:
    return tuple(f"{ROLLOUT_MATCHING}.{name}" for name in names)


_DATA = ("custom.val_jsonl", "custom.dataset")
_PRECISION = ("bf16", "optim", "allow_half_weights")
_SYNC = _of_rollout("rollout_backend", "vllm.mode", "vllm.sync.mode", "vllm.enable_lora")
_LENGTHS = _of_rollout("max_new_tokens", "vllm.max_model_len")
RULES: tuple[Rule, ...] = (
    Rule(reads=("tuner.use_dora", "tuner.train_type"), check=_dora),
    Rule(
        reads=("tuner", "model.adapter_start", *_of_rollout("vllm.sync.mode", "vllm.enable_lora")),
        check=_adapter_options,
    ),
    Rule(reads=("tuner", "rlhf", "custom.trainer_variant", *_SYNC), check=_adapter_sync),
    Rule(
        reads=(
            *("model.torch_dtype", "training.bf16", "custom.extra.rollout_server.engine"),
            *_of_rollout("vllm.quantization", "vllm.dtype", "vllm.sync.mode", "vllm.enable_lora"),
        ),
        check=_quantized_engine,
    ),
    Rule(
        reads=("tuner.train_type", "model.torch_dtype", *(f"training.{name}" for name in _PRECISION)),
        check=_half_weights,
    ),
    Rule(reads=("training.bf16", "training.extra_arguments"), check=_one_precision),
    Rule(reads=("tuner.freeze_llm", "tuner.freeze_vit", "tuner.freeze_aligner"), check=_frozen),
    Rule(reads=_of_rollout("decode_mode", "rollout_backend"), check=_beam_backend),
    Rule(reads=_of_rollout("decode_mode", "num_beams"), check=_beam_count),
    Rule(reads=_of_rollout("decode_mode", "decoding.temperature"), check=_beam_temperature),
    Rule(reads=("global_max_length", _LENGTHS[0]), check=_segment_length),
    Rule(reads=_LENGTHS, check=_engine_length),
    Rule(reads=("global_max_length", _LENGTHS[1]), check=_engine_in_segment),
    Rule(reads=_of_rollout("soft_ce_weight", "w1_weight", "gate_weight"), check=_coordinate_loss),
    Rule(reads=("custom.trainer_variant", *_of_rollout("answer_format")), check=_answer_format),
    Rule(reads=_of_rollout("answer_format", *COORDINATE_LOSS), check=_coordinate_loss_used),
    *BATCH_RULES,
    Rule(reads=("training.extra_arguments",), check=_extra_arguments),
    Rule(reads=("training.early_stopping", "training.eval_steps"), check=_early_stopping),
    Rule(reads=("training.eval_steps", "training.eval_scenes", *_DATA), check=_evaluations),
    Rule(reads=("training.report_to",), check=_reporters),
    Rule(reads=("custom.train_jsonl", *_DATA), check=_files_or_dataset),
    Rule(reads=("custom.dataset",), check=_box),
    Rule(reads=("custom.dataset", "custom.trainer_variant", *_of_rollout("answer_format")), check=_questions),
    Rule(reads=("custom.dataset",), check=_stream),
    *STRATEGY_RULES,
    *SERVER_RULES,
    *OVERLAP_RULES,
    *RLHF_RULES,
    *GRPO_RULES,
    *DISTILL_RULES,
    *ENVIRONMENT_RULES,
)
