"""Weights reach every server as one version, proven, or no server changes."""

import socket
import time
from contextlib import ExitStack
from dataclasses import replace

import pytest
import torch

from conformance.doubles.learner_side import rendezvous
from conformance.doubles.native_double import NativeDouble, Refused, equal, names_called, tensors_of
from conformance.doubles.refusals import refused
from conformance.judge.servers.bounded import in_thread
from rollmatch.dialects.calls import BackgroundCall
from rollmatch.dialects.native.sender import _cause_of
from rollmatch.errors import RollmatchError, SyncError
from rollmatch.weights.digest import digests_of
from rollmatch.weights.gloo import GlooGroup
from rollmatch.weights.group_address import CommunicatorTimeout, TransferFailed
from rollmatch.weights.plan import spec_of
from rollmatch.weights.transports import TRANSPORTS

TIMEOUT_S = 2.0


@pytest.mark.scenario(clauses=["weight-sync/weights-travel-in-memory#2"])
@pytest.mark.parametrize("num_servers", [1, 3])
def test_every_server_serves_the_learners_weights(start_sender, num_servers):
    doubles = [NativeDouble(tensors_of(0)) for _ in range(num_servers)]
    sender = start_sender(*doubles)
    for version, seed in ((1, 1), (2, 2)):
        sender.send(tensors_of(seed).items(), version=version)
        assert all(equal(double.served, tensors_of(seed)) for double in doubles)
        assert [double.policy_version for double in doubles] == [version] * num_servers


@pytest.mark.scenario(
    "weight-sync/three-receivers-cost-what-one-costs", clauses=["weight-sync/weights-travel-in-memory#3"]
)
def test_three_servers_take_as_many_broadcasts_as_one(start_sender, monkeypatch):
    """Why a time does not grow with servers, which conformance/gpu measures."""
    seen = []

    def begin(self, tensor, *, source=None, real=GlooGroup.begin):
        if self.rank == self.source:
            seen.append(tensor.nbytes)
        return real(self, tensor, source=source)

    monkeypatch.setattr(GlooGroup, "begin", begin)
    for num_servers in (1, 3):
        start_sender(*(NativeDouble(tensors_of(0)) for _ in range(num_servers))).send(tensors_of(1).items(), version=1)
    half = len(seen) // 2
    assert half > 2
    assert seen[:half] == seen[half:]


@pytest.mark.scenario(
    "server-dialects/a-sync-of-many-tensors-is-one-call",
    clauses=[
        "server-dialects/the-native-dialect-carries-a-sync-in-one-message#1,2",
        "weight-sync/full-sync-sends-every-weight-merged#5",
    ],
)
def test_one_announcement_carries_all_tensors_and_the_version_and_digests_follow_them(start_sender):
    sent = {f"layer{i}": torch.full((2, 2), i, dtype=(torch.float32, torch.bfloat16)[i % 2]) for i in range(399)}
    double = NativeDouble({name: tensor * 0 for name, tensor in sent.items()})
    start_sender(double).send(sent.items(), version=7)
    assert names_called(double) == ["communicator", "sync"]
    (body,) = [body for name, body in double.calls if name == "sync"]
    assert (body["version"], body["commit"], body["digests"], len(body["tensors"])) == (7, True, None, 399)
    described = {spec["name"]: (spec["dtype"], tuple(spec["shape"])) for spec in body["tensors"]}
    assert described == {name: (str(tensor.dtype).removeprefix("torch."), (2, 2)) for name, tensor in sent.items()}
    assert double.digests == digests_of([sent[spec["name"]] for spec in body["tensors"]])
    types = iter(spec["dtype"] for spec in body["tensors"])
    assert all(len({next(types) for _ in range(count)}) == 1 for count in body["buckets"])
    assert next(types, None) is None


def test_a_reply_of_another_instance_confirms_nothing(start_sender):
    double = NativeDouble(tensors_of(0))
    commit = double.commit
    double.commit = lambda body: commit(body) | {"instance": "another"}
    with refused("sync-unconfirmed"):
        start_sender(double).send(tensors_of(1).items(), version=1)
    double.commit = lambda body: commit(body) | {"instance": double.instance}
    start_sender(double).send(tensors_of(1).items(), version=2)


def test_several_servers_commit_after_all_have_proven(start_sender):
    doubles = [NativeDouble(tensors_of(0)) for _ in range(2)]
    start_sender(*doubles).send(tensors_of(1).items(), version=1)
    assert [names_called(double) for double in doubles] == [["communicator", "sync", "commit"]] * 2


