"""Servers and learners that were started again: between two syncs nothing is lost, in a sync it is an error."""

from conformance.doubles.native_double import NativeDouble, Refused, equal, names_called, tensors_of
from conformance.doubles.refusals import refused
from rollmatch.dialects.native.sender import NativeSender


def test_a_restarted_server_is_joined_again(start_sender):
    doubles = [NativeDouble(tensors_of(0)) for _ in range(2)]
    sender = start_sender(*doubles)
    sender.send(tensors_of(1).items(), version=1)
    doubles[1].restart(tensors_of(0))
    sender.send(tensors_of(2).items(), version=2)
    assert all(equal(double.served, tensors_of(2)) for double in doubles)
    assert [double.policy_version for double in doubles] == [2, 2]


def test_a_transfer_that_broke_is_an_error_even_if_its_server_is_back_by_then(start_sender):
    """The fence repeats it as a newer version, and writes that down."""
    double = NativeDouble(tensors_of(0))
    sender, receive = start_sender(double), double.receive
    sender.send(tensors_of(1).items(), version=1)

    def die(_body):
        double.restart(tensors_of(0))
        raise Refused("transfer-failed")

    double.receive = die
    with refused("transfer-failed"):
        sender.send(tensors_of(2).items(), version=2)
    double.receive = receive
    assert names_called(double).count("communicator") == 1
    sender.send(tensors_of(2).items(), version=3)
    assert equal(double.served, tensors_of(2))


def test_a_learner_that_was_started_again_takes_the_place_of_its_dead_self(start_sender):
    doubles = [NativeDouble(tensors_of(0)) for _ in range(2)]
    dead = start_sender(*doubles)
    dead.send(tensors_of(1).items(), version=1)
    dead.close = lambda: None  # killed: it sent no message, and its sockets are closed
    rendezvous, dead._group = dead.rendezvous, None
    again = NativeSender(dead.servers, rendezvous, stage=False)
    again.send(tensors_of(2).items(), version=2)
    assert all(equal(double.served, tensors_of(2)) for double in doubles)
    again.close()
