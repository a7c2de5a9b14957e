"""What comes back for prompts."""

import math

from conformance.servers.check import SHOULD, Check
from conformance.servers.dialects import DIALECTS, Generated
from conformance.servers.exchange import Exchange, RecordedCall
from conformance.servers.talk import Talk

QUESTIONS = ("List every digit with its box.", "Say something.", "one two three", "What is in the picture?")
ENDING_SEEDS, ENDING_TOKENS = range(1, 5), 200


def read(told: Exchange, label: str) -> list[Generated]:
    """What the call of this label generated; an answer of another form raises."""
    return read_call(told, told.one(label))


def read_call(told: Exchange, call: RecordedCall) -> list[Generated]:
    if not call.is_ok:
        raise ValueError(call.tell())
    return DIALECTS[told.notes["dialect"]]().read(call)


def ids_of(told: Exchange, label: str) -> list[list[int]]:
    return [one.ids for one in read(told, label)]


def note_dialect(talk: Talk) -> None:
    talk.note("dialect", talk.subject.dialect.name)


def ask_order(talk: Talk) -> None:
    note_dialect(talk)
    talk.generate("generate", QUESTIONS)
    talk.note("prompts", [talk.subject.prompt(question).ids for question in QUESTIONS])


def judge_order(told: Exchange) -> str:
    came = [one.prompt_ids for one in read(told, "generate")]
    return "" if came == told.notes["prompts"] else f"prompts came back as {came}"


def ask_one(talk: Talk) -> None:
    note_dialect(talk)
    talk.generate("generate", QUESTIONS[:1])


def judge_one(told: Exchange) -> str:
    count = len(read(told, "generate"))
    return "" if count == 1 else f"{count} responses"


def ask_text(talk: Talk) -> None:
    note_dialect(talk)
    call = talk.generate("generate", QUESTIONS[:2], max_tokens=12)
    if call.is_ok:
        talk.note("decoded", [talk.subject.policies.decode(one.ids) for one in talk.subject.dialect.read(call)])


def judge_text(told: Exchange) -> str:
    texts = [one.text for one in read(told, "generate")]
    return "" if texts == told.notes["decoded"] else f"texts are {texts}, ids decode to {told.notes['decoded']}"


def ask_stop(talk: Talk) -> None:
    note_dialect(talk)
    for seed in ENDING_SEEDS:
        talk.generate("generate", QUESTIONS[:2], max_tokens=ENDING_TOKENS, temperature=2.0, seed=seed)
    talk.note("stop_ids", sorted(talk.subject.policies.stop_ids))
    talk.note("pad_id", talk.subject.policies.tokenizer.pad_token_id)


def judge_stop(told: Exchange) -> str:
    """Every response that is shorter than asked ends with a stop token, or none does; some servers stop at padding."""
    calls = told.all("generate")
    came = [one for call in calls for one in read_call(told, call)]
    ended = [one for one in came if len(one.ids) < ENDING_TOKENS]
    ends = {*told.notes["stop_ids"], told.notes["pad_id"]}
    kept = {bool(one.ids) and one.ids[-1] in ends for one in ended}
    inside = [one for one in came if set(one.ids[:-1]) & set(told.notes["stop_ids"])]
    if not ended:
        return "no response stopped, so that nothing was seen"
    return "the stop token is kept in some responses only" if len(kept) > 1 or inside else ""


def ask_logprobs(talk: Talk) -> None:
    note_dialect(talk)
    talk.generate("generate", QUESTIONS, logprobs=True, max_tokens=12)


def judge_logprobs(told: Exchange) -> str:
    for place, one in enumerate(read(told, "generate")):
        if one.logprobs is None or len(one.logprobs) != len(one.ids):
            return f"response {place} has {len(one.ids)} ids and {one.logprobs} logprobs"
        if not all(math.isfinite(value) and value <= 0 for value in one.logprobs):
            return f"response {place} has logprobs {one.logprobs}"
    return ""


def ask_twice(talk: Talk) -> None:
    note_dialect(talk)
    for label in ("first", "second"):
        talk.generate(label, QUESTIONS, max_tokens=24)


def judge_twice(told: Exchange) -> str:
    return "" if ids_of(told, "first") == ids_of(told, "second") else "two different answers"


def ask_seed(talk: Talk) -> None:
    note_dialect(talk)
    for label in ("first", "second"):
        talk.generate(label, QUESTIONS, max_tokens=24, temperature=1.0, seed=11)


def ask_copies(talk: Talk) -> None:
    note_dialect(talk)
    talk.generate("generate", QUESTIONS[:1] * 4, max_tokens=24, temperature=2.0, seed=11)


def judge_copies(told: Exchange) -> str:
    came = {tuple(ids) for ids in ids_of(told, "generate")}
    return "" if len(came) > 1 else "all four copies of one prompt got the same response"


