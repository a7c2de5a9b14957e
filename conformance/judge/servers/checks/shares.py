"""How often each id is due as the first one of a response: by ``transformers``, or by what the server says itself."""

import math
from collections import Counter, defaultdict
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from statistics import fmean
from typing import Any

from conformance.judge.servers.numbers import FALSE_ALARM, SMALL, chance_at_most
from conformance.judge.servers.protocol import Generated
from conformance.judge.servers.question import Question
from conformance.judge.servers.talk import Talk

OPEN_PROMPTS = ("?", "Name an animal.", "Say a random word.")
"""The one with the least certain first id is drawn from; "?" of the digits model: 0.32, 0.15, then many below 0.03."""
NUM_CALLS, PER_CALL, LEAST_DUE, MOST_KEPT = 4, 128, 12, 8
NUM_DRAWN = NUM_CALLS * PER_CALL
WHOLE = {"temperature": 1.0, "top_p": 1.0, "top_k": -1}
"""Nothing is cut off, whatever the model's generation config says."""
Cells = list[tuple[float, int]]
"""(probability, times drawn)."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Shares:
    """Of the first ids of responses to ``question``."""

    question: Question
    logprobs: Mapping[int, float]
    """At temperature 1, from the likeliest id on. Unit: nats."""
    is_whole: bool
    """All ids; else those that the server has drawn."""
    came: Mapping[int, int] = field(default_factory=dict)
    """How often, in ``NUM_DRAWN`` draws; where they are not whole."""

    def cells(self, came: Mapping[int, int], *, temperature: float = 1.0, num_kept: int | None = None) -> Cells:
        """Ids alone or with the next ones, so that ``LEAST_DUE`` draws are due; the last cell is what cannot come.

        Of shares that are not whole: at temperature 1 the last cell is all that is not likely enough to have been
        drawn before for certain; at another one, what was not drawn before counts nowhere.

        >>> shares = Shares(question=None, logprobs={4: math.log(0.75), 7: math.log(0.25)}, is_whole=True)
        >>> [(round(p, 3), count) for p, count in shares.cells({4: 300, 9: 2}, temperature=0.5)]
        [(0.9, 300), (0.1, 0), (0.0, 2)]
        """
        ids, num_drawn = list(self.logprobs)[:num_kept], sum(came.values())
        if temperature == 1 and not (self.is_whole or num_kept):
            alone = [(math.exp(self.logprobs[i]), came.get(i, 0)) for i in ids if self.is_due(i)]
            rest = max(0.0, 1 - sum(p for p, _ in alone))
            return [*alone, (rest, num_drawn - sum(count for _, count in alone))]
        cells = _binned(_weighed([(self.logprobs[i], came.get(i, 0)) for i in ids], temperature))
        others = [(0.0, num_drawn - sum(count for _, count in cells))]
        return cells + (others if self.is_whole or num_kept else [])

    def plain(self) -> Counter[int]:
        """Draws as they are due where nothing is limited."""
        return Counter({i: round(NUM_DRAWN * math.exp(value)) for i, value in self.logprobs.items()})

    def shows(self, **limits: Any) -> bool:
        """Whether draws without these limits would be distinguished from draws with them."""
        cells = self.cells(self.plain(), **limits)
        if any(count >= LEAST_DUE for p, count in cells if not p):
            return True
        return chance_at_most([cell for cell in cells if cell[0]]) <= FALSE_ALARM

    @property
    def num_kept(self) -> int:
        """How many of the likeliest ids to keep: the next one is far less likely, so that rounding does not decide."""
        ids, values = list(self.logprobs), list(self.logprobs.values())
        likely = [n for n in range(1, min(MOST_KEPT, len(values) - 1) + 1) if self.is_due(ids[n - 1], 2 * LEAST_DUE)]
        return max(likely, key=lambda n: values[n - 1] - values[n], default=1)

    @property
    def limits(self) -> dict[str, float]:
        """Values of options that each keep ``num_kept`` ids; thresholds lie between two ids, or two sums.

        >>> def made(*shares):
        ...     return Shares(question=None, logprobs=dict(enumerate(map(math.log, shares))), is_whole=True)
        >>> made(0.3, 0.3, 0.1, 0.1, 0.1, 0.1).limits
        {'top_k': 2, 'top_p': 0.45, 'min_p': 0.57735}
        >>> made(0.6, 0.2, 0.2).limits
        {'top_k': 1, 'top_p': 0.3, 'min_p': 0.57735}
        """
        values = [*self.logprobs.values(), -math.inf]
        *before, last = values[: self.num_kept]
        least = max((last + values[self.num_kept]) / 2, last - math.log(2))
        return {
            "top_k": self.num_kept,
            "top_p": round(sum(map(math.exp, before)) + math.exp(last) / 2, 4),
            "min_p": round(math.exp(least - values[0]), 5),
        }

    def is_due(self, i: int, least: int = LEAST_DUE) -> bool:
        """Whether so many of the draws are due to be this id."""
        return math.exp(self.logprobs[i]) * NUM_DRAWN >= least


def shares_of(talk: Talk) -> Shares | None:
    """Kept for the run; None where a call failed, or replies have no log-probabilities (then it is not testable)."""
    if talk.subject.shares is None:
        talk.subject.shares = _by_transformers(talk) if talk.subject.policies else _by_server(talk)
    return talk.subject.shares


def draw(talk: Talk, label: str, shares: Shares, options: Mapping[str, Any]) -> Counter[int] | None:
    """The first ids of ``NUM_DRAWN`` responses, without a seed; None where a call failed."""
    came = Counter[int]()
    for _ in range(NUM_CALLS):
        call = talk.generate(label, [shares.question] * PER_CALL, max_tokens=1, **WHOLE | options)
        if not call.is_ok:
            return None
        came += Counter(one.ids[0] for one in talk.subject.dialect.read(call) if one.ids)
        call.reply = f"{came.total()} ids so far"
    return came


def unsteady(came: Iterable[Generated]) -> str:
    """Why log-probabilities of responses to one prompt cannot be those of their ids; empty where they can.

    >>> def made(ids, logprobs): return Generated(prompt_ids=[], ids=ids, logprobs=logprobs)
    >>> unsteady([made([5, 1], [-0.1, -1.0]), made([5, 2], [-0.1, -1.0]), made([6], [-2.5])])
    ''
    >>> unsteady([made([5], [-0.1]), made([5], [-0.9])])
    'id 5 as the first id has log-probabilities from -0.9 to -0.1'
    >>> unsteady([made([number], [-1.0]) for number in range(4)])
    'the 4 ids that came as the first id have probabilities of 1.472 together'
    """
    found: dict[tuple[int, ...], dict[int, list[float]]] = defaultdict(lambda: defaultdict(list))
    for one in came:
        for place, (i, value) in enumerate(zip(one.ids, one.logprobs or [], strict=False)):
            found[tuple(one.ids[:place])][i].append(value)
    for before, ids in found.items():
        where = f"after {list(before)}" if before else "as the first id"
        for i, values in ids.items():
            if max(values) - min(values) > SMALL:
                return f"id {i} {where} has log-probabilities from {min(values)} to {max(values)}"
        total = sum(math.exp(fmean(values)) for values in ids.values())
        if total > 1 + SMALL / 4:
            return f"the {len(ids)} ids that came {where} have probabilities of {total:.4g} together"
    return ""


def _by_transformers(talk: Talk) -> Shares:
    questions = [talk.subject.prompt(text) for text in OPEN_PROMPTS]
    rows = [talk.subject.policies.scorer.logits(0, question).log_softmax(-1) for question in questions]
    entropies = [-float((row.exp() * row).nan_to_num().sum()) for row in rows]
    place = entropies.index(max(entropies))
    ordered = rows[place].sort(descending=True)
    pairs = zip(ordered.indices.tolist(), ordered.values.tolist(), strict=True)
    return Shares(question=questions[place], logprobs=dict(pairs), is_whole=True)


def _by_server(talk: Talk) -> Shares | None:
    """What it says of the ids that it draws; noted is whether that can be."""
    options, read = WHOLE | {"logprobs": True}, talk.subject.dialect.read
    looks = {text: talk.generate("look", [text] * (PER_CALL // 2), max_tokens=2, **options) for text in OPEN_PROMPTS}
    if not all(call.is_ok for call in looks.values()):
        return None
    firsts = {text: Counter(one.ids[0] for one in read(call) if one.ids) for text, call in looks.items()}
    text = min(firsts, key=lambda text: max(firsts[text].values(), default=PER_CALL))
    calls = [talk.generate("own", [text] * PER_CALL, max_tokens=2, **options) for _ in range(NUM_CALLS)]
    if not all(call.is_ok for call in calls):
        return None
    drawn = [one for call in calls for one in read(call) if one.ids]
    came = [one for one in read(looks[text]) if one.ids] + drawn
    if any(one.logprobs is None or len(one.logprobs) != len(one.ids) for one in came):
        talk.exchange.untestable = "replies lack log-probabilities, and there is no --model"
        return None
    talk.note("unsteady", unsteady(came))
    found: dict[int, list[float]] = defaultdict(list)
    for one in came:
        found[one.ids[0]].append((one.logprobs or [])[0])
    means = sorted(((fmean(values), i) for i, values in found.items()), reverse=True)
    return Shares(
        question=talk.subject.prompt(text),
        logprobs={i: mean for mean, i in means},
        is_whole=False,
        came=Counter(one.ids[0] for one in drawn),
    )


def _weighed(ids: Iterable[tuple[float, int]], temperature: float) -> Cells:
    weights = [(math.exp(value / temperature), count) for value, count in ids]
    total = sum(weight for weight, _ in weights)
    return [(weight / total, count) for weight, count in weights]


def _binned(cells: Cells) -> Cells:
    bins: Cells = [(0.0, 0)]
    for p, count in cells:
        if bins[-1][0] * NUM_DRAWN >= LEAST_DUE:
            bins.append((0.0, 0))
        bins[-1] = (bins[-1][0] + p, bins[-1][1] + count)
    return bins
