"""Which of a run's rollout servers take part, and which processes they were at the last sync."""

import threading
import time
from collections.abc import Iterable, Sequence
from typing import TYPE_CHECKING

from rollmatch.dialects.calls import run_all
from rollmatch.dialects.http import CallTimeout, ServerRefused, TransportFailed
from rollmatch.dialects.session import HEALTH_TIMEOUT_S, RolloutServer
from rollmatch.dialects.watch import look
from rollmatch.errors import RolloutError
from rollmatch.ranks import Ranks
from rollmatch.rollout.work_items import Chunk, cut_chunks, first_server

if TYPE_CHECKING:
    from rollmatch.rollout.roster import ServerRoster

POLL_S = 0.25


class ServerLost(RolloutError):
    """A server was lost; its share moves to the others."""

    code = "server-lost"


class ServerMembers:
    """Servers by their index: those of the start in their order, then those that joined.

    A lost one takes no calls and no weights until it is readmitted.
    """

    def __init__(self, servers: Sequence[RolloutServer], ranks: Ranks | None = None) -> None:
        """``ranks``: of the learner that calls them."""
        self.servers, self._ranks = tuple(servers), ranks or Ranks()
        self.min_servers = len(self.servers)
        self.roster: ServerRoster | None = None
        """The list that is read again; None: servers neither join nor leave."""
        self.instances: dict[int, str] | None = None
        """What each present server called itself at the last sync; None: no sync, or one that failed."""
        self.restarted: set[int] = set()
        """Servers without such a name that were gone since the last sync, and may have lost its weights."""
        self._lost: set[int] = set()
        self._gone: set[int] = set()
        """Servers that have left for good; their indices are not used again."""
        self._lock = threading.Lock()

    @property
    def lost(self) -> frozenset[int]:
        """Servers that take no part."""
        return frozenset(self._lost)

    @property
    def present(self) -> tuple[int, ...]:
        """Indices of the servers that take part, ascending."""
        return tuple(index for index in range(len(self.servers)) if index not in self._lost | self._gone)

    def chosen(self) -> tuple[RolloutServer, ...]:
        """The servers that take part."""
        return tuple(self.servers[index] for index in self.present)

    def add(self, server: RolloutServer) -> int:
        """Let another server take part; returns its index. It holds no weights of this learner yet."""
        with self._lock:
            self.servers = (*self.servers, server)
            return len(self.servers) - 1

    def remove(self, server_index: int) -> None:
        """Let a server take no further part."""
        with self._lock:
            self._gone.add(server_index)
            self._lost.discard(server_index)

    def has_left(self, server_index: int) -> bool:
        """Whether a server has left the list for good."""
        return server_index in self._gone

    def leave_out(self, server_index: int) -> bool:
        """Lose a server if enough are left; returns whether it takes no part now. Callable from any thread."""
        with self._lock:
            if server_index not in self._lost and len(self.present) - 1 >= self.min_servers:
                self._lost.add(server_index)
            return server_index in self._lost

    def agree_on(self, lost: Iterable[int]) -> None:
        """Take over the set that all ranks have agreed on. Errors: ``ServerLost``, where too few servers are left."""
        with self._lock:
            self._lost = set(lost) - self._gone
        if len(self.present) < self.min_servers:
            urls = ", ".join(self.servers[index].base_url for index in sorted(self._lost))
            problem = f"{len(self.present)} servers are left, {self.min_servers} are needed; lost: {urls}"
            raise ServerLost(problem, key="vllm.server.min_servers", remedy="Restart them and resume the run.")

    def find_returned(self) -> frozenset[int]:
        """Lost servers that are well again."""
        return frozenset(index for index in self._lost if not self._problem_of(index))

    def wait_until_well(self, budget_s: float) -> bool:
        """Wait until the present servers are well, then lose those that are not; False if too few are left."""
        deadline = time.monotonic() + budget_s
        while ill := [index for index in self.present if self._problem_of(index)]:
            if time.monotonic() >= deadline:
                return all(self.leave_out(index) for index in ill)
            time.sleep(POLL_S)
        return True

    def is_well(self, server_index: int) -> bool:
        """Whether a server's health is good now."""
        return not self._problem_of(server_index)

    def cut(self, num_requests: int, *, start: int = 0) -> list[Chunk]:
        """This rank's contiguous chunks for the present servers; ``start``: index of the first request."""
        present, ranks = self.present, self._ranks
        first = first_server(ranks.rank, ranks.learner_world_size, len(present))
        return [
            Chunk(present[chunk.server_index], chunk.start + start, chunk.stop + start)
            for chunk in cut_chunks(num_requests, len(present), first=first)
        ]

    def read_instances(self) -> dict[int, str]:
        """What each present server calls itself since its start; empty where a dialect has no such name."""
        present = self.present
        return dict(zip(present, run_all(self.servers[index].instance for index in present)))

    def instance_of(self, server_index: int) -> str | None:
        """The same of one server; None where it does not answer."""
        try:
            return self.servers[server_index].instance()
        except (TransportFailed, CallTimeout, ServerRefused):
            return None

    def are_current(self) -> bool:
        """Whether the present servers are the processes that took the last sync."""
        try:
            return not self.restarted and self.instances is not None and self._known() == self.read_instances()
        except (TransportFailed, CallTimeout, ServerRefused):
            return False

    def read_version(self) -> int:
        """The highest policy version of any present server; 0 where a dialect has none."""
        healths = (server.health(timeout_s=HEALTH_TIMEOUT_S) for server in self.chosen())
        return max(health.get("policy_version", 0) for health in healths)

    def _known(self) -> dict[int, str]:
        return {index: name for index, name in (self.instances or {}).items() if index in self.present}

    def _problem_of(self, server_index: int) -> str:
        server = self.servers[server_index]
        return look(server.http, server.path_of("/health"), server.watch).problem
