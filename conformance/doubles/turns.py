"""A trainer of episodes of several turns in this process: two treasures, with the learner's own generate()."""

from itertools import count
from pathlib import Path

from conformance.doubles.digits import ROOT
from conformance.doubles.overlapped import attach_servers
from conformance.doubles.small_run import assembled
from rollmatch.config import load_config
from rollmatch.rollout.retry import ServerRestarted
from rollmatch.run.preflight import load_checked
from rollmatch.training.trainer import RolloutTrainer

SMALL = (
    f"model.model={ROOT}/fixtures/models/grid",
    f"custom.train_jsonl={ROOT}/fixtures/tasks/treasures.jsonl",
    f"custom.val_jsonl={ROOT}/fixtures/tasks/treasures.jsonl",
    "custom.extra.environment.max_turns=8",
    "custom.extra.grpo.num_generations=5",
    "custom.extra.grpo.eval_temperature=0",
    "custom.extra.vineppo.num_continuations=2",
    "training.per_device_train_batch_size=2",
    "training.optim=sgd",
    "training.learning_rate=0.1",
    "training.eval_steps=0",
    "training.max_steps=6",
    "training.save_steps=3",
    "training.report_to=none",
    "training.learner_threads=1",
)
"""A window of four steps, and the beginning of the next; a checkpoint in the middle of the first."""


def make_trainer(folder: Path, *overrides: str) -> RolloutTrainer:
    """Writes below ``folder``."""
    config = load_config(ROOT / "fixtures/tasks/treasures.yaml", [f"training.output_dir={folder}", *SMALL, *overrides])
    return assembled(config, *load_checked(config))


def with_servers(trainer: RolloutTrainer, *, restarts: tuple[int, ...]) -> RolloutTrainer:
    """Servers in this process, which lose their weights under rank 1 in the calls of these numbers."""
    servers, calls = attach_servers(trainer), count()

    def before_call(_server: int, _ids: list[int]) -> None:
        if trainer.source.ranks.rank == 1 and next(calls) in restarts:
            servers.is_well = lambda: False
            raise ServerRestarted("was restarted")

    servers.before_call = before_call
    return trainer
