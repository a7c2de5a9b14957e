"""The configured objective, ready."""

from rollmatch.config import RunConfig
from rollmatch.config.rollout_matching import RolloutMatchingConfig
from rollmatch.learn.loss import LossRules
from rollmatch.learn.mask import MaskRules
from rollmatch.objective.rollout_matching import RolloutMatchingObjective
from rollmatch.objective.seam import Objective
from rollmatch.target.match import MatchRules
from rollmatch.target.rollout_matching import RolloutMatching
from rollmatch.target.transport import TransportRules
from rollmatch.template import Template


def make_objective(config: RunConfig, template: Template) -> Objective:
    """What ``custom.trainer_variant`` names."""
    return _rollout_matching(config, template)


def _rollout_matching(config: RunConfig, template: Template) -> RolloutMatchingObjective:
    rules, vocabulary = config.custom.extra.rollout_matching, template.vocabulary
    transport = TransportRules(ot_cost=rules.ot_cost, ot_epsilon=rules.ot_epsilon, ot_iters=rules.ot_iters)
    return RolloutMatchingObjective(
        target=RolloutMatching(vocabulary, match_rules_of(rules, gate=rules.maskiou_gate), transport),
        eval_target=RolloutMatching(vocabulary, match_rules_of(rules, gate=rules.eval_iou), transport),
        mask_rules=MaskRules(desc_ce_weight=rules.desc_ce_weight),
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
        coord_ids=template.vocabulary.coord_ids,
        target_sigma=rules.target_sigma,
        target_truncate=rules.target_truncate,
        temperature_coord=rules.temperature_coord,
        soft_ce_weight=rules.soft_ce_weight,
        w1_weight=rules.w1_weight,
        gate_weight=rules.gate_weight,
    )
