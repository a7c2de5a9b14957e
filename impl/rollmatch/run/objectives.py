"""The configured objective, ready."""

from collections.abc import Sequence
from typing import Any

from rollmatch.config import RunConfig, effective
from rollmatch.config.custom import GrpoConfig
from rollmatch.config.rollout_matching import RolloutMatchingConfig
from rollmatch.data import Reuse
from rollmatch.model.template import Template
from rollmatch.objectives.chat.objective import ChatObjective
from rollmatch.objectives.distill.loss import Divergence
from rollmatch.objectives.distill.objective import DistillObjective
from rollmatch.objectives.distill.teacher import Teacher
from rollmatch.objectives.grpo.loss import Correction, PolicyRules
from rollmatch.objectives.grpo.objective import GroupRules, GrpoObjective
from rollmatch.objectives.policy_gradient import LogprobRules
from rollmatch.objectives.protocol import Objective
from rollmatch.objectives.rollout_matching.loss import LossRules
from rollmatch.objectives.rollout_matching.match import MatchRules, TransportRules
from rollmatch.objectives.rollout_matching.objective import RolloutMatchingObjective, SupervisedObjective
from rollmatch.objectives.rollout_matching.supervision import MaskRules
from rollmatch.objectives.rollout_matching.target import RolloutMatching, fitted_format
from rollmatch.rollout.episodes import EpisodeRunner
from rollmatch.run.plugins import load_configured_format, load_rewards
from rollmatch.run.vineppo_objective import make_vineppo


def make_objective(
    config: RunConfig, template: Template, teachers: Sequence[Teacher] = (), *, world: EpisodeRunner | None = None
) -> Objective:
    """What ``custom.trainer_variant`` names; ``teachers`` are distill's, ``world`` is that of ``make_world``.

    Errors: ``RewardUnknown``.
    """
    if config.custom.trainer_variant == "grpo":
        return GrpoObjective(**_of_grpo(config, template), world=world)
    if config.custom.trainer_variant == "distill":
        return _distill(config, template, teachers, world)
    if config.custom.trainer_variant in ("vineppo", "vineppo_mcts"):
        return make_vineppo(
            config,
            template,
            reuse=_reuse(config.custom.extra.grpo),
            policy_rules=_policy_rules(config, template),
            logprob_rules=_logprob_rules(config),
            world=world,
        )
    if config.custom.teaches_text:
        return _chat(template)
    return _rollout_matching(config, template)


def _of_grpo(config: RunConfig, template: Template) -> dict[str, Any]:
    """Fields of ``GrpoObjective``."""
    rules = config.custom.extra.grpo
    return {
        "reuse": _reuse(rules),
        "group_rules": GroupRules(
            baseline=rules.baseline,
            scale=rules.scale_rewards,
            mask_truncated=rules.mask_truncated_completions,
            max_rounds=rules.dynamic_sampling.max_rounds if rules.dynamic_sampling else 0,
        ),
        "logprob_rules": _logprob_rules(config),
        "policy_rules": _policy_rules(config, template),
        "rewards": load_rewards(config),
        "vocabulary": template.vocabulary,
    }


def _distill(
    config: RunConfig, template: Template, teachers: Sequence[Teacher], world: EpisodeRunner | None
) -> DistillObjective:
    rules, divergence = config.custom.extra.distill, None
    if rules.beta is not None and rules.top_k is not None:
        divergence = Divergence(beta=rules.beta, top_k=rules.top_k)
    fields = _of_grpo(config, template)
    return DistillObjective(
        **fields,
        world=world,
        teachers=tuple(teachers),
        divergence=divergence,
        environment_weight=rules.environment_weight,
    )


def _reuse(rules: GrpoConfig) -> Reuse:
    return Reuse(
        num_rollouts=rules.num_generations,
        steps_per_generation=rules.steps_per_generation,
        num_iterations=rules.num_iterations,
    )


def _logprob_rules(config: RunConfig) -> LogprobRules:
    return LogprobRules(
        old=effective.old_logprobs(config),
        corrects=effective.corrects(config),
        reference_in_batch=effective.reference_in_batch(config),
    )


def _policy_rules(config: RunConfig, template: Template) -> PolicyRules:
    rules, rollout = config.custom.extra.grpo, config.custom.extra.rollout_matching
    environment = config.custom.extra.environment
    return PolicyRules(
        importance=rules.importance,
        clip=rules.clip,
        epsilon=rules.epsilon,
        epsilon_high=rules.epsilon_high,
        ratio_cap=rules.ratio_cap,
        beta=rules.beta,
        correction=None if rules.corrects is None else Correction(**rules.corrects.model_dump()),
        normalize=rules.normalize,
        entropy_coef=rules.entropy_coef,
        top_entropy_share=rules.top_entropy_share,
        max_new_tokens=environment.max_response_tokens if environment.is_set else rollout.max_new_tokens,
        temperature=rollout.decoding.temperature,
        excluded_ids=template.banned_ids,
    )


def _chat(template: Template) -> ChatObjective:
    return ChatObjective(
        chat_of=template.answered_chat,
        is_cut=template.is_cut,
        vocabulary=template.vocabulary,
        mask_rules=MaskRules(),
        loss_rules=LossRules(coord_ids=()),
        bin_of=lambda token_id: None,
    )


def _rollout_matching(config: RunConfig, template: Template) -> RolloutMatchingObjective:
    rules, vocabulary = config.custom.extra.rollout_matching, template.vocabulary
    transport = TransportRules(ot_cost=rules.ot_cost, ot_epsilon=rules.ot_epsilon, ot_iters=rules.ot_iters)
    format_of = fitted_format(load_configured_format(config), template.image_size)
    made = RolloutMatchingObjective if config.custom.learns_from_rollouts else SupervisedObjective
    return made(
        target=RolloutMatching(
            vocabulary,
            match_rules_of(rules, gate=rules.maskiou_gate),
            transport,
            format_of,
            corrects_descs=rules.desc_ce_weight_matched > 0,
        ),
        eval_target=RolloutMatching(vocabulary, match_rules_of(rules, gate=rules.eval_iou), transport, format_of),
        mask_rules=MaskRules(desc_ce_weight=rules.desc_ce_weight, desc_ce_weight_matched=rules.desc_ce_weight_matched),
        loss_rules=loss_rules_of(rules, template),
        bin_of=vocabulary.bin_of,
    )


def match_rules_of(rules: RolloutMatchingConfig, *, gate: float) -> MatchRules:
    """The matching section as the matcher takes it; training and evaluation differ in the gate."""
    return MatchRules(
        candidate_top_k=rules.candidate_top_k,
        maskiou_gate=gate,
        maskiou_resolution=rules.maskiou_resolution,
        fp_cost=rules.fp_cost,
        fn_cost=rules.fn_cost,
    )


def loss_rules_of(rules: RolloutMatchingConfig, template: Template) -> LossRules:
    """The loss keys of the same section."""
    return LossRules(
        coord_ids=template.vocabulary.coord_ids if rules.uses_coord_tokens else (),
        target_sigma=rules.target_sigma,
        target_truncate=rules.target_truncate,
        temperature_coord=rules.temperature_coord,
        soft_ce_weight=rules.soft_ce_weight,
        w1_weight=rules.w1_weight,
        gate_weight=rules.gate_weight,
    )
