"""Responses to prompts."""

import math
from collections.abc import Sequence

from conformance.judge.servers.check import SHOULD, check
from conformance.judge.servers.dialect_plugins import kinds
from conformance.judge.servers.exchange import Exchange, RecordedCall
from conformance.judge.servers.numbers import remedy, tolerance_of
from conformance.judge.servers.protocol import Generated
from conformance.judge.servers.talk import Stopped, Talk

QUESTIONS = ("List every digit with its box.", "Say something.", "one two three", "What is in the picture?")
ENDING_SEEDS, ENDING_TOKENS = range(1, 13), 200


def read(exchange: Exchange, label: str) -> list[Generated]:
    """What the call of this label generated; an answer of another form raises."""
    return read_call(exchange, exchange.one(label))


def read_call(exchange: Exchange, call: RecordedCall) -> list[Generated]:
    if not call.is_ok:
        raise ValueError(call.summary())
    return kinds()[exchange.notes["dialect"]]().read(call)


def ids_of(exchange: Exchange, label: str) -> list[list[int]]:
    return [one.ids for one in read(exchange, label)]


def prompts_of(talk: Talk, texts: Sequence[str]) -> list[list[int]]:
    """Ids of each; where neither the judge nor its model makes them, those that the server returns for it alone."""
    if talk.subject.makes_ids:
        return [talk.subject.prompt(text).ids for text in texts]
    came = []
    for text in texts:
        call = talk.generate("alone", [text], max_tokens=1)
        came += [one.prompt_ids for one in talk.subject.dialect.read(call)[:1]] if call.is_ok else []
    if len(came) != len(texts):
        raise Stopped(f"{len(came)} of {len(texts)} prompts are answered alone")
    return came


def ask_order(talk: Talk) -> None:
    talk.generate("generate", QUESTIONS)
    talk.note("prompts", prompts_of(talk, QUESTIONS))


@check(
    "replies-in-order",
    "Prompts of one call MUST be answered in order, each with the token ids of the model's chat template.",
    clause="servers/each-prompt-gets-its-own-responses#1",
    ask=ask_order,
)
def judge_order(exchange: Exchange) -> str:
    came = [one.prompt_ids for one in read(exchange, "generate")]
    return "" if came == exchange.notes["prompts"] else f"prompts came back as {came}"


def ask_one(talk: Talk) -> None:
    talk.generate("generate", QUESTIONS[:1])


@check(
    "one-prompt-one-response",
    "A call with fewer prompts than workers MUST be answered with one response per prompt.",
    clause="servers/each-prompt-gets-its-own-responses#2",
    ask=ask_one,
)
def judge_one(exchange: Exchange) -> str:
    count = len(read(exchange, "generate"))
    return "" if count == 1 else f"{count} responses"


def ask_text(talk: Talk) -> None:
    call = talk.generate("generate", QUESTIONS[:2], max_tokens=12)
    if call.is_ok:
        talk.note("decoded", [talk.subject.policies.decode(one.ids) for one in talk.subject.dialect.read(call)])


@check(
    "text-is-the-ids-decoded",
    "The text of a response SHOULD be its ids, decoded.",
    clause="servers/a-response-says-what-was-generated#1",
    grade=SHOULD,
    dialects=("swift", "vllm"),
    ask=ask_text,
    needs=("model",),
)
def judge_text(exchange: Exchange) -> str:
    texts = [one.text for one in read(exchange, "generate")]
    return "" if texts == exchange.notes["decoded"] else f"texts are {texts}, ids decode to {exchange.notes['decoded']}"


