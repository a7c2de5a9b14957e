"""Segments with one prompt compute it once: the same losses, gradients and log-probabilities, of fewer tokens."""

from dataclasses import replace

import peft
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from conformance.doubles.configs import config_with
from conformance.doubles.grpo_run import GRPO, SAMPLES
from conformance.doubles.loss_cases import RULES, ScoringSupervisor
from conformance.doubles.models import TOLERANCE, assert_same_gradients, gradients, make_packed_model
from conformance.doubles.ranks import alone
from conformance.doubles.refusals import refused
from conformance.doubles.segments import make_group
from conformance.doubles.small_run import trained
from rollmatch.learn.balance import PassSize, RowBalancer, balance, costs_of, tokens_of
from rollmatch.learn.batch import Batcher
from rollmatch.learn.head import Scoring, logprobs_of
from rollmatch.learn.pack import Packer
from rollmatch.learn.score import score_segments
from rollmatch.objectives.rollout_matching.loss import count_totals, masked_loss_of_kept
from rollmatch.records import Row


@pytest.fixture(scope="module")
def cases():
    """Groups of several sizes, with and without images."""
    sizes = ((3, 2), (1, 1), (4, 0), (2, 3))
    return [pair for seed, (size, count) in enumerate(sizes) for pair in make_group(seed, size, num_images=count)]


def features_of(cases):
    images = {segment.sample.sample_id: some for segment, some in cases}
    return lambda sample: images[sample.sample_id]


def adapted():
    """A policy of which adapters learn."""
    torch.manual_seed(1)
    targets = ["q_proj", "k_proj", "v_proj", "down_proj"]
    config = peft.LoraConfig(r=4, target_modules=targets, init_lora_weights=False)
    return peft.get_peft_model(make_packed_model(), config)


def learnt(model, cases, *, shares, capacity, num_batches=2, packs=False):
    """(tokens of each pass, gradients, loss) of one step."""
    batcher = Batcher(
        model,
        ScoringSupervisor(),
        packer=Packer(capacity) if packs else None,
        pad_id=0,
        balancer=None if packs else RowBalancer(ranks=alone(), capacity=capacity),
        shares_prompts=shares,
        max_waiting=0 if packs else None,
    )
    batches = batcher.make([segment for segment, _ in cases], features_of(cases), num_batches=num_batches)
    totals = count_totals([batch.supervision for batch in batches])
    model.zero_grad()
    total = 0.0
    for batch in batches:
        rules = {"supervision": batch.supervision, "rules": RULES, "totals": totals}
        loss, _ = Scoring(None)(model, batch.inputs, lambda logits, k=rules: masked_loss_of_kept(logits, **k).total)
        loss.backward()
        total += loss.item()
    assert sum(batch.num_tokens for batch in batches) == sum(segment.encoded_len for segment, _ in cases)
    num_shared = sum(batch.num_shared for batch in batches)
    sizes = [batch.inputs["input_ids"].numel() for batch in batches]
    assert sum(sizes) == sum(batch.num_tokens for batch in batches) - num_shared
    return sizes, gradients(model), total


@pytest.mark.scenario(
    "packing/completions-of-one-image", clauses=["packing/a-prompt-of-several-segments-is-computed-once#1,2"]
)
@pytest.mark.parametrize("make_model", [make_packed_model, adapted])
@pytest.mark.parametrize("rows", [{"capacity": None}, {"capacity": 150}, {"capacity": 200, "packs": True}])
def test_losses_and_gradients_are_those_of_whole_segments(cases, make_model, rows):
    model = make_model()
    whole, expected, loss = learnt(model, cases, shares=False, **rows)
    shared, found, same_loss = learnt(model, cases, shares=True, **rows)
    assert sum(shared) < sum(whole)
    assert same_loss == pytest.approx(loss, abs=1e-5)
    assert_same_gradients(found, expected)


