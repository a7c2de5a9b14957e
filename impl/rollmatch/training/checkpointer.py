"""What a checkpoint of a run holds beside transformers' files, and how it is restored."""

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path

from transformers import TrainingArguments
from transformers.trainer import TRAINER_STATE_NAME, TrainerState

from rollmatch.data import WindowPlan
from rollmatch.learn.average import WeightAverage
from rollmatch.learn.batch import Batcher
from rollmatch.model.source import step_of
from rollmatch.model.split_checkpoint import check_parts
from rollmatch.records import Sample, Segment
from rollmatch.rollout.open_groups import OpenGroups, restore_groups
from rollmatch.rollout.source import RolloutSource
from rollmatch.training.checkpoint import SavedLearner, reading, sealing
from rollmatch.training.packer_state import (
    WindowTargets,
    forget_versions,
    packer_state,
    read_packer_state,
    write_packer_state,
)

AVERAGE_FILE = "average-{place}.safetensors"
"""Of a checkpoint: an average of the policy's weights."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Checkpointer:
    """Saves and restores what is under way between two optimizer steps. Made and used by ``RolloutTrainer``."""

    arguments: TrainingArguments
    source: RolloutSource
    batcher: Batcher
    plan: WindowPlan
    samples: Sequence[Sample]
    averages: Sequence[WeightAverage]
    groups: OpenGroups | None = None
    """Where steps take the groups that are complete first."""

    @property
    def has_packer_state(self) -> bool:
        """Whether anything can be under way: segments that wait for a row, or a window of several steps."""
        shape = self.plan.shape
        return self.batcher.packer is not None or shape.steps_per_generation * shape.num_iterations > 1

    @contextmanager
    def saving(self, step: int, waiting: Sequence[Segment], targets: WindowTargets | None) -> Iterator[None]:
        """Let transformers save inside; the manifest, written last, marks the checkpoint as whole."""
        ranks, folder = self.source.ranks, self.folder_of(step)
        folder.mkdir(parents=True, exist_ok=True)
        if self.has_packer_state:
            write_packer_state(folder, packer_state(waiting, targets, step=step), rank=ranks.rank)
        if self.groups is not None:
            self.groups.save(folder, step=step, rank=ranks.rank)
        if ranks.is_primary:
            saved_learner(self.arguments, ranks.learner_world_size).write(folder)
            for place, average in enumerate(self.averages):
                average.save(folder / AVERAGE_FILE.format(place=place))
        ranks.barrier()
        with sealing(folder, self.arguments, ranks):
            yield
        self.source.journal.write("saved", step=step, path=folder.name)

    def restore(self, checkpoint: Path) -> WindowTargets | None:
        """Put segments that waited back into the packer; returns the window under way, if there was one.

        Errors: ``resume-other-learner``, ``carry-unfit``, ``groups-unfit``, ``average-missing``.
        """
        ranks = self.source.ranks
        saved_learner(self.arguments, ranks.learner_world_size).check(checkpoint)
        with reading(checkpoint):
            for place, average in enumerate(self.averages):
                average.restore(checkpoint / AVERAGE_FILE.format(place=place))
            restore_groups(self.groups, checkpoint, self.source.journal.path, step=step_of(checkpoint), rank=ranks.rank)
        if not self.has_packer_state:
            return None
        state = read_packer_state(checkpoint, self.samples, rank=ranks.rank)
        if self.batcher.packer is not None:
            self.batcher.packer.restore(forget_versions(state.waiting))
        if not state.parts:
            return None
        parts = tuple(map(forget_versions, state.parts))
        return WindowTargets(window=self.plan.at(step_of(checkpoint)), parts=parts, summary=state.summary)

    def is_saved(self, step: int) -> bool:
        """Whether the checkpoint of a step is there."""
        return (self.folder_of(step) / "trainer_state.json").exists()

    def folder_of(self, step: int) -> Path:
        """Where transformers saves a step."""
        return Path(self.arguments.output_dir) / f"checkpoint-{step}"


def saved_learner(arguments: TrainingArguments, learner_world_size: int) -> SavedLearner:
    """What a resumed run is compared with."""
    split = "fsdp2" if arguments.fsdp else "ddp"
    samples = arguments.per_device_train_batch_size * arguments.gradient_accumulation_steps * learner_world_size
    return SavedLearner(
        learner_world_size=learner_world_size,
        samples_per_step=samples,
        strategy="deepspeed" if arguments.deepspeed else split,
    )


def check_trainer_state(checkpoint: Path) -> None:
    """Read transformers' own file as its loop will, and what parts of a policy name. Errors:
    ``checkpoint-unreadable``.
    """
    with reading(checkpoint):
        check_parts(checkpoint)
        state, empty = TrainerState.load_from_json(str(checkpoint / TRAINER_STATE_NAME)), TrainerState()
        for field in ("global_step", "log_history", "stateful_callbacks"):
            if type(getattr(state, field)) is not type(getattr(empty, field)):
                raise ValueError(f"{field} of {TRAINER_STATE_NAME} is {type(getattr(state, field)).__name__}")
        if state.global_step != step_of(checkpoint):
            raise ValueError(f"{TRAINER_STATE_NAME} is of step {state.global_step}")
