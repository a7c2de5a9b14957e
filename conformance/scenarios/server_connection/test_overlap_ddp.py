"""Two learner ranks on gloo whose rollouts come back at different times: one gradient, one order, one end.

As a script (``FOLDER OVERRIDE...``) it is one of the ranks, beside servers in its process, once in each mode.
"""

import json
import sys
import time
from itertools import chain
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file, save_file

from conformance.doubles.overlapped import overlapped
from conformance.doubles.small_run import weights_of
from conformance.doubles.started import finish_ranks, in_time, journals_of
from conformance.tools.judge import judge
from rollmatch.rollout.retry import ServerRestarted

WORKER = ("-m", "conformance.scenarios.server_connection.test_overlap_ddp")
RESTARTED = "-restarted"
"""Of a run in which a server is restarted under rank 1 in the middle of each step."""
MODES = ("off", "ahead", f"off{RESTARTED}", f"ahead{RESTARTED}")
STEPS = (
    *("training.packing=false", "training.per_device_train_batch_size=1", "training.gradient_accumulation_steps=2"),
    *("training.max_steps=2", "training.learning_rate=0.1", "custom.extra.rollout_matching.max_new_tokens=8"),
)
TOLERANCE = 1e-5
"""Of the length of a weight: float32, sums in another order."""


@pytest.fixture(scope="module")
def two_ranks(tmp_path_factory):
    folder = tmp_path_factory.mktemp("two_ranks")
    finish_ranks(folder, 2, sys.executable, *WORKER, str(folder), *STEPS)
    return folder


def weights(folder, mode, rank):
    return torch.cat(
        [tensor.flatten() for _, tensor in sorted(load_file(folder / f"{mode}-rank{rank}.safetensors").items())]
    )


@pytest.mark.parametrize("mode", MODES[1:])
def test_both_ranks_end_with_the_same_weights(two_ranks, mode):
    assert torch.equal(weights(two_ranks, mode, 0), weights(two_ranks, mode, 1))


def test_each_rank_consumes_the_samples_of_off_mode(two_ranks):
    off, on = (journals_of(two_ranks / each, num_ranks=2) for each in ("off", "ahead"))
    for rank in range(2):
        ids = [
            [sorted(chain(*event["sample_ids"])) for event in part[rank] if event["event"] == "packed"]
            for part in (off, on)
        ]
        assert ids[0] == ids[1]
        versions = [[e["version"] for e in part[rank] if e["event"] == "synced"] for part in (off, on)]
        assert versions[0] == versions[1] == [1, 2]


@pytest.mark.scenario(
    "server-connection/a-server-is-restarted-under-one-of-two-learner-ranks",
    clauses=["server-connection/a-call-outlives-a-busy-server#4"],
)
@pytest.mark.parametrize("mode", ["off", "ahead"])
def test_a_restart_under_one_rank_is_answered_by_a_sync_on_both(two_ranks, mode):
    journals = journals_of(two_ranks / f"{mode}-restarted", num_ranks=2)
    for events in journals:
        synced = [(event["step"], event["version"]) for event in events if event["event"] == "synced"]
        num_synced = 3 if mode == "ahead" else 4  # its second window was requested in the first step
        assert synced == [(0, 1), (0, 2), (1, 3), (1, 4)][:num_synced]
        assert len([event for event in events if event["event"] == "restarted"]) == num_synced - 2
        assert [event["step"] for event in events if event["event"] == "packed"] == [0, 1]
    assert judge(in_time(journals), max_staleness=int(mode == "ahead")) == []
    if mode != "ahead":  # where the next step's rollouts become fresher
        expected = weights(two_ranks, "off", 0)
        assert (weights(two_ranks, f"{mode}-restarted", 0) - expected).norm() < TOLERANCE * expected.norm()


def run(folder: Path, mode: str, *overrides: str) -> None:
    """Write weights and losses."""
    trainer, servers = overlapped(folder / mode, mode.removesuffix(RESTARTED), *overrides, is_shallow=True)
    rank = trainer.source.ranks.rank

    def before_call(server: int, ids: list[int]) -> None:
        if mode.endswith(RESTARTED) and rank == 1 and servers.policy_version % 2:  # the first version of each step
            servers.is_well = lambda: False
            raise ServerRestarted("was restarted")
        # The ranks' parts come back at different times: rank 1 waits for its last one.
        time.sleep(0.4 if rank and ids == trainer.last else 0.0)

    servers.before_call = before_call
    window = trainer.plan.at(0)
    trainer.last = [trainer.train_dataset[window.sample_indices[-1]].sample_id]
    trainer.train()
    save_file(weights_of(trainer.model), folder / f"{mode}-rank{rank}.safetensors")
    log = [line["loss"] for line in trainer.state.log_history if "loss" in line]
    (folder / f"{mode}-rank{rank}.json").write_text(json.dumps(log))


if __name__ == "__main__":
    for mode in MODES:
        run(Path(sys.argv[1]), mode, *sys.argv[2:])
