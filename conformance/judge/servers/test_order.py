"""Responses that end out of order: what is seen, and what only seems to be."""

from types import SimpleNamespace

import pytest

from conformance.judge.servers.check import FAULTY, MISSED, PASSED, UNTESTABLE, Check, judge
from conformance.judge.servers.checks import BY_ID
from conformance.judge.servers.checks.generation import ENDING_SEEDS, ENDING_TOKENS, QUESTIONS
from conformance.judge.servers.dialects import DIALECTS
from conformance.judge.servers.exchange import RecordedCall
from conformance.judge.servers.run import ask_and_judge
from conformance.judge.servers.subject import Subject
from conformance.judge.servers.talk import Talk

STOP, PAD = 2, 3
ORDER = BY_ID["order-holds-when-responses-end-out-of-order"]


def reply_of(entries):
    """Of (prompt, length): ids of that many, the last of which stops."""
    return {
        "prompt_ids": [list(QUESTIONS[prompt].encode()) for prompt, _ in entries],
        "completion_ids": [[5] * (length - 1) + [5 if length == ENDING_TOKENS else STOP] for _, length in entries],
    }


class ScriptedTalk(Talk):
    """Each call gets the next reply, the last one again and again."""

    replies = ()

    def generate(self, label, prompts, **options):
        reply = self.replies[min(len(self.exchange.calls), len(self.replies) - 1)]
        self.exchange.calls.append(RecordedCall(label=label, method="POST", path="", status=200, reply=reply))
        return self.exchange.calls[-1]


@pytest.mark.scenario(
    "judging/responses-that-all-end-in-order", clauses=["judging/numbers-are-compared-with-transformers#4"]
)
@pytest.mark.parametrize(
    ("entries", "state", "num_calls"),
    [
        ([(0, 50), (1, 60), (2, 200), (3, 200)], UNTESTABLE, len(ENDING_SEEDS)),
        ([(0, 200), (1, 200), (2, 200), (3, 200)], UNTESTABLE, len(ENDING_SEEDS)),
        ([(0, 60), (1, 50), (2, 200), (3, 200)], PASSED, 1),
        ([(1, 50), (0, 60), (2, 200), (3, 200)], MISSED, len(ENDING_SEEDS)),
    ],
    ids=["in order", "none stops", "out of order", "as they end"],
)
def test_only_responses_that_end_out_of_order_show_an_order(entries, state, num_calls):
    policies = SimpleNamespace(
        stop_ids={STOP}, tokenizer=SimpleNamespace(pad_token_id=PAD), tolerance=0.001,
        encode=lambda text: list(text.encode()),
    )  # fmt: skip
    subject = Subject(name="x", version="1", url="", dialect=DIALECTS["trl"](), policies=policies)
    talk = ScriptedTalk(subject)
    talk.replies = [reply_of(entries)]
    ORDER.ask(talk)
    assert (judge(ORDER, talk.exchange).state, len(talk.exchange.calls)) == (state, num_calls)


def test_a_check_that_calls_nothing_is_a_fault_of_the_judge():
    subject = Subject(name="x", version="1", url="", dialect=DIALECTS["trl"]())
    _, verdict, _ = ask_and_judge(Check(check_id="x", sentence="", ask=lambda talk: None, judge=lambda _: ""), subject)
    assert (verdict.state, verdict.reason) == (FAULTY, "nothing was called")
