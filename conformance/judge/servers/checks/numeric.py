"""Ids and log-probabilities of responses against ``transformers`` with the same weights, or against each other."""

from collections.abc import Sequence
from dataclasses import replace
from typing import Any

from conformance.judge.servers.check import check
from conformance.judge.servers.checks.generation import QUESTIONS
from conformance.judge.servers.exchange import Exchange, RecordedCall
from conformance.judge.servers.numbers import SMALL, distance, needed, off, remedy, seen, tolerance_of
from conformance.judge.servers.pictures import SHOWN, picture
from conformance.judge.servers.protocol import Generated
from conformance.judge.servers.question import Question
from conformance.judge.servers.talk import Stopped, Talk

ADDED = "2026-11-23"
SAMPLED = {"temperature": 1.0, "top_p": 1.0, "top_k": -1, "seed": 11}
"""With a seed, so that a tolerance that is named passes next time."""
LONG_RESPONSE, DIGITS = 200, 5
EVERY = 8
"""Of so many ids of a long response, one is asked for again."""
REPEATS = (1, 9, 39, 73, 97)
"""How often a prompt says the same; for the digits model, prompts of 12 to 300 ids."""
SIZES = (1, 8, 9, 64, 257)


def compare(talk: Talk, label: str, questions: Sequence[Question], *, number: int = 0) -> list[dict[str, Any]]:
    """Of each response of this call: log-probabilities, those it must have, how far its ids are from the likeliest."""
    call, rows = talk.exchange.one(label), []
    if call.is_ok:
        for question, one in zip(questions, talk.subject.dialect.read(call), strict=False):
            expected, gaps = talk.subject.policies.scorer.score(number, question, one.ids)
            replied = None if one.logprobs is None else _rounded(one.logprobs)
            rows.append({"logprobs": replied, "expected": _rounded(expected), "gaps": _rounded(gaps)})
    talk.note(label, rows)
    return rows


def _rounded(values: Sequence[float]) -> list[float]:
    return [round(float(value), DIGITS) for value in values]


def judge_rows(exchange: Exchange, *labels: str, wanted: str = "gaps logprobs") -> str:
    """Every call went well, and its responses have the numbers of their policy."""
    if failed := exchange.unmet(ok=labels):
        return failed
    tolerance = tolerance_of(exchange)
    least = needed([row for label in labels for row in exchange.notes[label]], wanted=wanted)
    for label in labels:
        if not exchange.notes[label]:
            return f"{label}: no responses"
        if wrong := off(exchange.notes[label], wanted=wanted, tolerance=tolerance):
            return f"{label}: {wrong}{remedy(least, tolerance)}"
    return ""


def ask_long(talk: Talk) -> None:
    questions = [talk.subject.prompt(QUESTIONS[0])]
    if talk.subject.policies:
        talk.generate("long", questions, max_tokens=LONG_RESPONSE)
        compare(talk, "long", questions)
    else:
        ask_again(talk, questions[0])


def ask_again(talk: Talk, question: Question) -> None:
    """Without a model: other ids come after the first ids of the response, or with ``top_k`` 1, and are likelier."""
    call = talk.generate("long", [question], max_tokens=LONG_RESPONSE, logprobs=True)
    long = first_of(talk, call)
    if not talk.subject.makes_ids:
        sampled = {"max_tokens": LONG_RESPONSE, "temperature": 1.0, "top_k": 1}
        again = first_of(talk, talk.generate("again", [question], logprobs=True, **sampled))
        found = list(zip(range(len(long.ids)), again.ids, again.logprobs or [], strict=False))
        found = [one for one in found if one[1] != long.ids[one[0]]][:1]
    else:
        places = range(0, len(long.ids), EVERY)
        begun = [replace(question, ids=question.ids + long.ids[:place]) for place in places]
        call = talk.generate("again", begun, max_tokens=1, logprobs=True)
        came = talk.subject.dialect.read(call) if call.is_ok else []
        found = [(place, one.ids[0], one.logprobs[0]) for place, one in zip(places, came, strict=False) if one.logprobs]
    gaps = [value - (long.logprobs or [])[place] for place, i, value in found if i != long.ids[place]]
    talk.note("long", [{"gaps": _rounded([gap for gap in gaps if gap > SMALL])}])


