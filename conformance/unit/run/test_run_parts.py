"""What a run says and counts around its training."""

import pytest
import torch

from conformance.doubles.configs import config_with
from conformance.doubles.small_run import make_trainer
from rollmatch.ranks import Ranks
from rollmatch.run import lifecycle as run

SERVED = ("~.vllm.mode=server", "~.vllm.server.base_url=http://a:1", "~.vllm.server.group_port=2")


@pytest.mark.parametrize(
    ("overrides", "is_waited_for"), [((), True), (SERVED, False), (("~.rollout_backend=hf",), False)]
)
def test_an_engine_of_its_own_is_waited_for(overrides, is_waited_for):
    lines = [*run._slow_parts(config_with(*overrides), torch.nn.Linear(2, 2))]
    assert [line.partition(",")[0] for line in lines] == ["starting the engine"] * is_waited_for


@pytest.mark.parametrize(("rank", "saved", "said"), [(0, (0, 2), "rank 1, 3 of 4"), (0, range(4), ""), (1, (0,), "")])
def test_ranks_without_a_random_state_are_named_once(capsys, tmp_path, rank, saved, said):
    for each in saved:
        (tmp_path / f"rng_state_{each}.pth").touch()
    run._warn_about_rng(tmp_path, Ranks(rank=rank, learner_world_size=4))
    printed = capsys.readouterr().out
    assert printed == (f"  warning: {tmp_path} has no random state for {said}\n" if said else "")


@pytest.mark.parametrize(("max_steps", "counted"), [(7, 7), (-1, None)])
def test_steps_of_a_run_are_the_configured_ones_or_those_of_all_epochs(tmp_path, max_steps, counted):
    packed = "training.packing_min_fill_ratio=0.5"
    settings = (f"training.max_steps={max_steps}", "training.num_train_epochs=3", "training.packing=true", packed)
    trainer = make_trainer(tmp_path, *settings)
    assert run._count_steps(trainer) == (counted or 3 * len(trainer.get_train_dataloader()))
    assert run._watch(trainer, config_with(*settings), None).min_fill == 0.5
