"""``rollmatch eval``: roll out one split with a run's policy, or with the model of a YAML, and judge the answers.

By boxes, rewards, or true texts.
"""

import argparse
import json
import sys
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple

from rollmatch.config import RunConfig, load_config
from rollmatch.config.files import check_model
from rollmatch.config.servers import uses_servers
from rollmatch.data.splits import load_split
from rollmatch.errors import ConfigError, DataError, LaunchError
from rollmatch.model.source import with_local_model
from rollmatch.records import Rollout, Sample
from rollmatch.run.directory import RESOLVED, last_checkpoint
from rollmatch.run.plugins import with_first_observations

if TYPE_CHECKING:
    from torch import nn

    from rollmatch.model.template import Template
    from rollmatch.objectives.protocol import Objective, ObjectiveContext
    from rollmatch.objectives.rollout_matching.objective import RolloutMatchingObjective
    from rollmatch.rollout.source import RolloutSource

SPLITS = ("train", "val")
FIGURES = "eval.json"
PRINTED = (
    *("loss", "AP", "AP50", "AP75", "AP_small", "AP_medium", "AP_large", "AR_100", "f1@0.5", "f1_desc@0.5"),
    *("invalid_rate", "truncated_rate", "num_images"),
)
COSTS = ("num_scenes", "tokens_per_s")
COUNTS = ("num_images",)
SCORED_TOGETHER = 8
"""Segments of a forward pass that measures a loss."""


class EvaluationTarget(NamedTuple):
    """What is evaluated."""

    config: RunConfig
    directory: Path
    """Of the run, wherever it was moved; of a YAML, the one that it names."""
    checkpoint: Path | None
    """None: the model as the YAML names it."""

    @property
    def step(self) -> int:
        """Optimizer steps of the checkpoint."""
        return int(self.checkpoint.name.rpartition("-")[2]) if self.checkpoint else 0


def evaluate(options: argparse.Namespace) -> None:
    """Write ``eval.json`` and ``eval.html``, print the main figures. Errors: ``not-a-run``,
    ``eval-beams``, ``checkpoint-missing``, those of samples, rewards, environment and of the rollout backend."""
    subject = _read(options)
    _check(subject.config)
    samples = _load(subject.config, options)
    out = options.out or subject.directory / f"eval-{options.split}-{subject.step:06d}"
    out.mkdir(parents=True, exist_ok=True)
    title = f"{Path(options.subject).resolve().name}, {options.split}, step {subject.step:,}"
    with _opened(subject, samples, out, skip_bad=options.skip_bad) as policy:
        figures = _judge_boxes(policy) if subject.config.custom.detects else _judge_answers(policy)
    teachers = _weights_of_teachers(subject)
    taught = {"teachers": teachers} if teachers else {}
    record = {"step": subject.step, "split": options.split, **taught, **figures}
    (out / FIGURES).write_text(json.dumps(record), encoding="utf-8")
    from rollmatch.report.detection import write_answers_page, write_detection_page
    from rollmatch.report.evaluations import load_evaluation

    evaluation, metrics = load_evaluation(out / FIGURES), figures["metrics"]
    if subject.config.custom.detects:
        page = write_detection_page(out, title=title, metrics=metrics, figures=figures, evaluation=evaluation)
        _print({name: metrics[name] for name in PRINTED if name in metrics})
    else:
        page = write_answers_page(out, title=title, evaluation=evaluation)
        _print({name: value for name, value in metrics.items() if name not in COSTS})
    for place, weights in enumerate(teachers):
        print(f"teacher {place}: {weights}")
    print(f"figures: {out / FIGURES}\npage: {page}")


def _read(options: argparse.Namespace) -> EvaluationTarget:
    path = Path(options.subject)
    if not path.exists():
        problem, remedy = f"{path} does not exist", "Name a YAML, or the training.output_dir of a run."
        raise LaunchError(problem, code="not-a-run", key="CONFIG|RUN", remedy=remedy)
    if not path.is_dir():
        if options.checkpoint:
            problem, remedy = "belongs to a run, but a YAML was named", "Name the run directory, or leave it out."
            raise LaunchError(problem, code="checkpoint-missing", key="--checkpoint", remedy=remedy)
        config = with_local_model(load_config(options.subject, options.overrides))
        return EvaluationTarget(config, Path(config.training.output_dir), None)
    if not (path / RESOLVED).is_file():
        problem, remedy = f"{path} has no {RESOLVED}", "Name a YAML, or the training.output_dir of a run."
        raise LaunchError(problem, code="not-a-run", key="RUN", remedy=remedy)
    checkpoint = options.checkpoint or last_checkpoint(path)
    if checkpoint is None or not checkpoint.is_dir():
        problem, remedy = f"{checkpoint or path} holds no whole checkpoint", "Name a checkpoint directory of the run."
        raise LaunchError(problem, code="checkpoint-missing", key="--checkpoint", remedy=remedy)
    if not checkpoint.name.rpartition("-")[2].isdecimal():
        problem, remedy = f"{checkpoint} does not end with a step", "Rename it to checkpoint-STEP."
        raise LaunchError(problem, code="checkpoint-missing", key="--checkpoint", remedy=remedy)
    return EvaluationTarget(with_local_model(load_config(str(path / RESOLVED), options.overrides)), path, checkpoint)


