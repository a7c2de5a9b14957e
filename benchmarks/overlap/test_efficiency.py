"""Efficiency of ``overlap: ahead``, max(R, L) / step, by the real trainer with calls and learning that last.

A call takes R seconds and a step's learning L more than the tiny policy needs, so that two cores are enough: what is
measured is the time that the longer side waits for the other one, for the sync and for what the step does besides.
"""

import statistics
import time

import pytest

from conformance.doubles.digits import scenes, unseen
from conformance.doubles.overlapped import overlapped

SHORT = (
    *("training.per_device_train_batch_size=4", "training.packing=false", "training.max_steps=8"),
    "custom.extra.rollout_matching.max_new_tokens=1",
)
BAR = 0.97
WARM_UP, TAIL = 2, 2
"""Steps that do not count: the first ones wait for their rollouts, the last ones have nothing left to request."""


def run_ahead(folder, *, call_s, learn_s):
    """Figures of each step that counts."""
    samples = {"samples": unseen(scenes("train")[:8]), "eval_samples": scenes()[:1]}
    trainer, servers = overlapped(folder, "ahead", *SHORT, is_shallow=True, **samples)
    servers.before_call = lambda server, ids: time.sleep(call_s)
    learn = trainer.training_step

    def learn_longer(*arguments, **keywords):
        time.sleep(learn_s)
        return learn(*arguments, **keywords)

    trainer.training_step = learn_longer
    trainer.train()
    steps = [line for line in trainer.state.log_history if "overlap/efficiency" in line][WARM_UP:-TAIL]
    return [
        {name: line[f"overlap/{name}"] for name in ("rollout_s", "learn_s", "sync_s", "efficiency")} for line in steps
    ]


@pytest.mark.parametrize(("call_s", "learn_s"), [(1.6, 0.6), (1.2, 1.0), (0.6, 1.2)])
def test_the_longer_side_never_waits(tmp_path, benchmark, check_bar, call_s, learn_s):
    figures = benchmark.pedantic(run_ahead, args=(tmp_path,), kwargs={"call_s": call_s, "learn_s": learn_s}, rounds=1)
    middle = {name: statistics.median(one[name] for one in figures) for name in figures[0]}
    benchmark.extra_info |= {"steps": figures, "bar": BAR}
    line = f"ahead, R {middle['rollout_s']:.2f} s, L {middle['learn_s']:.2f} s: efficiency {middle['efficiency']:.3f}"
    check_bar(f"{line} (bar {BAR}), sync {middle['sync_s'] * 1e3:.0f} ms", middle["efficiency"] >= BAR)
