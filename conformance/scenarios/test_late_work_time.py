"""What moving late work gains where one of two servers is slower: real prefetch, virtual clock, recorded answers."""

import json
from itertools import chain
from pathlib import Path

import pytest

from conformance.scenarios.configs import config_with
from conformance.scenarios.timed_late_work import Work, rollout_s
from rollmatch.config.effective import calls_together

RECORDING = Path(__file__).parents[2] / "fixtures" / "recorded" / "overlap" / "digits.json"
SIZE, NUM_SEATS = 128, 8
SERVED = (
    "~.overlap=ahead",
    "~.vllm.mode=server",
    "~.vllm.server.base_url=[http://127.0.0.1:1, http://127.0.0.1:2]",
    "~.vllm.server.group_port=51216",
    "training.packing=false",
    f"training.per_device_train_batch_size={SIZE}",
)


def windows(slowdowns, *, num_seats=NUM_SEATS):
    """Eight windows of all recorded answers, each beginning with another step's, and each server the slow one."""
    steps = json.loads(RECORDING.read_text())["finish_s"]
    for first in range(len(steps)):
        answers = tuple(chain(*steps[first:], *steps[:first]))
        assert len(answers) == SIZE
        for each in {slowdowns, slowdowns[::-1]}:
            yield Work(answer_s=answers, slowdowns=each, num_seats=num_seats)


def times_faster(works, *, pieces, replicas="1", seats=NUM_SEATS):
    """Than with shares that stay; as many calls under way as the configuration says."""
    told = f"custom.extra.rollout_server.vllm_data_parallel_size={replicas}", f"~.vllm.max_num_seqs={seats}"
    config = config_with(*SERVED, *told, f"~.pieces_per_server={pieces}")
    together = calls_together(config, num_servers=2)
    fixed = sum(rollout_s(work, pieces=1, together=1) for work in works)
    return fixed / sum(rollout_s(work, pieces=pieces, together=together) for work in works)


def test_shares_that_stay_take_as_long_as_the_slower_server():
    for work in windows((1, 2)):
        share = slice(0, SIZE // 2) if work.slowdowns[0] == 2 else slice(SIZE // 2, SIZE)
        least = 2 * sum(work.answer_s[share]) / NUM_SEATS
        assert least <= rollout_s(work, pieces=1, together=1) <= least + 2 * max(work.answer_s)


@pytest.mark.parametrize(("pieces", "gain"), [(4, 1.2), (16, 1.3), (64, 1.33)])
def test_late_work_is_faster_where_one_server_takes_twice_as_long(pieces, gain):
    works = list(windows((1, 2)))
    bound = sum(rollout_s(work, pieces=1, together=1) for work in works) / sum(work.bound_s for work in works)
    assert 1.5 < bound < 1.7
    assert gain <= times_faster(works, pieces=pieces) < bound


def test_it_gains_more_where_one_server_takes_four_times_as_long():
    assert times_faster(list(windows((1, 4))), pieces=64) > 1.8


@pytest.mark.parametrize("pieces", [4, 16, 64])
def test_it_costs_nothing_where_servers_are_equally_fast(pieces):
    assert times_faster(list(windows((1, 1))), pieces=pieces) > 1.04, "long answers may be all in one share"


def test_calls_that_fill_the_engines_leave_more_to_move_than_half_of_a_share():
    works = list(windows((1, 2)))
    assert times_faster(works, pieces=64) > times_faster(works, pieces=64, replicas="null") + 0.1


def test_it_does_not_pay_where_an_engine_has_a_seat_for_each_request_of_its_share():
    """An engine with half of its share under way leaves seats empty."""
    equal, twice = (list(windows(slowdowns, num_seats=SIZE)) for slowdowns in ((1, 1), (1, 2)))
    assert times_faster(equal, pieces=64, seats=SIZE) < 0.9
    assert times_faster(twice, pieces=64, seats=SIZE) < 1.0
