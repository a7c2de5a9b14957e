"""Rules of the objectives: rewards, environments, overlap and staleness."""

from collections import Counter
from collections.abc import Iterator

from rollmatch.config.custom import GrpoConfig
from rollmatch.config.effective import has_policy_gradient, judges_ahead, steps_per_window, windows_of_staleness
from rollmatch.config.findings import ROLLOUT_MATCHING
from rollmatch.config.schema import Rule, RunConfig
from rollmatch.config.servers import uses_servers
from rollmatch.errors import ConfigError

GRPO = "custom.extra.grpo"
VARIANT = "custom.trainer_variant"


def _rewards(config: RunConfig) -> Iterator[ConfigError]:
    rewards = config.custom.extra.grpo.rewards
    is_paid = bool(rewards) or config.custom.extra.environment.name is not None
    if config.custom.learns_from_completions and config.custom.trainer_variant != "distill" and not is_paid:
        remedy = "Name one, as {function: package.module:function}, or an environment, which pays by its steps."
        yield ConfigError("names no reward function", code="rewards-missing", key=f"{GRPO}.rewards", remedy=remedy)
    twice = [name for name, count in Counter(reward.shown_name for reward in rewards).items() if count > 1]
    if twice:
        remedy = "Give one of them a name of its own."
        yield ConfigError(
            f"two rewards are called {twice[0]}", code="reward-named-twice", key=f"{GRPO}.rewards", remedy=remedy
        )


def _sampled(config: RunConfig) -> Iterator[ConfigError]:
    rollout = config.custom.extra.rollout_matching
    is_greedy = rollout.decoding.temperature == 0 or rollout.num_beams > 1
    if config.custom.learns_from_completions and is_greedy:
        problem, key = "is 0, or beams search: all completions of a group would be the same", "decoding.temperature"
        remedy = "Set it to 1, and decode_mode to greedy."
        yield ConfigError(problem, code="group-not-sampled", key=f"{ROLLOUT_MATCHING}.{key}", remedy=remedy)


def _ratio_cap(config: RunConfig) -> Iterator[ConfigError]:
    rules = config.custom.extra.grpo
    high = 1 + (rules.epsilon if rules.epsilon_high is None else rules.epsilon_high)
    if rules.ratio_cap is not None and rules.ratio_cap <= high:
        remedy = "Raise it, or leave it null."
        yield ConfigError(
            f"must be above {high}, but is {rules.ratio_cap}",
            code="ratio-cap-under-clip",
            key=f"{GRPO}.ratio_cap",
            remedy=remedy,
        )


def _importance(config: RunConfig) -> Iterator[ConfigError]:
    rules, variant = config.custom.extra.grpo, config.custom.trainer_variant
    if rules.importance != "sequence" or not config.custom.learns_from_completions:
        return
    if rules.clip == "cispo":
        problem, remedy = "is sequence, but cispo weighs single tokens", "Set it to token, or clip to ppo."
    elif rules.ratio_cap is not None:
        problem, remedy = "is sequence, but ratio_cap bounds ratios of tokens", "Set it to token, or ratio_cap to null."
    elif variant != "grpo":
        unit = "token" if variant == "distill" else "step"
        problem = f"is sequence, but {variant} has an advantage per {unit}, and the ratio of a response has one of all"
        remedy = "Set it to token, or trainer_variant to grpo."
    else:
        return
    yield ConfigError(problem, code="importance-undefined", key=f"{GRPO}.importance", remedy=remedy)


def _entropy(config: RunConfig) -> Iterator[ConfigError]:
    """Pairs that no paper defines."""
    rules, variant = config.custom.extra.grpo, config.custom.trainer_variant
    for name, neutral in (("entropy_coef", 0.0), ("top_entropy_share", 1.0)):
        if getattr(rules, name) != neutral and variant == "distill":
            problem = "is set, but what teachers say of a token does not depend on its entropy"
            yield ConfigError(problem, code="entropy-undefined", key=f"{GRPO}.{name}", remedy="Remove it.")
    if rules.top_entropy_share != 1 and (rules.importance, rules.clip) != ("token", "ppo"):
        problem = "selects tokens, which is defined for ratios of tokens that are clipped by ppo"
        remedy = "Set it to 1, or importance to token and clip to ppo."
        yield ConfigError(problem, code="entropy-undefined", key=f"{GRPO}.top_entropy_share", remedy=remedy)