def _check(config: RunConfig) -> None:
    check_model(config)
    if config.custom.detects and config.custom.extra.rollout_matching.num_beams > 1:
        problem, remedy = "beams have no token probabilities to score by", "Set it to 1 (--set)."
        raise ConfigError(problem, code="eval-beams", key="custom.extra.rollout_matching.num_beams", remedy=remedy)


def _load(config: RunConfig, options: argparse.Namespace) -> Sequence[Sample]:
    skipped: list[DataError] | None = [] if options.skip_bad else None
    if options.split == "val" and not config.custom.is_evaluated:
        problem = "the run has no held-out samples"
        remedy = "Name some (--set custom.val_jsonl=FILE), or evaluate --split train."
        raise ConfigError(problem, code="nothing-to-evaluate", key="--split", remedy=remedy)
    samples = load_split(config.custom, options.split, ordering="as_given", skipped=skipped)
    for error in skipped or ():
        print(f"skipped: {error}", file=sys.stderr)
    return with_first_observations(config, samples[: options.limit])


def usable(template: "Template", samples: Sequence[Sample]) -> list[Sample]:
    """Samples whose prompts and images the model can be given; the others are named."""
    kept = []
    for sample in samples:
        try:
            template.prompt_length(sample)
            template.image_features(sample)
        except DataError as error:
            print(f"skipped: {error}", file=sys.stderr)
        else:
            kept.append(sample)
    return kept


class _Policy(NamedTuple):
    """A policy that can answer."""

    samples: Sequence[Sample]
    """Those that can be used."""
    source: "RolloutSource"
    objective: "Objective"
    context: "ObjectiveContext"


@contextmanager
def _opened(subject: EvaluationTarget, samples: Sequence[Sample], out: Path, *, skip_bad: bool) -> "Iterator[_Policy]":
    """The configured backend with the subject's weights."""
    from rollmatch.config.effective import enforce_eager, rollout_backend
    from rollmatch.run.machine import check_engine, has_gpu, set_environment
    from rollmatch.startup import loading

    config = subject.config
    if uses_servers(config):
        from rollmatch.run.server_checks import WaitPolicy, wait_for_servers

        wait_for_servers(config, WaitPolicy(), gpus=())
    else:
        check_engine(rollout_backend(config))
    set_environment(eager=enforce_eager(config, on_gpu=has_gpu()))
    with loading():
        from transformers.utils.logging import disable_progress_bar

        from rollmatch.journal import Journal
        from rollmatch.ranks import Ranks
        from rollmatch.run.assemble import (
            make_eval_decoding,
            make_source,
            make_taught_objective,
            make_template,
            make_train_decoding,
        )
        from rollmatch.run.vineppo_objective import make_world
        from rollmatch.weights.named_weights import named_weights

        disable_progress_bar()
        template, model = make_template(config), _policy(subject)
        samples = usable(template, samples) if skip_bad else samples
    journal, world = Journal(out / "journal.jsonl"), make_world(config, template)
    source = make_source(config, model, template, journal=journal, ranks=Ranks.from_environment())
    try:
        eval_decoding = replace(make_eval_decoding(config), logprobs=config.custom.detects)
        source = replace(source, decoding=make_train_decoding(config), eval_decoding=eval_decoding, world=world)
        source.sync(subject.step, lambda: named_weights(model))
        objective = make_taught_objective(config, template, policy=model, world=world)
        _restore_averages(subject, objective)
        yield _Policy(samples, source, objective, _context(source, model, subject.step))
    finally:
        source.fence.backend.close()
        journal.close()


