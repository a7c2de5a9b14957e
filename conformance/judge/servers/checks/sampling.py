"""Sampling: distributions of one id, seeds, several responses."""

import math
from collections.abc import Callable
from itertools import combinations
from typing import Any

from conformance.judge.servers.check import check
from conformance.judge.servers.checks.generation import QUESTIONS, ids_of
from conformance.judge.servers.checks.numeric import ADDED
from conformance.judge.servers.checks.shares import NUM_DRAWN, WHOLE, Shares, draw, shares_of
from conformance.judge.servers.exchange import Exchange
from conformance.judge.servers.numbers import FALSE_ALARM, chance_at_most
from conformance.judge.servers.protocol import Generated
from conformance.judge.servers.question import Question
from conformance.judge.servers.talk import Talk

TEMPERATURES = {"cold": 0.5, "hot": 2.0}
SEEDS = (11, 12, 2**30 + 11)
"""The last one is the first one in its lower bits: a learner's seeds are large numbers."""
WITH_N = ("swift", "trl", "vllm")


def compare(talk: Talk, shares: Shares | None, **asked: tuple[dict[str, Any], dict[str, Any]]) -> None:
    """Per label: options of the calls, and the limits that they set; noted are ``Shares.cells``."""
    for label, (options, limits) in asked.items():
        if not shares or not shares.shows(**limits):
            reason = "every first id is nearly certain, so that draws without this option would look the same"
            talk.exchange.untestable = talk.exchange.untestable or (reason if shares else "")
            return
        if (came := draw(talk, label, shares, options)) is None:
            return
        cells = shares.cells(came, **limits)
        talk.note(label, cells)
        talk.note(f"{label} aside", came.total() - sum(count for _, count in cells))


def judge_drawn(exchange: Exchange, *labels: str) -> str:
    """By the label of the calls; ``drawn`` unless others are named."""
    if failed := "; ".join(call.summary() for call in exchange.calls if not call.is_ok):
        return failed
    for label in labels or ("drawn",):
        cells = exchange.notes[label]
        drawn = sum(count for _, count in cells) + exchange.notes.get(f"{label} aside", 0)
        if drawn != NUM_DRAWN:
            return f"{drawn} ids of {NUM_DRAWN} responses"
        if (chance := chance_at_most(cells)) <= FALSE_ALARM:
            shown = ", ".join(f"{count} for {NUM_DRAWN * p:.0f}" for p, count in cells)
            return f"{label}: so often came what was due so often: {shown}; chance at most {chance:.1g}"
    return ""


def ask_whole(talk: Talk) -> None:
    """Without a model, what a server draws has to fit its own log-probabilities."""
    talk.subject.shares = None
    shares = shares_of(talk)
    if shares and (came := shares.came or draw(talk, "drawn", shares, {})):
        talk.note("drawn", shares.cells(came))


def ask_temperatures(talk: Talk) -> None:
    asked = {label: ({"temperature": value}, {"temperature": value}) for label, value in TEMPERATURES.items()}
    compare(talk, shares_of(talk), **asked)


def asks_limit(name: str) -> Callable[[Talk], None]:
    """Draw with this option of ``Shares.limits``."""

    def ask(talk: Talk) -> None:
        if shares := shares_of(talk):
            compare(talk, shares, drawn=({name: shares.limits[name]}, {"num_kept": shares.num_kept}))

    return ask


def judge_whole(exchange: Exchange) -> str:
    return exchange.notes.get("unsteady", "") or judge_drawn(exchange)


def judge_temperatures(exchange: Exchange) -> str:
    return judge_drawn(exchange, *TEMPERATURES)


