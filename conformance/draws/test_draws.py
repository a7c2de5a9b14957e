"""Drawn runs agree with the oracle; more of them, and longer: ``python -m conformance.draws --seconds 600``."""

import json
import os
from itertools import cycle, islice
from types import SimpleNamespace

import pytest

from conformance.draws.__main__ import search
from conformance.draws.compare import judge, run, write
from conformance.draws.everyday import NUMBER, everyday
from conformance.draws.models import model_directory
from conformance.draws.servers import scripted
from conformance.draws.strategy import PLAIN
from conformance.oracle.defaults import E, G, R, T
from conformance.oracle.policy import words_of
from conformance.oracle.script import BOXES, NAMES
from rollmatch.model.policy import LARGE_VOCABULARY

MATCHING = {"custom.trainer_variant": "rollout_matching_sft", "custom.prompts.user": "find", "global_max_length": 420}
MATCHING[f"{R}.max_new_tokens"] = 160
BOXED = [{"desc": name, "bbox_2d": list(box)} for name, box in zip(NAMES, BOXES, strict=False)]
OBJECTS = [
    {"images": [f"32-32-{i}.png"], "objects": list(islice(cycle(BOXED), i % 4)), "width": 32, "height": 32}
    for i in range(9)
]


@pytest.mark.slow
@pytest.mark.parametrize("place", range(sum(NUMBER.values())))
def test_a_draw_of_every_day_agrees_with_the_oracle(place, tmp_path):
    judge(everyday()[place], tmp_path / "draw", tmp_path / "models")


@pytest.mark.slow
def test_drawn_runs_agree_with_the_oracle(capsys):
    """3 draws, 150 in CI, as far as four minutes go; always of one seed: the command above looks for new ones."""
    draws = 150 if "ROLLMATCH_STRICT" in os.environ else 3
    options = SimpleNamespace(draws=draws, seconds=240, seed=7, ranks=None, only=[], shrink_seconds=60)
    assert search(options) == 0, capsys.readouterr().out


@pytest.mark.wide
def test_a_rank_whose_segments_became_too_old_does_not_wait_for_one_whose_did_not(tmp_path):
    """Rank 0 asks again at steps 4 and 5, rank 1 never; both continue to the end."""
    keys = MATCHING | {f"{R}.overlap": "ahead", f"{R}.max_staleness": 2, f"{T}.packing": True}
    keys |= {f"{T}.max_steps": 6, f"{T}.per_device_train_batch_size": 2, f"{T}.gradient_accumulation_steps": 2}
    keys |= {"model.attn_impl": "packed", f"{T}.seed": 2, f"{T}.eval_scenes": 1, f"{T}.learning_rate": 0.001}
    draw = {"samples": OBJECTS, "servers": [{}, {}], "ranks": 2, "keys": keys}
    directory = model_directory("qwen3_vl", tmp_path / "models")
    with scripted(draw, directory, words_of(directory)) as (_, named):
        write(draw, tmp_path, directory, named)
        run(draw, tmp_path)
    events = [
        [json.loads(line) for line in (tmp_path / "run" / name).read_text().splitlines()]
        for name in ("journal.jsonl", "journal-rank1.jsonl")
    ]
    asked = [[e["num_rollouts"] > 0 for e in own if e["event"] == "asked_again"] for own in events]
    assert any(first != second for first, second in zip(*asked, strict=True)), "only one rank had something to ask"
    assert [e["step"] for e in events[0] if e["event"] == "step"] == [1, 2, 3, 4, 5, 6]


@pytest.mark.scenario(clauses=["server-dialects/the-vllm-dialect-drives-a-stock-vllm-server#8"])
@pytest.mark.slow
def test_a_stock_server_writes_prompts_with_images_by_the_variables_of_the_run(tmp_path):
    keys = PLAIN | {f"{R}.rollout_backend": "vllm", f"{T}.max_steps": 2, f"{T}.eval_scenes": 1}
    keys |= {"global_max_length": 110, f"{G}.num_generations": 2, "model.chat_template_kwargs": {"mark": "m"}}
    asked = {f"32-32-{i}.png": f"<image>{i}a" for i in range(5)}
    samples = [{"images": [image], "messages": [{"role": "user", "content": asked[image]}]} for image in asked]
    draw = {"family": "qwen3_vl", "samples": samples, "servers": [{}], "dialect": "vllm", "keys": keys}
    judge(draw, tmp_path / "draw", tmp_path / "models")


@pytest.mark.slow
@pytest.mark.parametrize("objective", ["grpo", pytest.param("matching", marks=pytest.mark.wide)])
def test_a_loss_scored_within_the_head_agrees_with_the_oracle(objective, tmp_path):
    """As on GPUs and of every real model: with so many rows of the embedding no logits of a whole row are made."""
    keys = PLAIN | {f"{R}.rollout_backend": "vllm", f"{T}.max_steps": 2, f"{T}.eval_scenes": 1}
    keys |= {f"{G}.num_generations": 2, f"{G}.beta": 0.1, f"{T}.per_device_train_batch_size": 2}
    family, samples = "qwen3", [{"prompt": f"{number}a"} for number in range(5)]
    if objective == "matching":
        family, samples, keys = "qwen3_vl", OBJECTS, {name: v for name, v in keys.items() if not name.startswith(G)}
        keys |= MATCHING | {f"{T}.max_steps": 1, "custom.prompts.system": ""}
    judge(
        {"family": family, "rows": LARGE_VOCABULARY, "samples": samples, "servers": [{}], "keys": keys},
        *(tmp_path / "draw", tmp_path / "models"),
    )


