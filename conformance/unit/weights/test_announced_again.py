"""What servers are asked and sent in a sync: all tensors once in a group, and the name of that afterwards."""

import pytest

from conformance.doubles.native_double import NativeDouble, equal, tensors_of
from conformance.doubles.refusals import refused


@pytest.mark.parametrize("late_s", [0.0, 0.4])
def test_identity_is_requested_once_and_health_only_of_a_late_server(start_sender, late_s):
    doubles = [NativeDouble(tensors_of(0)) for _ in range(2)]
    sender = start_sender(*doubles)
    for version in (1, 2):
        for double in doubles:
            double.calls, double.faults = [], {"late": late_s if version == 2 else 0.0}
        sender.send(tensors_of(version).items(), version=version)
        asked = [{name for name, _ in double.calls if name in ("health", "identity")} for double in doubles]
        if version == 1:
            assert all("identity" in names for names in asked)
        elif late_s:
            assert asked == [{"health"}] * 2
        else:
            assert all(names <= {"health"} for names in asked)
        assert sender.instances == ("0", "0")


def announced_by(double):
    """Names of the calls that announce, and how many tensors each names."""
    return [(name, len(body.get("tensors", ()))) for name, body in double.calls if name in ("sync", "sync_again")]


def test_tensors_are_announced_once_in_a_group_and_by_name_afterwards(start_sender):
    double = NativeDouble(tensors_of(0))
    sender, num = start_sender(double), len(tensors_of(0))
    for version in (1, 2, 3):
        sender.send(tensors_of(version).items(), version=version)
        assert equal(double.served, tensors_of(version))
    assert announced_by(double) == [("sync", num), ("sync_again", 0), ("sync_again", 0)]
    sender.close()
    sender.send(tensors_of(4).items(), version=4)
    assert announced_by(double)[3:] == [("sync", num)]


def test_a_server_without_the_route_gets_all_tensors(start_sender):
    doubles = [NativeDouble(tensors_of(0)) for _ in range(2)]
    doubles[1].faults = {"lacks": ["/native/sync/again"]}
    sender = start_sender(*doubles)
    for version in (1, 2):
        sender.send(tensors_of(version).items(), version=version)
    assert [announced_by(double) for double in doubles] == [[("sync", len(tensors_of(0)))] * 2] * 2


def test_other_tensors_are_announced_in_full(start_sender):
    double = NativeDouble(tensors_of(0))
    sender = start_sender(double)
    sender.send(tensors_of(1).items(), version=1)
    sender.send(reversed(list(tensors_of(2).items())), version=2)
    assert [name for name, _ in announced_by(double)] == ["sync", "sync"]
    assert equal(double.served, tensors_of(2))


@pytest.mark.parametrize(("name", "value"), [("protocol", 0), ("digest", "crc32")])
def test_a_server_of_another_protocol_is_refused(start_sender, name, value):
    double = NativeDouble(tensors_of(0))
    described = double.identity
    double.identity = lambda body: described(body) | {name: value}
    sender = start_sender(double)
    with refused("protocol-unknown"):
        sender.send(tensors_of(1).items(), version=1)
    double.identity = described
    sender.send(tensors_of(1).items(), version=1)