def _cispo(config: RunConfig) -> Iterator[ConfigError]:
    rules = config.custom.extra.grpo
    if rules.clip != "cispo" or not config.custom.learns_from_completions:
        return
    if rules.epsilon_high is None:
        problem, remedy = "is null, but is the only bound of cispo", "Set it, for example to 4."
        yield ConfigError(problem, code="cispo-bounds", key=f"{GRPO}.epsilon_high", remedy=remedy)
    if rules.epsilon != GrpoConfig.model_fields["epsilon"].default:
        problem, remedy = f"is {rules.epsilon}, but cispo has no lower bound", "Remove it, or set clip to ppo."
        yield ConfigError(problem, code="cispo-bounds", key=f"{GRPO}.epsilon", remedy=remedy)
    if rules.ratio_cap is not None:
        problem = f"is {rules.ratio_cap}, but cispo bounds ratios by epsilon_high alone"
        remedy = "Set it to null, or clip to ppo."
        yield ConfigError(problem, code="cispo-bounds", key=f"{GRPO}.ratio_cap", remedy=remedy)


def _dynamic_sampling(config: RunConfig) -> Iterator[ConfigError]:
    variant, rollout = config.custom.trainer_variant, config.custom.extra.rollout_matching
    if config.custom.extra.grpo.dynamic_sampling is None:
        return
    if variant != "grpo":
        problem = f"is set, but custom.trainer_variant is {variant}, which learns from groups without spread, too"
        remedy = "Remove it, or set trainer_variant to grpo."
    elif config.custom.extra.environment.is_set:
        problem, remedy = "is set, but episodes of an environment are not replaced", "Remove it, or the environment."
    elif rollout.overlap != "off":
        problem = f"is set, but with overlap: {rollout.overlap} learning would wait for what nobody requested in time"
        remedy = "Remove it, or set overlap to off."
    else:
        return
    yield ConfigError(problem, code="dynamic-sampling-undefined", key=f"{GRPO}.dynamic_sampling", remedy=remedy)


def _correction_parts(config: RunConfig) -> Iterator[ConfigError]:
    rules, found = config.custom.extra.grpo, config.custom.extra.grpo.correction
    if found is None or not config.custom.learns_from_completions:
        return
    key = f"{GRPO}.correction"
    if rules.correction_cap is not None:
        problem, remedy = "is set, and correction is, too", "Remove it, and write correction.high."
        yield ConfigError(problem, code="correction-twice", key=f"{GRPO}.correction_cap", remedy=remedy)
    if rules.old_logprobs == "server":
        problem = "is set, but with old_logprobs: server the ratio itself starts from the engine"
        remedy = "Remove it, or set old_logprobs to recomputed."
        yield ConfigError(problem, code="correction-not-used", key=key, remedy=remedy)
    if found.level == "geometric" and found.mode == "truncate":
        problem, remedy = "is truncate, but a geometric mean only decides which responses count", "Set it to mask."
        yield ConfigError(problem, code="correction-undefined", key=f"{key}.mode", remedy=remedy)
    if found.low is not None and found.low > found.high:
        problem, remedy = f"must be at most high {found.high}, but is {found.low}", "Lower it, or raise high."
        yield ConfigError(problem, code="correction-bounds", key=f"{key}.low", remedy=remedy)


def find_sampling_bias(config: RunConfig) -> str | None:
    """What ratio and correction are off by where the engine samples from another distribution than the learner has.

    Temperature is the learner's, too; what cuts or moves probabilities is the engine's alone. None: nothing is off.
    """
    rollout = config.custom.extra.rollout_matching
    top_p, top_k, penalty = rollout.decoding.top_p, rollout.decoding.top_k, rollout.repetition_penalty
    settings = {"decoding.top_p": (top_p, 1.0), "decoding.top_k": (top_k, -1), "repetition_penalty": (penalty, 1.0)}
    changed = [f"{name}: {value}" for name, (value, neutral) in settings.items() if value != neutral]
    if not changed or not has_policy_gradient(config):
        return None
    effect = "how far depends on the model: correction_mean of the first step says it"
    if len(changed) == 1 and top_p != 1:
        length = rollout.max_new_tokens
        whole = f"{top_p**length:.2g} for a response of {length}"
        effect = f"at equal weights by {top_p:g} to 1 for a token, and down to {whole}"
    return (
        f"{ROLLOUT_MATCHING}: {', '.join(changed)}: the engine samples from other probabilities than the learner's, so "
        f"that ratios and corrections are off, {effect}; top_p 1, top_k -1 and repetition_penalty 1 are exact"
    )


