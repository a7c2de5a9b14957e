"""Prompts are rendered and counted before the model is loaded; what is too long is refused, left out or cut."""

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
from rollmatch.run.plugins import first_reply, shown_schemas
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

    Errors: ``tools-not-rendered``, those of the template, of ``fit_prompts`` and ``check_teachers``.
    """
    with loading():
        template = make_template(config)
        if schemas := shown_schemas(config):
            template.check_tools(schemas)
    fitted, held_out = (fit_prompts(config, template, samples) for samples in (train, val))
    check_teachers(config, template, fitted.samples, held_out.samples)
    return template, fitted, held_out


def find_long_answers(config: RunConfig, template: Template, samples: Sequence[Sample]) -> ConfigError | None:
    """``answers-too-long`` where more than half of the true answers do not fit ``max_new_tokens``, else None.

    Of many samples some are looked at.
    """
    limit = config.custom.extra.rollout_matching.max_new_tokens
    if config.custom.learns_from_completions:
        return None
    shown = [samples[place] for place in range(0, len(samples), max(1, len(samples) // ANSWERS))]
    lengths = _text_lengths(template, shown) if config.custom.teaches_text else _answer_lengths(config, template, shown)
    median = int(median_high(lengths))
    if median <= limit:
        return None
    return ConfigError(
        f"is {limit}, and half of the true answers have {median} tokens or more: responses would be cut off",
        code="answers-too-long",
        key="custom.extra.rollout_matching.max_new_tokens",
        remedy=f"Raise it to {max(lengths)}, the longest of {len(shown)}.",
    )


def _text_lengths(template: Template, samples: Sequence[Sample]) -> list[int]:
    turns = [template.answered_ids(sample)[1][-1] for sample in samples]
    return [end - first for first, end in turns]


def _answer_lengths(config: RunConfig, template: Template, samples: Sequence[Sample]) -> list[int]:
    from rollmatch.run.objectives import make_objective

    target = cast(RolloutMatchingObjective, make_objective(config, template)).target
    nothing = Rollout(
        request_id="", prompt_token_ids=(template.pad_id,), response_token_ids=(), stop_id=None, policy_version=0
    )
    segments, _ = target.make_segments(samples, [nothing] * len(samples))
    return [segment.train_len for segment in segments]


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
    environment = config.custom.extra.environment
    has_turns = environment.is_set and environment.observations == "chat"
    if has_turns:
        template.reply_token_ids(first_reply(config), is_stopped=True)
    lengths = _lengths_of(template, samples, has_turns=has_turns)
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


def _lengths_of(template: Template, samples: Sequence[Sample], *, has_turns: bool) -> list[int]:
    """Tokens of each prompt; answers, and turns behind it, are rendered, too. Errors: ``BadSamples``."""
    lengths, errors = list[int](), list[DataError]()
    for sample in samples:
        try:
            lengths.append(template.prompt_length(sample))
            if sample.answer is not None:
                template.answered_ids(sample)
            if has_turns:
                template.check_turns(sample)
        except DataError as error:
            errors.append(error)
    if errors:
        raise BadSamples(errors)
    return lengths


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