def _restore_averages(subject: EvaluationTarget, objective: "Objective") -> None:
    """Averages that teach, as the checkpoint has them; those of a model that has not learnt are its own weights.

    Errors: ``average-missing``.
    """
    from rollmatch.run.teachers import averages_of
    from rollmatch.training.checkpointer import AVERAGE_FILE

    for place, average in enumerate(averages_of(objective)):
        if subject.checkpoint is not None:
            average.restore(subject.checkpoint / AVERAGE_FILE.format(place=place))


def _weights_of_teachers(subject: EvaluationTarget) -> list[str]:
    """Whose weights each teacher has, in the order of ``distill.teachers``."""
    evaluated = "the evaluated weights"

    def of_average(keep: float) -> str:
        return evaluated if subject.checkpoint is None else f"average of {subject.checkpoint.name} that keeps {keep:g}"

    return [
        one.model or one.base_url or (evaluated if one.average is None else of_average(one.average))
        for one in subject.config.custom.extra.distill.teachers
    ]


def _context(source: "RolloutSource", model: "nn.Module", step: int) -> "ObjectiveContext":
    from transformers import TrainerState

    from rollmatch.learn.balance import PassSize
    from rollmatch.learn.score import SegmentScorer
    from rollmatch.objectives.protocol import ObjectiveContext

    score = SegmentScorer(
        model=model,
        reference=None,
        features_of=source.template.image_features,
        temperature=source.decoding.temperature or 1.0,
        excluded_ids=source.template.banned_ids,
        size=PassSize(segments=SCORED_TOGETHER),
        check_images=lambda has_images: None,
    )
    return ObjectiveContext(
        step=step,
        ranks=source.ranks,
        decoding=source.eval_decoding,
        generate=source.generate,
        play=source.play,
        score=score,
        teach=score.teach,
        further=lambda num: [],
        log=source.journal.write,
        trainer_state=TrainerState(global_step=step),
    )


def _judge_answers(policy: _Policy) -> dict[str, Any]:
    from rollmatch.training.evaluation import evaluate_policy

    record, metrics = evaluate_policy(policy.source, policy.objective, policy.samples, policy.context)
    return {**record, "metrics": metrics}


def _judge_boxes(policy: _Policy) -> dict[str, Any]:
    from rollmatch.objectives.rollout_matching.objective import RolloutMatchingObjective, SupervisedObjective

    objective = policy.objective
    assert isinstance(objective, RolloutMatchingObjective)
    rollouts = policy.source.roll_out(policy.samples, policy.context.step, purpose="eval")
    record = {"score": "token_probability", **judge(objective, policy.samples, rollouts)}
    if isinstance(objective, SupervisedObjective):
        evaluated = objective.evaluate(policy.samples, rollouts, policy.context)
        record["metrics"] = {"loss": evaluated.metrics["loss"], **record["metrics"]}
    return record


def _policy(subject: EvaluationTarget) -> "nn.Module":
    from rollmatch.run.assemble import read_policy
    from rollmatch.run.export import load_trained

    if subject.checkpoint is None:
        return read_policy(subject.config)
    return load_trained(subject.config, subject.checkpoint)


def judge(
    objective: "RolloutMatchingObjective", samples: Sequence[Sample], rollouts: Sequence[Rollout]
) -> dict[str, Any]:
    """Metrics, figures by class, and all scenes with the scores of their predictions."""
    from rollmatch.objectives.rollout_matching.detection import Answered, judge_detection, object_scores
    from rollmatch.objectives.rollout_matching.objective import describe_scene

    target, answers, scenes = objective.eval_target, [], []
    for sample, rollout in zip(samples, rollouts, strict=True):
        matched = target.match(sample, rollout)
        parsed = matched.parsed
        scores = object_scores(parsed.objects, rollout, target.vocabulary)
        answers.append(Answered(sample=sample, parsed=parsed, scores=scores))
        scene = describe_scene(sample, rollout, matched, target.vocabulary)
        predicted = [one | {"score": score} for one, score in zip(scene["predicted"], scores, strict=True)]
        scenes.append(scene | {"predicted": predicted})
    figures = judge_detection(answers, target.match_rules)
    gate = target.match_rules.maskiou_gate
    return {
        "metrics": figures.metrics,
        "by_desc": figures.by_desc,
        "precision_by_recall": figures.curve,
        "drops": figures.drops,
        "iou_threshold": gate,
        "scenes": scenes,
    }


def _print(metrics: Mapping[str, float | None]) -> None:
    for name, value in metrics.items():
        print(f"{name:14} {'-' if value is None else f'{value:.0f}' if name in COUNTS else f'{value:z.3f}'}")
