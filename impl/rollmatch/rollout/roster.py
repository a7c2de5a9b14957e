"""Servers that join and leave a running job, by a list that is read again before each sync.

Rank 0 reads the list and shares it, every rank connects to what is new, and a server joins where all ranks reached it.
Nothing that is wrong with the list or with a new server ends the run: the servers before it stay.
"""

import logging
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial
from typing import NamedTuple

from rollmatch.config.servers import ServerAddress
from rollmatch.config.servers_file import SERVERS_FILE
from rollmatch.dialects.calls import BackgroundCall
from rollmatch.dialects.session import HEALTH_TIMEOUT_S, RolloutServer
from rollmatch.errors import ConfigError, LaunchError, RollmatchError
from rollmatch.journal import Journal
from rollmatch.ranks import Ranks
from rollmatch.rollout.members import ServerLost, ServerMembers

LOG = logging.getLogger("rollmatch.rollout")


class RosterProblem(NamedTuple):
    """Why a change of the list is not followed."""

    code: str
    problem: str
    remedy: str

    @classmethod
    def of(cls, error: RollmatchError) -> "RosterProblem":
        """An error as all ranks can share it."""
        return cls(error.code, f"{error.key}: {error.problem}", error.remedy)


class Newcomer(NamedTuple):
    """A server that may join."""

    server: RolloutServer
    policy_version: int
    """That it holds, from this learner or another one."""


@dataclass(frozen=True, slots=True, kw_only=True)
class RosterRules:
    """How the list is read and who may join. Made by ``run.joining``."""

    read: Callable[[], Sequence[ServerAddress]]
    """The list as it is now. Errors: ``ConfigError``, ``LaunchError``."""
    admit: Callable[[ServerAddress], RolloutServer]
    """Connect to a server and check it; called in threads. Errors: ``RollmatchError``."""
    min_servers: int | None
    """None holds a run to all servers that have joined, and the list to one."""


class ServerRoster:
    """The list of a job's servers as it is followed."""

    def __init__(
        self,
        members: ServerMembers,
        addresses: Sequence[ServerAddress],
        rules: RosterRules,
        *,
        ranks: Ranks,
        journal: Journal | None,
    ) -> None:
        """``addresses``: of the members."""
        self.members = members
        self.rules = rules
        self._ranks = ranks
        self._journal = journal
        self._indices = {address: index for index, address in enumerate(addresses)}
        self._known: frozenset[RosterProblem] = frozenset()

    def update(self, *, is_read: bool) -> list[int]:
        """Let servers join and leave, on all ranks alike; returns the versions that the new ones hold.

        Called by all ranks at once, without calls under way; the list is read where ``is_read`` holds on rank 0.
        """
        mine = self._read_list() if is_read and self._ranks.is_primary else None
        shared = self._ranks.gather((mine, self.members.lost))
        listed, lost = shared[0][0], frozenset().union(*(of_rank for _, of_rank in shared))
        if listed is None:
            return []
        if isinstance(listed, RosterProblem):
            self._say([listed])
            return []
        joined, problems = self._connect([address for address in listed if address not in self._indices])
        leaving = [address for address in self._indices if address not in listed]
        num_stay = sum(index not in lost for address, index in self._indices.items() if address in listed)
        if problem := self._too_few(leaving, num_left=num_stay + len(joined)):
            problems, leaving = [*problems, problem], []
        for address in leaving:
            self.members.remove(self._indices.pop(address))
        self._indices |= {address: self.members.add(one.server) for address, one in joined.items()}
        self.members.min_servers = self.rules.min_servers or len(self._indices)
        for address in leaving:
            self._tell("server_left", address)
        for address, one in joined.items():
            self._tell("server_joined", address, policy_version=one.policy_version)
        self._say(problems)
        return [one.policy_version for one in joined.values()]

    def _read_list(self) -> Sequence[ServerAddress] | RosterProblem:
        try:
            return self.rules.read()
        except (ConfigError, LaunchError) as error:
            return RosterProblem.of(error)

    def _too_few(self, leaving: Sequence[ServerAddress], *, num_left: int) -> RosterProblem | None:
        """Why the ``leaving`` must stay: the rest is lost, or has not joined yet."""
        fewest = self.rules.min_servers or 1
        if not leaving or num_left >= fewest:
            return None
        urls = ", ".join(address.base_url for address in leaving)
        problem = f"{urls} cannot leave yet: {num_left} servers would be left, {fewest} are needed"
        remedy = "List servers that are ready, or lower min_servers."
        return RosterProblem.of(ServerLost(problem, code="servers-file-too-short", key=SERVERS_FILE, remedy=remedy))

    def _connect(self, wanted: Sequence[ServerAddress]) -> tuple[dict[ServerAddress, Newcomer], list[RosterProblem]]:
        """The servers that every rank could connect to; the others are tried again with the next list."""
        if not wanted:
            return {}, []
        calls = [BackgroundCall(partial(self._meet, address)) for address in wanted]
        found = [_outcome_of(call) for call in calls]
        failed = self._ranks.gather([one if isinstance(one, RosterProblem) else None for one in found])
        joined, problems = dict[ServerAddress, Newcomer](), list[RosterProblem]()
        for address, one, *of_ranks in zip(wanted, found, *failed, strict=True):
            if isinstance(one, Newcomer) and not any(of_ranks):
                joined[address] = one
            else:
                problems += [problem for problem in of_ranks if problem is not None][:1]
        return joined, problems

    def _meet(self, address: ServerAddress) -> Newcomer:
        server = self.rules.admit(address)
        return Newcomer(server, server.health(timeout_s=HEALTH_TIMEOUT_S).get("policy_version", 0))

    def _tell(self, event: str, address: ServerAddress, **fields: int) -> None:
        if not self._ranks.is_primary:
            return
        num_present = len(self.members.present)
        if self._journal is not None:
            self._journal.write(event, server=address.base_url, num_present=num_present, **fields)
        LOG.warning("%s: %s (%d take part)", event.replace("_", " "), address.base_url, num_present)

    def _say(self, problems: Sequence[RosterProblem]) -> None:
        """Announce what was not announced after the last reading."""
        for problem in problems if self._ranks.is_primary else ():
            if problem not in self._known:
                if self._journal is not None:
                    self._journal.write("servers_kept", code=problem.code, problem=problem.problem)
                LOG.warning("servers_file: [%s] %s. %s", *problem)
        self._known = frozenset(problems)


def _outcome_of(call: BackgroundCall[Newcomer]) -> Newcomer | RosterProblem:
    try:
        return call.result()
    except RollmatchError as error:
        return RosterProblem.of(error)
