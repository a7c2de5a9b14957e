"""Ranks that follow one list: the first one reads it, and a server joins on all of them or on none."""

from types import SimpleNamespace

import pytest

from conformance.doubles.ranks import together
from rollmatch.config.servers import ServerAddress
from rollmatch.dialects.session import ClientSettings, RolloutServer
from rollmatch.errors import RolloutError
from rollmatch.rollout.members import ServerMembers
from rollmatch.rollout.roster import RosterRules, ServerRoster

A, B, C = (ServerAddress(base_url=f"http://{name}:1", group_port=1) for name in "abc")


class Reached(RolloutServer):
    """Is well, by version 3."""

    def health(self, *, timeout_s):
        return {"policy_version": 3}


def server_of(address):
    return Reached(address.base_url, ClientSettings(timeout_s=5))


@pytest.mark.scenario(clauses=["server-connection/servers-join-and-leave-a-running-job#3,4,8"])
def test_a_server_joins_on_all_ranks_or_on_none():
    reads, written = [], []
    journal = SimpleNamespace(write=lambda event, **fields: written.append((event, fields)))

    def work(member):
        rank = member.rank
        ranks = SimpleNamespace(gather=member.gather, is_primary=rank == 0)

        def read():
            reads.append(rank)
            return [A, B, C]

        def admit(address):
            if rank == 1 and address == B:
                raise RolloutError("no route", key=B.base_url, code="transport-failed")
            return server_of(address)

        members = ServerMembers([server_of(A)])
        rules = RosterRules(read=read, admit=admit, min_servers=None)
        roster = ServerRoster(members, [A], rules, ranks=ranks, journal=journal)
        newest = [roster.update(is_read=rank == 1), roster.update(is_read=rank == 0)]
        return [server.base_url for server in members.chosen()], newest, members.min_servers

    assert together(2, work) == [([A.base_url, C.base_url], [[], [3]], 2)] * 2
    assert reads == [0]
    moves = [fields for event, fields in written if event == "server_joined"]
    assert moves == [{"server": C.base_url, "num_present": 2, "policy_version": 3}]


def test_the_version_is_the_newest_of_all_that_take_part():
    servers = [server_of(address) for address in (A, B, C)]
    for server, version in zip(servers, (1, 3, 2), strict=True):
        server.health = lambda version=version, *, timeout_s: {"policy_version": version}
    members = ServerMembers(servers)
    members.min_servers = 1
    assert members.read_version() == 3
    assert members.leave_out(1)
    assert members.read_version() == 2


@pytest.mark.scenario(clauses=["server-connection/servers-join-and-leave-a-running-job#4,9"])
def test_a_server_that_one_rank_has_lost_counts_on_no_rank():
    def work(member):
        ranks = SimpleNamespace(gather=member.gather, is_primary=member.rank == 0)
        members = ServerMembers([server_of(A), server_of(B)])
        members.min_servers = 1
        rules = RosterRules(read=lambda: [A], admit=server_of, min_servers=1)
        if member.rank == 1:
            assert members.leave_out(0)
        ServerRoster(members, [A, B], rules, ranks=ranks, journal=None).update(is_read=True)
        return members.present

    assert together(2, work) == [(0, 1), (1,)]
