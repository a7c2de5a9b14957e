"""The teachers of a distillation: checked before a model is loaded, then loaded."""

import os
from collections.abc import Callable, Mapping, Sequence
from functools import partial
from http import HTTPStatus
from pathlib import Path

from torch import nn

from rollmatch.config import RunConfig
from rollmatch.config.custom import TeacherConfig
from rollmatch.config.distill_rules import DISTILL
from rollmatch.data import BadSamples, spread
from rollmatch.dialects.http import CallTimeout, ReplyMalformed, ServerRefused, TransportFailed
from rollmatch.dialects.vllm.teacher import JudgedTokens, TeacherServer, first_difference_in_text, num_ids_of
from rollmatch.errors import ConfigError, DataError
from rollmatch.learn.average import WeightAverage
from rollmatch.model.images import expand_placeholders
from rollmatch.model.source import num_positions
from rollmatch.model.template import Template
from rollmatch.objectives.distill.objective import DistillObjective
from rollmatch.objectives.distill.prompt import TeacherPrompt
from rollmatch.objectives.distill.teacher import (
    Answers,
    LocalAnswers,
    ServerAnswers,
    Teacher,
    judged_tokens,
    teacher_of,
)
from rollmatch.objectives.protocol import Objective
from rollmatch.records import Sample
from rollmatch.rollout.overlap import AnswerOf
from rollmatch.server.settings import KEY_VARIABLE

CLOSED = (HTTPStatus.UNAUTHORIZED, HTTPStatus.FORBIDDEN)
TRY_S = 60.0
"""Longest call that tries a server."""


def make_teachers(
    config: RunConfig,
    template: Template,
    load: Callable[[str], nn.Module] | None,
    *,
    policy: nn.Module | None = None,
) -> list[Teacher]:
    """What ``distill.teachers`` names. ``load`` reads a frozen model from its directory; None leaves models out.

    ``policy``: whose weights an ``average`` is of; None leaves averages out.

    Errors: ``teacher-prompt-malformed``.
    """
    made = []
    for place, entry in enumerate(config.custom.extra.distill.teachers):
        prompt, prompt_of = _prompt_of(entry, place, template), None
        if prompt is not None:
            prompt_of = partial(_prompt_ids, template=template, prompt=prompt)
        average = None
        if policy is not None and entry.average is not None:
            average = WeightAverage(policy, keep=entry.average)
        answers: Answers = LocalAnswers(model=load(entry.model) if load and entry.model else None, average=average)
        if entry.base_url is not None:
            server = _server_of(entry.base_url, template)
            answers = ServerAnswers(server=server, unexpanded=template.unexpanded, timeout_s=entry.timeout_s)
        made.append(Teacher(answers=answers, weight=entry.weight, when=entry.when, prompt_of=prompt_of))
    return made


def averages_of(objective: Objective) -> tuple[WeightAverage, ...]:
    """Averages of the policy that teach."""
    teachers = objective.teachers if isinstance(objective, DistillObjective) else ()
    found = [one.answers.average for one in teachers if isinstance(one.answers, LocalAnswers)]
    return tuple(average for average in found if average is not None)


def check_teachers(config: RunConfig, template: Template, *splits: Sequence[Sample]) -> None:
    """Compare vocabularies, try servers, and render each sample's prompt as its teacher sees it; of lazy samples some.

    Errors: ``teacher-vocabulary``, ``teacher-without-logprobs``, ``teacher-refused``, ``teacher-unreachable``,
    ``top-k-too-large``, ``teacher-prompt-malformed``, ``teacher-too-short``, ``teacher-without-images``;
    ``BadSamples`` of samples without a teacher or a field, or whose prompts cannot be made.
    """
    entries = config.custom.extra.distill.teachers
    for place, entry in enumerate(entries):
        if entry.model is not None:
            _check_vocabulary(template, entry.model, key=f"{DISTILL}.teachers.{place}.model")
        if entry.base_url is not None:
            key, top_k = f"{DISTILL}.teachers.{place}.base_url", config.custom.extra.distill.top_k or 1
            _check_server(template, _server_of(entry.base_url, template), top_k=top_k, key=key)
    if entries:
        _check_top_k(config, template)
        tried = [sample for samples in splits for sample in spread(samples)]
        _check_answers(config, template, tried)
        _check_prompts(config, template, tried)
        _check_images(config, template, tried)


