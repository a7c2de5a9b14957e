"""A rollout side that fails for good leaves a checkpoint of the last whole step, and the error keeps its name."""

import pytest
import torch

from conformance.trainer.small_run import make_trainer, requested, weights_of
from rollmatch.cli.run import train_or_save
from rollmatch.dialects.watch import ServerDied

SHORT = ("training.max_steps=3", "training.save_steps=1000", "custom.extra.rollout_matching.max_new_tokens=8")


def fail_at(trainer, call):
    """The backend's call of this number (from 1) and every later one fails."""
    backend, calls = trainer.source.fence.backend, []
    generate = backend.generate

    def counted(requests, decoding):
        calls.append(1)
        if len(calls) >= call:
            raise ServerDied("is gone", key="http://server")
        return generate(requests, decoding)

    backend.generate = counted


@pytest.mark.scenario(
    "server-connection/a-run-whose-servers-die-is-resumed-where-it-stopped",
    clauses=["server-connection/a-call-outlives-a-busy-server#6"],
)
def test_a_run_whose_servers_die_is_resumed_where_it_stopped(tmp_path):
    whole = make_trainer(tmp_path / "whole", *SHORT, is_shallow=True)
    whole.train()
    broken = make_trainer(tmp_path / "broken", *SHORT, is_shallow=True)
    fail_at(broken, 3)
    with pytest.raises(ServerDied):
        train_or_save(broken, None)
    checkpoint = tmp_path / "broken" / "checkpoint-2"
    assert (checkpoint / "trainer_state.json").exists()
    resumed = make_trainer(tmp_path / "broken", *SHORT, is_shallow=True)
    resumed.restore_packer_state(checkpoint)
    train_or_save(resumed, checkpoint)
    assert requested(resumed)[-4:] == requested(whole)[-4:]
    ours, theirs = weights_of(resumed.model), weights_of(whole.model)
    assert all(torch.equal(ours[name], theirs[name]) for name in theirs)


def test_nothing_is_saved_before_the_first_step(tmp_path):
    trainer = make_trainer(tmp_path, *SHORT, is_shallow=True)
    fail_at(trainer, 1)
    with pytest.raises(ServerDied):
        train_or_save(trainer, None)
    assert not list(tmp_path.glob("checkpoint-*"))