def ask_alone(talk: Talk) -> None:
    note_dialect(talk)
    talk.generate("together", QUESTIONS, max_tokens=16)
    for place, question in enumerate(QUESTIONS):
        talk.generate(f"alone-{place}", [question], max_tokens=16)


def judge_alone(told: Exchange) -> str:
    alone = [ids_of(told, f"alone-{place}")[0] for place in range(len(QUESTIONS))]
    return "" if alone == ids_of(told, "together") else "a prompt gets another response alone than in a batch"


def ask_oracle(talk: Talk) -> None:
    note_dialect(talk)
    call = talk.generate("generate", QUESTIONS, max_tokens=16)
    if call.is_ok:
        prompts = [one.prompt_ids for one in talk.subject.dialect.read(call)]
        talk.note("expected", [talk.subject.policies.writes(0, ids, max_tokens=16) for ids in prompts])


def judge_oracle(told: Exchange) -> str:
    came = ids_of(told, "generate")
    return "" if same_but_stop(came, told.notes["expected"]) else f"wrote {came}, expected {told.notes['expected']}"


def same_but_stop(came: list[list[int]], expected: list[list[int]]) -> bool:
    """Equal, a stop token at the end aside: dialects keep it or do not.

    >>> same_but_stop([[1, 2]], [[1, 2, 410]]), same_but_stop([[1]], [[1, 2, 410]])
    (True, False)
    """
    return len(came) == len(expected) and all(
        one == other or one == other[:-1] for one, other in zip(came, expected, strict=True)
    )


def ask_many(talk: Talk) -> None:
    note_dialect(talk)
    talk.generate("generate", QUESTIONS[:2], n=2, temperature=2.0, seed=5)
    talk.note("prompts", [talk.subject.prompt(question).ids for question in QUESTIONS[:2] for _ in range(2)])


def judge_many(told: Exchange) -> str:
    came = [one.prompt_ids for one in read(told, "generate")]
    return "" if came == told.notes["prompts"] else f"{len(came)} responses for 2 prompts with n = 2"


def ask_empty(talk: Talk) -> None:
    note_dialect(talk)
    talk.generate("generate", [])


def judge_empty(told: Exchange) -> str:
    call = told.one("generate")
    if call.is_refusal:
        return ""
    return "" if call.is_ok and not read(told, "generate") else call.tell()


CHECKS = (
    Check(
        check_id="replies-in-order",
        sentence="Prompts of one call are returned in order, as the token ids of the model's chat template.",
        ask=ask_order,
        judge=judge_order,
        needs=("model",),
    ),
    Check(
        check_id="one-prompt-one-response",
        sentence="Fewer prompts than workers return one response per prompt.",
        ask=ask_one,
        judge=judge_one,
    ),
    Check(
        check_id="greedy-equals-transformers",
        sentence="Greedy responses equal those of transformers with the same weights, token by token.",
        ask=ask_oracle,
        judge=judge_oracle,
        needs=("model",),
        deadline_s=60,
    ),
    Check(
        check_id="text-is-the-ids-decoded",
        sentence="A response's text is its ids, decoded.",
        grade=SHOULD,
        dialects=("swift", "vllm"),
        ask=ask_text,
        judge=judge_text,
        needs=("model",),
    ),
    Check(
        check_id="stop-token-is-kept-or-not",
        sentence="The stop token is always in the ids of a response, or never.",
        grade=SHOULD,
        ask=ask_stop,
        judge=judge_stop,
        needs=("model",),
        deadline_s=90,
    ),
    Check(
        check_id="logprobs-fit-the-ids",
        sentence="Each token of a response has one finite log-probability, at most 0.",
        ask=ask_logprobs,
        judge=judge_logprobs,
    ),
    Check(check_id="greedy-repeats", sentence="Greedy generation repeats exactly.", ask=ask_twice, judge=judge_twice),
    Check(
        check_id="a-seed-repeats",
        sentence="The same call with the same seed gives the same sampled responses.",
        ask=ask_seed,
        judge=judge_twice,
    ),
    Check(
        check_id="copies-of-a-prompt-differ",
        sentence="Copies of one prompt in one call with one seed do not all get the same response.",
        grade=SHOULD,
        ask=ask_copies,
        judge=judge_copies,
    ),
    Check(
        check_id="alone-as-in-a-batch",
        sentence="A greedy response does not depend on what else is in the call.",
        grade=SHOULD,
        ask=ask_alone,
        judge=judge_alone,
    ),
    Check(
        check_id="n-responses-of-a-prompt",
        sentence="With n = 2, the two responses of a prompt are adjacent.",
        dialects=("swift", "trl", "vllm"),
        ask=ask_many,
        judge=judge_many,
        needs=("model",),
    ),
    Check(
        check_id="no-prompts-no-responses",
        sentence="A call without prompts returns no responses, or 4xx.",
        grade=SHOULD,
        ask=ask_empty,
        judge=judge_empty,
    ),
)