def first_difference(ours: Mapping[str, int], theirs: Mapping[str, int]) -> int | None:
    """Smallest id that two vocabularies, token -> id, do not give to the same token; None: they are the same.

    >>> first_difference({"a": 0, "b": 1}, {"a": 0, "c": 1}), first_difference({"a": 0}, {"a": 0})
    (1, None)
    """
    return min((token_id for _, token_id in ours.items() ^ theirs.items()), default=None)


def _check_vocabulary(template: Template, directory: str, *, key: str) -> None:
    from transformers import AutoTokenizer  # a second to load

    ours = template.tokenizer.get_vocab()
    theirs = AutoTokenizer.from_pretrained(directory, trust_remote_code=False).get_vocab()
    differs = first_difference(ours, theirs)
    if differs is not None:
        problem = f"{directory} has {len(theirs)} tokens, the policy {len(ours)}, and they differ first at id {differs}"
        remedy = "Take a teacher of the same family: it must read and name the policy's tokens."
        raise ConfigError(problem, code="teacher-vocabulary", key=key, remedy=remedy)


def _server_of(base_url: str, template: Template) -> TeacherServer:
    return TeacherServer(base_url, api_key=os.environ.get(KEY_VARIABLE), excluded_ids=template.banned_ids)


def _check_server(template: Template, server: TeacherServer, *, top_k: int, key: str) -> None:
    """Have one token judged, then compare what every id writes."""
    num_ids = len(template.tokenizer)
    try:
        server.teach(JudgedTokens(token_ids=(0, 1), prompt_len=1), top_k=top_k, timeout_s=TRY_S)
    except (ServerRefused, ReplyMalformed) as error:
        if isinstance(error, ServerRefused) and error.status in CLOSED:
            remedy = f"Set the environment variable {KEY_VARIABLE} to the key of that server."
            raise ConfigError(str(error.problem), code="teacher-refused", key=key, remedy=remedy) from error
        remedy = (
            f"Start vllm serve --max-logprobs {server.num_asked(top_k)} or more there (rollmatch serve: "
            "custom.extra.rollout_server.vllm_engine_kwargs.max_logprobs); see what it says."
        )
        raise ConfigError(str(error.problem), code="teacher-without-logprobs", key=key, remedy=remedy) from error
    except (CallTimeout, TransportFailed) as error:
        remedy = "Start it (vllm serve or rollmatch serve), or correct the address."
        problem = f"{server.base_url} does not answer: {error.problem}"
        raise ConfigError(problem, code="teacher-unreachable", key=key, remedy=remedy) from error
    try:
        differs = first_difference_in_text(template.tokenizer.decode, server.text, num_ids)
        theirs = num_ids_of(server.text) if differs is not None or server.text([num_ids]) else num_ids
    except (ServerRefused, ReplyMalformed) as error:
        remedy = (
            "Serve it by vllm serve or rollmatch serve: their /detokenize shows whether it has the policy's tokens."
        )
        raise ConfigError(str(error.problem), code="teacher-vocabulary", key=key, remedy=remedy) from error
    if differs is not None or theirs != num_ids:
        differs = num_ids if differs is None else differs
        problem = f"{server.base_url} has {theirs} tokens, the policy {num_ids}, and they differ first at id {differs}"
        remedy = "Serve a teacher of the same family: it must read and name the policy's tokens."
        raise ConfigError(problem, code="teacher-vocabulary", key=key, remedy=remedy)


def _limit_of(config: RunConfig, entry: TeacherConfig, template: Template) -> int | None:
    """Most tokens of a sequence that a teacher takes; a server writes one more."""
    if entry.base_url is None:
        return num_positions(Path(entry.model or config.model.model))
    _, longest = _server_of(entry.base_url, template).model()
    return None if longest is None else longest - 1


def _check_top_k(config: RunConfig, template: Template) -> None:
    top_k, most = config.custom.extra.distill.top_k, len(template.tokenizer) - len(template.banned_ids)
    if top_k is not None and top_k > most:
        problem, remedy = f"is {top_k}, but a response has {most} tokens to choose from", "Lower it."
        raise ConfigError(problem, code="top-k-too-large", key=f"{DISTILL}.top_k", remedy=remedy)


