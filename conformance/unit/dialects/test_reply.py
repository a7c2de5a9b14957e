"""What a reply must hold: an entry per request, ids, log-probabilities, and why a response ended."""

from types import SimpleNamespace

import pytest

from conformance.doubles.refusals import refused
from rollmatch.dialects.prompt import CallLog
from rollmatch.dialects.reply import chat_reply_of, entries_of, filled, ids_of, logprobs_of, reason_of

AT = {"base_url": "http://a:1"}


@pytest.mark.parametrize(
    ("read", "good", "wrong", "code"),
    [
        (lambda value: entries_of(value, num_requests=2, **AT), [[1, 2]], [[1], [1, 2, 3], []], "reply-count-mismatch"),
        (lambda value: entries_of(value, num_requests=2, **AT), [], [None, {}, "ab"], "reply-malformed"),
        (
            lambda value: ids_of(value, name="ids", place=4, **AT),
            [(), (1,), (3, 0)],
            [None, "ab", b"ab", [1.0], [True], 5, ["1"]],
            "reply-malformed",
        ),
        (
            lambda value: logprobs_of(value, (5, 6), place=4, **AT),
            [(-1.0, 0.0), (0, -2)],
            [None, "ab", b"ab", [-1.0], [-1.0] * 3, [-1.0, None]],
            "reply-malformed",
        ),
        (lambda value: filled(value, name="ids", place=4, **AT), [(1,)], [()], "reply-malformed"),
        (lambda value: reason_of(value, place=4, **AT), ["stop", "length"], [None, "abort", "", 1], "reply-malformed"),
    ],
)
def test_what_is_not_as_the_dialect_says_is_refused(read, good, wrong, code):
    assert [read(value) for value in good] == good
    for value in wrong:
        with refused(code, "http://a:1"):
            read(value)


def chat(**fields):
    choice = {"token_ids": [5], "finish_reason": "stop", "logprobs": {"content": [{"logprob": -0.5}]}}
    return {"prompt_token_ids": [1, 2], "choices": [choice | fields]}


@pytest.mark.parametrize(("fields", "logprobs"), [({}, (-0.5,)), ({"logprobs": None}, None)])
def test_a_chat_completion_is_read_with_or_without_log_probabilities(fields, logprobs):
    reply = chat_reply_of(chat(**fields), version=7, place=4, **AT)
    assert (reply.prompt_token_ids, reply.response_token_ids, reply.finish_reason) == ((1, 2), (5,), "stop")
    assert (reply.logprobs, reply.policy_version) == (logprobs, 7)
    with refused("reply-malformed", problem="entry 4 "):
        chat_reply_of(chat(**fields) | {"prompt_token_ids": []}, version=7, place=4, **AT)


def test_a_call_s_log_names_what_was_sent_and_the_versions_that_came_back():
    log = CallLog()
    log.note([SimpleNamespace(seed=8), SimpleNamespace(seed=9)], start=3)
    log.note_replies([SimpleNamespace(policy_version=version) for version in (4, None, 2, 4)])
    assert log.as_dict() == {
        "num_retries": 0, "num_splits": 0, "policy_versions": [2, 4],
        "sent": [{"first": 3, "num_requests": 2, "seeds": [8, 9]}],
    }  # fmt: skip
