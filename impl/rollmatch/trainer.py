"""One step around the ring, inside transformers' own training loop.

``RolloutTrainer`` stays a normal ``Trainer``: callbacks, loggers, accumulation, checkpoints, schedulers and
``accelerate launch`` work as always. Only three things are its own: the batches of an optimizer step are made from
rollouts (``get_batch_samples``), the loss is masked (``compute_loss``), and evaluation is a rollout
(``evaluate``).
"""

import json
import time
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from transformers import Trainer

from rollmatch.errors import LaunchError
from rollmatch.evaluation import describe_scene, score, write_evaluation
from rollmatch.journal import Journal
from rollmatch.learn.batch import Batcher, MicroBatch, total_of
from rollmatch.learn.loss import LossRules, LossTerms, LossTotals, masked_loss, masked_loss_of_kept
from rollmatch.ranks import Ranks
from rollmatch.records import Rollout, RolloutRequest, Sample, Segment
from rollmatch.rollout.backend import Decoding
from rollmatch.rollout.request import make_requests
from rollmatch.samples import LearnerOrder
from rollmatch.step_report import StepReport
from rollmatch.sync.fence import Fence
from rollmatch.sync.named_weights import named_weights
from rollmatch.target.rollout_matching import RolloutMatching
from rollmatch.template import ImageFeatures, Template

CARRY_FILE = "carry-rank{rank}.json"


@dataclass(frozen=True, slots=True, kw_only=True)
class Ring:
    """The rooms a step walks through, ready to use. Made by ``launch.learner``."""

    template: Template
    fence: Fence
    decoding: Decoding
    target: RolloutMatching
    eval_target: RolloutMatching
    batcher: Batcher
    loss_rules: LossRules
    journal: Journal
    ranks: Ranks
    rollout_threads: int | None = None
    learner_threads: int | None = None


class CarryUnfit(LaunchError):
    """The segments that waited when a checkpoint was written are there for this rank, and of this data set."""

    code = "carry-unfit"


