"""Sampling: distributions of one id against those of transformers, seeds, several responses."""

from collections import Counter
from itertools import combinations
from typing import TYPE_CHECKING, Any

from conformance.servers.check import check
from conformance.servers.checks.generation import QUESTIONS, ids_of
from conformance.servers.checks.numeric import ADDED
from conformance.servers.exchange import Exchange
from conformance.servers.numbers import FALSE_ALARM, chance_at_most
from conformance.servers.talk import Talk

if TYPE_CHECKING:
    from torch import Tensor

OPEN_PROMPT = "?"
"""Its first id is uncertain: 0.32, 0.15, then many below 0.03, for the digits model."""
NUM_CALLS, PER_CALL, LEAST_EXPECTED = 4, 128, 12
NUM_DRAWN = NUM_CALLS * PER_CALL
WHOLE = {"temperature": 1.0, "top_p": 1.0, "top_k": -1}
"""Nothing is cut off, whatever the model's generation config says."""
TEMPERATURES = {"cold": 0.5, "hot": 2.0}
TOP_K, TOP_P, MIN_P = 2, 0.4, 0.05
SEEDS = (11, 12, 2**30 + 11)
"""The last one is the first one in its lower bits: a learner's seeds are large numbers."""
WITH_N = ("swift", "trl", "vllm")


def draw(talk: Talk, label: str, options: dict[str, Any], probabilities: "Tensor") -> None:
    """Copies of one prompt, without a seed; noted are how many came of each bin, and of what cannot come."""
    question, came = talk.subject.prompt(OPEN_PROMPT), Counter[int]()
    for _ in range(NUM_CALLS):
        call = talk.generate(label, [question] * PER_CALL, max_tokens=1, **options)
        if not call.is_ok:
            return
        came += Counter(one.ids[0] for one in talk.subject.dialect.read(call) if one.ids)
        call.reply = f"{came.total()} ids so far"
    bins = binned(probabilities)
    cells = [(float(probabilities[ids].sum()), sum(came[i] for i in ids)) for ids in bins]
    talk.note(label, [*cells, (0.0, came.total() - sum(count for _, count in cells))])


def binned(probabilities: "Tensor") -> list[list[int]]:
    """Ids from the likeliest on, alone or with the next ones, so that ``LEAST_EXPECTED`` of the draws are due."""
    bins: list[list[int]] = [[]]
    due = 0.0
    for i in probabilities.argsort(descending=True).tolist():
        if not probabilities[i]:
            break
        bins[-1].append(i)
        due += float(probabilities[i]) * NUM_DRAWN
        if due >= LEAST_EXPECTED:
            bins.append([])
            due = 0.0
    return [ids for ids in bins if ids]


def distribution(talk: Talk, temperature: float = 1.0) -> "Tensor":
    """[V] of the first id, nothing cut off."""
    question = talk.subject.prompt(OPEN_PROMPT)
    return (talk.subject.policies.scorer.logits(0, question) / temperature).softmax(-1)


def kept(probabilities: "Tensor", num_kept: int) -> "Tensor":
    """Those of the likeliest ids, with sum 1; 0 for the others."""
    order = probabilities.argsort(descending=True)[:num_kept]
    cut = probabilities.new_zeros(probabilities.shape)
    cut[order] = probabilities[order]
    return cut / cut.sum()


def judge_drawn(exchange: Exchange, *labels: str) -> str:
    """By the label of the calls; ``drawn`` unless others are named."""
    for label in labels or ("drawn",):
        if failed := "; ".join(call.summary() for call in exchange.all(label) if not call.is_ok):
            return failed
        cells = exchange.notes[label]
        if (drawn := sum(count for _, count in cells)) != NUM_DRAWN:
            return f"{drawn} ids of {NUM_DRAWN} responses"
        if (chance := chance_at_most(cells)) <= FALSE_ALARM:
            shown = ", ".join(f"{count} for {NUM_DRAWN * p:.0f}" for p, count in cells)
            return f"{label}: so often came what was due so often: {shown}; chance at most {chance:.1g}"
    return ""


def ask_whole(talk: Talk) -> None:
    draw(talk, "drawn", WHOLE, distribution(talk))


def ask_temperatures(talk: Talk) -> None:
    for label, temperature in TEMPERATURES.items():
        draw(talk, label, WHOLE | {"temperature": temperature}, distribution(talk, temperature))


def ask_top_k(talk: Talk) -> None:
    draw(talk, "drawn", WHOLE | {"top_k": TOP_K}, kept(distribution(talk), TOP_K))


def ask_top_p(talk: Talk) -> None:
    """The threshold lies between two sums, so that rounding does not decide."""
    probabilities = distribution(talk)
    sums = probabilities.sort(descending=True).values.cumsum(0)
    num_kept = int((sums < TOP_P).sum()) + 1
    options = WHOLE | {"top_p": round(float(sums[num_kept - 2] + sums[num_kept - 1]) / 2, 4)}
    draw(talk, "drawn", options, kept(probabilities, num_kept))


def ask_min_p(talk: Talk) -> None:
    """Also between two."""
    probabilities = distribution(talk)
    ratios = (probabilities / probabilities.max()).sort(descending=True).values
    num_kept = int((ratios > MIN_P).sum())
    options = WHOLE | {"min_p": round(float(ratios[num_kept - 1] + ratios[num_kept]) / 2, 5)}
    draw(talk, "drawn", options, kept(probabilities, num_kept))


def judge_temperatures(exchange: Exchange) -> str:
    return judge_drawn(exchange, *TEMPERATURES)


WHOLE_ID = "sampling-is-from-the-whole-distribution"
DRAWN = (
    (WHOLE_ID, "Without limits, sampled ids MUST follow the model's distribution", ask_whole, judge_drawn),
    (
        "temperature-is-applied",
        "At temperatures 0.5 and 2, sampled ids MUST follow the sharpened and the flattened distribution",
        *(ask_temperatures, judge_temperatures),
    ),
    ("top-k-is-applied", "With top_k, sampled ids MUST follow the distribution of so many", ask_top_k, judge_drawn),
    (
        "top-p-is-applied",
        "With top_p, sampled ids MUST follow the distribution of the likeliest ones up to that sum",
        *(ask_top_p, judge_drawn),
    ),
    (
        "min-p-is-applied",
        "With min_p, sampled ids MUST follow the distribution of those above it",
        *(ask_min_p, judge_drawn),
    ),
)
for number, (name, sentence, ask, judge) in enumerate(DRAWN, start=1):
    check(
        name,
        f"{sentence} ({NUM_DRAWN} draws, false alarm {FALSE_ALARM:g}).",
        clause=f"servers/sampling-follows-its-parameters#{number}",
        ask=ask,
        since=ADDED,
        needs=("model",),
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