GRPO_RULES: tuple[Rule, ...] = (
    Rule(reads=(VARIANT, f"{GRPO}.rewards", "custom.extra.environment"), check=_rewards),
    Rule(reads=(VARIANT, f"{ROLLOUT_MATCHING}.decoding.temperature", f"{ROLLOUT_MATCHING}.num_beams"), check=_sampled),
    Rule(reads=(f"{GRPO}.ratio_cap", f"{GRPO}.epsilon", f"{GRPO}.epsilon_high"), check=_ratio_cap),
    Rule(reads=(VARIANT, f"{GRPO}.importance", f"{GRPO}.clip", f"{GRPO}.ratio_cap"), check=_importance),
    Rule(
        reads=(
            VARIANT,
            f"{GRPO}.entropy_coef",
            f"{GRPO}.top_entropy_share",
            f"{GRPO}.importance",
            f"{GRPO}.clip",
        ),
        check=_entropy,
    ),
    Rule(reads=(VARIANT, f"{GRPO}.clip", f"{GRPO}.epsilon", f"{GRPO}.epsilon_high", f"{GRPO}.ratio_cap"), check=_cispo),
    Rule(
        reads=(VARIANT, f"{GRPO}.correction", f"{GRPO}.correction_cap", f"{GRPO}.old_logprobs"),
        check=_correction_parts,
    ),
    Rule(
        reads=(VARIANT, f"{GRPO}.dynamic_sampling", "custom.extra.environment", f"{ROLLOUT_MATCHING}.overlap"),
        check=_dynamic_sampling,
    ),
)


ENVIRONMENT = "custom.extra.environment"
MOST_TOKENS = f"{ROLLOUT_MATCHING}.max_new_tokens"


def _environment_variant(config: RunConfig) -> Iterator[ConfigError]:
    is_played = config.custom.learns_from_completions
    environment = config.custom.extra.environment
    if environment.is_set and not is_played:
        problem = f"is set, but custom.trainer_variant is {config.custom.trainer_variant}"
        remedy = "Set trainer_variant to grpo, distill, vineppo or vineppo_mcts, or leave the environment out."
        key = f"{ENVIRONMENT}.{'name' if environment.name else 'tools'}"
        yield ConfigError(problem, code="environment-not-played", key=key, remedy=remedy)


def _tools(config: RunConfig) -> Iterator[ConfigError]:
    environment = config.custom.extra.environment
    if not environment.tools:
        return
    if environment.name is not None:
        problem, remedy = f"is set beside name {environment.name}", "Keep one: an environment shows its own tools."
        yield ConfigError(problem, code="tools-beside-environment", key=f"{ENVIRONMENT}.tools", remedy=remedy)
    elif environment.options:
        problem, remedy = "is set, and tools take none", "Remove it."
        yield ConfigError(problem, code="tools-beside-environment", key=f"{ENVIRONMENT}.options", remedy=remedy)


def _environment_rewards(config: RunConfig) -> Iterator[ConfigError]:
    environment = config.custom.extra.environment
    if environment.name is not None and not environment.tools and config.custom.extra.grpo.rewards:
        problem = "is named, and custom.extra.grpo.rewards names functions"
        remedy = "Leave the functions out, and let the environment's steps pay."
        yield ConfigError(problem, code="environment-beside-rewards", key=f"{ENVIRONMENT}.name", remedy=remedy)


def _episode_length(config: RunConfig) -> Iterator[ConfigError]:
    environment, turn = config.custom.extra.environment, config.custom.extra.rollout_matching.max_new_tokens
    if not environment.is_set:
        return
    key = f"{ENVIRONMENT}.max_response_tokens"
    if environment.max_response_tokens >= config.global_max_length:
        problem = (
            f"must be below global_max_length {config.global_max_length}, but is {environment.max_response_tokens}"
        )
        yield ConfigError(
            problem,
            code="episode-length-misfit",
            key=key,
            remedy="Lower it by the length of a prompt, or raise the other.",
        )
    elif environment.max_response_tokens < turn:
        problem = f"must be at least max_new_tokens {turn}, but is {environment.max_response_tokens}"
        yield ConfigError(
            problem,
            code="episode-length-misfit",
            key=key,
            remedy="Raise it, or lower max_new_tokens: that is of one turn.",
        )