WHOLE_ID = "sampling-is-from-the-whole-distribution"
DRAWN = (
    (WHOLE_ID, "Without limits, sampled ids MUST follow the model's distribution", ask_whole, judge_whole),
    (
        "temperature-is-applied",
        "At temperatures 0.5 and 2, sampled ids MUST follow the sharpened and the flattened distribution",
        *(ask_temperatures, judge_temperatures),
    ),
    (
        "top-k-is-applied",
        "With top_k, sampled ids MUST follow the distribution of so many",
        *(asks_limit("top_k"), judge_drawn),
    ),
    (
        "top-p-is-applied",
        "With top_p, sampled ids MUST follow the distribution of the likeliest ones up to that sum",
        *(asks_limit("top_p"), judge_drawn),
    ),
    (
        "min-p-is-applied",
        "With min_p, sampled ids MUST follow the distribution of those above it",
        *(asks_limit("min_p"), judge_drawn),
    ),
)
for number, (name, sentence, ask, judge) in enumerate(DRAWN, start=1):
    check(
        name,
        f"{sentence} ({NUM_DRAWN} draws, false alarm {FALSE_ALARM:g}).",
        clause=f"servers/sampling-follows-its-parameters#{number}",
        ask=ask,
        since=ADDED,
        deadline_s=120,
        requires=("every-prompt-of-a-call-is-answered", *((WHOLE_ID,) if name != WHOLE_ID else ())),
    )(judge)


def ask_seeds(talk: Talk) -> None:
    for seed in SEEDS:
        talk.generate(f"seed-{seed}", QUESTIONS[:2], max_tokens=24, temperature=2.0, seed=seed)


@check(
    "another-seed-differs",
    "The same call with another seed MUST give other sampled responses.",
    clause="servers/sampling-follows-its-parameters#7",
    ask=ask_seeds,
    since=ADDED,
)
def judge_seeds(exchange: Exchange) -> str:
    came = {call.label: ids_of(exchange, call.label) for call in exchange.calls}
    same = [f"{a} and {b}" for a, b in combinations(came, 2) if came[a] == came[b]]
    return f"the same responses: {', '.join(same)}" if same else ""


def ask_several(talk: Talk) -> None:
    talk.generate("several", QUESTIONS[:1], n=4, max_tokens=24, temperature=2.0)


@check(
    "n-responses-differ",
    "With n = 4 and temperature 2, the responses of 24 ids to a prompt MUST be four different ones.",
    clause="servers/sampling-follows-its-parameters#8",
    ask=ask_several,
    since=ADDED,
    dialects=WITH_N,
    requires=("n-responses-of-a-prompt",),
)
def judge_several(exchange: Exchange) -> str:
    came = ids_of(exchange, "several")
    if len(came) != 4:
        return f"{len(came)} responses with n = 4"
    num_kinds = len({tuple(ids) for ids in came})
    return "" if num_kinds == 4 else f"only {num_kinds} of 4 responses are different"


KINDS = {"cold": {"temperature": 0.5}, "top_p": {}, "top_k": {}}
OWN, DRAWN_FROM = "the model's own", "those of the distribution"
COMPILING_S = 60.0
"""A first call for log-probabilities may wait for an engine that compiles them."""
LEAST_APART = 0.2
"""Nats between the log-probabilities of two kinds, from which on they differ."""


def ask_kinds(talk: Talk) -> None:
    """One id a response, as the draws; noted per option: pairs of the model's log-probability and the returned one."""
    shares = shares_of(talk)
    if shares is None:
        return
    limits = {name: {name: shares.limits[name]} for name in ("top_p", "top_k")}
    for label, options in (KINDS | limits).items():
        call = talk.generate(
            label, [shares.question] * 64, max_tokens=1, logprobs=True, timeout_s=COMPILING_S, **WHOLE | options
        )
        came = talk.subject.dialect.read(call) if call.is_ok else []
        drawn = {one.ids[0]: one.logprobs[0] for one in came if one.logprobs and one.ids[0] in shares.logprobs}
        talk.note(label, [[round(shares.logprobs[i], 4), round(value, 4)] for i, value in drawn.items()])
    kept = sum(math.exp(value) for value in list(shares.logprobs.values())[: shares.num_kept])
    if kept > math.exp(-LEAST_APART):
        talk.exchange.untestable = "what top_p keeps is nearly all, so that both kinds are the same"