def first_of(talk: Talk, call: RecordedCall) -> Generated:
    """Of one prompt. Errors: ``Stopped`` where there is no response, or one without log-probabilities."""
    came = talk.subject.dialect.read(call) if call.is_ok else []
    if not came or came[0].logprobs is None or len(came[0].logprobs) != len(came[0].ids):
        raise Stopped(f"no response with log-probabilities: {call.summary()}")
    return came[0]


@check(
    "long-responses-stay-greedy",
    "Each id of a greedy response of up to 200 ids MUST be the model's likeliest, given those before it.",
    clause="servers/numbers-are-those-of-the-model#3",
    ask=ask_long,
    since=ADDED,
    deadline_s=90,
    requires=("greedy-equals-transformers", "replies-in-order"),
)
def judge_long(exchange: Exchange) -> str:
    return judge_rows(exchange, "long", wanted="gaps")


def ask_logprobs(talk: Talk) -> None:
    questions = [talk.subject.prompt(text) for text in QUESTIONS]
    if not talk.subject.policies:
        compare_with_itself(talk, questions)
        return
    talk.generate("greedy", questions, max_tokens=24, logprobs=True)
    talk.generate("sampled", questions, max_tokens=24, logprobs=True, **SAMPLED)
    for label in ("greedy", "sampled"):
        compare(talk, label, questions)


def compare_with_itself(talk: Talk, questions: Sequence[Question]) -> None:
    """Without a model: an id has the log-probability that it has as the first one, with those before in the prompt.

    An id that does not come again says nothing.
    """
    talk.note("tolerance", SMALL)
    rows = []
    for label, options in (("greedy", {}), ("sampled", SAMPLED)):
        call = talk.generate(label, questions, max_tokens=24, logprobs=True, **options)
        came = talk.subject.dialect.read(call) if call.is_ok else []
        places = [(q, one, place) for q, one in zip(questions, came, strict=False) for place in _third(one)]
        begun = [replace(question, ids=question.ids + one.ids[:place]) for question, one, place in places]
        again = talk.generate(f"{label}, begun", begun, max_tokens=1, logprobs=True, **options)
        firsts = talk.subject.dialect.read(again) if again.is_ok else []
        rows += [
            {"logprobs": one.logprobs and [one.logprobs[place]], "expected": first.logprobs}
            for (_, one, place), first in zip(places, firsts, strict=False)
            if first.ids == [one.ids[place]]
        ]
    talk.note("greedy", rows)
    talk.note("sampled", rows)


def _third(one: Generated) -> range:
    return range(0, len(one.ids), 3)


@check(
    "logprobs-equal-transformers",
    "Log-probabilities, greedy and at temperature 1, MUST be those of the model, within the tolerance (0.001).",
    clause="servers/numbers-are-those-of-the-model#4",
    ask=ask_logprobs,
    since=ADDED,
    needs=("ids",),
    deadline_s=90,
    requires=("logprobs-fit-the-ids", "replies-in-order"),
)
def judge_logprobs(exchange: Exchange) -> str:
    failed = exchange.unmet(ok=[call.label for call in exchange.calls])
    return failed or judge_rows(exchange, "greedy", "sampled", wanted="logprobs")


def ask_lengths(talk: Talk) -> None:
    questions = [talk.subject.prompt("one two three " * times) for times in REPEATS]
    talk.generate("lengths", questions, max_tokens=4)
    compare(talk, "lengths", questions)


@check(
    "prompts-of-other-lengths-are-read-whole",
    "Prompts of 12 to 300 ids in one call MUST each be continued greedily from their last id.",
    clause="servers/numbers-are-those-of-the-model#5",
    ask=ask_lengths,
    since=ADDED,
    needs=("model",),
    deadline_s=90,
    requires=("greedy-equals-transformers", "replies-in-order"),
)
def judge_lengths(exchange: Exchange) -> str:
    return judge_rows(exchange, "lengths", wanted="gaps")