def ask_stop(talk: Talk) -> None:
    """Small models stop more often at temperature 2, large ones at 1."""
    came, stop_ids = list[Generated](), talk.subject.policies.stop_ids
    talk.note("prompts", [talk.subject.prompt(question).ids for question in QUESTIONS])
    talk.note("stop_ids", sorted(stop_ids))
    talk.note("pad_id", talk.subject.policies.tokenizer.pad_token_id)
    for seed in ENDING_SEEDS:
        options = {"max_tokens": ENDING_TOKENS, "temperature": 2.0 if seed % 2 else 1.0}
        call = talk.generate("generate", QUESTIONS, seed=seed, **options)
        responses = talk.subject.dialect.read(call) if call.is_ok else []
        came += responses
        lengths = [len(one.ids) for one in responses]
        if lengths != sorted(lengths):  # one has stopped, and one that came before it had not
            break
    if came and all(len(one.ids) >= ENDING_TOKENS and not {*one.ids} & {*stop_ids} for one in came):
        talk.exchange.untestable = f"no response of up to {ENDING_TOKENS} ids has stopped"


@check(
    "stop-token-is-kept-or-not",
    "The stop token SHOULD always be in the ids of a response, or never.",
    clause="servers/a-response-says-what-was-generated#2",
    grade=SHOULD,
    ask=ask_stop,
    needs=("model",),
    deadline_s=90,
    requires=("temperature-is-applied", "another-seed-differs"),
)
def judge_stop(exchange: Exchange) -> str:
    """Every response that is shorter than asked ends with a stop token, or none does; some servers stop at padding."""
    calls = exchange.all("generate")
    came = [one for call in calls for one in read_call(exchange, call)]
    ended = [one for one in came if len(one.ids) < ENDING_TOKENS]
    ends = {*exchange.notes["stop_ids"], exchange.notes["pad_id"]}
    kept = {bool(one.ids) and one.ids[-1] in ends for one in ended}
    inside = [one for one in came if set(one.ids[:-1]) & set(exchange.notes["stop_ids"])]
    if inside:
        return "a response continues after a stop token"
    if not ended:
        return "no response stopped, so that nothing was seen"
    return "the stop token is kept in some responses only" if len(kept) > 1 else ""


def ask_logprobs(talk: Talk) -> None:
    talk.generate("generate", QUESTIONS, logprobs=True, max_tokens=12)


@check(
    "logprobs-fit-the-ids",
    "Each token of a response MUST have one finite log-probability, at most 0.",
    clause="servers/a-response-says-what-was-generated#4",
    ask=ask_logprobs,
)
def judge_logprobs(exchange: Exchange) -> str:
    for place, one in enumerate(read(exchange, "generate")):
        if one.logprobs is None or len(one.logprobs) != len(one.ids):
            return f"response {place} has {len(one.ids)} ids and {one.logprobs} logprobs"
        if not all(math.isfinite(value) and value <= 0 for value in one.logprobs):
            return f"response {place} has logprobs {one.logprobs}"
    return ""


def ask_twice(talk: Talk) -> None:
    for label in ("first", "second"):
        talk.generate(label, QUESTIONS, max_tokens=24)


def ask_seed(talk: Talk) -> None:
    for label in ("first", "second"):
        talk.generate(label, QUESTIONS, max_tokens=24, temperature=1.0, seed=11)


@check(
    "greedy-repeats",
    "Greedy generation MUST repeat exactly.",
    clause="servers/numbers-are-those-of-the-model#1",
    ask=ask_twice,
)
@check(
    "a-seed-repeats",
    "The same call with the same seed MUST give the same sampled responses.",
    clause="servers/sampling-follows-its-parameters#6",
    ask=ask_seed,
)
def judge_twice(exchange: Exchange) -> str:
    return "" if ids_of(exchange, "first") == ids_of(exchange, "second") else "two different answers"


def ask_copies(talk: Talk) -> None:
    talk.generate("generate", QUESTIONS[:1] * 4, max_tokens=24, temperature=2.0, seed=11)


