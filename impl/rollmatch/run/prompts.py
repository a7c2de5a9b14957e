"""Prompts are rendered and counted before the model is loaded; what is too long is refused, left out or cut."""

import os
from collections.abc import Sequence
from dataclasses import dataclass
from statistics import median_high
from typing import cast

from rollmatch.config import RunConfig, effective
from rollmatch.data import BadSamples, LazySamples, spread
from rollmatch.errors import ConfigError, DataError
from rollmatch.model.template import PromptUncuttable, Template
from rollmatch.objectives.rollout_matching.objective import RolloutMatchingObjective
from rollmatch.records import Rollout, Sample
from rollmatch.run.assemble import make_template
from rollmatch.run.teachers import check_teachers
from rollmatch.startup import loading

ANSWERS = 200
"""True answers that are counted."""


@dataclass(frozen=True, slots=True, kw_only=True)
class PromptFit:
    """Samples whose prompts fit, and the lengths of all."""

    samples: Sequence[Sample]
    """Those to use, in their order."""
    lengths: tuple[int, ...]
    """Tokens of the prompts that were counted, images expanded, after any cut; of lazy samples some."""
    longest: int
    """Before any cut. Unit: tokens."""
    origin: str
    """``file:line`` of the longest."""
    limit: int
    """Longest prompt that leaves tokens for a response. Unit: tokens."""
    num_skipped: int
    num_cut: int

    def figures(self) -> dict[str, int]:
        """For people and the journal."""
        return {
            "longest": self.longest,
            "limit": self.limit,
            "num_skipped": self.num_skipped,
            "num_truncated": self.num_cut,
        }


def read_prompts(
    config: RunConfig, train: Sequence[Sample], val: Sequence[Sample]
) -> tuple[Template, PromptFit, PromptFit]:
    """The template, and the samples whose prompts fit; in seconds, before the minutes of loading a model.

    Errors: those of the template, of ``fit_prompts``, ``check_teachers`` and ``check_packing``.
    """
    with loading():
        template = make_template(config)
    fitted, held_out = (fit_prompts(config, template, samples) for samples in (train, val))
    world_size = int(os.environ.get("WORLD_SIZE", "1"))
    for fit in (fitted, held_out):
        check_teachers(config, template, fit.samples)
    check_packing(config, fitted.lengths, num_samples=len(fitted.samples), learner_world_size=world_size)
    return template, fitted, held_out