def ask_sizes(talk: Talk) -> None:
    """What came back is noted in short: it would fill the record."""
    questions = [talk.subject.prompt(f"Say {place}.") for place in range(max(SIZES))]
    for size in SIZES:
        label = f"size-{size}"
        call = talk.generate(label, questions[:size], max_tokens=1)
        if call.is_ok:
            came = talk.subject.dialect.read(call)
            wrong = _elsewhere(talk, questions[:size], came)
            problem = ""
            if talk.subject.policies:
                rows, tolerance = compare(talk, label, questions), talk.subject.tolerance
                problem = off(rows, wanted="gaps", tolerance=tolerance)
                problem += remedy(needed(rows, wanted="gaps"), tolerance) if problem else ""
            talk.note(label, {"num": len(came), "elsewhere": wrong[:5], "wrong": problem})
            call.reply = f"{len(came)} responses"


def _elsewhere(talk: Talk, questions: Sequence[Question], came: Sequence[Generated]) -> list[int]:
    """Responses that are not those of their prompts; where nobody knows the ids of a text, that repeat a prompt."""
    prompts = [one.prompt_ids for one in came]
    if talk.subject.makes_ids:
        return [i for i, ids in enumerate(prompts) if i >= len(questions) or ids != questions[i].ids]
    return [i for i, ids in enumerate(prompts) if ids in prompts[:i]]


@check(
    "every-prompt-of-a-call-is-answered",
    "Calls of 1, 8, 9, 64 and 257 prompts MUST get as many responses, in order, each to its own prompt.",
    clause="servers/each-prompt-gets-its-own-responses#3",
    ask=ask_sizes,
    since=ADDED,
    deadline_s=150,
    requires=(
        "greedy-equals-transformers",
        "replies-in-order",
        "greedy-repeats",
        "alone-as-in-a-batch",
        "max-tokens-is-the-limit",
    ),
)
def judge_sizes(exchange: Exchange) -> str:
    for size in SIZES:
        label = f"size-{size}"
        if failed := exchange.unmet(ok=(label,)):
            return failed
        note = exchange.notes[label]
        if note["num"] != size:
            return f"{note['num']} responses to {size} prompts"
        if note["elsewhere"]:
            return f"of {size} prompts, responses {note['elsewhere']} belong to others"
        if note["wrong"]:
            return f"of {size} prompts, {note['wrong']}"
    return ""


def ask_pictures(talk: Talk) -> None:
    """A prompt without a picture stands between; a stock vLLM takes one chat a call."""
    asked = [talk.subject.prompt(QUESTIONS[0], picture(number)) for number in SHOWN]
    questions = [asked[0], talk.subject.prompt(QUESTIONS[1]), asked[1]]
    calls = [[one] for one in questions] if talk.subject.dialect.family == "vllm" else [questions]
    rows = []
    for place, prompts in enumerate(calls):
        talk.generate(f"shown-{place}", prompts, max_tokens=12, logprobs=True)
        rows += compare(talk, f"shown-{place}", prompts)
    talk.note("num", (len(calls), len(rows), len(questions)))
    if len(rows) == len(questions):
        scorer, ids = talk.subject.policies.scorer, talk.subject.policies.scorer.write(0, asked[0], 12)
        talk.note("power", distance(*(scorer.score(0, one, ids)[0] for one in asked)))


@check(
    "pictures-are-seen",
    "Responses to prompts with different pictures MUST each have the ids and log-probabilities of transformers.",
    clause="servers/numbers-are-those-of-the-model#6",
    ask=ask_pictures,
    since=ADDED,
    needs=("model", "pictures"),
    deadline_s=90,
    requires=("logprobs-equal-transformers", "greedy-equals-transformers"),
)
def judge_pictures(exchange: Exchange) -> str:
    num_calls, num_rows, num_wanted = exchange.notes["num"]
    labels = [f"shown-{place}" for place in range(num_calls)]
    if wrong := judge_rows(exchange, *labels):
        return wrong
    if num_rows != num_wanted:
        return f"{num_rows} responses to {num_wanted} prompts"
    if exchange.notes["power"] > seen(tolerance_of(exchange)):
        return ""
    return "both pictures give the same numbers, so that nothing was seen"
