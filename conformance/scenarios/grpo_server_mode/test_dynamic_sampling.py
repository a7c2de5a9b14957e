"""Groups of equal rewards are replaced by groups of further samples; whole runs beside the oracle's."""

import json

import pytest

from conformance.doubles.configs import config_with, problems_of
from conformance.doubles.objectives import GRPO, VOCABULARY, OfVocabulary
from conformance.doubles.records import make_rollout
from conformance.draws.compare import judge
from conformance.draws.strategy import PLAIN
from conformance.oracle.defaults import G, R, T
from rollmatch.objectives.protocol import ObjectiveContext
from rollmatch.ranks import Ranks
from rollmatch.records import Sample
from rollmatch.rollout.backend import Decoding
from rollmatch.run.objectives import make_objective

ON = f"{G}.dynamic_sampling={{max_rounds: 2}}"


def sample(number):
    return Sample(sample_id=number, origin=f"x:{number}", images=())


def rollouts(*rewards):
    """One that is worth each of the rewards."""
    answers = [VOCABULARY.encode(str(reward)) for reward in rewards]
    return [make_rollout(ids, prompt_token_ids=(1, 2), response_logprobs=(-1.0,) * (len(ids) + 1)) for ids in answers]


def targets_of(found, *further, overrides=(ON,)):
    """Of groups of two with the rewards ``found``; ``further``: the rewards of each further round's groups."""
    asked, rounds = [], iter(further)

    def roll_out(num):
        asked.append(num)
        rewards = next(rounds)[: 2 * num]
        owners = [sample(10 * len(asked) + place // 2) for place in range(len(rewards))]
        return list(zip(owners, rollouts(*rewards), strict=True))

    context = ObjectiveContext(
        step=0,
        ranks=Ranks(),
        decoding=Decoding(max_new_tokens=8, temperature=1.0),
        generate=None,
        play=None,
        score=None,
        teach=None,
        further=roll_out,
        log=lambda *event, **fields: None,
    )
    objective = make_objective(
        config_with(*GRPO, f"{G}.num_generations=2", f"{G}.scale_rewards=none", *overrides), OfVocabulary()
    )
    made = objective.make_segments([sample(place) for place in range(len(found) // 2)], rollouts(*found), context)
    ids = [[segment.sample.sample_id for segment in group] for group in made.segments]
    advantages = [[segment.policy.advantages[0] for segment in group] for group in made.segments]
    return ids, advantages, asked, objective.summarize(made.reports)


@pytest.mark.scenario(
    "grpo-server-mode/a-group-of-equal-rewards-makes-place",
    clauses=["grpo-server-mode/groups-without-spread-may-be-replaced#1,2"],
)
def test_a_group_of_equal_rewards_makes_place():
    ids, advantages, asked, means = targets_of([1, 1, 1, 0, 0, 0], [1, 1, 0, 1], [1, 0])
    assert asked == [2, 1]
    assert ids == [[11, 11], [1, 1], [20, 20]]
    assert advantages == [[-0.5, 0.5], [0.5, -0.5], [0.5, -0.5]]
    assert (means["further_group_rate"], means["flat_group_rate"]) == (pytest.approx(2 / 3), 0)


@pytest.mark.scenario(clauses=["grpo-server-mode/groups-without-spread-may-be-replaced#1,2"])
def test_what_is_left_after_the_last_round_or_at_the_end_of_the_data_set_stays():
    ids, advantages, asked, means = targets_of([1, 1, 1, 1], [0, 0, 1, 1], [2, 2, 2, 2])
    assert (ids, asked, means["flat_group_rate"]) == ([[0, 0], [1, 1]], [2, 2], 1)
    assert advantages == [[0, 0], [0, 0]]
    assert targets_of([1, 1, 1, 1], [1, 0], [])[0] == [[10, 10], [1, 1]]
    assert targets_of([1, 1], overrides=())[2] == []


SIX = {"samples": [{"prompt": f"{number}a"} for number in range(9)], "family": "qwen3", "servers": [{}]}
KEYS = PLAIN | {
    f"{G}.num_generations": 2,
    f"{G}.dynamic_sampling.max_rounds": 2,
    f"{R}.rollout_backend": "vllm",
    f"{R}.max_new_tokens": 2,
    f"{T}.max_steps": 3,
    f"{T}.per_device_train_batch_size": 2,
    f"{T}.gradient_accumulation_steps": 2,
    f"{T}.eval_scenes": 1,
    f"{T}.learning_rate": 0.003,
    f"{T}.optim": "sgd",
}
PACKED = {f"{T}.packing": True, "model.attn_impl": "packed", f"{T}.gradient_accumulation_steps": 1}
RUNS = {
    "failing-rewards": ({}, {f"{G}.rewards": [{"function": "conformance.oracle.rewards:fails"}]}),
    "two-ranks-packed": ({"servers": [{}, {}], "ranks": 2}, PACKED | {f"{R}.max_new_tokens": 1}),
}


@pytest.mark.slow
@pytest.mark.scenario(clauses=["grpo-server-mode/groups-without-spread-may-be-replaced#1,2,3,4,5"])
@pytest.mark.parametrize("name", RUNS)
def test_a_run_agrees_with_the_oracle(tmp_path, name):
    """Samples, seeds, rewards, tokens, gradients, and after a resume the weights, bit for bit."""
    fields, keys = RUNS[name]
    judge(SIX | fields | {"keys": KEYS | keys}, tmp_path / "draw", tmp_path / "models")
    events = [json.loads(line) for line in (tmp_path / "draw/run/journal.jsonl").read_text().splitlines()]
    further = [e for e in events if e["event"] == "generated" and e["purpose"] == "further"]
    assert sum(event["num_rollouts"] for event in further) > 0
    if fields.get("ranks"):  # both replace groups in the same round
        other = [json.loads(line) for line in (tmp_path / "draw/run/journal-rank1.jsonl").read_text().splitlines()]
        theirs = [e for e in other if e["event"] == "generated" and e["purpose"] == "further"]
        assert any(a["num_rollouts"] and b["num_rollouts"] for a, b in zip(further, theirs, strict=True))
    assert sum(event["num_tokens"] for event in further) > 0


@pytest.mark.scenario(clauses=["grpo-server-mode/groups-without-spread-may-be-replaced#6"])
@pytest.mark.parametrize(
    "other",
    [
        ("custom.trainer_variant=vineppo",),
        ("custom.extra.environment.name=a:B", f"{G}.rewards=[]"),
        (f"{R}.overlap=ahead", "rlhf.use_vllm=true", "rlhf.vllm_mode=server", "rlhf.vllm_server_host=[localhost]"),
    ],
    ids=["vineppo", "environment", "ahead"],
)
def test_what_no_paper_defines_is_refused(other):
    found = {(error.code, error.key) for error in problems_of(*GRPO, *other, ON)}
    assert ("dynamic-sampling-undefined", f"{G}.dynamic_sampling") in found
    assert config_with(*GRPO, ON)