ENVIRONMENT_RULES: tuple[Rule, ...] = (
    Rule(reads=("custom.trainer_variant", ENVIRONMENT), check=_environment_variant),
    Rule(reads=("custom.extra.grpo.rewards", ENVIRONMENT), check=_environment_rewards),
    Rule(reads=(ENVIRONMENT,), check=_tools),
    Rule(reads=("global_max_length", MOST_TOKENS, ENVIRONMENT), check=_episode_length),
)


OVERLAP = f"{ROLLOUT_MATCHING}.overlap"
STALENESS = f"{ROLLOUT_MATCHING}.max_staleness"
PIECES = f"{ROLLOUT_MATCHING}.pieces_per_server"
LATE = f"{ROLLOUT_MATCHING}.late_windows"
IN_FLIGHT = f"{ROLLOUT_MATCHING}.vllm.sync.in_flight"


_SERVER_MODE = f"{ROLLOUT_MATCHING}.vllm.mode"


def _servers(config: RunConfig) -> Iterator[ConfigError]:
    rules = config.custom.extra.rollout_matching
    if rules.overlap != "off" and config.custom.learns_from_rollouts and not uses_servers(config):
        problem = f"is {rules.overlap}, but rollouts are made in the learner's own process"
        remedy = f"Set {_SERVER_MODE} to server (or rlhf.use_vllm to true with vllm_mode server), or overlap to off."
        yield ConfigError(problem, code="overlap-needs-servers", key=OVERLAP, remedy=remedy)


def _pieces(config: RunConfig) -> Iterator[ConfigError]:
    rules = config.custom.extra.rollout_matching
    if rules.pieces_per_server > 1 and rules.overlap == "off":
        problem, remedy = f"is {rules.pieces_per_server}, but overlap is off", "Set it to 1, or overlap to ahead."
        yield ConfigError(problem, code="late-work-needs-overlap", key=PIECES, remedy=remedy)


def _overlap_variant(config: RunConfig) -> Iterator[ConfigError]:
    overlap, variant = config.custom.extra.rollout_matching.overlap, config.custom.trainer_variant
    if overlap != "off" and variant == "sft":
        problem = f"is {overlap}, but custom.trainer_variant is sft: it learns from no rollouts"
        yield ConfigError(problem, code="overlap-of-another-objective", key=OVERLAP, remedy="Set it to off.")


def _values_ahead(config: RunConfig) -> Iterator[ConfigError]:
    """A window's values are of the weights that wrote it: it is written and judged between two syncs."""
    rules, variant = config.custom.extra.rollout_matching, config.custom.trainer_variant
    if not judges_ahead(config):
        return
    if rules.vllm.sync.in_flight != "wait":
        problem = f"is {rules.vllm.sync.in_flight}, but values of {variant} are of the weights that wrote the response"
        yield ConfigError(problem, code="values-of-other-weights", key=IN_FLIGHT, remedy="Remove it.")
    if windows_of_staleness(config) > 1:
        problem = f"is {rules.max_staleness}, but {variant} requests one window in advance"
        remedy = f"Set it to {2 * steps_per_window(config) - 1}."
        yield ConfigError(problem, code="values-of-other-weights", key=STALENESS, remedy=remedy)


def _in_flight(config: RunConfig) -> Iterator[ConfigError]:
    rules = config.custom.extra.rollout_matching
    if rules.vllm.sync.in_flight == "wait":
        return
    if rules.overlap == "off":
        why, remedy = "overlap is off: nothing is under way when weights are sent", "Remove it, or set overlap."
    elif rules.vllm.sync.in_flight == "restart" and not config.custom.extra.environment.is_set:
        why, remedy = "there is no environment, whose episodes it is about", "Name an environment, or set it to keep."
    else:
        return
    problem = f"is {rules.vllm.sync.in_flight}, but {why}"
    yield ConfigError(problem, code="in-flight-unused", key=IN_FLIGHT, remedy=remedy)