@check(
    "copies-of-a-prompt-differ",
    "Copies of one prompt in one call with one seed SHOULD NOT all get the same response.",
    clause="servers/each-prompt-gets-its-own-responses#9",
    grade=SHOULD,
    ask=ask_copies,
)
def judge_copies(exchange: Exchange) -> str:
    came = {tuple(ids) for ids in ids_of(exchange, "generate")}
    return "" if len(came) > 1 else "all four copies of one prompt got the same response"


def ask_alone(talk: Talk) -> None:
    talk.generate("together", QUESTIONS, max_tokens=16)
    for place, question in enumerate(QUESTIONS):
        talk.generate(f"alone-{place}", [question], max_tokens=16)


@check(
    "alone-as-in-a-batch",
    "A greedy response SHOULD NOT depend on what else is in the call.",
    clause="servers/each-prompt-gets-its-own-responses#10",
    grade=SHOULD,
    ask=ask_alone,
    requires=("replies-in-order",),
)
def judge_alone(exchange: Exchange) -> str:
    alone = [ids_of(exchange, f"alone-{place}")[0] for place in range(len(QUESTIONS))]
    return "" if alone == ids_of(exchange, "together") else "a prompt gets another response alone than in a batch"


def ask_oracle(talk: Talk) -> None:
    call = talk.generate("generate", QUESTIONS, max_tokens=16)
    if call.is_ok:
        scorer, came = talk.subject.policies.scorer, talk.subject.dialect.read(call)
        talk.note("expected", [scorer.greedy(0, one.prompt_ids, one.ids, 16) for one in came])
        talk.note("least", max([scorer.least(0, one.prompt_ids, one.ids) for one in came], default=0.0))


@check(
    "greedy-equals-transformers",
    "Greedy responses MUST equal those of transformers with the same weights, token by token.",
    clause="servers/numbers-are-those-of-the-model#2",
    ask=ask_oracle,
    needs=("model",),
    deadline_s=60,
)
def judge_oracle(exchange: Exchange) -> str:
    came, expected = ids_of(exchange, "generate"), exchange.notes["expected"]
    if same_but_stop(came, expected):
        return ""
    return f"wrote {came}, expected {expected}{remedy(exchange.notes.get('least', 0.0), tolerance_of(exchange))}"


def same_but_stop(came: list[list[int]], expected: list[list[int]]) -> bool:
    """Equal, a stop token at the end aside: dialects keep it or do not.

    >>> same_but_stop([[1, 2]], [[1, 2, 410]]), same_but_stop([[1]], [[1, 2, 410]])
    (True, False)
    """
    return len(came) == len(expected) and all(
        one == other or one == other[:-1] for one, other in zip(came, expected, strict=True)
    )


def ask_many(talk: Talk) -> None:
    talk.generate("generate", QUESTIONS[:2], n=2, temperature=2.0, seed=5)
    talk.note("prompts", [ids for ids in prompts_of(talk, QUESTIONS[:2]) for _ in range(2)])


@check(
    "n-responses-of-a-prompt",
    "With n = 2, the two responses of a prompt MUST be adjacent.",
    clause="servers/each-prompt-gets-its-own-responses#5",
    dialects=("swift", "trl", "vllm"),
    ask=ask_many,
    requires=("replies-in-order",),
)
def judge_many(exchange: Exchange) -> str:
    came = [one.prompt_ids for one in read(exchange, "generate")]
    return "" if came == exchange.notes["prompts"] else f"{len(came)} responses for 2 prompts with n = 2"


def ask_empty(talk: Talk) -> None:
    talk.generate("generate", [])


@check(
    "no-prompts-no-responses",
    "A call without prompts SHOULD return no responses, or 4xx.",
    clause="servers/each-prompt-gets-its-own-responses#6",
    grade=SHOULD,
    ask=ask_empty,
)
def judge_empty(exchange: Exchange) -> str:
    call = exchange.one("generate")
    if call.is_refusal:
        return ""
    return "" if call.is_ok and not read(exchange, "generate") else call.summary()
