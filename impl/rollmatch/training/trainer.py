"""The step, inside transformers' own training loop: sync, rollout, target, learn.

``RolloutTrainer`` stays a normal ``Trainer``: callbacks, loggers, accumulation, checkpoints, schedulers and
``accelerate launch`` work as always. Four things are its own: the batches of an optimizer step are made from rollouts
(``get_batch_samples``), the loss is the objective's (``compute_loss``), evaluation is a rollout (``evaluate``), and
checkpoints hold what is under way between two steps (``Checkpointer``).
"""

import sys
import time
from collections.abc import Iterator, Mapping, MutableMapping, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext
from dataclasses import replace
from functools import partial
from itertools import chain, zip_longest
from pathlib import Path
from typing import Any

import torch
from accelerate import Accelerator
from torch import Tensor, nn
from torch.optim.lr_scheduler import LambdaLR
from transformers import Trainer, TrainerCallback, TrainerControl, TrainingArguments

from rollmatch.config.strategy import KEY, Strategy
from rollmatch.data import LearnerOrder, ReusedOrder, StepShape, Window, WindowPlan
from rollmatch.data.order import check_order
from rollmatch.errors import LaunchError, LearnError
from rollmatch.learn.average import WeightAverage
from rollmatch.learn.balance import PassSize
from rollmatch.learn.batch import Passes
from rollmatch.learn.head import Logits, Scoring
from rollmatch.learn.score import SegmentScorer
from rollmatch.model.decoder_layers import sharded_units
from rollmatch.model.even_gradients import EvenGradients
from rollmatch.model.images import ImageFeatures
from rollmatch.model.parts import NAMES, Part, count_parts
from rollmatch.model.policy import head_worth_avoiding, unwrap
from rollmatch.model.sharding import check_split, not_engaged
from rollmatch.model.source import step_of
from rollmatch.objectives.protocol import ObjectiveContext, Terms, TrainingTargets
from rollmatch.records import Rollout, Sample, Segment
from rollmatch.rollout.overlap import Ahead, FirstComplete, GeneratedWindow, Overlap, RequestedWindow
from rollmatch.rollout.source import RolloutSource
from rollmatch.training.checkpoint import reading
from rollmatch.training.checkpointer import Checkpointer, check_trainer_state
from rollmatch.training.evaluation import evaluate_policy, keep_evaluation
from rollmatch.training.further import FurtherSamples
from rollmatch.training.learner import Learner
from rollmatch.training.optimizer_state import complete_state
from rollmatch.training.packer_state import WindowTargets
from rollmatch.training.report import StepReport, gpu_use
from rollmatch.weights.finite import first_not_finite
from rollmatch.weights.named_weights import named_weights

SPOILED = ("loss-not-finite", "policy-not-finite")
"""Codes of errors after which the weights are no numbers."""
SWITCH_S = 0.0005
"""Seconds that a thread may keep the interpreter while another one waits for it; Python's own is 0.005.

Threads that play episodes or judge rollouts share it with the learner, which needs it back after each of thousands of
small GPU operations.
"""


