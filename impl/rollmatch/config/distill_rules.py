"""Rules of distillation: its teachers, its loss, and what of the policy gradient it uses."""

from collections.abc import Iterator

from rollmatch.config.custom import GrpoConfig
from rollmatch.config.effective import compares_beside_teachers, has_policy_gradient
from rollmatch.config.schema import Rule, RunConfig
from rollmatch.errors import ConfigError

DISTILL, GRPO, VARIANT = "custom.extra.distill", "custom.extra.grpo", "custom.trainer_variant"
OVERLAP = "custom.extra.rollout_matching.overlap"
TEMPERATURE = "custom.extra.rollout_matching.decoding.temperature"
OF_THE_GRADIENT = (
    "baseline",
    "scale_rewards",
    "importance",
    "clip",
    "epsilon",
    "epsilon_high",
    "ratio_cap",
    "old_logprobs",
    "correction",
)
"""Keys of ``custom.extra.grpo`` that only a policy gradient reads."""


def _teachers(config: RunConfig) -> Iterator[ConfigError]:
    teachers, variant, key = config.custom.extra.distill.teachers, config.custom.trainer_variant, f"{DISTILL}.teachers"
    if variant == "distill" and not teachers:
        remedy = "Name one, as {model: DIRECTORY}, or {self: true, prompt: ...}."
        yield ConfigError("names no teacher", code="teachers-missing", key=key, remedy=remedy)
    if variant != "distill" and teachers:
        problem, remedy = f"is set, but {VARIANT} is {variant}", "Set trainer_variant to distill, or remove it."
        yield ConfigError(problem, code="teachers-not-asked", key=key, remedy=remedy)


def _each_teacher(config: RunConfig) -> Iterator[ConfigError]:
    teachers, key = config.custom.extra.distill.teachers, f"{DISTILL}.teachers"
    for place, teacher in enumerate(teachers):
        named = [name for name in ("base_url", "model", "self") if getattr(teacher, name)]
        if len(named) != 1:
            problem = f"names {' and '.join(named) or 'no teacher'}"
            remedy = "Write one of base_url, model and self: true."
            yield ConfigError(problem, code="teacher-ambiguous", key=f"{key}.{place}", remedy=remedy)
        elif teacher.self and teacher.prompt is None:
            problem, remedy = "would teach what it does itself", "Add a prompt, such as one with worked examples."
            yield ConfigError(problem, code="teacher-is-the-policy", key=f"{key}.{place}.prompt", remedy=remedy)


def _average(config: RunConfig) -> Iterator[ConfigError]:
    for place, teacher in enumerate(config.custom.extra.distill.teachers):
        key = f"{DISTILL}.teachers.{place}.average"
        if teacher.average is not None and not teacher.self:
            problem, remedy = (
                "is set, but only the policy's own weights are averaged",
                "Remove it, or write self: true.",
            )
            yield ConfigError(problem, code="teacher-average-of-another", key=key, remedy=remedy)
        elif teacher.average is not None and config.training.strategy != "ddp":
            problem = f"is set, but {config.training.strategy} keeps the weights in parts, or not in float32"
            remedy = "Set training.strategy to ddp, or remove it."
            yield ConfigError(problem, code="teacher-average-in-parts", key=key, remedy=remedy)


def _off_policy(config: RunConfig) -> Iterator[ConfigError]:
    extra = config.custom.extra
    rules, key = extra.distill, f"{DISTILL}.lmbda"
    if rules.lmbda == 1:
        if rules.answers is not None:
            problem, remedy = "is set, but lmbda is 1: all completions are the policy's", "Remove it, or lower lmbda."
            yield ConfigError(problem, code="off-policy-unused", key=f"{DISTILL}.answers", remedy=remedy)
        return
    if rules.answers is None:
        remedy = 'Write it with fields of the metadata, such as "The answer is {answer}.", or set lmbda to 1.'
        problem = f"is null, but lmbda is {rules.lmbda:g}: other completions are the data set's own"
        yield ConfigError(problem, code="off-policy-without-answers", key=f"{DISTILL}.answers", remedy=remedy)
    if config.custom.trainer_variant != "distill":
        why, remedy = f"trainer_variant is {config.custom.trainer_variant}", "Set trainer_variant to distill."
    elif has_policy_gradient(config):
        why, remedy = (
            "a policy gradient needs what the policy wrote",
            "Set loss to divergence, rewards to weight 0.",
        )
    elif extra.grpo.beta:
        why, remedy = "grpo.beta measures a distance at what the policy wrote", "Set grpo.beta to 0."
    elif extra.grpo.num_generations > 1:
        why, remedy = "num_generations would repeat each answer", "Set grpo.num_generations to 1."
    elif extra.environment.is_set:
        why, remedy = "an environment is to be played", "Leave the environment out."
    elif extra.rollout_matching.overlap != "off":
        why, remedy = "overlap requests completions of all phases in advance", "Set overlap to off."
    else:
        return
    problem = f"is {rules.lmbda:g}, but {why}"
    yield ConfigError(problem, code="off-policy-undefined", key=key, remedy=remedy)


