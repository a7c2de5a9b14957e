"""The step, inside transformers' own training loop: sync, rollout, target, learn.

``RolloutTrainer`` stays a normal ``Trainer``: callbacks, loggers, accumulation, checkpoints, schedulers and
``accelerate launch`` work as always. Only three things are its own: the batches of an optimizer step are made from
rollouts (``get_batch_samples``), the loss is the objective's (``compute_loss``), and evaluation is a rollout
(``evaluate``).
"""

import time
from collections.abc import Iterator, Mapping, Sequence
from contextlib import nullcontext
from functools import partial
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from rollmatch.data import LearnerOrder, ReusedOrder, StepShape, Window, WindowPlan
from rollmatch.data.order import check_order
from rollmatch.learn.balance import PassSize
from rollmatch.learn.batch import Passes
from rollmatch.learn.head import Logits, Scoring, logprobs_of
from rollmatch.learn.score import SegmentScorer
from rollmatch.model.images import ImageFeatures
from rollmatch.model.policy import head_worth_avoiding
from rollmatch.objectives.protocol import ObjectiveContext, Terms, TrainingTargets
from rollmatch.records import Rollout, Sample
from rollmatch.rollout.overlap import Ahead, GeneratedWindow, Overlap, RequestedWindow
from rollmatch.rollout.source import RolloutSource
from rollmatch.training.evaluation import evaluate_policy, keep_evaluation
from rollmatch.training.packer_state import WindowTargets
from rollmatch.training.report import StepReport
from rollmatch.training.segment_trainer import Learner, SegmentTrainer
from rollmatch.weights.named_weights import named_weights