@pytest.mark.wide
@pytest.mark.slow
def test_a_rank_with_fewer_rows_takes_as_many_passes(tmp_path):
    """Long prompts fill a row each, so that the ranks' rows differ in number."""
    keys = PLAIN | {f"{T}.packing": True, f"{T}.packing_buffer": 1, "model.attn_impl": "packed", f"{T}.max_steps": 3}
    keys |= {f"{T}.eval_scenes": 1, f"{T}.per_device_train_batch_size": 2, f"{G}.num_generations": 2}
    samples = [{"prompt": f"{number}{'a' * (30 if number % 3 == 0 else 1)}"} for number in range(9)]
    draw = {"family": "qwen3", "samples": samples, "servers": [], "ranks": 2, "keys": keys}
    judge(draw, tmp_path / "draw", tmp_path / "models")
    events = [json.loads(line) for line in (tmp_path / "draw/run/journal-rank1.jsonl").read_text().splitlines()]
    assert any([] in one["sample_ids"] for one in events if one["event"] == "packed"), "as many rows as rank 0"


@pytest.mark.wide
@pytest.mark.slow
def test_two_ranks_send_a_stock_server_the_weights_of_a_step_once(tmp_path):
    """Such a server is named by what was committed, which rank 1 does not wait for."""
    keys = PLAIN | {
        f"{R}.rollout_backend": "vllm",
        f"{T}.max_steps": 3,
        f"{T}.eval_scenes": 1,
        f"{G}.num_generations": 2,
    }
    samples = [{"prompt": f"{number}a"} for number in range(5)]
    draw = {"family": "qwen3", "samples": samples, "servers": [{}], "dialect": "vllm", "ranks": 2, "keys": keys}
    judge(draw, tmp_path / "draw", tmp_path / "models")


@pytest.mark.slow
@pytest.mark.parametrize(
    ("in_flight", "further"),
    [
        pytest.param("wait", {"resume": 2}, marks=pytest.mark.wide),
        ("keep", {"resume": 1}),
        ("restart", {}),
        pytest.param("keep", {"ranks": 2}, marks=pytest.mark.wide),
    ],
)
def test_episodes_ahead_agree_with_the_oracle(in_flight, further, tmp_path):
    """Environments that take up to 0.3 s a call, two servers; resumed from a checkpoint, or on two ranks."""
    judge_episodes({f"{R}.max_staleness": 2, f"{R}.vllm.sync.in_flight": in_flight}, further, tmp_path)


@pytest.mark.slow
@pytest.mark.parametrize(
    "further", [{}, *(pytest.param(each, marks=pytest.mark.wide) for each in ({"resume": 2}, {"ranks": 2}))]
)
def test_steps_that_take_the_first_complete_groups_agree_with_the_oracle(further, tmp_path):
    """One window in advance, two late; an epoch ends with a smaller step."""
    keys = {f"{R}.max_staleness": 3, f"{R}.late_windows": 2, f"{R}.vllm.sync.in_flight": "keep"}
    judge_episodes(keys | {f"{T}.max_steps": 6, f"{T}.per_device_train_batch_size": 2}, further, tmp_path)


@pytest.mark.slow
@pytest.mark.parametrize("further", [{}, pytest.param({"ranks": 2}, marks=pytest.mark.wide)])
def test_responses_that_meet_a_sync_agree_with_the_oracle(further, tmp_path):
    """Two servers that are slower than the learner; the oldest version of a response counts."""
    ahead = {f"{R}.rollout_backend": "vllm", f"{R}.overlap": "ahead", f"{R}.max_staleness": 2}
    keys = PLAIN | ahead | {f"{R}.vllm.sync.in_flight": "keep", f"{G}.num_generations": 2, f"{T}.max_steps": 5}
    samples = [{"prompt": f"{number}a"} for number in range(5)]
    draw = {"family": "qwen3", "samples": samples, "servers": [{}, {}], "slow_s": 1.0, "keys": keys} | further
    judge(draw, tmp_path / "draw", tmp_path / "models")
    events = [json.loads(line) for line in (tmp_path / "draw/run/journal.jsonl").read_text().splitlines()]
    runs = [each for event in events for each in event.get("policy_versions", []) if event["event"] == "generated"]
    assert any(len(each) > 1 for each in runs), "no sync came within a response"


@pytest.mark.slow
@pytest.mark.parametrize(
    "further", [{}, *(pytest.param(each, marks=pytest.mark.wide) for each in ({"resume": 2}, {"ranks": 2}))]
)
def test_turns_that_a_sync_comes_within_agree_with_the_oracle(further, tmp_path):
    """Two servers that are slower than the learner."""
    judge_episodes({f"{R}.max_staleness": 2, f"{R}.vllm.sync.in_flight": "keep"}, further | {"slow_s": 0.7}, tmp_path)
    events = [json.loads(line) for line in (tmp_path / "draw/run/journal.jsonl").read_text().splitlines()]
    turns = [each for event in events if event["event"] == "played" for each in event["policy_versions"]]
    assert any(len(each) > 1 for each in turns), "no sync came within an episode"


def judge_episodes(own, further, folder):
    keys = (
        PLAIN
        | {
            f"{R}.rollout_backend": "vllm",
            f"{R}.overlap": "ahead",
            f"{E}.name": "conformance.oracle.echo:Echo",
            f"{E}.options": {"delay_s": 0.3},
            f"{E}.max_turns": 3,
            f"{E}.max_response_tokens": 40,
            f"{E}.observations": "text",
            f"{T}.max_steps": 4,
            f"{T}.eval_scenes": 1,
            f"{G}.num_generations": 2,
            "global_max_length": 110,
        }
        | own
    )
    keys.pop(f"{G}.rewards", None)
    samples = [{"prompt": f"{number}a"} for number in range(5)]
    draw = {"family": "qwen3", "samples": samples, "servers": [{}, {}], "keys": keys} | further
    judge(draw, folder / "draw", folder / "models")
