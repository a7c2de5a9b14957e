"""What the trainer has besides the step, which is in ``trainer``.

``Learner`` is what segments are learnt with. ``SegmentTrainer`` adds to transformers' ``Trainer``:

- The policy may be split over ranks, before it is first used.
- Checkpoints hold what is under way between two optimizer steps.
"""

from collections.abc import Mapping, Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass, replace
from functools import partial
from itertools import zip_longest
from pathlib import Path
from typing import Any, cast

from accelerate import Accelerator
from torch import nn
from transformers import Trainer, TrainerControl, TrainingArguments

from rollmatch.config.strategy import KEY, Strategy
from rollmatch.data import ReusedOrder, WindowPlan
from rollmatch.errors import LaunchError
from rollmatch.learn.batch import Batcher, MicroBatch
from rollmatch.learn.head import Scoring
from rollmatch.learn.pack import Packer
from rollmatch.learn.score import score_without_adapters
from rollmatch.model.decoder_layers import sharded_units
from rollmatch.model.overlong import LengthRules
from rollmatch.model.parts import NAMES, Part, count_parts
from rollmatch.model.policy import unwrap
from rollmatch.model.sharding import EvenGradients, check_split, not_engaged
from rollmatch.objectives.protocol import Objective, PolicyObjective, ScoreSegments, TrainingTargets
from rollmatch.records import Segment
from rollmatch.rollout.overlap import Overlap
from rollmatch.rollout.source import RolloutSource
from rollmatch.training.checkpoint import SavedLearner, sealing
from rollmatch.training.packer_state import (
    WindowTargets,
    forget_versions,
    packer_state,
    read_packer_state,
    write_packer_state,
)
from rollmatch.training.report import StepReport


@dataclass(frozen=True, slots=True, kw_only=True)
class Learner:
    """What segments are learnt with. Made by ``cli.assemble``, used by ``trainer``."""

    objective: Objective
    batcher: Batcher
    reference: nn.Module | None
    """The policy before training, where it is not the policy without its adapters."""
    reference_in_batch: bool
    """Whether each micro-batch is scored by the policy without its adapters before it is learnt from."""
    scores_waiting: bool
    """Whether segments that wait for a row of a later step need old log-probabilities."""
    lengths: LengthRules
    """The longest segment."""

    def with_reference(self, model: nn.Module, batch: MicroBatch, scoring: Scoring) -> MicroBatch:
        """The micro-batch with log-probabilities of the policy without its adapters."""
        objective = cast(PolicyObjective, self.objective)
        logprobs = score_without_adapters(model, batch.inputs, partial(objective.logprobs, batch=batch), scoring)
        return objective.with_reference(batch, logprobs)

    def score_waiting(self, packer: Packer, score: ScoreSegments) -> None:
        """Give segments that wait for a row of a later step old log-probabilities."""
        packer.restore(cast(PolicyObjective, self.objective).with_old_logprobs(packer.state(), score))

    def fitted(self, made: TrainingTargets) -> TrainingTargets:
        """With each segment that is longer than ``lengths`` fitted to them. Errors: ``SegmentTooLong``."""
        long = [s for segments in made.segments for s in segments if s.encoded_len > self.lengths.max_len]
        fitted = tuple(tuple(self.lengths.fit(segment) for segment in segments) for segments in made.segments)
        num_cut = sum(self.lengths.fit(segment).train_len == segment.train_len for segment in long)
        return replace(made, segments=fitted, num_skipped=len(long) - num_cut, num_cut=num_cut)