def test_weights_are_cast_to_what_the_server_holds(start_sender):
    double = NativeDouble(tensors_of(0, dtype=torch.bfloat16))
    start_sender(double).send(tensors_of(1).items(), version=1)
    assert equal(double.served, tensors_of(1, dtype=torch.bfloat16))


def test_what_is_not_contiguous_arrives_as_it_reads(start_sender):
    double = NativeDouble({"a": torch.zeros(3, 5), "b": torch.zeros(4)})
    weights = {"a": torch.arange(15.0).view(5, 3).t(), "b": torch.arange(8.0)[::2]}
    start_sender(double).send(weights.items(), version=1)
    assert equal(double.served, weights)


def test_a_tied_head_need_not_be_sent(start_sender):
    doubles = [NativeDouble(tensors_of(0), aliases={"head": "a"}) for _ in range(2)]
    sender = start_sender(*doubles)
    sender.send(tensors_of(1).items(), version=1)
    sender.send((tensors_of(1) | {"head": tensors_of(1)["a"]}).items(), version=2)
    assert doubles[0].policy_version == 2


@pytest.mark.scenario(
    "weight-sync/a-tensor-that-the-server-does-not-know-stops-the-sync",
    "weight-sync/a-server-of-another-model-stops-the-start",
    clauses=[
        "weight-sync/full-sync-sends-every-weight-merged#3,4,6",
        "weight-sync/a-wrong-update-is-refused-and-named#1",
    ],
)
@pytest.mark.parametrize(
    ("change", "code", "key"),
    [
        ({"extra": torch.zeros(2)}, "tensor-unknown", "extra"),
        ({"b": None}, "tensor-missing", "b"),
        ({"a": torch.zeros(3, 5)}, "tensor-shape-mismatch", "a"),
        ({"b": torch.zeros(11, dtype=torch.int32)}, "tensor-dtype-mismatch", "b"),
    ],
)
def test_tensors_that_do_not_fit_stop_the_sync_before_the_first_byte(start_sender, change, code, key):
    doubles = [NativeDouble(tensors_of(0)) for _ in range(2)]
    sender = start_sender(*doubles)
    wrong = {name: tensor for name, tensor in (tensors_of(1) | change).items() if tensor is not None}
    with refused(code, key):
        sender.check([spec_of(*pair) for pair in wrong.items()])
    assert not any(map(names_called, doubles))
    with refused(code, key) as caught:
        sender.send(wrong.items(), version=1)
    assert caught.value.remedy
    assert all("sync" not in names_called(double) for double in doubles)
    assert sender.check([spec_of(*pair) for pair in tensors_of(1).items()])
    sender.send(tensors_of(1).items(), version=1)
    assert equal(doubles[1].served, tensors_of(1))


@pytest.mark.scenario(
    "weight-sync/a-flipped-bit-is-found",
    clauses=["weight-sync/every-sync-has-a-version-and-is-proven#2,3", "weight-sync/no-request-sees-two-versions#2"],
)
@pytest.mark.parametrize(
    ("faults", "code", "key"),
    [
        ({"flip": "b"}, "digest-mismatch", "b"),
        ({"wrong digest": 1}, "digest-mismatch", "a"),
        ({"refuse": "update-in-progress"}, "update-in-progress", "a"),
        ({"lie": 1}, "sync-unconfirmed", None),
        ({"stall": 4 * TIMEOUT_S}, "transfer-failed", None),
    ],
)
def test_one_server_that_fails_leaves_the_others_on_the_old_version(start_sender, faults, code, key):
    doubles = [NativeDouble(tensors_of(0)) for _ in range(3)]
    doubles[1].faults = faults
    sender, began = start_sender(*doubles), time.monotonic()
    with pytest.raises(RollmatchError) as caught:
        sender.send(tensors_of(1).items(), version=1)
    assert time.monotonic() - began < 15
    assert caught.value.code == code
    assert key in (None, caught.value.key)
    assert len(causes_of(caught.value)) < 10
    if code != "sync-unconfirmed":
        assert all(equal(double.served, tensors_of(0)) for double in doubles)
    doubles[1].faults = {}
    sender.send(tensors_of(2).items(), version=2)
    assert all(equal(double.served, tensors_of(2)) for double in doubles)


def test_a_control_call_is_sent_once(start_sender):
    doubles = [NativeDouble(tensors_of(0)) for _ in range(2)]
    doubles[0].faults = {"refuse": "version-not-newer"}
    with pytest.raises(RollmatchError):
        start_sender(*doubles).send(tensors_of(1).items(), version=1)
    assert [names_called(double).count("sync") for double in doubles] == [1, 1]


