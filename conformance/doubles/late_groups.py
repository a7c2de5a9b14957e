"""``python -m conformance.doubles.late_groups FOLDER``: a run whose steps take the groups that are complete first.

Environments reply after a while that no seed knows, so that the order of completion is another one each time. A folder
with a checkpoint is continued.
"""

import random
import sys
import time
from pathlib import Path

from conformance.doubles.overlapped import attach_servers, note_what_is_learnt
from conformance.doubles.turns import make_trainer
from fixtures.tasks.treasures import TwoTreasures
from rollmatch.journal import read_journal
from rollmatch.model.source import checkpoints_in, step_of
from rollmatch.run.directory import JOURNAL
from rollmatch.training.checkpoint import find_damage

GROUP, PER_STEP, STEPS, LEAD, LATE = 3, 2, 12, 2, 2
OVERRIDES = (
    "custom.trainer_variant=grpo",
    "custom.extra.environment.name=conformance.doubles.late_groups:Slow",
    f"custom.extra.grpo.num_generations={GROUP}",
    "custom.extra.grpo.steps_per_generation=1",
    "custom.extra.grpo.num_iterations=1",
    f"training.per_device_train_batch_size={PER_STEP}",
    f"training.max_steps={STEPS}",
)


class Slow(TwoTreasures):
    """Replies late; ``before_reply`` gets the sample's start."""

    def reset(self, sample, rng):
        self.start = sample.metadata["start"]
        return super().reset(sample, rng)

    def clone(self, rng):
        twin = Slow(self.size, self.horizon)
        twin.__dict__.update(self.__dict__)
        return twin

    def step(self, action):
        Slow.before_reply(self.start)
        return super().step(action)

    @staticmethod
    def before_reply(_start):
        time.sleep(0.02 * random.lognormvariate(0, 1.5))


def trainer_of(folder: Path, *overrides: str, late: int = LATE, lead: int = LEAD):
    """A trainer with servers in this process."""
    trainer = make_trainer(folder, *OVERRIDES, "training.save_steps=1", *overrides)
    how = {"in_flight": "keep", "callers": (lead + 1) * PER_STEP, "group_size": GROUP}
    attach_servers(trainer, "ahead", lead + late, lead, **how)
    note_what_is_learnt(trainer)
    return trainer


def checkpoint_in(folder: Path) -> Path | None:
    """The newest whole one."""
    whole = [path for path in checkpoints_in(folder) if not find_damage(path)]
    return max(whole, key=step_of, default=None)


def groups_by_step(folder: Path) -> list[tuple[int, list[tuple[int, int]]]]:
    """(step, its groups) as each line of the journal says it."""
    taken = (event for event in read_journal(folder / JOURNAL) if event["event"] == "taken")
    return [(event["step"], [(window, place) for window, place in event["groups"]]) for event in taken]


def all_groups(steps: int = STEPS) -> list[tuple[int, int]]:
    """Every one that a run has to learn from."""
    return [(window, place) for window in range(steps) for place in range(PER_STEP)]


def main() -> None:
    """Train to the end."""
    folder = Path(sys.argv[1])
    trainer, checkpoint = trainer_of(folder), checkpoint_in(folder)
    trainer.train(resume_from_checkpoint=None if checkpoint is None else str(checkpoint))
    assert max(trainer.ages, default=0) <= LEAD + LATE
    trainer.close()


if __name__ == "__main__":
    main()