def find_long_answers(config: RunConfig, template: Template, samples: Sequence[Sample]) -> ConfigError | None:
    """``answers-too-long`` where more than half of the true answers do not fit ``max_new_tokens``, else None.

    Of many samples some are looked at.
    """
    limit = config.custom.extra.rollout_matching.max_new_tokens
    if config.custom.learns_from_completions:
        return None
    from rollmatch.run.objectives import make_objective

    target = cast(RolloutMatchingObjective, make_objective(config, template)).target
    shown = [samples[place] for place in range(0, len(samples), max(1, len(samples) // ANSWERS))]
    nothing = Rollout(
        request_id="", prompt_token_ids=(template.pad_id,), response_token_ids=(), stop_id=None, policy_version=0
    )
    segments, _ = target.make_segments(shown, [nothing] * len(shown))
    median = int(median_high(segment.train_len for segment in segments))
    if median <= limit:
        return None
    return ConfigError(
        f"is {limit}, and half of the true answers have {median} tokens or more: responses would be cut off",
        code="answers-too-long",
        key="custom.extra.rollout_matching.max_new_tokens",
        remedy=f"Raise it to {max(segment.train_len for segment in segments)}, the longest of {len(shown)}.",
    )


def fit_prompts(config: RunConfig, template: Template, samples: Sequence[Sample]) -> PromptFit:
    """Render and count every prompt, and apply ``overlong``.

    Of lazy samples only some are counted (``spread``), unless any may be skipped.

    Errors: ``BadSamples`` of all whose prompts cannot be made; those of the template; ``prompt-too-long`` with
    ``overlong: error``, or where no sample is left.
    """
    everything, limit = samples, effective.max_prompt_len(config)
    if not samples:
        return PromptFit(samples=(), lengths=(), longest=0, origin="", limit=limit, num_skipped=0, num_cut=0)
    samples = samples if config.overlong == "skip" else spread(samples)
    lengths = _lengths_of(template, samples)
    longest, place = max((length, -place) for place, length in enumerate(lengths))
    origin, num_overlong = samples[-place].origin, sum(length > limit for length in lengths)
    for sample in _first_and_longest(samples, lengths):
        template.check_expansion(sample)
    if num_overlong and config.overlong == "error":
        raise _too_long(f"{num_overlong} of {len(samples)} prompts have more", longest, limit=limit, origin=origin)
    places = [place for place, length in enumerate(lengths) if length <= limit or _can_be_cut(template, samples[place])]
    if not places:
        raise _too_long(f"all {len(samples)} prompts have more", longest, limit=limit, origin=origin)
    return PromptFit(
        samples=everything if samples is not everything else _select(samples, places),
        lengths=tuple(min(lengths[place], limit) for place in places),
        longest=longest,
        origin=origin,
        limit=limit,
        num_skipped=len(samples) - len(places),
        num_cut=sum(lengths[place] > limit for place in places),
    )


def _lengths_of(template: Template, samples: Sequence[Sample]) -> list[int]:
    """Tokens of each prompt. Errors: ``BadSamples``."""
    lengths, errors = list[int](), list[DataError]()
    for sample in samples:
        try:
            lengths.append(template.prompt_length(sample))
        except DataError as error:
            errors.append(error)
    if errors:
        raise BadSamples(errors)
    return lengths


def check_packing(
    config: RunConfig, lengths: Sequence[int], *, num_samples: int | None = None, learner_world_size: int
) -> None:
    """Raise ``packing-buffer-full`` where rows take so few segments that the buffer must overflow within the run.

    A segment has at least its prompt and one token. A step's segments are added before its rows are taken.
    """
    training = config.training
    if not training.packing:
        return
    capacity, num_rows = config.global_max_length, training.gradient_accumulation_steps
    copies = config.custom.extra.grpo.num_generations if config.custom.learns_from_completions else 1
    num_segments = training.per_device_train_batch_size * num_rows * copies
    least = [min(length + 1, capacity) for length in lengths]
    growth = waiting_per_step(least, num_segments=num_segments, num_rows=num_rows, capacity=capacity)
    samples_per_step = training.per_device_train_batch_size * num_rows * learner_world_size
    epochs = int(training.num_train_epochs * (num_samples or len(lengths))) // samples_per_step
    steps = training.max_steps if training.max_steps > 0 else epochs
    if num_segments + growth * (steps - 1) > training.packing_buffer:
        raise ConfigError(
            f"{num_segments} segments come into {num_rows} rows of {capacity} tokens per step, and have at least "
            f"{sum(least) / len(least):.0f} tokens on average: {growth:.1f} more wait after each of {steps} steps",
            code="packing-buffer-full",
            key="training.packing_buffer",
            remedy="Raise global_max_length or gradient_accumulation_steps, lower per_device_train_batch_size or "
            "num_generations, or set training.packing to false.",
        )


def waiting_per_step(least: Sequence[int], *, num_segments: int, num_rows: int, capacity: int) -> float:
    """Segments that at least remain of each step's, where a sample's segment has ``least`` tokens or more.

    Four segments of 6 tokens or more per step, one row of 10: it takes one of them.

    >>> waiting_per_step([6], num_segments=4, num_rows=1, capacity=10)
    3.0
    >>> waiting_per_step([2, 8], num_segments=4, num_rows=1, capacity=10)
    1.0
    >>> waiting_per_step([2], num_segments=4, num_rows=1, capacity=10)
    0.0
    """
    by_number = num_segments - num_rows * (capacity // min(least))
    by_tokens = num_segments * sum(least) / len(least) / capacity - num_rows
    return max(0.0, float(by_number), by_tokens)


def _select(samples: Sequence[Sample], places: Sequence[int]) -> Sequence[Sample]:
    return samples.select(places) if isinstance(samples, LazySamples) else [samples[place] for place in places]


def _first_and_longest(samples: Sequence[Sample], lengths: Sequence[int]) -> list[Sample]:
    """Two samples with images, or one, or none."""
    places = [place for place, sample in enumerate(samples) if sample.images]
    return [samples[place] for place in dict.fromkeys([*places[:1], *sorted(places, key=lengths.__getitem__)[-1:]])]


def _can_be_cut(template: Template, sample: Sample) -> bool:
    if template.options.max_prompt_len is None:
        return False
    try:
        template.prompt_token_ids(sample)
    except PromptUncuttable:
        return False
    return True


def _too_long(problem: str, longest: int, *, limit: int, origin: str) -> ConfigError:
    return ConfigError(
        f"{problem} than {limit} tokens, which leaves too little for a response; the longest has {longest} ({origin})",
        code="prompt-too-long",
        key="global_max_length",
        remedy=f"Raise it by {longest - limit}, lower max_new_tokens, or set overlong to skip or truncate_left.",
    )