@pytest.mark.scenario(clauses=["packing/a-prompt-of-several-segments-is-computed-once#3"])
@pytest.mark.parametrize("size", [{}, {"tokens": 150}])
def test_log_probabilities_are_those_of_padded_batches(cases, size):
    model, segments = make_packed_model(), [segment for segment, _ in cases]

    def scored(size):
        return score_segments(model, segments, features_of(cases), logprobs=logprobs_of, size=size)

    expected = scored(PassSize(segments=3))
    found = scored(PassSize(segments=3, shares_prompts=True, **size))
    for ours, theirs in zip(found, expected, strict=True):
        assert ours == pytest.approx(theirs, abs=TOLERANCE)


@pytest.mark.scenario(clauses=["packing/a-prompt-of-several-segments-is-computed-once#5"])
def test_auto_shares_prompts_unless_there_is_dropout(tmp_path):
    def shared(name, *settings):
        settings = (*GRPO, "training.padding_free=true", "tuner.train_type=lora", *settings)
        trainer, _ = trained(tmp_path / name, *settings, samples=SAMPLES)
        return trainer.state.log_history[0]["shared_tokens"]

    assert shared("without", "tuner.lora_dropout=0.0") > 0
    assert shared("dropout", "tuner.lora_dropout=0.25") == 0
    assert shared("all the same", "tuner.lora_dropout=0.25", "training.share_prompts=true") > 0


@pytest.mark.scenario(clauses=["packing/a-prompt-of-several-segments-is-computed-once#6"])
@pytest.mark.parametrize(
    "settings", [("training.padding_free=auto",), ("training.packing=true", "model.attn_impl=sdpa")]
)
def test_prompts_of_segments_that_are_not_concatenated_cannot_be_shared(settings):
    with refused("prompts-not-shared", "training.share_prompts"):
        config_with("training.share_prompts=true", "training.packing=false", *settings)


def test_the_vision_tower_sees_the_images_of_a_shared_prompt_once(cases):
    model, grids = make_packed_model(), []
    model.model.visual.register_forward_pre_hook(
        lambda _, args, inputs: grids.append(len(inputs["grid_thw"])), with_kwargs=True
    )
    for shares in (False, True):
        learnt(model, cases, shares=shares, capacity=None, num_batches=1)
    assert grids == [3 * 2 + 1 + 2 * 3, 2 + 1 + 3]


@pytest.mark.scenario(clauses=["packing/a-prompt-of-several-segments-is-computed-once#4"])
def test_segments_of_other_images_share_nothing(cases):
    first, second = (cases[place][0] for place in (0, 1))
    stranger = replace(second, sample=replace(second.sample, images=("other.png",)))
    for pair, is_shared in (((first, second), True), ((first, stranger), False)):
        row = Row(segments=pair, capacity=100, shares_prompts=True)
        assert (row.num_tokens < sum(row.lengths)) == is_shared


def costs_of_groups(groups):
    """Of (tokens of a prompt, tokens of its targets)."""
    return [
        (prompt + target, target + (prompt if index == 0 else 1))
        for prompt, targets in groups
        for index, target in enumerate(targets)
    ]


GROUPS = st.tuples(st.integers(1, 6), st.lists(st.integers(1, 6), min_size=1, max_size=5))
COSTS = st.lists(GROUPS, min_size=1, max_size=8).map(costs_of_groups)


@given(COSTS, st.integers(1, 4))
def test_rows_of_shared_prompts_hold_each_segment_once_and_are_as_many_on_every_rank(costs, num_ranks):
    rows = balance(costs, capacity=12, num_ranks=num_ranks)
    assert len({len(mine) for mine in rows}) == 1
    assert sorted(index for mine in rows for row in mine for index in row) == list(range(len(costs)))
    assert all(tokens_of(row, costs) <= 12 for mine in rows for row in mine)


def test_costs_are_the_tokens_that_a_row_gets(cases):
    segments = [segment for segment, _ in cases]
    costs = costs_of(segments, shares_prompts=True)
    for end in range(1, len(segments) + 1):
        row = Row(segments=tuple(segments[:end]), capacity=0, shares_prompts=True)
        assert tokens_of(range(end), costs) == row.num_tokens
