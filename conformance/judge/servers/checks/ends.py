"""How responses end: limits, stop texts, the order of a call, the finish reason."""

from conformance.judge.servers.check import check
from conformance.judge.servers.checks.generation import ENDING_TOKENS, QUESTIONS, ask_stop, ids_of, read_call
from conformance.judge.servers.checks.numeric import ADDED
from conformance.judge.servers.checks.sampling import WITH_N
from conformance.judge.servers.exchange import Exchange
from conformance.judge.servers.protocol import Generated
from conformance.judge.servers.talk import Talk

CUT_TOKENS, MANY_TOKENS = 5, 300


def ask_brief(talk: Talk) -> None:
    """A long response is not written again by transformers: it may end where a stop token is the likeliest.

    Without a model, one ends early if it does not say that the limit ended it.
    """
    if not talk.subject.policies:
        for limit in (1, 5, MANY_TOKENS):
            call = talk.generate(f"limit-{limit}", QUESTIONS[:2], max_tokens=limit)
            came = talk.subject.dialect.read(call) if call.is_ok else []
            talk.note(f"limit-{limit}", [limit if one.finish_reason == "length" else len(one.ids) for one in came])
        return
    for limit in (1, 5):
        call = talk.generate(f"limit-{limit}", QUESTIONS[:2], max_tokens=limit)
        if call.is_ok:
            greedy, came = talk.subject.policies.scorer.greedy, talk.subject.dialect.read(call)
            talk.note(f"limit-{limit}", [len(greedy(0, one.prompt_ids, one.ids, limit)) for one in came])
    call = talk.generate(f"limit-{MANY_TOKENS}", QUESTIONS[:2], max_tokens=MANY_TOKENS)
    if call.is_ok:
        came = talk.subject.dialect.read(call)
        talk.note(f"limit-{MANY_TOKENS}", [len(one.ids) if _stops(talk, one) else MANY_TOKENS for one in came])


def _stops(talk: Talk, one: Generated) -> bool:
    """Whether it ends with a stop token, or one may follow that the server leaves out."""
    policies = talk.subject.policies
    ends = {*policies.stop_ids, policies.tokenizer.pad_token_id} - {None}
    if {*one.ids[-1:]} & ends:
        return True
    return any(policies.scorer.least(0, one.prompt_ids, [*one.ids, end]) <= policies.tolerance for end in sorted(ends))


@check(
    "max-tokens-is-the-limit",
    "With max_tokens 1, 5 and 300, greedy responses MUST have so many ids, unless they stop before.",
    clause="servers/sampling-follows-its-parameters#9",
    ask=ask_brief,
    since=ADDED,
    deadline_s=90,
)
def judge_brief(exchange: Exchange) -> str:
    labels = {call.label: int(call.label.removeprefix("limit-")) for call in exchange.calls}
    for label, limit in labels.items():
        came, due = [len(ids) for ids in ids_of(exchange, label)], exchange.notes[label]
        pairs = zip(came, due, strict=True)
        if any(length > limit or length not in (wanted, wanted - (wanted < limit)) for length, wanted in pairs):
            return f"responses of {came} ids with max_tokens {limit}"
    return ""


def ask_stop_text(talk: Talk) -> None:
    """The text is one that the server's own greedy response comes to, but not at once."""
    policies, call = talk.subject.policies, talk.generate("free", QUESTIONS[:1], max_tokens=24)
    [written] = [one.ids for one in talk.subject.dialect.read(call)]
    for place in range(2, len(written)):
        text, before = policies.decode(written[place : place + 1]).strip(), policies.decode(written[:place])
        if text and text not in before:
            talk.note("wanted", written[: place + 1])
            talk.generate("stopped", QUESTIONS[:1], max_tokens=24, stop=[text])
            return
    talk.exchange.untestable = "the greedy response has no text to stop at"