class RolloutTrainer(SegmentTrainer):
    """A ``transformers.Trainer`` whose batches are made from the policy's own rollouts."""

    def __init__(
        self,
        *,
        source: RolloutSource,
        overlap: Overlap,
        learner: Learner,
        logged_completions: int,
        **arguments: Any,
    ) -> None:
        super().__init__(data_collator=list, **arguments)
        self.source, self.overlap, self.learner = source, overlap, learner
        self.logged_completions = logged_completions
        reuse, num_samples = learner.objective.reuse, len(self.train_dataset)
        shape = StepShape(
            batch_size=self.args.per_device_train_batch_size,
            accumulation=self.args.gradient_accumulation_steps,
            learner_world_size=source.ranks.learner_world_size,
            steps_per_generation=reuse.steps_per_generation,
            num_iterations=reuse.num_iterations,
        )
        self.order = ReusedOrder(LearnerOrder(num_samples, seed=self.args.seed), shape)
        self.plan = WindowPlan(num_samples, seed=self.args.seed, shape=shape, rank=source.ranks.rank)
        self.window_targets: WindowTargets | None = None
        self.totals: object = None
        """What the optimizer step supervises, over all micro-batches and ranks."""
        # Both names of one switch (transformers renamed it): the loss is already divided by the whole step's totals.
        self.model_accepts_loss_kwargs = self.loss_is_scaled_for_ga = True
        self.report = StepReport(step=0, objective=learner.objective)
        self.scoring = Scoring(head_worth_avoiding(self.model))

    def get_batch_samples(
        self, epoch_iterator: Iterator[list[Sample]], num_batches: int, device: torch.device
    ) -> tuple[Sequence[Passes], int | None]:
        """One optimizer step: its micro-batches, for transformers to iterate, and the number of its samples."""
        is_over = self.state.global_step >= self.state.max_steps  # a run that was resumed at its end
        planned, _ = ([], None) if is_over else super().get_batch_samples(epoch_iterator, num_batches, device)
        if not planned:
            return [], None
        step, window = self.state.global_step, self.plan.at(self.state.global_step)
        check_order(planned, self._samples_of(window.parts[window.part_of(step)]), step=step)
        report = self.report = StepReport(step, self.learner.objective, num_batches=len(planned))
        if self.window_targets is None or self.window_targets.window != window:
            if self.overlap.needs_weights:
                self.sync(report)
            self.window_targets = self.target(window, self.rollout(window, report), report)
        return self.learn(self.window_targets, report), sum(map(len, planned))

    def sync(self, report: StepReport) -> None:
        """Send the weights to the rollout side if the optimizer has stepped since the last sync."""
        if isinstance(self.overlap, Ahead):
            with report.phase("rollout"):
                self.overlap.wait_for_next()
        report.note("sync", self.source.sync(report.step, lambda: named_weights(self.model)))

    def rollout(self, window: Window, report: StepReport) -> GeneratedWindow:
        """Rollouts of the window, from the engine or the servers."""
        with report.phase("rollout"):
            return self.overlap.rollout(list(self._requested(window)))

    def target(self, window: Window, generated: GeneratedWindow, report: StepReport) -> WindowTargets:
        """Turn rollouts into segments: parse, match, append | rewards and advantages | values of states."""
        rollouts, journal = generated.rollouts, self.source.journal
        report.staleness, report.rollouts = generated.staleness, rollouts
        journal.write(
            "generated", purpose="train", **report.generated(rollouts, policy_version=self.source.policy_version)
        )
        samples = self._samples_of(window.sample_indices)
        asked = self.learner.objective.reuse.repeat(samples)
        with report.phase("target"):
            features = generated.features or self.source.check_alignment(asked, rollouts)
            made = self._make_targets(samples, rollouts, self._context(report, features))
        report.add_targets(made)
        if self.logged_completions and self.source.ranks.is_primary:
            shown, text_of = rollouts[: self.logged_completions], self.source.template.vocabulary.text
            completions = report.completions(asked, shown, made.reports, text_of)
            journal.write("completions", step=report.step, completions=completions)
        report.num_rollout_tokens = made.num_rollout_tokens
        report.num_cut_prompts += sum(map(self.source.template.is_cut, asked))
        return WindowTargets(
            window=window, parts=window.by_part(made.segments), features=features, reports=made.reports
        )

    def learn(self, targets: WindowTargets, report: StepReport) -> Sequence[Passes]:
        """Pack segments into micro-batches; transformers takes each through ``training_step``, then steps."""
        report.reports = targets.reports
        self._renew_waiting(report)
        with report.phase("pack"):
            segments = targets.parts[targets.window.part_of(report.step)]
            features_of = partial(self._features_of, known=targets.features)
            report.batches = self.learner.batcher.make(segments, features_of, num_batches=report.num_batches)
            packer = self.learner.batcher.packer
            if packer is not None and self.learner.scores_waiting:
                self.learner.score_waiting(packer, self._context(report, targets.features).score)
            report.num_carried = 0 if packer is None else packer.buffered
            self.source.journal.write("packed", **report.packed())
        supervisions = [batch.supervision for batch in report.batches]
        self.totals = self.learner.objective.total_of(supervisions, self.source.ranks.sum)
        self.source.fence.backend.rest()
        report.learn_began = time.time()
        return self.learner.batcher.as_inputs(report.batches)

    def training_step(self, model: nn.Module, inputs: Passes, num_items_in_batch: Tensor | None = None) -> Tensor:
        """As transformers', over a batch's passes: one, or all of a step whose passes follow from its segments.

        Errors: ``images-on-some-ranks``.
        """
        self.check()
        passes, losses = inputs["passes"], []
        if self.args.deepspeed:
            self._check_images([any(one.sample.images for one in batch.segments) for batch in passes])
        for left, batch in zip(reversed(range(len(passes))), passes, strict=True):  # the last one exchanges gradients
            with self._accumulating(model) if left else nullcontext():
                losses.append(super().training_step(model, {"passes": (batch,)}, num_items_in_batch))
        return torch.stack(losses).sum()

    def compute_loss(self, model: nn.Module, inputs: Passes, **_: object) -> Tensor:
        """The micro-batch's share of the step's loss, times the ranks that DDP will average over.

        transformers asks for the model's outputs in its own evaluation only, which ``evaluate`` replaces.
        """
        (batch,) = inputs["passes"]
        if self.learner.reference_in_batch:
            batch = self.learner.with_reference(model, batch, self.scoring)
        terms: list[Terms] = []

        def score(logits: Logits) -> Tensor:
            terms.append(self.learner.objective.loss(logits, batch, totals=self.totals))
            return terms[-1].total

        total, _outputs = self.scoring(model, batch.inputs, score)
        self.report.add_terms(terms[-1].figures)
        loss = total * self.source.ranks.learner_world_size
        return loss if self._even_gradients is None else self._even_gradients.join(loss)

    def log(self, logs: dict[str, float], start_time: float | None = None) -> None:
        """Add the step's figures to the line that holds the loss; the timeline follows it."""
        timeline: dict[str, object] = {}
        if "loss" in logs:
            self.report.end_learning()
            figures, timeline = self.report.times(self.overlap.prefetch)
            waits = self.source.ranks.gather(self.report.phase_s["rollout"])
            figures |= {f"time/rollout_s/rank{rank}": seconds for rank, seconds in enumerate(waits)}
            phases = {f"time/{phase}_s": seconds for phase, seconds in self.report.phase_s.items()}
            logs |= self.report.figures() | figures | phases
        super().log(logs, start_time)
        if timeline:
            self.source.journal.write("timeline", **timeline)

    def evaluate(
        self, eval_dataset: Sequence[Sample] | None = None, ignore_keys: object = None, metric_key_prefix: str = "eval"
    ) -> dict[str, float]:
        """One rollout per held-out sample; metrics get the prefix, the record goes to the run directory."""
        samples: Sequence[Sample] = self.eval_dataset if eval_dataset is None else eval_dataset
        report, began = StepReport(step=self.state.global_step, objective=self.learner.objective), time.perf_counter()
        self.split()
        self.sync(report)
        context = self._context(report, {}, purpose="eval")
        record, metrics = evaluate_policy(self.source, self.learner.objective, samples, context)
        metrics["seconds"] = time.perf_counter() - began
        keep_evaluation(self.source, Path(self.args.output_dir), step=report.step, metrics=metrics, record=record)
        named = {f"{metric_key_prefix}_{name}": value for name, value in metrics.items()}
        self.log(dict(named))
        self.control = self.callback_handler.on_evaluate(self.args, self.state, self.control, named)
        self.control.should_save |= self.control.should_training_stop  # a callback ends training by what it saw
        return named

    def check(self) -> None:
        """Raise what a call beside learning has failed with; several ranks do so where they meet."""
        if self.overlap.prefetch is not None and self.source.ranks.learner_world_size == 1:
            self.overlap.prefetch.check()

    def _requested(self, window: Window) -> Iterator[RequestedWindow]:
        """A window and the ``lead`` windows that follow, within the run; a place per rollout."""
        for _ in range(self.overlap.lead + 1):
            if window.first_step < self.state.max_steps:
                samples = self.learner.objective.reuse.repeat(self._samples_of(window.sample_indices))
                yield RequestedWindow(window.first_step, samples)
            window = self.plan.at(window.end_step)

    def _renew_waiting(self, report: StepReport) -> None:
        """Generate again what waited for a row until it was too old; the new segments take the places of the old."""
        source, packer = self.source, self.learner.batcher.packer
        if not isinstance(self.overlap, Ahead) or packer is None:
            return
        waiting, oldest = packer.state(), self.overlap.min_version(report.step, source.fence.step_of)
        old = [place for place, segment in enumerate(waiting) if segment.policy_version < oldest]
        if not any(source.ranks.gather(len(old))):
            return
        samples = [waiting[place].sample for place in old]
        with report.phase("rollout"):
            rollouts = source.roll_out(samples, report.step, purpose="again")
        source.journal.write("asked_again", step=report.step, num_rollouts=len(rollouts))
        with report.phase("target"):
            features = source.check_alignment(samples, rollouts)
            made = self._make_targets(samples, rollouts, self._context(report, features))
            report.add_targets(made)
        for place, (segment,) in zip(old, made.segments):
            waiting[place] = segment
        packer.restore(waiting)

    def _context(
        self, report: StepReport, features: Mapping[int, ImageFeatures], *, purpose: str = "train"
    ) -> ObjectiveContext:
        """What the objective may use; ``features`` by sample id, missing ones are computed."""
        source, temperature = self.source, self.source.decoding.temperature or 1.0
        num_rollouts = self.args.per_device_train_batch_size * self.learner.objective.reuse.num_rollouts
        score = SegmentScorer(
            model=self.model,
            reference=self.learner.reference,
            features_of=partial(self._features_of, known=features),
            logprobs=partial(logprobs_of, temperature=temperature, excluded_ids=source.template.banned_ids),
            size=PassSize(segments=num_rollouts, tokens=self.learner.batcher.tokens_per_batch),
            check_images=self._check_images,
            ranks=source.ranks,
        )
        return ObjectiveContext(
            step=report.step,
            ranks=source.ranks,
            decoding=source.decoding_of(purpose),
            generate=source.generate,
            score=score,
            log=source.journal.write,
        )

    def _make_targets(
        self, samples: Sequence[Sample], rollouts: Sequence[Rollout], context: ObjectiveContext
    ) -> TrainingTargets:
        """The objective's, each segment fitted to the longest length. Errors: ``SegmentTooLong``."""
        made, max_len = self.learner.objective.make_segments(samples, rollouts, context), self.learner.lengths.max_len
        is_long = any(one.encoded_len > max_len for segments in made.segments for one in segments)
        return self.learner.fitted(made) if is_long else made

    def _samples_of(self, indices: Sequence[int]) -> list[Sample]:
        return [self.train_dataset[index] for index in indices]

    def _features_of(self, sample: Sample, *, known: Mapping[int, ImageFeatures]) -> ImageFeatures:
        return known.get(sample.sample_id) or self.source.template.image_features(sample)