def _order(config: RunConfig) -> Iterator[ConfigError]:
    for place, teacher in enumerate(config.custom.extra.distill.teachers[:-1]):
        if not teacher.when:
            problem = "is empty: every sample has this teacher, and those behind it none"
            remedy = "Add the metadata of its samples, or make it the last one."
            key = f"{DISTILL}.teachers.{place}.when"
            yield ConfigError(problem, code="teacher-never-asked", key=key, remedy=remedy)


def _temperature(config: RunConfig) -> Iterator[ConfigError]:
    """A server's log-probabilities are of its own distribution, whatever a request says."""
    temperature = config.custom.extra.rollout_matching.decoding.temperature
    for place, teacher in enumerate(config.custom.extra.distill.teachers):
        if teacher.base_url is not None and temperature != 1:
            problem = f"needs completions of temperature 1, but they have {temperature}"
            remedy = f"Set {TEMPERATURE} to 1, or load the teacher by model."
            key = f"{DISTILL}.teachers.{place}.base_url"
            yield ConfigError(problem, code="teacher-temperature", key=key, remedy=remedy)


def _loss(config: RunConfig) -> Iterator[ConfigError]:
    rules = config.custom.extra.distill
    for name, good in (("beta", "1 (the reverse KL)"), ("top_k", "64")):
        is_set = getattr(rules, name) is not None
        if rules.loss == "divergence" and not is_set and config.custom.trainer_variant == "distill":
            problem, remedy = "is null, but loss is divergence", f"Set it, for example to {good}."
            yield ConfigError(problem, code="divergence-unset", key=f"{DISTILL}.{name}", remedy=remedy)
        if rules.loss == "sampled" and is_set:
            problem = "is set, but loss is sampled, which looks at the sampled token alone"
            remedy = "Remove it, or set loss to divergence."
            yield ConfigError(problem, code="divergence-unused", key=f"{DISTILL}.{name}", remedy=remedy)


def _policy_gradient(config: RunConfig) -> Iterator[ConfigError]:
    """A divergence without rewards has no ratio and no advantage."""
    rules = config.custom.extra.grpo
    if config.custom.trainer_variant != "distill" or has_policy_gradient(config):
        return
    for name in OF_THE_GRADIENT:
        if getattr(rules, name) != GrpoConfig.model_fields[name].default:
            problem = "is set, but a divergence without rewards has no policy gradient"
            remedy = "Remove it, name rewards, or set distill.loss to sampled."
            yield ConfigError(problem, code="policy-gradient-unused", key=f"{GRPO}.{name}", remedy=remedy)


def _group(config: RunConfig) -> Iterator[ConfigError]:
    """What compares completions needs two of them."""
    rules, variant = config.custom.extra.grpo, config.custom.trainer_variant
    compares = config.custom.learns_from_completions and (variant != "distill" or compares_beside_teachers(config))
    if rules.num_generations == 1 and compares:
        problem, remedy = "is 1, but rewards are compared within a group", "Set it to 2 or more."
        yield ConfigError(problem, code="group-too-small", key=f"{GRPO}.num_generations", remedy=remedy)


PAY = f"{DISTILL}.environment_weight"


def _pay(config: RunConfig) -> Iterator[ConfigError]:
    extra, key = config.custom.extra, PAY
    is_distill = config.custom.trainer_variant == "distill"
    if extra.distill.environment_weight and (not is_distill or extra.environment.name is None):
        why = "no environment pays" if is_distill else f"trainer_variant is {config.custom.trainer_variant}"
        problem, remedy = f"is set, but {why}", "Remove it, or set trainer_variant to distill and environment.name."
        yield ConfigError(problem, code="pay-unused", key=key, remedy=remedy)


DISTILL_RULES: tuple[Rule, ...] = (
    Rule(reads=(VARIANT, PAY, "custom.extra.environment"), check=_pay),
    Rule(reads=(VARIANT, f"{DISTILL}.teachers"), check=_teachers),
    Rule(reads=(f"{DISTILL}.teachers",), check=_each_teacher),
    Rule(reads=(f"{DISTILL}.teachers",), check=_order),
    Rule(reads=(f"{DISTILL}.teachers", "training.strategy"), check=_average),
    Rule(
        reads=(
            VARIANT,
            *(f"{DISTILL}.{name}" for name in ("lmbda", "answers", "loss")),
            *(f"{GRPO}.{name}" for name in ("rewards", "beta", "num_generations")),
            OVERLAP,
            "custom.extra.environment",
        ),
        check=_off_policy,
    ),
    Rule(reads=(f"{DISTILL}.teachers", TEMPERATURE), check=_temperature),
    Rule(reads=(VARIANT, f"{DISTILL}.loss", f"{DISTILL}.beta", f"{DISTILL}.top_k"), check=_loss),
    Rule(
        reads=(VARIANT, f"{DISTILL}.loss", PAY, f"{GRPO}.rewards", *(f"{GRPO}.{name}" for name in OF_THE_GRADIENT)),
        check=_policy_gradient,
    ),
    Rule(reads=(VARIANT, PAY, f"{GRPO}.rewards", f"{GRPO}.num_generations"), check=_group),
)