@check(
    "a-stop-text-ends-the-response",
    "A response MUST end with the id that completes a text of stop, or before that text.",
    clause="servers/sampling-follows-its-parameters#10",
    ask=ask_stop_text,
    since=ADDED,
    needs=("model",),
    dialects=WITH_N,
    requires=("greedy-repeats", "one-prompt-one-response"),
)
def judge_stop_text(exchange: Exchange) -> str:
    [ids], wanted = ids_of(exchange, "stopped"), exchange.notes["wanted"]
    return "" if ids in (wanted, wanted[:-1]) else f"wrote {ids} instead of {wanted}"


def ask_uneven(talk: Talk) -> None:
    """A correct server may end all responses in order: then nothing is known, and nothing is missed."""
    ask_stop(talk)
    exchange = talk.exchange
    if not all(call.is_ok for call in exchange.calls) or exchange.untestable:
        return
    lengths = [[len(one.ids) for one in read_call(exchange, call)] for call in exchange.calls]
    if not judge_prompts_kept(exchange) and all(one == sorted(one) for one in lengths):
        exchange.untestable = f"all responses of {len(lengths)} calls ended in the order of their prompts"


def judge_prompts_kept(exchange: Exchange) -> str:
    for call in exchange.all("generate"):
        if [one.prompt_ids for one in read_call(exchange, call)] != exchange.notes["prompts"]:
            return "responses come in another order than their prompts"
    return ""


check(
    "order-holds-when-responses-end-out-of-order",
    "Responses of one call that end at different times MUST be returned in the order of their prompts.",
    clause="servers/each-prompt-gets-its-own-responses#4",
    ask=ask_uneven,
    since=ADDED,
    needs=("model",),
    deadline_s=120,
    requires=("replies-in-order", "stop-token-is-kept-or-not"),
)(judge_prompts_kept)


def ask_reason(talk: Talk) -> None:
    """All responses may stop early; with a lower limit hardly any does."""
    ask_stop(talk)
    cut = talk.generate("cut", QUESTIONS, max_tokens=CUT_TOKENS, temperature=2.0, seed=1)
    if cut.is_ok and all(len(one.ids) < CUT_TOKENS for one in talk.subject.dialect.read(cut)):
        talk.exchange.untestable = f"every response of up to {CUT_TOKENS} ids has stopped"


@check(
    "finish-reason-says-how-it-ended",
    "The finish reason MUST be stop after a stop token, and length where max_tokens ended the response.",
    clause="servers/a-response-says-what-was-generated#3",
    ask=ask_reason,
    since=ADDED,
    needs=("model",),
    dialects=("native", "swift", "vllm"),
    deadline_s=120,
    requires=("stop-token-is-kept-or-not",),
)
def judge_reason(exchange: Exchange) -> str:
    """Some servers leave the stop token out, some stop at padding; then a response is shorter than asked."""
    ends = {*exchange.notes["stop_ids"], exchange.notes["pad_id"]}
    for label, limit in (("generate", ENDING_TOKENS), ("cut", CUT_TOKENS)):
        for one in [one for call in exchange.all(label) for one in read_call(exchange, call)]:
            due = "stop" if len(one.ids) < limit or one.ids[-1] in ends else "length"
            if one.finish_reason != due:
                return f"{one.finish_reason} for {len(one.ids)} of {limit} ids, the last of them {one.ids[-1:]}"
    return ""


def ask_every_stop(talk: Talk) -> None:
    """Each stop token of the model is made the likeliest id."""
    ends = sorted(talk.subject.policies.stop_ids)
    talk.note("stop_ids", ends)
    for end in ends:
        talk.generate(f"stop-{end}", QUESTIONS[:1], max_tokens=4, logit_bias={str(end): 100})


@check(
    "every-stop-token-ends-a-response",
    "A response MUST end with each stop token that the model's generation config names, with the reason stop.",
    clause="servers/a-response-says-what-was-generated#6",
    ask=ask_every_stop,
    since="2026-11-27",
    needs=("model",),
    dialects=("vllm",),
)
def judge_every_stop(exchange: Exchange) -> str:
    for end in exchange.notes["stop_ids"]:
        [one] = read_call(exchange, exchange.one(f"stop-{end}"))
        if one.ids not in ([], [end]) or one.finish_reason != "stop":
            return f"where {end} is the likeliest id, a response has the ids {one.ids} and ends by {one.finish_reason}"
    return ""
