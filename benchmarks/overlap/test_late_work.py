"""Late work beside shares that stay: two real servers, a core each, of which one stands still half of the time.

A server writes four answers at once, as one whose attention cache holds no more, and has 24 of a step's 48 to write.
A minute on a machine with two cores; with ``LATE_ROUNDS=4``, for a figure to report, three at most.
"""

import os
import statistics
import time
from contextlib import ExitStack

import pytest
import torch

from benchmarks.overlap.pinned import CONFIG, MATCHING, slowed, two_servers
from conformance.doubles.digits import load_model, requests_for, scenes
from conformance.doubles.started import absolute
from rollmatch.config import load_config
from rollmatch.config.effective import calls_together
from rollmatch.ranks import Ranks
from rollmatch.rollout.backend import Decoding
from rollmatch.rollout.prefetch import Prefetch, PrefetchRules
from rollmatch.run.assemble import make_template
from rollmatch.run.connect import connect_servers
from rollmatch.weights.named_weights import named_weights

NUM_ROUNDS = int(os.environ.get("LATE_ROUNDS", "2"))
NUM_SEATS, SIZE = 4, 48
DECODING = Decoding(max_new_tokens=48)
PIECES = (1, 4, SIZE // 2)
BAR = 1.2
"""For single requests."""
OVERRIDES = (
    f"{MATCHING}.overlap=ahead",
    f"{MATCHING}.vllm.max_num_seqs={NUM_SEATS}",
    f"training.per_device_train_batch_size={SIZE}",
    "training.gradient_accumulation_steps=1",
)


class Steps:
    """Rollouts of whole steps, without learning between them; ``pieces`` as in the configuration."""

    def __init__(self, backend, config, *, pieces):
        together = calls_together(config, num_servers=backend.num_servers)
        rules = PrefetchRules(max_windows=1, callers_per_server=together, pieces_per_server=pieces)
        self.prefetch = Prefetch(backend, DECODING, rules)
        with self.prefetch.quiet():
            pass
        self.took_s, self.shares, self.busy_s = [], [], []

    def write(self, step, requests):
        began = time.perf_counter()
        self.prefetch.submit(step, requests)
        rollouts, _ = self.prefetch.collect(step, min_version=1)
        self.prefetch.forget(step)
        self.took_s.append(time.perf_counter() - began)
        calls = self.prefetch.take_calls()
        by_server = [[call for call in calls if call.item.server_index == place] for place in range(2)]
        self.shares.append([sum(call.item.stop - call.item.start for call in each) for each in by_server])
        self.busy_s.append([max(call.ended for call in each) - min(call.began for call in each) for each in by_server])
        return [rollout.request_id for rollout in rollouts]


@pytest.fixture(scope="module")
def steps(tmp_path_factory):
    """By their pieces; in every round each writes the same step, in an order that turns."""
    folder = tmp_path_factory.mktemp("late")
    torch.set_num_threads(1)
    with ExitStack() as stack:
        settings, servers = stack.enter_context(two_servers(folder, *OVERRIDES))
        configs = {n: load_config(CONFIG, absolute(*settings, f"{MATCHING}.pieces_per_server={n}")) for n in PIECES}
        backend = connect_servers(configs[1], make_template(configs[1]), ranks=Ranks())
        stack.callback(backend.close)
        backend.push(named_weights(load_model()), version=1)
        steps_by_pieces = {pieces: Steps(backend, config, pieces=pieces) for pieces, config in configs.items()}
        samples = scenes("train")
        backend.generate(requests_for(samples[:NUM_SEATS]), DECODING)  # the first tokens of an engine take longest
        stack.enter_context(slowed(servers[0]))
        for number in range(NUM_ROUNDS):
            requests = requests_for(samples[number * SIZE : (number + 1) * SIZE])
            turn = number % len(PIECES)
            for pieces in (*PIECES[turn:], *PIECES[:turn]):
                assert steps_by_pieces[pieces].write(number, requests) == [request.request_id for request in requests]
        for each in steps_by_pieces.values():
            each.prefetch.close()
    return steps_by_pieces


def test_one_server_takes_longer_for_its_share(steps):
    slow, fast = (statistics.median(busy[place] for busy in steps[1].busy_s) for place in range(2))
    assert slow / fast > 1.4, (slow, fast)
    assert steps[1].shares == [[SIZE // 2, SIZE // 2]] * NUM_ROUNDS


@pytest.mark.parametrize("pieces", PIECES[1:])
def test_a_step_whose_late_work_moves_beside_one_whose_shares_stay(steps, pieces, benchmark, check_bar):
    fixed, ours = steps[1], steps[pieces]
    ratio = statistics.median(fixed.took_s) / statistics.median(ours.took_s)
    slow, fast = (statistics.median(busy[place] for busy in fixed.busy_s) for place in range(2))
    bar = BAR if pieces == max(PIECES) else None
    line = (
        f"late work, {pieces} pieces: {ratio:.2f} x shares that stay (bar {bar}), {statistics.median(ours.took_s):.3g}"
    )
    line += f" s a step; fixed {statistics.median(fixed.took_s):.3g} s, servers {slow:.3g} s and {fast:.3g} s; "
    line += f"the slow one wrote {statistics.median(share[0] for share in ours.shares):g} of {SIZE}"
    benchmark.extra_info |= {"ratio": ratio, "bar": bar, "fixed_s": fixed.took_s, "ours_s": ours.took_s}
    benchmark.pedantic(lambda: None, rounds=1)
    check_bar(line, bar is None or ratio >= bar)
