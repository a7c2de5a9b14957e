"""Which version wrote which token, from the reply of a server to the rollout."""

import pytest

from conformance.doubles.learner_side import native_backend
from conformance.doubles.native_double import NativeDouble, serving, tensors_of
from conformance.doubles.records import make_request
from conformance.doubles.refusals import refused
from rollmatch.data.ids import pack_ids
from rollmatch.rollout.backend import Decoding

STOP = 9
"""As in the template of ``native_backend``."""
DECODING = Decoding(max_new_tokens=5)


class Naming(NativeDouble):
    """Answers with these ids, and names these runs of versions."""

    response, runs = (5, 6, 7, 8, 4), [[1, 2], [2, 3]]

    def infer(self, body):
        returned = super().infer(body)
        for response in returned["responses"]:
            response |= {"response_token_ids": pack_ids(self.response), "policy_versions": self.runs}
        return returned


def written(runs, response=Naming.response):
    """The rollout that a learner makes of such a reply."""
    double = Naming(tensors_of(0))
    double.runs, double.response = runs, response
    with serving(double) as (url,):
        backend = native_backend(url)
        try:
            backend.push(tensors_of(0).items(), version=1)
            return backend.generate([make_request(prompt_token_ids=(1, 2))], DECODING)[0]
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