class RolloutTrainer(Trainer):  # type: ignore[misc]  # transformers is not typed
    """A ``transformers.Trainer`` whose batches are made from the policy's own rollouts."""

    accelerator: Accelerator
    control: TrainerControl

    def __init__(
        self,
        *,
        source: RolloutSource,
        overlap: Overlap,
        learner: Learner,
        logged_completions: int,
        model: nn.Module,
        **arguments: Any,
    ) -> None:
        """``arguments``: those of transformers' ``Trainer``, among them ``args``."""
        args: TrainingArguments = arguments["args"]
        if args.fsdp:
            args.fsdp_plugin_args.setdefault("transformer_cls_names_to_wrap", sharded_units(model))
        super().__init__(model=model, data_collator=list, **arguments)
        self.source, self.overlap, self.learner = source, overlap, learner
        self.logged_completions = logged_completions
        reuse, num_samples = learner.objective.reuse, len(self.train_dataset)
        shape = StepShape(
            batch_size=args.per_device_train_batch_size,
            accumulation=args.gradient_accumulation_steps,
            learner_world_size=source.ranks.learner_world_size,
            steps_per_generation=reuse.steps_per_generation,
            num_iterations=reuse.num_iterations,
        )
        self.order = ReusedOrder(LearnerOrder(num_samples, seed=args.seed), shape)
        self.plan = WindowPlan(num_samples, seed=args.seed, shape=shape, rank=source.ranks.rank)
        self.window_targets: WindowTargets | None = None
        self.totals: object = None
        """What the optimizer step supervises, over all micro-batches and ranks."""
        # Both names of one switch (transformers renamed it): the loss is already divided by the whole step's totals.
        self.model_accepts_loss_kwargs = self.loss_is_scaled_for_ga = True
        self.report = StepReport(step=0, objective=learner.objective)
        self.has_begun = False
        """Whether this process has begun a step: before, what is in memory is no step's."""
        self.scoring = Scoring(head_worth_avoiding(self.model))
        if learner.averages:
            self.add_callback(AverageWeights(learner.averages))
        self._is_split = False
        finds_unused = args.ddp_find_unused_parameters and source.ranks.learner_world_size > 1
        self._even_gradients = EvenGradients(model, is_split=False) if finds_unused else None
        """What gives all ranks gradients of the same weights; None: they have them by themselves."""

    @property
    def checkpointer(self) -> Checkpointer:
        """What checkpoints hold beside transformers' files."""
        return Checkpointer(
            arguments=self.args,
            source=self.source,
            batcher=self.learner.batcher,
            plan=self.plan,
            samples=self.train_dataset,
            averages=self.learner.averages,
            groups=self.overlap.groups if isinstance(self.overlap, FirstComplete) else None,
        )

    def train(self, *arguments: Any, **named: Any) -> Any:
        """As transformers'. An error that ends training leaves a checkpoint of the last whole step.

        Where several ranks learn, they save only after an error that all of them have. Not after ``loss-not-finite``,
        nor where the disk has failed.
        """
        if isinstance(checkpoint := named.get("resume_from_checkpoint"), str):
            check_trainer_state(Path(checkpoint))
        try:
            with _quick_switches():
                return super().train(*arguments, **named)
        except Exception as error:
            is_shared = getattr(error, "is_shared", False) or self.source.ranks.learner_world_size == 1
            is_spoiled = getattr(error, "code", "") in SPOILED or isinstance(error, OSError)
            step = self.state.global_step
            if is_shared and self.has_begun and step and not (is_spoiled or self.checkpointer.is_saved(step)):
                self._save_checkpoint(self.model, None)
            raise

    def get_batch_samples(
        self, epoch_iterator: Iterator[list[Sample]], num_batches: int, device: torch.device
    ) -> tuple[Sequence[Passes], int | None]:
        """One optimizer step: its micro-batches, for transformers to iterate, and the number of its samples."""
        step = self.state.global_step
        if step >= self.state.max_steps:  # a run that was resumed at its end
            return [], None
        window = self.plan.at(step)
        self.order.set_epoch(window.epoch)  # the iterator asks for its order when its first batch is taken
        planned, _ = super().get_batch_samples(epoch_iterator, num_batches, device)
        if not planned:
            return [], None
        check_order(planned, self._samples_of(window.parts[window.part_of(step)]), step=step)
        self.has_begun = True
        report = self.report = StepReport(step, self.learner.objective, num_batches=len(planned))
        if self.window_targets is None or self.window_targets.window != window:
            if self.overlap.needs_weights:
                self.sync(report)
            generated = self.rollout(window, report)
            self.window_targets = self.target(window, generated, report)
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
            generated = self.overlap.rollout(list(self._requested(window)))
        report.rollouts, report.staleness = generated.rollouts, generated.staleness
        if generated.is_given:
            report.is_given = True
            num_tokens = sum(len(rollout.response_token_ids) for rollout in generated.rollouts)
            num_answers = len(generated.rollouts)
            self.source.journal.write("given", step=report.step, num_answers=num_answers, num_tokens=num_tokens)
            return generated
        event = report.generated(generated.rollouts, policy_version=self.source.policy_version)
        self.source.journal.write("generated", purpose="train", **event)
        return generated

    def target(self, window: Window, generated: GeneratedWindow, report: StepReport) -> WindowTargets:
        """Turn rollouts into segments: parse, match, append | rewards and advantages | values of states."""
        samples = self._samples_of(window.sample_indices) if generated.samples is None else generated.samples
        made, features = self._make_targets(
            samples, generated.rollouts, report, features=generated.features, early=generated.early
        )
        self._report_targets(samples, made, report)
        return WindowTargets(
            window=window,
            parts=window.by_part(made.segments),
            features=features,
            summary=self.learner.objective.summarize([*chain(*self.source.ranks.gather(made.reports))]),
        )

    def learn(self, targets: WindowTargets, report: StepReport) -> Sequence[Passes]:
        """Pack segments into micro-batches; transformers takes each through ``training_step``, then steps."""
        report.summary = targets.summary
        self._renew_waiting(report)
        with report.phase("pack"):
            segments = targets.parts[targets.window.part_of(report.step)]
            features_of = partial(self._features_of, known=targets.features)
            is_last = report.step + 1 == self.state.max_steps
            report.batches = self.learner.batcher.make(
                segments, features_of, num_batches=report.num_batches, is_last_step=is_last
            )
            packer = self.learner.batcher.packer
            if packer is not None and self.learner.scores_waiting:
                self.learner.score_waiting(packer, self._context(report, targets.features).score)
            report.num_carried = 0 if packer is None else packer.buffered
            self.source.journal.write("packed", **report.packed())
        if self._even_gradients is not None:
            has_images = any(segment.sample.images for batch in report.batches for segment in batch.segments)
            self._even_gradients.is_needed = any(self.source.ranks.gather(has_images))
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
        return loss if loss.requires_grad else loss.requires_grad_()  # a pass that uses nothing that learns

    def log(self, logs: dict[str, float], start_time: float | None = None) -> None:
        """Add the step's figures to the line that holds the loss; the timeline follows it."""
        timeline: dict[str, object] = {}
        if "loss" in logs:
            self.report.end_learning()
            self.report.sum_terms(self.source.ranks.sum)
            figures, timeline = self.report.times(self.overlap.prefetch, self.source.ranks.sum)
            waits = self.source.ranks.gather(self.report.phase_s["rollout"])
            figures |= {f"time/rollout_s/rank{rank}": seconds for rank, seconds in enumerate(waits)}
            phases = {f"time/{phase}_s": seconds for phase, seconds in self.report.phase_s.items()}
            logs |= self.report.figures(self.source.ranks.sum) | figures | phases | gpu_use()
        super().log(logs, start_time)
        if timeline:
            self.source.journal.write("timeline", **timeline)

    def evaluate(
        self, eval_dataset: Sequence[Sample] | None = None, ignore_keys: object = None, metric_key_prefix: str = "eval"
    ) -> dict[str, float]:
        """One rollout per held-out sample; metrics get the prefix, the record goes to the run directory.

        Errors: ``nothing-to-evaluate``.
        """
        samples: Sequence[Sample] = self.eval_dataset if eval_dataset is None else eval_dataset
        if not samples:
            problem, remedy = "there are no held-out samples", "Name some; what a run learns from is not evaluated."
            raise LaunchError(problem, code="nothing-to-evaluate", key="eval_dataset", remedy=remedy)
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

    def close(self) -> None:
        """Leave the servers, or stop the engine."""
        if self.overlap.prefetch is not None:
            self.overlap.prefetch.close()
        self.source.template.preparation.close()
        self.source.fence.backend.close()

    def check(self) -> None:
        """Raise what a call beside learning has failed with; several ranks do so at a common call."""
        if self.overlap.prefetch is not None and self.source.ranks.learner_world_size == 1:
            self.overlap.prefetch.check()

    def _requested(self, window: Window) -> Iterator[RequestedWindow]:
        """A window and the ``lead`` windows that follow, within the run; a place per rollout."""
        for _ in range(self.overlap.lead + 1):
            if window.first_step < self.state.max_steps:
                yield self._window_at(window.first_step)
            window = self.plan.at(window.end_step)

    def _window_at(self, step: int) -> RequestedWindow:
        samples = self.learner.objective.reuse.repeat(self._samples_of(self.plan.at(step).sample_indices))
        return RequestedWindow(step, samples)

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
        made, _ = self._make_targets(samples, rollouts, report)
        for place, (segment,) in zip(old, made.segments):
            waiting[place] = segment
        packer.restore(waiting)

    def _context(
        self, report: StepReport, features: MutableMapping[int, ImageFeatures], *, purpose: str = "train"
    ) -> ObjectiveContext:
        """What the objective may use; ``features`` by sample id, missing ones are computed."""
        source, temperature = self.source, self.source.decoding.temperature or 1.0
        batcher = self.learner.batcher
        num_rollouts = self.args.per_device_train_batch_size * self.learner.objective.reuse.num_rollouts
        score = SegmentScorer(
            model=self.model,
            reference=self.learner.reference,
            features_of=partial(self._features_of, known=features),
            temperature=temperature,
            excluded_ids=source.template.banned_ids,
            size=PassSize(
                segments=num_rollouts, tokens=batcher.tokens_per_batch, shares_prompts=batcher.shares_prompts
            ),
            check_images=self._check_images,
            ranks=source.ranks,
        )
        return ObjectiveContext(
            step=report.step,
            ranks=source.ranks,
            decoding=source.decoding_of(purpose),
            generate=source.generate,
            play=source.play,
            score=score,
            teach=score.teach,
            further=FurtherSamples(
                source=source,
                samples=self.train_dataset,
                plan=self.plan,
                num_rollouts=self.learner.objective.reuse.num_rollouts,
                step=report.step,
                features=features,
            ),
            log=source.journal.write,
            trainer_state=self.state,
        )

    def _make_targets(
        self,
        samples: Sequence[Sample],
        rollouts: Sequence[Rollout],
        report: StepReport,
        *,
        features: MutableMapping[int, ImageFeatures] | None = None,
        early: Any = None,
    ) -> tuple[TrainingTargets, MutableMapping[int, ImageFeatures]]:
        """The objective's targets, each segment fitted to the longest length, and the features of all images.

        Errors: ``prompt-mismatch``, ``SegmentTooLong``.
        """
        objective, max_len = self.learner.objective, self.learner.lengths.max_len
        with report.phase("target"):
            features = features or self.source.check_alignment(objective.reuse.repeat(samples), rollouts)
            context = replace(self._context(report, features), early=early)
            made = objective.make_segments(samples, rollouts, context)
            is_long = any(one.encoded_len > max_len for segments in made.segments for one in segments)
            made = self.learner.fitted(made) if is_long else made
        report.num_cut += made.num_cut
        report.num_skipped += made.num_skipped
        return made, features

    def _report_targets(self, samples: Sequence[Sample], made: TrainingTargets, report: StepReport) -> None:
        """Count what the window's rollouts were, and write the first of them into the journal."""
        asked, template = self.learner.objective.reuse.repeat(samples), self.source.template
        rollouts = report.rollouts
        if made.completions is not None:
            asked, rollouts = [list(column) for column in zip(*made.completions, strict=True)]
        if self.logged_completions and self.source.ranks.is_primary:
            size = self.learner.objective.reuse.num_rollouts  # groups stay whole
            shown = rollouts[: -(-self.logged_completions // size) * size]
            completions = report.completions(asked, shown, made.reports, template.vocabulary.text)
            self.source.journal.write("completions", step=report.step, completions=completions)
        report.num_rollout_tokens = made.num_rollout_tokens
        report.num_cut_prompts += sum(map(template.is_cut, asked))

    def _samples_of(self, indices: Sequence[int]) -> list[Sample]:
        return [self.train_dataset[index] for index in indices]

    def _features_of(self, sample: Sample, *, known: Mapping[int, ImageFeatures]) -> ImageFeatures:
        return known.get(sample.sample_id) or self.source.template.image_features(sample)

    def split(self) -> None:
        """Split the policy over ranks before it is first used, where FSDP2 does. Errors: ``strategy-not-engaged``."""
        if self.args.fsdp and not self._is_split:
            if not self.is_fsdp_enabled:
                raise not_engaged("fsdp2")
            loader = self.get_train_dataloader()
            num_steps = self.set_initial_training_values(self.args, loader)[-1]
            super()._prepare_for_training(num_steps, loader, None)
            check_split(self.model, "fsdp2")
            self._is_split, self._even_gradients = True, EvenGradients(self.model, is_split=True)
        if self.args.deepspeed and not self.is_deepspeed_enabled:
            raise not_engaged("deepspeed")

    def _get_train_sampler(self, *_: object) -> ReusedOrder:
        """The learner owns the order."""
        return self.order

    def _prepare_for_training(
        self, max_steps: int, train_dataloader: object, resume_from_checkpoint: str | None
    ) -> tuple[nn.Module, object]:
        """As transformers'; a policy that is split already only reads the checkpoint.

        Errors: those of ``Checkpointer.restore``.
        """
        self.split()
        if resume_from_checkpoint is not None:
            self.window_targets = self.checkpointer.restore(Path(resume_from_checkpoint))
            if isinstance(self.overlap, FirstComplete):
                for window in self.overlap.groups.left:
                    self.overlap.request(self._window_at(window), step=step_of(Path(resume_from_checkpoint)))
        if not self._is_split:
            prepared: tuple[nn.Module, object] = super()._prepare_for_training(
                max_steps, train_dataloader, resume_from_checkpoint
            )
            return prepared
        if resume_from_checkpoint is not None:
            self._load_from_checkpoint(resume_from_checkpoint, self.model_wrapped)
            self._load_optimizer_and_scheduler(resume_from_checkpoint)
        return self.model_wrapped, train_dataloader

    def _issue_warnings_after_load(self, load_result: Any) -> None:
        """As transformers', but a tied weight is not missing: a checkpoint holds it under its first name."""
        names = {name for name, _ in chain(self.model.named_parameters(), self.model.named_buffers())}  # tied ones once
        missing = [key for key in load_result.missing_keys if key in names]
        super()._issue_warnings_after_load(load_result._replace(missing_keys=missing))

    def _load_from_checkpoint(self, resume_from_checkpoint: str, model: nn.Module | None = None) -> None:
        with reading(Path(resume_from_checkpoint)):
            super()._load_from_checkpoint(resume_from_checkpoint, model)

    def _load_rng_state(self, checkpoint: str | None) -> None:
        with reading(Path(checkpoint or "")):
            super()._load_rng_state(checkpoint)

    def _load_scaler(self, checkpoint: str | None) -> None:
        with reading(Path(checkpoint or "")):
            super()._load_scaler(checkpoint)

    def _load_optimizer_and_scheduler(self, checkpoint: str | None) -> None:
        """As transformers', then the schedule's rate of this step: of a run with more steps now, it is another one.

        transformers would take the first step with the rate that the run ended with, mostly 0.
        """
        with reading(Path(checkpoint or "")):
            super()._load_optimizer_and_scheduler(checkpoint)
        schedule = getattr(self.lr_scheduler, "scheduler", self.lr_scheduler)
        if checkpoint is None or not isinstance(schedule, LambdaLR):
            return
        rates = [base * rate(schedule.last_epoch) for base, rate in zip(schedule.base_lrs, schedule.lr_lambdas)]
        for group, rate in zip(schedule.optimizer.param_groups, rates, strict=True):
            group["lr"] = rate
        schedule._last_lr = rates

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

    def _maybe_log_save_evaluate(self, *arguments: Any, **named: Any) -> None:
        """As transformers'. Errors, on all ranks, before weights are saved or sent: ``loss-not-finite``,
        ``policy-not-finite``.
        """
        ranks, step = self.source.ranks, self.state.global_step
        remedy = "Start a new run from the last checkpoint with a lower one, or --resume with a lower max_grad_norm."
        trained = ((name, weight) for name, weight in self.model.named_parameters() if weight.requires_grad)
        are_finite, names = zip(*ranks.gather((self.report.is_finite, first_not_finite(trained))), strict=True)
        if not all(are_finite):
            problem = f"the loss of step {step} is no finite number, nor are the weights now"
            raise LearnError(problem, code="loss-not-finite", key="training.learning_rate", remedy=remedy)
        if name := next(filter(None, names), None):
            problem = f"{name} holds NaN or infinity after step {step}"
            raise LearnError(problem, code="policy-not-finite", key="training.learning_rate", remedy=remedy)
        super()._maybe_log_save_evaluate(*arguments, **named)

    def _waiting(self, step: int) -> Sequence[Segment]:
        """Segments that wait for a row after ``step`` steps; one under way has taken some, and may not be finished."""
        batcher, is_packed = self.learner.batcher, self.report.step == step and bool(self.report.batches)
        if batcher.packer is None:
            return ()
        return batcher.waiting_before if is_packed else batcher.packer.state()

    def _save_checkpoint(self, model: nn.Module, trial: object) -> None:
        """As transformers', with what is under way."""
        step = self.state.global_step
        if self._is_split:
            complete_state(self.optimizer.optimizer)
        with self.checkpointer.saving(step, self._waiting(step), self.window_targets):
            super()._save_checkpoint(model, trial)


class AverageWeights(TrainerCallback):  # type: ignore[misc]  # transformers is not typed
    """Keeps averages of the policy up to date."""

    def __init__(self, averages: Sequence[WeightAverage]) -> None:
        self.averages = averages

    def on_train_begin(self, *_: object, **__: object) -> None:
        """Begin with the policy, or with what a checkpoint has."""
        for average in self.averages:
            average.begin()

    def on_step_end(self, *_: object, **__: object) -> None:
        """Once for each optimizer step."""
        for average in self.averages:
            average.update()


def _exchanges_tower(model: nn.Module, settings: Mapping[str, object]) -> bool:
    """Whether ranks exchange the vision tower's weights (ZeRO-3) or its gradients; ``settings`` are DeepSpeed's."""
    parts = count_parts(model, unwrap(model))
    found = [parts[NAMES[part]] for part in (Part.VISION, Part.PROJECTOR) if NAMES[part] in parts]
    is_in_parts = Strategy(engine="deepspeed", settings=settings).splits_weights
    return bool(found) and (is_in_parts or any(part.num_trained for part in found))


@contextmanager
def _quick_switches() -> Iterator[None]:
    """Threads change places after ``SWITCH_S``."""
    before = sys.getswitchinterval()
    sys.setswitchinterval(SWITCH_S)
    try:
        yield
    finally:
        sys.setswitchinterval(before)
