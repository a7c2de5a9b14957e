"""A ladder that is climbed turn by turn, a policy of known probabilities in front of it, and exact values of both."""

from dataclasses import dataclass, field, replace
from functools import cache
from random import Random

from conformance.doubles.locks import (
    POLICY_RULES,
    VOCABULARY,
    A,
    B,
    RolloutSide,
    objective,
    requests_of,
    sample_of,
)
from conformance.doubles.ranks import alone
from conformance.doubles.records import make_reply
from conformance.doubles.tokenizer import ids_of_bytes
from rollmatch.data import Reuse
from rollmatch.environments.environment import ActionUnparsable
from rollmatch.objectives.episodes import note_episodes
from rollmatch.objectives.grpo.objective import GroupRules, GrpoObjective
from rollmatch.objectives.policy_gradient import LogprobRules
from rollmatch.objectives.vineppo.objective import TrajectoryReport
from rollmatch.objectives.vineppo.search import SearchBudget, TreeValues
from rollmatch.objectives.vineppo.split import Turns
from rollmatch.objectives.vineppo.tree import SearchRules
from rollmatch.rollout.backend import Decoding
from rollmatch.rollout.episodes import EpisodeRunner, begin_all, play_in_waves

TOP, MAX_TURNS, UP = 3, 5, 0.5
STEP_REWARD, TOP_REWARD = 0.25, 1.0
SLIP = 0.2
STOP = VOCABULARY.stop_id


class Ladder:
    """A: one rung up, unless it slips; B: stay. Each rung pays, and so does the top, which ends it."""

    def __init__(self, slip=SLIP):
        self.slip, self.rung, self.rng = slip, 0, None

    def reset(self, sample, rng):
        self.rng, self.rung = rng, 0
        return f"rung 0 of {sample.sample_id}"

    def clone(self, rng):
        twin = Ladder(self.slip)
        twin.rung, twin.rng = self.rung, rng
        return twin

    def step(self, action):
        if action not in ("A", "B"):
            raise ActionUnparsable(f"{action!r} is neither A nor B")
        climbs = action == "A" and self.rng.random() >= self.slip
        self.rung += climbs
        is_top = self.rung == TOP
        return f"<{self.rung}>", STEP_REWARD * climbs + TOP_REWARD * is_top, is_top, False

    def fingerprint(self):
        return self.rung


@cache
def value_of(rung, turns_left, slip=SLIP):
    """Exactly, under a policy that writes A with probability UP."""
    if rung == TOP or turns_left == 0:
        return 0.0
    up = UP * (1 - slip)
    paid = STEP_REWARD + TOP_REWARD * (rung + 1 == TOP)
    return up * (paid + value_of(rung + 1, turns_left - 1, slip)) + (1 - up) * value_of(rung, turns_left - 1, slip)


@dataclass
class TurnSide(RolloutSide):
    """Writes one letter per turn, and the stop token where the turn's limit allows it."""

    letters: tuple = (A, B)
    decoding: Decoding = field(default_factory=lambda: Decoding(max_new_tokens=1, temperature=1.0))
    has_logprobs: bool = False

    def write(self, request, decoding):
        limit = request.limit(decoding.max_new_tokens)
        letter = Random(request.seed).choice(self.letters)
        is_stopped = limit > 1
        logprobs = (-0.7,) * (1 + is_stopped) if self.has_logprobs else None
        reason = "stop" if is_stopped else "length"
        return make_reply(request, (letter,), version=self.version, finish_reason=reason, response_logprobs=logprobs)

    def answer(self, samples, *, num=2, in_world=None):
        """Whole episodes; ``calls`` hold the turns behind the first ones."""
        episodes = begin_all(in_world or world(), requests_of(samples, num=num), self.decoding)
        for episode in episodes:
            episode.take(self.write(episode.request(), self.decoding))
        play_in_waves(episodes, self.decoding, generate=self.generate, ranks=alone())
        return [episode.rollout() for episode in episodes]

    def context(self, ranks=None):
        return replace(super().context(ranks), decoding=self.decoding)


def reply(text, is_stopped):
    """An observation as bare text, behind a line feed where no stop token stands."""
    return ids_of_bytes((b"" if is_stopped else b"\n") + text.encode())


def world(make=Ladder, **fields):
    fields = {"max_turns": MAX_TURNS, "max_response_tokens": 100, "run_seed": 1, **fields}
    return EpisodeRunner(make=make, vocabulary=VOCABULARY, reply=reply, **fields)


def climbing(*, in_world=None, **fields):
    """VinePPO on the ladder, one step per turn."""
    return replace(objective(**fields), world=in_world or world(), splitter=fields.get("splitter", Turns()))


def searching():
    """VinePPO by search on the ladder."""
    budget = SearchBudget(num_rounds=2, num_per_round=4, num_least=3)
    return replace(climbing(), valuer=TreeValues(SearchRules(), budget, Turns()))


def grouped(*, old="recomputed"):
    """GRPO on the ladder."""
    return GrpoObjective(
        reuse=Reuse(num_rollouts=2), group_rules=GroupRules(scale="none", mask_truncated=False),
        policy_rules=POLICY_RULES, logprob_rules=LogprobRules(old=old, corrects=False, reference_in_batch=False),
        rewards=(), vocabulary=VOCABULARY, world=world(),
    )  # fmt: skip


def played(side, made=None, *, num=2):
    """Whole episodes of two samples, written down."""
    rollouts = side.answer([sample_of(0), sample_of(1)], num=num, in_world=made)
    note_episodes(made or world(), rollouts, side.context())
    return rollouts


def values_in(segment):
    """The exact value of each state of an episode, by the rungs that it shows."""
    shown = VOCABULARY.text(segment.token_ids[segment.prompt_len :]).split("<")[1:]
    rungs = [0, *(int(part[0]) for part in shown)]
    return [value_of(rung, MAX_TURNS - turn) for turn, rung in enumerate(rungs)]


SAMPLES = [sample_of(0), sample_of(1)]


def targets_of(side, made=None, *, samples=SAMPLES, ranks=None):
    made = made or climbing()
    return made.make_segments(samples, side.answer(samples, in_world=made.world), side.context(ranks))


def reports_of(targets):
    return [report for report in targets.reports if isinstance(report, TrajectoryReport)]