def refuse(_body):
    raise Refused("engine-dead")


def test_the_cause_is_named_also_where_the_server_answers_nothing_afterwards(start_sender):
    double = NativeDouble(tensors_of(0))
    sender = start_sender(double)
    sender.send(tensors_of(1).items(), version=1)
    double.faults = {"flip": "b"}
    double.health = refuse
    with refused("digest-mismatch", "b"):
        sender.send(tensors_of(2).items(), version=2)


@pytest.mark.scenario(
    "weight-sync/a-busy-group-port-is-named", clauses=["weight-sync/a-wrong-update-is-refused-and-named#4"]
)
def test_a_busy_group_port_is_named(start_sender):
    double = NativeDouble(tensors_of(0))
    sender = start_sender(double)
    with (
        socket.create_server(("127.0.0.1", sender.rendezvous.port)),
        refused("group-port-in-use", problem=str(sender.rendezvous.port)),
    ):
        began = time.monotonic()
        sender.send(tensors_of(1).items(), version=1)
    assert time.monotonic() - began < 15, "no group of ours held it"
    sender.send(tensors_of(1).items(), version=1)
    assert equal(double.served, tensors_of(1))


@pytest.mark.wide
def test_the_port_of_a_left_group_is_waited_for_as_long_as_a_broadcast_may_take(start_sender):
    """A killed and resumed learner found its own group's port taken: a worker held it for 20 s, and 5 were waited."""
    double = NativeDouble(tensors_of(0))
    double.faults = {"leaving": True}
    sender = start_sender(double)
    assert sender.rendezvous.port_held_s == sender.rendezvous.timeout_s + 5
    with ExitStack() as held:
        held.enter_context(socket.create_server(("127.0.0.1", sender.rendezvous.port)))
        sending = in_thread(sender.send, tensors_of(1).items(), version=1)
        time.sleep(6)
        assert not sending.done()
        held.close()
        sending.result(timeout=30)
    assert equal(double.served, tensors_of(1))


def test_each_group_has_a_secret_of_its_own(start_sender):
    doubles = [NativeDouble(tensors_of(0)) for _ in range(2)]
    for double in doubles:
        start_sender(double).send(tensors_of(1).items(), version=1)
    secrets = {body["secret"] for double in doubles for name, body in double.calls if name == "communicator"}
    assert len(secrets) == 2
    assert min(map(len, secrets)) >= 32


def test_a_call_to_join_waits_longer_than_the_group_so_that_the_server_s_own_error_arrives():
    assert rendezvous(join_timeout_s=30).join_call_timeout_s == 35


@pytest.mark.scenario(clauses=["weight-sync/a-wrong-update-is-refused-and-named#3"])
def test_a_second_learner_is_refused(start_sender):
    double = NativeDouble(tensors_of(0))
    start_sender(double).send(tensors_of(1).items(), version=1)
    with refused("client-already-attached"):
        start_sender(double, client="another").send(tensors_of(2).items(), version=2)
    assert equal(double.served, tensors_of(1))


def test_a_group_that_fails_to_open_at_once_says_why(start_sender, monkeypatch):
    def fail(address, device):
        GlooGroup.open(address).close()  # or the double would wait beyond the test
        raise CommunicatorTimeout("two ranks have one GPU", key="group_port", remedy="Give each its own.")

    sender = start_sender(NativeDouble(tensors_of(0)))
    with monkeypatch.context() as patched:
        patched.setitem(TRANSPORTS, "gloo", replace(TRANSPORTS["gloo"], open=fail))
        with pytest.raises(CommunicatorTimeout) as seen:
            sender.send(tensors_of(1).items(), version=1)
    assert (seen.value.problem, seen.value.key) == ("two ranks have one GPU", "group_port")


def causes_of(error):
    """The chain of causes; one that is a circle has an error twice, and who follows it never ends."""
    chain = []
    while error is not None:
        assert error not in chain
        chain.append(error)
        error = error.__cause__ or error.__context__
    return chain


@pytest.mark.parametrize(("code", "explains"), [("communicator-missing", False), ("digest-mismatch", True)])
def test_an_error_that_only_reports_the_learners_end_is_not_the_cause(code, explains):
    def fail():
        seen = SyncError("a server's", key="x", remedy="Look.")
        seen.code = code
        raise seen

    broken = TransferFailed("ours", key="broadcast", remedy="Look.")
    assert (_cause_of(broken, [BackgroundCall(fail)]) is not broken) == explains
