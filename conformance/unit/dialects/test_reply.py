"""What a reply must hold: an entry per request, ids, log-probabilities, and why a response ended."""

from types import SimpleNamespace

import pytest

from conformance.doubles.refusals import refused
from rollmatch.dialects.prompt import CallLog
from rollmatch.dialects.reply import chat_reply_of

AT = {"base_url": "http://a:1"}


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
