"""One step around the ring, inside transformers' own training loop.

``RolloutTrainer`` stays a normal ``Trainer``: callbacks, loggers, accumulation, checkpoints, schedulers and
``accelerate launch`` work as always. Only three things are its own: the batches of an optimizer step are made from
rollouts (``get_batch_samples``), the loss is the objective's (``compute_loss``), and evaluation is a rollout
(``evaluate``).
"""

import time
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import partial
from itertools import chain
from pathlib import Path
from typing import Any

import torch
from transformers import Trainer

from rollmatch.checkpoint import sealing
from rollmatch.data import LearnerOrder, ReusedOrder, StepShape, Window, WindowPlan
from rollmatch.errors import LearnError
from rollmatch.learn.batch import MicroBatch, split_evenly
from rollmatch.learn.head import Scoring, head_worth_avoiding, logprobs_of
from rollmatch.learn.score import score_segments
from rollmatch.model.policy import unwrap, without_adapters
from rollmatch.model.template import ImageFeatures
from rollmatch.objectives.evaluation import write_evaluation
from rollmatch.objectives.protocol import ObjectiveContext
from rollmatch.packer_state import PackerState, read_packer_state, write_packer_state
from rollmatch.records import Rollout, Sample, Segment
from rollmatch.ring import Ring
from rollmatch.rollout.ahead import AGE_UNKNOWN, Wanted
from rollmatch.step_report import StepReport
from rollmatch.streaming import StreamedLearning, StreamedStep
from rollmatch.weights.named_weights import named_weights


class OrderDisagrees(LearnError):
    """The data loader brings the samples that the learner's own order names."""

    code = "order-disagrees"


@dataclass(slots=True, kw_only=True)
class Generation:
    """A window's rollouts, made into what its optimizer steps learn from."""

    window: Window
    parts: tuple[tuple[Segment, ...], ...]
    """Per part of the window."""
    features: Mapping[int, ImageFeatures] = field(default_factory=dict)
    """By sample id; what is not there is computed again."""
    reports: tuple[Any, ...] = ()
    """Of its rollouts; none where a run goes on in the middle of it."""


