"""Which version wrote which token, from the reply of a server to the rollout."""

import threading

import pytest

from conformance.doubles.learner_side import native_backend
from conformance.doubles.native_double import NativeDouble, serving, tensors_of
from conformance.doubles.records import make_request
from conformance.doubles.refusals import refused
from conformance.judge.servers.bounded import in_thread
from rollmatch.data.ids import pack_ids
from rollmatch.rollout.backend import Decoding

STOP = 9
"""As in the template of ``native_backend``."""
DECODING = Decoding(max_new_tokens=5)


class Naming(NativeDouble):
    """Answers with these ids, and names these runs of versions, once it may."""

    response, runs = (5, 6, 7, 8, 4), [[1, 2], [2, 3]]

    def __init__(self):
        super().__init__(tensors_of(0))
        self.is_asked, self.may_answer = threading.Event(), threading.Event()

    def infer(self, body):
        returned = super().infer(body)
        self.is_asked.set()
        self.may_answer.wait(20)
        for response in returned["responses"]:
            response |= {"response_token_ids": pack_ids(self.response), "policy_versions": self.runs}
        return returned


def written(runs, response=Naming.response, *, keep=True):
    """The rollout that a learner makes of such a reply, to a call that began before version 2 was sent."""
    double = Naming()
    double.runs, double.response = runs, response
    with serving(double) as (url,):
        backend = native_backend(url)
        backend.calls.keep = keep
        try:
            backend.push(tensors_of(0).items(), version=1)
            call = in_thread(backend.generate, [make_request(prompt_token_ids=(1, 2))], DECODING)
            assert double.is_asked.wait(20)
            backend.push(tensors_of(0).items(), version=2)
            double.may_answer.set()
            return call.result()[0]
        finally:
            backend.close()


@pytest.mark.parametrize(
    ("runs", "fields", "wanted", "num_tokens"),
    [
        ([[1, 2], [2, 3]], {}, ((1, 2), (2, 3)), 5),
        ([[1, 5]], {}, ((1, 5),), 5),
        (None, {}, ((1, 5),), 5),
        ([[1, 2], [2, 3]], {"response": (5, 6, 7, STOP, 4)}, ((1, 2), (2, 2)), 3),
        ([[1, 3], [2, 2]], {"response": (5, STOP, 7, 8, 4)}, ((1, 2),), 1),
    ],
    ids=["two versions", "one", "a server that names one", "cut behind the stop token", "cut within the first run"],
)
def test_runs_of_versions_are_cut_where_the_response_is(runs, fields, wanted, num_tokens):
    rollout = written(runs, **fields)
    assert (rollout.policy_versions, rollout.policy_version, rollout.num_tokens) == (wanted, 1, num_tokens)
    assert sum(length for _, length in rollout.policy_versions) == len(rollout.sampled_ids)


@pytest.mark.parametrize(
    "runs", [[[1, 2], [2, 2]], [[1, 5], [2]], [[1, -1], [2, 6]], [1, 4], "15", [["1", 5]], [[1, 6]]]
)
def test_runs_that_do_not_add_up_are_refused(runs):
    with refused("reply-malformed", problem="policy_versions of entry 0"):
        written(runs)


@pytest.mark.parametrize(
    ("runs", "keep", "wrong"),
    [([[1, 2], [3, 3]], True, 3), ([[0, 1], [1, 4]], True, 0), ([[1, 2], [2, 3]], False, 2)],
    ids=["newer than what was sent", "older than the call", "a sync that keeps nothing"],
)
def test_versions_that_no_sync_explains_are_refused(runs, keep, wrong):
    with refused("policy-version-mismatch", problem=f"wrote with version {wrong}"):
        written(runs, keep=keep)