@check(
    "logprobs-are-of-one-kind",
    "Log-probabilities with temperature, top_p and top_k MUST all be the model's own, or all those of the distribution "
    "that was sampled from.",
    clause="servers/numbers-are-those-of-the-model#7",
    ask=ask_kinds,
    since="2026-11-27",
    deadline_s=120,
    requires=("logprobs-equal-transformers", "top-p-is-applied", "top-k-is-applied", "temperature-is-applied"),
)
def judge_kinds(exchange: Exchange) -> str:
    """Of the model, values are the same; of the distribution, an option shifts all of them by one constant."""
    if failed := exchange.unmet(ok=[call.label for call in exchange.calls]):
        return failed
    found: dict[str, set[str]] = {}
    for label in KINDS:
        power = 2.0 if label == "cold" else 1.0  # 1 / temperature
        pairs = exchange.notes[label]
        if not pairs:
            return f"{label}: no log-probabilities of ids that the model has"
        shifts = [value - power * own for own, value in pairs]
        is_own = all(abs(value - own) < LEAST_APART / 2 for own, value in pairs)
        is_shifted = max(shifts) - min(shifts) < LEAST_APART / 2 and (power != 1 or min(shifts) > LEAST_APART / 2)
        kinds = {name for name, is_it in ((OWN, is_own), (DRAWN_FROM, is_shifted)) if is_it}
        if not kinds:
            return f"{label}: log-probabilities are of neither kind; the model's and those returned: {pairs[:4]}"
        found[label] = kinds
    shared = set.intersection(*found.values())
    return "" if shared else "; ".join(f"{label}: {' or '.join(sorted(kinds))}" for label, kinds in found.items())


PENALTIES = {"cold": {"temperature": 0.5}, "penalty": {"repetition_penalty": 1.5}}


def ask_penalties(talk: Talk) -> None:
    """Noted per option and id: the log-probability by the model, by what it was drawn from, and the returned one."""
    for label, options in PENALTIES.items():
        asked = {"max_tokens": 24, "logprobs": True, "timeout_s": COMPILING_S}
        call = talk.generate(label, QUESTIONS, **WHOLE | options, **asked)
        if call.is_ok:
            rows = [row for one in talk.subject.dialect.read(call) for row in _scored(talk, one, options)]
            talk.note(label, rows)
            if max((abs(own - drawn) for own, drawn, _ in rows), default=0.0) < LEAST_APART:
                talk.exchange.untestable = f"with {options}, both kinds are the same"


def _scored(talk: Talk, one: Generated, options: dict[str, float]) -> list[list[float]]:
    scorer, question = talk.subject.policies.scorer, Question(text="", ids=list(one.prompt_ids))
    own, _ = scorer.score(0, question, one.ids)
    limits = {"temperature": options.get("temperature", 1.0), "penalty": options.get("repetition_penalty", 1.0)}
    drawn = scorer.drawn_from(0, question, one.ids, **limits)
    return [[round(value, 4) for value in row] for row in zip(own, drawn, one.logprobs or [], strict=True)]


@check(
    "logprobs-of-penalties-are-of-one-kind",
    "Log-probabilities with a repetition penalty MUST be of one kind with those at temperature 0.5: the model's own, "
    "or those of the distribution that was sampled from.",
    clause="servers/numbers-are-those-of-the-model#8",
    ask=ask_penalties,
    since="2026-11-28",
    needs=("model",),
    deadline_s=150,
    requires=("logprobs-are-of-one-kind",),
)
def judge_penalties(exchange: Exchange) -> str:
    if failed := exchange.unmet(ok=[*PENALTIES]):
        return failed
    limit = max(LEAST_APART / 2, exchange.notes["tolerance"])
    found: dict[str, set[str]] = {}
    for label in PENALTIES:
        rows = exchange.notes[label]
        far = {OWN: max(abs(v - own) for own, _, v in rows), DRAWN_FROM: max(abs(v - drawn) for _, drawn, v in rows)}
        found[label] = {kind for kind, distance in far.items() if distance < limit}
        if not found[label]:
            return f"{label}: log-probabilities are of neither kind; they lie {far} nats from them"
    shared = set.intersection(*found.values())
    return "" if shared else "; ".join(f"{label}: {' or '.join(sorted(kinds))}" for label, kinds in found.items())