class RolloutTrainer(Trainer):  # type: ignore[misc]  # transformers is not typed
    """A ``transformers.Trainer`` whose batches are the policy's own rollouts, corrected."""

    control: Any

    def __init__(self, *, ring: Ring, **arguments: Any) -> None:
        super().__init__(data_collator=list, **arguments)
        self.ring = ring
        self.order = LearnerOrder(len(self.train_dataset), seed=self.args.seed)
        # Both names of one switch (transformers renamed it): the loss is already divided by the whole step's totals.
        self.model_accepts_loss_kwargs = True
        self.loss_is_scaled_for_ga = True
        self.report = StepReport(step=0)

    def get_batch_samples(
        self, epoch_iterator: Any, num_batches: int, device: torch.device
    ) -> tuple[list[dict[str, Any]], LossTotals | None]:
        """Samples of one optimizer step -> rollouts -> targets -> its micro-batches and what they supervise."""
        micro_batches, _ = super().get_batch_samples(epoch_iterator, num_batches, device)
        if not micro_batches:
            return [], None
        samples = [sample for micro_batch in micro_batches for sample in micro_batch]
        report = self.report = StepReport(step=self.state.global_step)
        report.rollouts = self.roll_out(samples, report, purpose="train")
        with report.phase("target"):
            features = self._check_alignment(samples, report.rollouts)
            segments, report.reports = self.ring.target.make_segments(samples, report.rollouts)
        with report.phase("pack"):
            report.batches = self._make_batches(segments, features, num_batches=len(micro_batches))
        report.learn_began = time.perf_counter()
        return [{"micro_batch": batch} for batch in report.batches], total_of(report.batches, self.ring.ranks.sum)

    def roll_out(self, samples: Sequence[Sample], report: StepReport, *, purpose: str) -> list[Rollout]:
        """Sync if the learner has moved, then one rollout per sample, in order; ``purpose`` is train or eval."""
        ring, step = self.ring, report.step
        with _threads(ring.rollout_threads):
            report.phase_s["sync"] += ring.fence.sync_if_due(step, lambda: named_weights(self.model))
            with report.phase("rollout"):
                requests = self._make_requests(samples, step=step, purpose=purpose)
                rollouts = ring.fence.backend.generate(requests, ring.decoding)
        ring.journal.write(
            "generated",
            step=step,
            purpose=purpose,
            seconds=round(report.phase_s["rollout"], 4),
            num_rollouts=len(rollouts),
            num_tokens=sum(len(rollout.response_token_ids) for rollout in rollouts),
            policy_version=ring.fence.backend.policy_version,
        )
        return rollouts

    def compute_loss(
        self, model: Any, inputs: dict[str, Any], return_outputs: bool = False, num_items_in_batch: Any = None
    ) -> Any:
        """The micro-batch's share of the step's loss, times the ranks that DDP will average over."""
        batch: MicroBatch = inputs["micro_batch"]
        outputs = model(**batch.inputs)
        terms = self._score(outputs.logits, batch, totals=num_items_in_batch)
        self.report.add_terms(terms)
        loss = terms.total * self.ring.ranks.learner_world_size
        return (loss, outputs) if return_outputs else loss

    def log(self, logs: dict[str, float], start_time: float | None = None) -> None:
        """Add the step's figures to the line that holds the loss."""
        if "loss" in logs:
            self.report.phase_s["learn"] = time.perf_counter() - self.report.learn_began
            logs |= self.report.figures()
            logs |= {f"time/{phase}_s": seconds for phase, seconds in self.report.phase_s.items()}
        super().log(logs, start_time)

    def evaluate(
        self, eval_dataset: Any = None, ignore_keys: Any = None, metric_key_prefix: str = "eval"
    ) -> dict[str, float]:
        """One rollout per held-out sample; metrics get the prefix, scenes go to the run directory."""
        samples: Sequence[Sample] = self.eval_dataset if eval_dataset is None else eval_dataset
        ranks, began = self.ring.ranks, time.perf_counter()
        report = StepReport(step=self.state.global_step)
        mine = samples[ranks.rank :: ranks.learner_world_size]
        rollouts = self.roll_out(mine, report, purpose="eval")
        parts = ranks.gather(list(zip(mine, rollouts, strict=True)))
        pairs = sorted((pair for part in parts for pair in part), key=lambda pair: pair[0].sample_id)
        metrics = self._score_evaluation([s for s, _ in pairs], [r for _, r in pairs])
        tokens = sum(len(rollout.response_token_ids) for _, rollout in pairs)
        metrics |= {"seconds": time.perf_counter() - began, "tokens_per_s": tokens / report.phase_s["rollout"]}
        if ranks.is_primary:
            self._write_evaluation(pairs, metrics)
        named = {f"{metric_key_prefix}_{name}": value for name, value in metrics.items()}
        self.log(dict(named))
        self.control = self.callback_handler.on_evaluate(self.args, self.state, self.control, named)
        return named

    def restore_carry(self, checkpoint: Path) -> None:
        """Take up the segments that were waiting for a row when ``checkpoint`` was written. Errors: ``CarryUnfit``."""
        if self.ring.batcher.packer is None:
            return
        file = checkpoint / CARRY_FILE.format(rank=self.ring.ranks.rank)
        samples = {sample.sample_id: sample for sample in self.train_dataset}
        try:
            carried = [
                Segment(sample=samples[sample_id], **{name: _as_tuple(value) for name, value in fields.items()})
                for sample_id, fields in json.loads(file.read_text())
            ]
        except (OSError, ValueError, KeyError) as error:
            remedy = "Go on with the ranks, the packing and the data set of the run that wrote it, or start anew."
            raise CarryUnfit(f"{type(error).__name__}: {error}", key=str(file), remedy=remedy) from error
        self.ring.batcher.packer.restore(carried)

    def _make_requests(self, samples: Sequence[Sample], *, step: int, purpose: str) -> list[RolloutRequest]:
        ring = self.ring
        requests = make_requests(
            samples,
            prompt_of=ring.template.prompt_token_ids,
            run_seed=self.args.seed,
            step=step,
            rank=ring.ranks.rank,
        )
        ring.journal.write(
            "requested",
            step=step,
            purpose=purpose,
            num_requests=len(requests),
            seeds=[request.seed for request in requests],
            sample_ids=[sample.sample_id for sample in samples],
            decoding=ring.decoding.as_dict(),
        )
        return requests

    def _check_alignment(self, samples: Sequence[Sample], rollouts: Sequence[Rollout]) -> dict[int, ImageFeatures]:
        """Features of each sample's images, by sample id, after checking that the engine saw the learner's prompt."""
        template, features = self.ring.template, {}
        for sample, rollout in zip(samples, rollouts, strict=True):
            features[sample.sample_id] = template.image_features(sample)
            prompt = template.expand(template.prompt_token_ids(sample), features[sample.sample_id])
            template.check_alignment(sample, prompt, rollout)
        return features

    def _make_batches(
        self, segments: Sequence[Segment], features: dict[int, ImageFeatures], *, num_batches: int
    ) -> list[MicroBatch]:
        def features_of(sample: Sample) -> ImageFeatures:
            known = features.get(sample.sample_id)
            return self.ring.template.image_features(sample) if known is None else known

        batches = self.ring.batcher.make(segments, features_of, num_batches=num_batches)
        packer = self.ring.batcher.packer
        self.report.num_carried = packer.buffered if packer else 0
        self.ring.journal.write(
            "packed",
            step=self.state.global_step,
            rows=len(batches),
            segments=sum(len(batch.segments) for batch in batches),
            sample_ids=[[segment.sample.sample_id for segment in batch.segments] for batch in batches],
            tokens=sum(batch.num_tokens for batch in batches),
            fill=round(sum(batch.fill for batch in batches) / len(batches), 4),
            oldest_policy_version=min(segment.policy_version for batch in batches for segment in batch.segments),
            carried=self.report.num_carried,
        )
        return batches

    def _score(self, logits: torch.Tensor, batch: MicroBatch, *, totals: LossTotals) -> LossTerms:
        score_logits = masked_loss_of_kept if batch.is_packed else masked_loss
        return score_logits(
            logits.flatten(0, 1), supervision=batch.supervision, rules=self.ring.loss_rules, totals=totals
        )

    def _score_evaluation(self, samples: Sequence[Sample], rollouts: Sequence[Rollout]) -> dict[str, float]:
        return score(samples, rollouts, self.ring.eval_target)

    def _write_evaluation(self, pairs: Sequence[tuple[Sample, Rollout]], metrics: dict[str, float]) -> None:
        target = self.ring.eval_target
        scenes = [
            describe_scene(sample, rollout, vocabulary=target.vocabulary, rules=target.match_rules)
            for sample, rollout in pairs
        ]
        step = self.state.global_step
        file = write_evaluation(
            Path(self.args.output_dir), step=step, metrics=metrics, scenes=scenes, iou=target.match_rules.maskiou_gate
        )
        self.ring.journal.write("evaluated", step=step, file=file, metrics=metrics)

    def _get_train_sampler(self, *arguments: Any) -> Any:
        """The learner owns the order."""
        return self.order

    def _save_checkpoint(self, model: Any, trial: Any) -> None:
        """The waiting segments first: transformers writes ``trainer_state.json`` last, which marks the whole."""
        folder = Path(self.args.output_dir) / f"checkpoint-{self.state.global_step}"
        folder.mkdir(parents=True, exist_ok=True)
        if self.ring.batcher.packer is not None:
            carried = [_as_fields(segment) for segment in self.ring.batcher.packer.state()]
            (folder / CARRY_FILE.format(rank=self.ring.ranks.rank)).write_text(json.dumps(carried))
        self.ring.ranks.barrier()
        super()._save_checkpoint(model, trial)
        self.ring.journal.write("saved", step=self.state.global_step, path=folder.name)


class _threads:
    """torch's CPU threads inside a phase, and back to what they were."""

    def __init__(self, num_threads: int | None) -> None:
        self.num_threads = num_threads
        self.before = torch.get_num_threads()

    def __enter__(self) -> None:
        if self.num_threads:
            torch.set_num_threads(self.num_threads)

    def __exit__(self, *exception: object) -> None:
        if self.num_threads:
            torch.set_num_threads(self.before)


def _as_fields(segment: Segment) -> tuple[int, dict[str, Any]]:
    names = [name for name in Segment.__slots__ if name != "sample"]
    return segment.sample.sample_id, {name: getattr(segment, name) for name in names}


def _as_tuple(value: Any) -> Any:
    return tuple(value) if isinstance(value, list) else value