def _check_prompts(config: RunConfig, template: Template, samples: Sequence[Sample]) -> None:
    entries, teachers = config.custom.extra.distill.teachers, make_teachers(config, template, None)
    prompts = [_prompt_of(entry, place, template) for place, entry in enumerate(entries)]
    limits = [_limit_of(config, entry, template) for entry in entries]
    extra, errors = config.custom.extra, list[DataError]()
    is_played = extra.environment.is_set
    longest = extra.environment.max_response_tokens if is_played else extra.rollout_matching.max_new_tokens
    named = "environment.max_response_tokens" if is_played else "max_new_tokens"
    for sample in samples:
        place = teacher_of(teachers, sample)
        if place is None:
            problem, remedy = "has the metadata of no teacher", "Add a teacher without when as the last one."
            errors.append(DataError(problem, code="teacher-missing", key=sample.origin, remedy=remedy))
            continue
        prompt, limit = prompts[place], limits[place]
        try:
            length = template.prompt_length(sample if prompt is None else prompt.ask(sample))
        except DataError as error:
            errors.append(error)
            continue
        if limit is not None and length + longest > limit:
            problem = f"has {limit} positions; a prompt of {length} tokens ({sample.origin}) and {longest} do not fit"
            remedy = f"Shorten its prompt, lower {named}, or take another teacher."
            key = f"{DISTILL}.teachers.{place}"
            raise ConfigError(problem, code="teacher-too-short", key=key, remedy=remedy)
    if errors:
        raise BadSamples(errors)


def _check_images(config: RunConfig, template: Template, samples: Sequence[Sample]) -> None:
    """Have each server judge one token behind a prompt with images, where it will see some."""
    teachers = make_teachers(config, template, None)
    pictured = [sample for sample in samples if sample.images]
    for place, entry in enumerate(config.custom.extra.distill.teachers):
        shown = next((sample for sample in pictured if teacher_of(teachers, sample) == place), None)
        if entry.base_url is None or shown is None:
            continue
        prompt = _prompt_ids(shown, template=template, prompt=_prompt_of(entry, place, template))
        ids = (*prompt, template.vocabulary.stop_id)
        judged = judged_tokens(shown, ids, len(prompt), unexpanded=template.unexpanded)
        try:
            _server_of(entry.base_url, template).teach(judged, top_k=1, timeout_s=TRY_S)
        except (ServerRefused, ReplyMalformed) as error:
            remedy = (
                "Serve it by vllm serve --enable-scale-out (vLLM 0.28 or newer) or rollmatch serve, with the policy's "
                "sizes of images (mm_processor_kwargs); or load it by model."
            )
            problem = f"does not judge behind the image of {shown.origin}: {error.problem}"
            key = f"{DISTILL}.teachers.{place}.base_url"
            raise ConfigError(problem, code="teacher-without-images", key=key, remedy=remedy) from error


def answer_of(config: RunConfig, template: Template) -> AnswerOf:
    """A sample's own answer as the ids of a response, by ``distill.answers``."""
    text = TeacherPrompt(text=config.custom.extra.distill.answers or "", key=f"{DISTILL}.answers", user=template.user)
    return lambda sample: template.vocabulary.encode(text.fill(sample))


def _check_answers(config: RunConfig, template: Template, samples: Sequence[Sample]) -> None:
    rules, longest = config.custom.extra.distill, config.custom.extra.rollout_matching.max_new_tokens
    if rules.answers is None:
        return
    find, errors = answer_of(config, template), list[DataError]()
    for sample in samples:
        try:
            length = len(find(sample)) + 1
        except DataError as error:
            errors.append(error)
            continue
        if length > longest:
            problem, remedy = f"has an answer of {length} tokens, its end included", f"Shorten it to {longest}, the "
            remedy += "max_new_tokens of rollout_matching, or raise that."
            errors.append(DataError(problem, code="off-policy-answer-too-long", key=sample.origin, remedy=remedy))
    if errors:
        raise BadSamples(errors)


def _prompt_of(entry: TeacherConfig, place: int, template: Template) -> TeacherPrompt | None:
    if entry.prompt is None:
        return None
    return TeacherPrompt(text=entry.prompt, key=f"{DISTILL}.teachers.{place}.prompt", user=template.user)


def _prompt_ids(sample: Sample, *, template: Template, prompt: TeacherPrompt | None) -> tuple[int, ...]:
    """[P] the teacher's prompt, images expanded; without one that of the policy."""
    asked = sample if prompt is None else prompt.ask(sample)
    ids = template.prompt_token_ids(asked)
    return expand_placeholders(ids, template.expansions(asked), placeholder_id=template.placeholder_id)
