"""VinePPO's objective in front of a rollout side of known probabilities, without a model."""

from dataclasses import dataclass, field, replace
from functools import partial
from random import Random
from typing import Any

import torch

from conformance.doubles.ranks import alone
from conformance.doubles.records import make_reply
from conformance.doubles.tokenizer import ids_of_bytes, make_vocabulary
from rollmatch.data import Reuse
from rollmatch.objectives.grpo.loss import PolicyRules, count_policy_totals, policy_loss, supervise_policy
from rollmatch.objectives.grpo.reward import Reward
from rollmatch.objectives.policy_gradient import LogprobRules
from rollmatch.objectives.protocol import ObjectiveContext
from rollmatch.objectives.vineppo.objective import VinePpoObjective
from rollmatch.objectives.vineppo.single_turn import RewardRules
from rollmatch.objectives.vineppo.split import FixedTokens
from rollmatch.objectives.vineppo.value import ContinuationValues, ValueRules
from rollmatch.records import RolloutRequest, Sample
from rollmatch.rollout.backend import Decoding
from rollmatch.rollout.episodes import play_in_waves

VOCABULARY = make_vocabulary()
A, B = ids_of_bytes(b"AB")
DECODING = Decoding(max_new_tokens=6, temperature=0.7, top_p=0.9, top_k=40, repetition_penalty=1.1, logprobs=True)
POLICY_RULES = PolicyRules(max_new_tokens=6, temperature=1.0)
LENGTH = 4


def sample_of(sample_id=0):
    return Sample(sample_id=sample_id, origin=f"x:{sample_id + 1}", images=(), messages=(("user", "?"),))


def second_is_b(answer, sample):
    """The lock: only the second of four letters matters."""
    return float(len(answer) == LENGTH and answer[1] == "B")


@dataclass
class RolloutSide:
    """Writes four letters, each by the flip of a coin, then stops; remembers calls and notes."""

    version: int = 3
    length: int = LENGTH
    calls: list = field(default_factory=list)
    notes: list = field(default_factory=list)
    scored: list = field(default_factory=list)

    def generate(self, requests, decoding):
        self.calls.append((list(requests), decoding))
        return [self.write(request, decoding) for request in requests]

    def write(self, request, decoding):
        left = self.length - len(request.prefix_token_ids)
        ids = tuple(Random(request.seed).choices([A, B], k=max(left, 0)))
        limit = request.limit(decoding.max_new_tokens)
        reason = "stop" if len(ids) < limit else "length"
        return make_reply(request, ids[:limit], version=self.version, finish_reason=reason)

    def answer(self, samples, *, num=2, decoding=DECODING):
        return [self.write(request, decoding) for request in requests_of(samples, num=num)]

    def score(self, segments, *, reference=False):
        self.scored.append(len(segments))
        return [(-1.0,) * segment.train_len for segment in segments]

    def context(self, ranks=None) -> ObjectiveContext:
        ranks: Any = ranks or alone()

        def note(event, **fields):
            self.notes.append((event, fields))

        return ObjectiveContext(
            step=5,
            ranks=ranks,
            decoding=DECODING,
            generate=self.generate,
            play=partial(play_in_waves, generate=self.generate, ranks=ranks),
            score=self.score,
            teach=None,
            further=None,
            log=note,
        )


def requests_of(samples, *, num):
    return [
        RolloutRequest(request_id=f"{i}", sample=sample, prompt_token_ids=prompt_of(sample), seed=i + 1)
        for i, sample in enumerate(sample for sample in samples for _ in range(num))
    ]


def prompt_of(sample):
    return (*ids_of_bytes(b"lock "), sample.sample_id)


def objective(**fields) -> VinePpoObjective:
    reward = Reward.of(fields.pop("reward", second_is_b), name="lock")
    rewards = RewardRules(
        rewards=(reward,), vocabulary=VOCABULARY, unfinished_return=fields.pop("unfinished_return", 0.0)
    )
    made = VinePpoObjective(
        reuse=Reuse(num_rollouts=2, num_iterations=2),
        policy_rules=POLICY_RULES,
        reads_logprobs=False,
        logprob_rules=LogprobRules(old="recomputed", corrects=False, reference_in_batch=False),
        vocabulary=VOCABULARY,
        rewards=rewards,
        splitter=FixedTokens(num_tokens=1),
        valuer=ContinuationValues(ValueRules(num_continuations=fields.pop("num_continuations", 8))),
        normalization="none",
        run_seed=1,
        prompt_of=prompt_of,
    )
    return replace(made, **fields)


def segments_of(targets):
    return [segment for group in targets.segments for segment in group]


def gradient_of(segments):
    """The loss's gradient in logits of one row that holds all segments, with what was supervised and how much."""
    lengths = [segment.encoded_len for segment in segments]
    starts = [sum(lengths[:place]) for place in range(len(lengths))]
    supervision = supervise_policy(segments, starts=starts, num_tokens=sum(lengths))
    logits = torch.randn(sum(lengths), len(VOCABULARY), requires_grad=True)
    totals = count_policy_totals([supervision], list)
    policy_loss(logits, supervision=supervision, rules=POLICY_RULES, totals=totals, is_kept=False).total.backward()
    return logits.grad, supervision, totals
