"""What keys make of an objective, beside those that are handed on as they are."""

import pytest

from conformance.doubles.configs import config_with
from conformance.doubles.digits import template_of
from conformance.doubles.objectives import GRPO, VINEPPO, AsTemplate
from rollmatch.environments.limits import EnvironmentLimits
from rollmatch.objectives.rollout_matching.match import TransportRules
from rollmatch.objectives.vineppo.split import AtMost, FixedTokens, Lines, LowProbability, Sentences
from rollmatch.objectives.vineppo.tree import SearchRules
from rollmatch.objectives.vineppo.value import ContinuationValues, ValueRules
from rollmatch.run.objectives import make_objective
from rollmatch.run.plugins import limits_of, load_rewards
from rollmatch.run.teachers import make_teachers

STEPS = "custom.extra.vineppo.steps"
PLAYED = ("custom.extra.environment.name=a:b", "custom.extra.grpo.rewards=[]")
LENGTHS = ("~.max_new_tokens=64", "custom.extra.environment.max_response_tokens=99")


def objective_of(*overrides):
    return make_objective(config_with(*overrides), AsTemplate())


@pytest.mark.parametrize(
    ("overrides", "old", "corrects"),
    [
        *(((), "current", True), (("old_logprobs=server",), "server", False)),
        (("num_iterations=2", "correction_cap=2"), "recomputed", True),
        (("correction_cap=null",), "current", False),
    ],
)
def test_older_weights_are_corrected_where_a_cap_says_so_and_their_values_are_computed_again(overrides, old, corrects):
    rules = objective_of(*GRPO, *(f"custom.extra.grpo.{each}" for each in overrides)).logprob_rules
    assert (rules.old, rules.corrects, rules.reference_in_batch) == (old, corrects, False)


@pytest.mark.parametrize(("environment", "most"), [((), 64), (PLAYED, 99)])
def test_the_constant_of_a_loss_is_the_longest_response_or_episode(environment, most):
    assert objective_of(*GRPO, *LENGTHS, *environment).policy_rules.max_new_tokens == most


@pytest.mark.parametrize(("weight", "corrects"), [("0", False), ("0.5", True)])
def test_training_and_evaluation_match_by_gates_of_their_own(weight, corrects):
    keys = ("maskiou_gate=0.3", "eval_iou=0.7", "candidate_top_k=3", "fp_cost=2", "fn_cost=5", "maskiou_resolution=9")
    objective = objective_of(*(f"~.{key}" for key in keys), f"~.desc_ce_weight_matched={weight}")
    assert (objective.target.corrects_descs, objective.eval_target.corrects_descs) == (corrects, False)
    gates = [target.match_rules.maskiou_gate for target in (objective.target, objective.eval_target)]
    assert gates == [0.3, 0.7]
    rules = objective.target.match_rules
    assert (rules.candidate_top_k, rules.fp_cost, rules.fn_cost, rules.maskiou_resolution) == (3, 2, 5, 9)


def test_polygons_are_paired_by_the_transport_of_its_keys():
    objective = objective_of("~.ot_cost=l1", "~.ot_epsilon=4", "~.ot_iters=9")
    assert objective.target.transport_rules == TransportRules(ot_cost="l1", ot_epsilon=4, ot_iters=9)


@pytest.mark.parametrize(
    ("overrides", "kind", "reads"),
    [
        *(((f"{STEPS}=lines",), Lines, False), ((f"{STEPS}=sentences",), Sentences, False)),
        *(((f"{STEPS}=tokens",), FixedTokens, False), ((f"{STEPS}=low_probability",), LowProbability, True)),
        ((f"{STEPS}=lines", "custom.extra.vineppo.search.select=puct"), Lines, True),
    ],
)
def test_steps_are_split_as_named_and_probabilities_are_read_where_they_count(overrides, kind, reads):
    objective = objective_of(*VINEPPO, *overrides, "custom.extra.vineppo.max_steps=null")
    assert (type(objective.splitter), objective.reads_logprobs) == (kind, reads)
    bounded = objective_of(*VINEPPO, *overrides, "custom.extra.vineppo.max_steps=3").splitter
    assert (type(bounded), type(bounded.splitter), bounded.num_steps) == (AtMost, kind, 3)


def test_continuations_and_searches_have_the_numbers_of_their_keys():
    rules = ("num_continuations=5", "first_continuations=2", "siblings=all")
    values = objective_of(*VINEPPO, *(f"custom.extra.vineppo.{rule}" for rule in rules)).valuer
    assert isinstance(values, ContinuationValues)
    assert values.rules == ValueRules(num_continuations=5, siblings="all", first_continuations=2)
    search = "custom.extra.vineppo.search"
    keys = (f"{search}.num_rounds=3", f"{search}.num_per_round=4", f"{search}.num_least=2")
    keys += (f"{search}.select=puct", f"{search}.exploration=0.3", f"{search}.widening=1.7")
    tree = objective_of("custom.trainer_variant=vineppo_mcts", *VINEPPO[1:], *keys).valuer
    assert (tree.budget.num_rounds, tree.budget.num_per_round, tree.budget.num_least) == (3, 4, 2)
    assert tree.rules == SearchRules(select="puct", exploration=0.3, widening=1.7)


async def late(answer, sample):
    """A reward that may be waited for."""


def test_calls_of_rewards_environments_and_teachers_have_the_limits_of_their_keys():
    reward = {"function": f"{__name__}:late", "timeout_s": 2.5, "weight": -0.5, "name": "own"}
    config = config_with(*GRPO[::2], f"custom.extra.grpo.rewards={[reward]}")
    (found,) = load_rewards(config)
    assert (found.name, found.weight, found.call.timeout_s) == ("own", -0.5, 2.5)
    keys = ("name=a:b", "call_timeout_s=1.5", "processes=2", "max_observation_bytes=99", "max_response_tokens=600")
    played = config_with(*GRPO, *PLAYED, *(f"custom.extra.environment.{key}" for key in keys))
    wanted = EnvironmentLimits(timeout_s=1.5, processes=2, max_observation_bytes=99)
    assert limits_of(played.custom.extra.environment) == wanted
    taught = "custom.extra.distill.teachers=[{base_url: 'http://a:1', timeout_s: 7.5, weight: 2, when: {task: x}}]"
    (teacher,) = make_teachers(config_with("custom.trainer_variant=distill", taught), template_of(), None)
    assert (teacher.answers.timeout_s, teacher.weight, teacher.when) == (7.5, 2, {"task": "x"})