class RolloutTrainer(StreamedLearning, Trainer):  # type: ignore[misc]  # transformers is not typed
    """A ``transformers.Trainer`` whose batches are made of the policy's own rollouts."""

    control: Any

    def __init__(self, *, ring: Ring, **arguments: Any) -> None:
        super().__init__(data_collator=list, **arguments)
        self.ring = ring
        reuse, num_samples = ring.objective.reuse, len(self.train_dataset)
        shape = StepShape(
            batch_size=self.args.per_device_train_batch_size,
            accumulation=self.args.gradient_accumulation_steps,
            learner_world_size=ring.ranks.learner_world_size,
            steps_per_generation=reuse.steps_per_generation,
            num_iterations=reuse.num_iterations,
        )
        self.order = ReusedOrder(LearnerOrder(num_samples, seed=self.args.seed), shape)
        self.plan = WindowPlan(num_samples, seed=self.args.seed, shape=shape, rank=ring.ranks.rank)
        self.generation: Generation | None = None
        # Both names of one switch (transformers renamed it): the loss is already divided by the whole step's totals.
        self.model_accepts_loss_kwargs = True
        self.loss_is_scaled_for_ga = True
        self.report = StepReport(step=0, objective=ring.objective)
        self.scoring = Scoring(head_worth_avoiding(unwrap(self.model)))

    def get_batch_samples(
        self, epoch_iterator: Any, num_batches: int, device: torch.device
    ) -> tuple[list[dict[str, Any]], Any]:
        """Samples of one optimizer step -> rollouts -> targets -> its micro-batches and what they supervise."""
        micro_batches, _ = super().get_batch_samples(epoch_iterator, num_batches, device)
        if not micro_batches:
            return [], None
        step, window = self.state.global_step, self.plan.at(self.state.global_step)
        report = self.report = StepReport(step=step, objective=self.ring.objective)
        _check_order(micro_batches, self._samples_of(window.parts[window.part_of(step)]), step=step)
        if self.ring.streams:
            streamed = self._stream(window, report, num_parts=len(micro_batches))
            return streamed, streamed  # type: ignore[return-value]
        if self.generation is None or self.generation.window != window:
            self.generation = self._generate(window, report)
        report.reports = self.generation.reports
        self._renew_waiting(report)
        with report.phase("pack"):
            segments = self.generation.parts[window.part_of(step)]
            report.batches = self._make_batches(segments, self.generation.features, num_batches=len(micro_batches))
        supervisions = [batch.supervision for batch in report.batches]
        totals = self.ring.objective.total_of(supervisions, self.ring.ranks.sum)
        self.ring.begin_learning(report)
        return [{"micro_batch": batch} for batch in report.batches], totals

    def _generate(self, window: Window, report: StepReport) -> Generation:
        """Roll a window out, and make segments of it."""
        ring = self.ring
        samples, asked = self._samples_of(window.sample_indices), self._asked_of(window)
        if ring.ahead is None:
            report.rollouts = self.roll_out(asked, report, purpose="train")
        else:
            wanted = list(self._windows_from(window, lead=ring.ahead.lead))
            report.rollouts = ring.roll_out_ahead(wanted, report, lambda: named_weights(self.model))
        with report.phase("target"):
            features = ring.check_alignment(asked, report.rollouts)
            context = self._context(report.step, features)
            harvest = ring.objective.make_segments(samples, report.rollouts, context)
        report.num_rollout_tokens = harvest.num_rollout_tokens
        of_sample = iter(harvest.segments)
        parts = tuple(tuple(chain.from_iterable(next(of_sample) for _ in part)) for part in window.parts)
        return Generation(window=window, parts=parts, features=features, reports=harvest.reports)

    def roll_out(self, samples: Sequence[Sample], report: StepReport, *, purpose: str) -> list[Rollout]:
        """Sync if the learner has moved, then one rollout per place, in order; ``purpose`` is train or eval."""
        return self.ring.roll_out(samples, report, lambda: named_weights(self.model), purpose=purpose)

    def _asked_of(self, window: Window) -> list[Sample]:
        """A place per rollout of a window."""
        return self.ring.objective.reuse.repeat(self._samples_of(window.sample_indices))

    def _windows_from(self, window: Window, *, lead: int) -> Iterator[Wanted]:
        """A window and the ``lead`` windows that follow, within the run."""
        yield Wanted(window.first_step, self._asked_of(window))
        for _ in range(lead):
            window = self.plan.at(window.end_step)
            if window.first_step < self.state.max_steps:
                yield Wanted(window.first_step, self._asked_of(window))

    def _renew_waiting(self, report: StepReport) -> None:
        """Ask again for what waited for a row until it was too old; the new segments take the places of the old."""
        ring, packer = self.ring, self.ring.batcher.packer
        if ring.ahead is None or packer is None:
            return
        waiting, oldest = packer.state(), ring.ahead.min_version(report.step, ring.fence.step_of)
        old = [place for place, segment in enumerate(waiting) if segment.policy_version < oldest]
        if not any(ring.ranks.gather(len(old))):
            return
        samples = [waiting[place].sample for place in old]
        rollouts = ring.ask_again(samples, report)
        with report.phase("target"):
            features = ring.check_alignment(samples, rollouts)
            harvest = ring.objective.make_segments(samples, rollouts, self._context(report.step, features))
        for place, (segment,) in zip(old, harvest.segments, strict=True):
            waiting[place] = segment
        packer.restore(waiting)

    def _stream(self, window: Window, report: StepReport, *, num_parts: int) -> StreamedStep:
        """The step's micro-batches as they come."""
        self.ring.sync(report, lambda: named_weights(self.model))
        report.learn_began = time.time()
        samples, means = self._samples_of(window.sample_indices), partial(self._context, report.step)
        parts = split_evenly(samples, num_parts)
        return StreamedStep(self.ring, parts, report, make_context=means, work_ahead=self.work_ahead)

    def log(self, logs: dict[str, float], start_time: float | None = None) -> None:
        """Add the step's figures to the line that holds the loss; the timeline follows it."""
        timeline: dict[str, Any] = {}
        if "loss" in logs:
            self.report.end_learning()
            figures, timeline = self.ring.times_of(self.report)
            phases = {f"time/{phase}_s": seconds for phase, seconds in self.report.phase_s.items()}
            logs |= self.report.figures() | figures | phases
        super().log(logs, start_time)
        if timeline:
            self.ring.journal.write("timeline", **timeline)

    def evaluate(
        self, eval_dataset: Any = None, ignore_keys: Any = None, metric_key_prefix: str = "eval"
    ) -> dict[str, float]:
        """One rollout per held-out sample; metrics get the prefix, the record goes to the run directory."""
        samples: Sequence[Sample] = self.eval_dataset if eval_dataset is None else eval_dataset
        ranks, began = self.ring.ranks, time.perf_counter()
        report = StepReport(step=self.state.global_step, objective=self.ring.objective)
        mine = samples[ranks.rank :: ranks.learner_world_size]
        rollouts = self.roll_out(mine, report, purpose="eval")
        parts = ranks.gather(list(zip(mine, rollouts, strict=True)))
        pairs = sorted((pair for part in parts for pair in part), key=lambda pair: pair[0].sample_id)
        context = self._context(report.step, {}, purpose="eval")
        evaluated = self.ring.objective.evaluate([s for s, _ in pairs], [r for _, r in pairs], context)
        tokens = sum(len(rollout.response_token_ids) for _, rollout in pairs)
        speed = {"seconds": time.perf_counter() - began, "tokens_per_s": tokens / report.phase_s["rollout"]}
        metrics = dict(evaluated.metrics) | speed
        if ranks.is_primary:
            self._write_evaluation(evaluated.record, metrics)
        named = {f"{metric_key_prefix}_{name}": value for name, value in metrics.items()}
        self.log(dict(named))
        self.control = self.callback_handler.on_evaluate(self.args, self.state, self.control, named)
        return named

    def restore_packer_state(self, checkpoint: Path) -> None:
        """Take up what was under way when ``checkpoint`` was written. Errors: ``PackerStateUnfit``."""
        if not self._carries:
            return
        carry = read_packer_state(checkpoint, self.train_dataset, rank=self.ring.ranks.rank)
        if self.ring.batcher.packer is not None:
            self.ring.batcher.packer.restore(self._aged(carry.waiting))
        if carry.parts:
            window = self.plan.at(int(checkpoint.name.rpartition("-")[2]))
            self.generation = Generation(window=window, parts=carry.parts)

    def _aged(self, waiting: Sequence[Segment]) -> list[Segment]:
        """Versions of an earlier life of the run say nothing in this one: where age matters, all are too old."""
        if self.ring.ahead is None:
            return list(waiting)
        return [replace(segment, policy_version=AGE_UNKNOWN) for segment in waiting]

    @property
    def _carries(self) -> bool:
        """Whether anything can be under way between two optimizer steps."""
        reuse = self.ring.objective.reuse
        return self.ring.batcher.packer is not None or reuse.steps_per_generation * reuse.num_iterations > 1

    def _samples_of(self, indices: Sequence[int]) -> list[Sample]:
        return [self.train_dataset[index] for index in indices]

    def _features_of(self, sample: Sample, known: Mapping[int, ImageFeatures]) -> ImageFeatures:
        found = known.get(sample.sample_id)
        return self.ring.template.image_features(sample) if found is None else found

    def _context(self, step: int, features: Mapping[int, ImageFeatures], *, purpose: str = "train") -> ObjectiveContext:
        ring = self.ring
        temperature = ring.decoding.temperature or 1.0
        logprobs = partial(logprobs_of, temperature=temperature, excluded_ids=ring.template.banned_ids)

        def score(segments: Sequence[Segment], *, reference: bool = False) -> list[tuple[float, ...]]:
            kept = ring.reference if reference else None
            with without_adapters(self.model, wanted=reference and kept is None):
                return score_segments(
                    self.model if kept is None else kept,
                    segments,
                    lambda sample: self._features_of(sample, features),
                    logprobs=logprobs,
                    batch_size=self.args.per_device_train_batch_size * ring.objective.reuse.num_rollouts,
                )

        decoding = ring.decoding_of(purpose)
        return ObjectiveContext(
            step=step, ranks=ring.ranks, decoding=decoding, generate=ring.ask, score=score, log=ring.journal.write
        )

    def _make_batches(
        self, segments: Sequence[Segment], features: Mapping[int, ImageFeatures], *, num_batches: int
    ) -> list[MicroBatch]:
        batcher = self.ring.batcher
        batches = batcher.make(segments, lambda sample: self._features_of(sample, features), num_batches=num_batches)
        self.report.num_carried = batcher.packer.buffered if batcher.packer else 0
        self.ring.tell_packed(batches, self.report)
        return batches

    def _write_evaluation(self, record: Mapping[str, Any], metrics: Mapping[str, float]) -> None:
        step = self.state.global_step
        file = write_evaluation(Path(self.args.output_dir), step=step, metrics=metrics, record=record)
        self.ring.journal.write("evaluated", step=step, file=file, metrics=metrics)

    def _get_train_sampler(self, *arguments: Any) -> Any:
        """The learner owns the order."""
        return self.order

    def _save_checkpoint(self, model: Any, trial: Any) -> None:
        """Save, then write the manifest that marks the checkpoint as whole, and only then remove old ones."""
        step = self.state.global_step
        folder = Path(self.args.output_dir) / f"checkpoint-{step}"
        folder.mkdir(parents=True, exist_ok=True)
        if self._carries:
            packer, going = self.ring.batcher.packer, self.generation
            is_under_way = going is not None and going.window.first_step < step < going.window.end_step
            carry = PackerState(
                waiting=tuple(packer.state()) if packer else (),
                parts=going.parts if going is not None and is_under_way else (),
            )
            write_packer_state(folder, carry, rank=self.ring.ranks.rank)
        self.ring.ranks.barrier()
        with sealing(folder, self.args, self.ring.ranks):
            super()._save_checkpoint(model, trial)
        self.ring.journal.write("saved", step=step, path=folder.name)


def _check_order(micro_batches: Sequence[Sequence[Sample]], planned: Sequence[Sample], *, step: int) -> None:
    brought, named = [s.sample_id for s in chain(*micro_batches)], [s.sample_id for s in planned]
    if brought != named:
        raise OrderDisagrees(
            f"the data loader brings samples {brought[:8]} for step {step}, the learner's order names {named[:8]}",
            key="training",
            remedy="Leave sampling to the learner: no group_by_length, no dataloader settings that deal batches anew.",
        )