def _late_windows(config: RunConfig) -> Iterator[ConfigError]:
    rules, length = config.custom.extra.rollout_matching, steps_per_window(config)
    if not rules.late_windows:
        return
    if rules.overlap == "off":
        why, remedy = "overlap is off", "Remove it, or set overlap to ahead."
    elif not config.custom.extra.environment.is_set:
        why, remedy = "there is no environment, whose episodes end at times of their own", "Remove it."
    elif rules.vllm.sync.in_flight != "keep":
        why, remedy = f"vllm.sync.in_flight is {rules.vllm.sync.in_flight}", f"Remove it, or set {IN_FLIGHT} to keep."
    elif rules.pieces_per_server > 1:
        why, remedy = "pieces_per_server is set, while each group is a call of its own", "Remove one of them."
    elif windows_of_staleness(config) - rules.late_windows < 1:
        needed = (rules.late_windows + 2) * length - 1
        why = f"max_staleness {rules.max_staleness} leaves no window to request in advance"
        remedy = f"Set max_staleness to {needed}."
    else:
        return
    problem = f"is {rules.late_windows}, but {why}"
    yield ConfigError(problem, code="late-windows-undefined", key=LATE, remedy=remedy)


def _packed(config: RunConfig) -> Iterator[ConfigError]:
    rules = config.custom.extra.rollout_matching
    if not config.training.packing:
        return
    if rules.overlap == "ahead" and config.custom.learns_from_completions:
        problem = "is ahead, but with training.packing a completion may wait for a row until it is too old"
        yield ConfigError(
            problem,
            code="ahead-needs-padded-batches",
            key=OVERLAP,
            remedy="Set training.packing to false, or overlap off.",
        )
    elif rules.overlap == "ahead" and windows_of_staleness(config) < 1:
        problem = "is 1, which leaves no step in advance: with training.packing a segment may wait a step for its row"
        remedy = "Set it to 2, or training.packing to false."
        yield ConfigError(problem, code="carry-needs-staleness", key=STALENESS, remedy=remedy)


def _window(config: RunConfig) -> Iterator[ConfigError]:
    rules, length = config.custom.extra.rollout_matching, steps_per_window(config)
    if rules.overlap == "ahead" and length > 1 and windows_of_staleness(config) < 1:
        problem = f"is {rules.max_staleness}, and a window is used for {length} optimizer steps"
        remedy = f"Set it to {2 * length - 1}, or steps_per_generation and num_iterations to 1."
        yield ConfigError(problem, code="window-needs-staleness", key=STALENESS, remedy=remedy)


def _correction(config: RunConfig) -> Iterator[ConfigError]:
    rules, is_grpo = config.custom.extra.grpo, config.custom.learns_from_completions
    if not is_grpo or config.custom.extra.rollout_matching.overlap != "ahead":
        return
    if rules.corrects is None and rules.old_logprobs == "recomputed":
        problem = "is null, while old_logprobs is recomputed and overlap ahead learns from completions of older weights"
        remedy = "Set it to a number, or old_logprobs to server."
        yield ConfigError(problem, code="staleness-uncorrected", key=f"{GRPO}.correction_cap", remedy=remedy)


_REUSE = (f"{GRPO}.steps_per_generation", f"{GRPO}.num_iterations")
OVERLAP_RULES: tuple[Rule, ...] = (
    Rule(
        reads=(
            OVERLAP,
            VARIANT,
            f"{ROLLOUT_MATCHING}.rollout_backend",
            _SERVER_MODE,
            "rlhf.use_vllm",
            "rlhf.vllm_mode",
        ),
        check=_servers,
    ),
    Rule(reads=(OVERLAP, PIECES), check=_pieces),
    Rule(reads=(OVERLAP, VARIANT), check=_overlap_variant),
    Rule(reads=(OVERLAP, VARIANT, STALENESS, IN_FLIGHT, *_REUSE), check=_values_ahead),
    Rule(reads=(OVERLAP, IN_FLIGHT, "custom.extra.environment"), check=_in_flight),
    Rule(
        reads=(OVERLAP, VARIANT, LATE, STALENESS, PIECES, IN_FLIGHT, "custom.extra.environment", *_REUSE),
        check=_late_windows,
    ),
    Rule(reads=(OVERLAP, VARIANT, STALENESS, "training.packing"), check=_packed),
    Rule(reads=(OVERLAP, VARIANT, STALENESS, "training.packing", *_REUSE), check=_window),
    Rule(
        reads=(OVERLAP, VARIANT, f"{GRPO}.correction", f"{GRPO}.correction_cap", f"{GRPO}.old_logprobs"),
        check=_correction,
    ),
)