class SegmentTrainer(Trainer):  # type: ignore[misc]  # transformers is not typed
    """A ``Trainer`` whose policy may be split over ranks, and whose checkpoints hold segments that wait."""

    accelerator: Accelerator
    control: TrainerControl
    source: RolloutSource
    overlap: Overlap
    learner: Learner
    order: ReusedOrder
    plan: WindowPlan
    window_targets: WindowTargets | None
    report: StepReport

    def __init__(self, *, model: nn.Module, args: TrainingArguments, **arguments: Any) -> None:
        if args.fsdp:
            args.fsdp_plugin_args.setdefault("transformer_cls_names_to_wrap", sharded_units(model))
        super().__init__(model=model, args=args, **arguments)
        self._is_split = False
        self._even_gradients: EvenGradients | None = None
        """What gives all ranks gradients of the same weights from every pass; None: they have them by themselves."""

    def split(self) -> None:
        """Split the policy over ranks before it is first used, where FSDP2 does. Errors: ``strategy-not-engaged``."""
        if self.args.fsdp and not self._is_split:
            if not self.is_fsdp_enabled:
                raise not_engaged("fsdp2")
            loader = self.get_train_dataloader()
            num_steps = self.set_initial_training_values(self.args, loader)[-1]
            super()._prepare_for_training(num_steps, loader, None)
            check_split(self.model, "fsdp2")
            self._is_split, self._even_gradients = True, EvenGradients(self.model)
        if self.args.deepspeed and not self.is_deepspeed_enabled:
            raise not_engaged("deepspeed")

    def _get_train_sampler(self, *_: object) -> ReusedOrder:
        """The learner owns the order."""
        return self.order

    def _prepare_for_training(
        self, max_steps: int, train_dataloader: object, resume_from_checkpoint: str | None
    ) -> tuple[nn.Module, object]:
        """As transformers'; a policy that is split already only reads the checkpoint."""
        self.split()
        if not self._is_split:
            prepared: tuple[nn.Module, object] = super()._prepare_for_training(
                max_steps, train_dataloader, resume_from_checkpoint
            )
            return prepared
        if resume_from_checkpoint is not None:
            self._load_from_checkpoint(resume_from_checkpoint, self.model_wrapped)
            self._load_optimizer_and_scheduler(resume_from_checkpoint)
        return self.model_wrapped, train_dataloader

    def _accumulating(self, model: nn.Module) -> AbstractContextManager[None]:
        """Around all passes of an optimizer step but the last: without an exchange of gradients.

        As in transformers' loop, not where every pass needs one (FSDP2).
        """
        if self.accelerator.gradient_state.plugin_kwargs.get("sync_each_batch", False):
            return nullcontext()
        waiting: AbstractContextManager[None] = self.accelerator.no_sync(model)
        return waiting

    def _check_images(self, has_images: Sequence[bool]) -> None:
        """DeepSpeed exchanges a vision tower's weights or gradients only on ranks that have used it.

        ``has_images``: of each pass that this rank is about to run; a rank with fewer of them runs others without.
        """
        if not self.args.deepspeed or not _exchanges_tower(self.model, self.args.deepspeed):
            return
        passes = zip_longest(*self.source.ranks.gather(list(has_images)), fillvalue=False)
        mixed = next((seen for seen in passes if len(set(seen)) > 1), None)
        if mixed is None:
            return
        problem = (
            f"step {self.state.global_step}: rank {mixed.index(False)} has a batch without images, others have some"
        )
        remedy = "Set it to fsdp2 or ddp, give every batch an image, or use deepspeed_zero2 with a frozen vision tower."
        raise LaunchError(problem, code="images-on-some-ranks", key=KEY, remedy=remedy)

    def close(self) -> None:
        """Leave the servers, or stop the engine."""
        if self.overlap.prefetch is not None:
            self.overlap.prefetch.close()
        self.source.template.preparation.close()
        self.source.fence.backend.close()

    @property
    def _has_packer_state(self) -> bool:
        """Whether anything can be under way between two optimizer steps."""
        reuse = self.learner.objective.reuse
        return self.learner.batcher.packer is not None or reuse.steps_per_generation * reuse.num_iterations > 1

    def restore_packer_state(self, checkpoint: Path) -> None:
        """Restore what was under way when ``checkpoint`` was written. Errors: ``PackerStateUnfit``."""
        if not self._has_packer_state:
            return
        state = read_packer_state(checkpoint, self.train_dataset, rank=self.source.ranks.rank)
        if self.learner.batcher.packer is not None:
            self.learner.batcher.packer.restore(forget_versions(state.waiting))
        if state.parts:
            window = self.plan.at(int(checkpoint.name.rpartition("-")[2]))
            self.window_targets = WindowTargets(window=window, parts=tuple(map(forget_versions, state.parts)))

    def save_unfinished(self) -> None:
        """Save the last whole optimizer step, before an error that every rank has ends the run."""
        step, folder = self.state.global_step, Path(self.args.output_dir)
        is_saved = (folder / f"checkpoint-{step}" / "trainer_state.json").exists()
        if step and not is_saved:
            self._save_checkpoint(self.model, None)

    def _waiting(self, step: int) -> Sequence[Segment]:
        """Segments that wait for a row after ``step`` steps; one under way has taken some, and may not be finished."""
        batcher, is_packed = self.learner.batcher, self.report.step == step and bool(self.report.batches)
        if batcher.packer is None:
            return ()
        return batcher.waiting_before if is_packed else batcher.packer.state()

    def _save_checkpoint(self, model: nn.Module, trial: object) -> None:
        """Save, then write the manifest that marks the checkpoint as whole, and only then remove old ones."""
        step, source = self.state.global_step, self.source
        folder = Path(self.args.output_dir) / f"checkpoint-{step}"
        folder.mkdir(parents=True, exist_ok=True)
        if self._has_packer_state:
            write_packer_state(
                folder, packer_state(self._waiting(step), self.window_targets, step=step), rank=source.ranks.rank
            )
        if source.ranks.is_primary:
            saved_learner(self.args, source.ranks.learner_world_size).write(folder)
        source.ranks.barrier()
        with sealing(folder, self.args, source.ranks):
            super()._save_checkpoint(model, trial)
        source.journal.write("saved", step=step, path=folder.name)


def saved_learner(arguments: TrainingArguments, learner_world_size: int) -> SavedLearner:
    """What a resumed run is compared with."""
    split = "fsdp2" if arguments.fsdp else "ddp"
    samples = arguments.per_device_train_batch_size * arguments.gradient_accumulation_steps * learner_world_size
    return SavedLearner(
        learner_world_size=learner_world_size,
        samples_per_step=samples,
        strategy="deepspeed" if arguments.deepspeed else split,
    )


def _exchanges_tower(model: nn.Module, settings: Mapping[str, object]) -> bool:
    """Whether ranks exchange the vision tower's weights (ZeRO-3) or its gradients; ``settings`` are DeepSpeed's."""
    parts = count_parts(model, unwrap(model))
    found = [parts[NAMES[part]] for part in (Part.VISION, Part.PROJECTOR) if NAMES[part] in parts]
    is_in_parts = Strategy(engine="deepspeed", settings=settings).splits_weights
    return bool(found) and (is_in_parts or any(part.num_trained for part in found))
