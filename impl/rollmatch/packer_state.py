"""What a checkpoint keeps beside weights and optimizer: segments that wait for a row, and a window under way."""

import json
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, field, fields, replace
from itertools import zip_longest
from pathlib import Path
from typing import Any

from torch import Tensor, nn
from transformers import TrainerControl, TrainingArguments

from rollmatch.checkpoint import SavedLearner, sealing
from rollmatch.config.strategy import KEY, Strategy
from rollmatch.data import Window, WindowPlan
from rollmatch.data.lazy import samples_by_id
from rollmatch.errors import LaunchError
from rollmatch.learn.batch import Passes
from rollmatch.model.decoder_layers import sharded_units
from rollmatch.model.images import ImageFeatures
from rollmatch.model.parts import NAMES, Part, count_parts
from rollmatch.model.policy import unwrap
from rollmatch.model.sharding import EvenGradients, check_split, not_engaged
from rollmatch.multi_pass import MultiPassTrainer
from rollmatch.objectives.protocol import Learner
from rollmatch.records import PolicyTarget, Sample, Segment
from rollmatch.rollout.source import Overlap, RolloutSource
from rollmatch.step_report import StepReport

PACKER_STATE_FILE = "packer-rank{rank}.json"
BEFORE_RESUME = 0
"""Policy version of what was generated before the run was resumed: versions restart, the first one sent is 1."""


class PackerStateUnfit(LaunchError):
    """What waited when a checkpoint was written is there for this rank, and belongs to this data set."""

    code = "carry-unfit"


@dataclass(frozen=True, slots=True, kw_only=True)
class PackerState:
    """What one rank keeps. Made and restored by ``trainer``."""

    waiting: tuple[Segment, ...] = ()
    """Segments in the packing buffer, oldest first."""
    parts: tuple[tuple[Segment, ...], ...] = ()
    """Segments of the window under way, per part; empty between windows."""


@dataclass(slots=True, kw_only=True)
class WindowTargets:
    """What the optimizer steps of a window learn from."""

    window: Window
    parts: tuple[tuple[Segment, ...], ...]
    """Segments of each part of the window."""
    features: Mapping[int, ImageFeatures] = field(default_factory=dict)
    """By sample id; what is missing is computed again."""
    reports: tuple[object, ...] = ()
    """Of its rollouts; none where a run was resumed in the middle of it."""


def packer_state(waiting: Sequence[Segment], targets: WindowTargets | None, *, step: int) -> PackerState:
    """What is under way after ``step`` optimizer steps."""
    is_under_way = targets is not None and targets.window.first_step < step < targets.window.end_step
    return PackerState(
        waiting=tuple(waiting),
        parts=targets.parts if targets is not None and is_under_way else (),
    )


def write_packer_state(folder: Path, state: PackerState, *, rank: int) -> None:
    """Write the rank's file into a checkpoint's folder."""
    waiting = [_as_fields(segment) for segment in state.waiting]
    parts = [[_as_fields(segment) for segment in part] for part in state.parts]
    (folder / PACKER_STATE_FILE.format(rank=rank)).write_text(json.dumps({"waiting": waiting, "parts": parts}))


def read_packer_state(folder: Path, samples: Sequence[Sample], *, rank: int) -> PackerState:
    """Read it back. Errors: ``PackerStateUnfit``."""
    file = folder / PACKER_STATE_FILE.format(rank=rank)
    try:
        stored = json.loads(file.read_text())
        named = (sample_id for part in (stored["waiting"], *stored["parts"]) for sample_id, _ in part)
        by_id = samples_by_id(samples, named)
        waiting = _as_segments(stored["waiting"], by_id)
        parts = tuple(_as_segments(part, by_id) for part in stored["parts"])
    except (OSError, ValueError, KeyError, TypeError) as error:
        remedy = "Resume with the ranks, the packing and the data set of the run that wrote it, or start a new run."
        raise PackerStateUnfit(f"{type(error).__name__}: {error}", key=str(file), remedy=remedy) from error
    return PackerState(waiting=waiting, parts=parts)


def forget_versions(segments: Sequence[Segment]) -> tuple[Segment, ...]:
    """Segments of a checkpoint, older than every version of the resumed run, whose numbers restart."""
    return tuple(replace(segment, policy_version=BEFORE_RESUME) for segment in segments)


def _as_fields(segment: Segment) -> tuple[int, dict[str, object]]:
    values = {field.name: getattr(segment, field.name) for field in fields(segment) if field.name != "sample"}
    if segment.policy is not None:
        values["policy"] = asdict(segment.policy)
    return segment.sample.sample_id, values


def _as_segments(
    stored: Sequence[tuple[int, Mapping[str, object]]], samples: Mapping[int, Sample]
) -> tuple[Segment, ...]:
    return tuple(_as_segment(samples[sample_id], values) for sample_id, values in stored)


def _as_segment(sample: Sample, values: Mapping[str, Any]) -> Segment:
    policy = values.get("policy")
    return Segment(
        sample=sample,
        **{name: _as_tuple(value) for name, value in values.items() if name != "policy"},
        policy=None if policy is None else PolicyTarget(**{name: _as_tuple(value) for name, value in policy.items()}),
    )


def _as_tuple(value: Any) -> Any:
    return tuple(_as_tuple(item) for item in value) if isinstance(value, list) else value


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


class ResumableTrainer(MultiPassTrainer):
    """A ``Trainer`` whose checkpoints also hold what is under way between two optimizer steps."""

    control: TrainerControl
    source: RolloutSource
    overlap: Overlap
    learner: Learner
    plan: WindowPlan
    window_targets: WindowTargets | None
    report: StepReport

    def __init__(self, *, model: nn.Module, args: TrainingArguments, **arguments: Any) -> None:
        if args.fsdp:
            args.fsdp_plugin_args.setdefault("transformer_cls_names_to_wrap", sharded_units(model))
        super().__init__(model=model, args=args, **arguments)
        self._is_split = False
        self._even_gradients: EvenGradients | None = None

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

    def evened(self, loss: Tensor) -> Tensor:
        """The loss of a forward pass; all ranks get gradients of the same weights from it."""
        return loss if self._even_gradients is None else self._even_gradients.join(loss)

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

    def training_step(self, model: nn.Module, inputs: Passes, num_items_in_batch: Tensor | None = None) -> Tensor:
        """As transformers'. Errors: ``images-on-some-ranks``."""
        if self.args.deepspeed:
            self._check_images([any(one.sample.images for one in batch.segments) for batch in inputs["passes"]])
        return super().training_step(model, inputs, num_items_in_batch)

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
