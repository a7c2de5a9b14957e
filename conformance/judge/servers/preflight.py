"""Whether a server can be judged at all, and what it says about itself; before the first check."""

from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from typing import Any

from packaging.requirements import InvalidRequirement, Requirement
from packaging.version import InvalidVersion

from conformance.judge.servers.checks.generation import QUESTIONS, same_but_stop
from conformance.judge.servers.exchange import RecordedCall
from conformance.judge.servers.protocol import ReplyUnreadable
from conformance.judge.servers.subject import KEY_REMEDY, KEY_STATUS, Subject
from conformance.judge.servers.talk import Talk

NUM_COMPARED = 16
"""Tokens of each answer that is compared at the end."""
NUM_WARM, GENERATE_TIMEOUT_S, FACT_TIMEOUT_S = 3, 60.0, 5.0
FACT_PATHS = ("/version", "/native/identity/")
WORLD_SIZE = ("/get_world_size/", "/get_world_size")


@dataclass(slots=True, kw_only=True)
class Preflight:
    """What was found. ``problem``: why nothing can be judged; empty where all is well."""

    problem: str = ""
    facts: dict[str, Any] = field(default_factory=dict)
    warnings: list[str] = field(default_factory=list)
    quiet_s: float = 0.0
    """Longest of some calls for one token, while nobody else was served by the judge."""
    first_ids: list[list[int]] = field(default_factory=list)
    """Greedy answers before anything was changed."""


def look_at(subject: Subject) -> Preflight:
    """Health, one generation, facts and declared ranges."""
    found, talk = Preflight(), Talk(subject)
    health = talk.get("health", subject.dialect.health_path, timeout_s=FACT_TIMEOUT_S)
    if not health.is_ok:
        found.problem = f"health: {health.summary()}"
        return found
    found.problem = _generate(talk, found)
    if not found.problem:
        came = [talk.get("fact", path, timeout_s=FACT_TIMEOUT_S) for path in (*FACT_PATHS, *WORLD_SIZE)]
        found.facts = _facts(subject, [health, *came])
        found.warnings = [*outside_ranges(found.facts), *_other_weights(subject, found)]
    return found


def _generate(talk: Talk, found: Preflight) -> str:
    """Once as an answer, then for its time."""
    try:
        found.first_ids = answers_of(talk)
    except ReplyUnreadable as error:
        return f"prompts are not answered as in the {talk.subject.dialect.name} dialect: {error}"
    calls = [talk.generate("warm", QUESTIONS[:1], max_tokens=1, timeout_s=GENERATE_TIMEOUT_S) for _ in range(NUM_WARM)]
    found.quiet_s = max(call.seconds for call in calls)
    return ""


def answers_of(talk: Talk) -> list[list[int]]:
    """Greedy ids of some prompts, which other weights would change. Errors: ``ReplyUnreadable``."""
    call = talk.generate("answers", QUESTIONS, max_tokens=NUM_COMPARED, timeout_s=GENERATE_TIMEOUT_S)
    if not call.is_ok:
        raise ReplyUnreadable(call.summary() + f"; {KEY_REMEDY}" * (call.status in KEY_STATUS))
    return [one.ids for one in talk.subject.dialect.read(call)]


def _facts(subject: Subject, calls: list[RecordedCall]) -> dict[str, Any]:
    """Short values of all replies; of one name, the first that is returned."""
    facts: dict[str, Any] = {"dialect": subject.dialect.name}
    if model := getattr(subject.dialect, "model", None):
        facts["served_model"] = model
    for call in calls:
        if call.is_ok and isinstance(call.reply, Mapping):
            plain = {name: value for name, value in call.reply.items() if isinstance(value, str | int | float)}
            ranges = {name: call.reply[name] for name in ("packages", "requires") if name in call.reply}
            facts = plain | ranges | facts
    return facts


def outside_ranges(facts: Mapping[str, Any]) -> Iterator[str]:
    """Installed ``packages`` (name: version) outside what ``requires`` (a list as in a wheel's metadata) declares.

    >>> list(outside_ranges({"packages": {"vllm": "0.32.0"}, "requires": ["vllm<=0.26,>=0.12"]}))
    ['vllm 0.32.0 is outside the range that the server declares: <=0.26,>=0.12']
    """
    packages, declared = facts.get("packages"), facts.get("requires")
    if not isinstance(packages, Mapping) or not isinstance(declared, list):
        return
    for line in declared:
        try:
            requirement = Requirement(str(line))
            version = packages.get(requirement.name)
            if version is not None and not requirement.specifier.contains(str(version), prereleases=True):
                limits = requirement.specifier
                yield f"{requirement.name} {version} is outside the range that the server declares: {limits}"
        except (InvalidRequirement, InvalidVersion) as error:
            yield f"a declared range cannot be read: {error}"


def _other_weights(subject: Subject, found: Preflight) -> Iterator[str]:
    """Updates end with the weights of ``--model``: it must be what the server serves."""
    if subject.policies is None or subject.transport is None:
        return
    greedy, prompts = subject.policies.scorer.greedy, [subject.prompt(question).ids for question in QUESTIONS]
    pairs = zip(prompts, found.first_ids, strict=False)
    written = [greedy(0, prompt_ids, came, NUM_COMPARED) for prompt_ids, came in pairs]
    if not same_but_stop(found.first_ids, written):
        yield "the first answers are not those of --model, whose weights the server will hold after updates"
