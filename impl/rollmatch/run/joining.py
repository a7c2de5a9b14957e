"""From ``vllm.server.servers_file`` to servers that may join a running job."""

from collections.abc import Callable, MutableMapping, Sequence
from dataclasses import dataclass
from functools import partial

from rollmatch.config import RunConfig
from rollmatch.config.server_rules import read_servers
from rollmatch.config.servers import ServerAddress, server_section
from rollmatch.config.servers_file import SERVERS_FILE
from rollmatch.dialects.native.group import read_identity, resolve
from rollmatch.dialects.sender import WeightSender
from rollmatch.dialects.session import HEALTH_TIMEOUT_S, ClientSettings, RolloutServer
from rollmatch.errors import ConfigError, SyncError
from rollmatch.journal import Journal
from rollmatch.ranks import Ranks
from rollmatch.rollout.members import ServerMembers
from rollmatch.rollout.roster import RosterRules, ServerRoster
from rollmatch.run.server_checks import check_server, check_servers_reachable, learner_gpus
from rollmatch.weights.plan import Spec


@dataclass(frozen=True, slots=True, kw_only=True)
class Admission:
    """What a server that wants to join is compared with."""

    config: RunConfig
    settings: ClientSettings
    members: ServerMembers
    places: MutableMapping[RolloutServer, ServerAddress]
    """Of all servers that took part at any time."""
    sender_to: Callable[[Sequence[RolloutServer]], WeightSender]
    specs: Sequence[Spec] | None
    """The policy's tensors, on rank 0; None where they are not compared."""

    def admit(self, address: ServerAddress, *, is_primary: bool) -> RolloutServer:
        """Connect to a server that is healthy now; rank 0 compares it with the configuration and with the others.

        Errors: those of ``RolloutServer.connect``, ``check_server``, ``WeightSender.check``; ``dialect-not-elastic``,
        ``group-host-unknown``, ``transports-differ``.
        """
        server = RolloutServer(address.base_url, self.settings)
        health = server.health(timeout_s=HEALTH_TIMEOUT_S)
        server.connect()
        check_dialects([server])
        self.places[server] = address
        if is_primary:
            check_server(server, health, self.config, gpus=learner_gpus())
            _check_group_host(address)
            self._check_transports(server)
        if self.specs is not None:
            self.sender_to([server]).check(self.specs)
        return server

    def _check_transports(self, server: RolloutServer) -> None:
        """A group has one transport, which was chosen for the servers that take part."""
        present = self.members.chosen()[0]
        theirs, ours = (read_identity(one).transports for one in (server, present))
        if theirs != ours:
            problem = f"{server.base_url} has transports {', '.join(theirs)}; {present.base_url} has {', '.join(ours)}"
            remedy = "Start it on the same kind of device, by the same rollmatch."
            raise SyncError(problem, code="transports-differ", key=server.base_url, remedy=remedy)


def _check_group_host(address: ServerAddress) -> None:
    try:
        resolve(address.group_host)
    except OSError as error:
        problem = f"{address.group_host}, the host of the weight group, is not known: {error.strerror or error}"
        remedy = "Name an address of the server's machine in group_host."
        raise ConfigError(problem, code="group-host-unknown", key=address.base_url, remedy=remedy) from error


def make_roster(
    admission: Admission, addresses: Sequence[ServerAddress], ranks: Ranks, journal: Journal | None
) -> ServerRoster:
    """The list of ``servers_file``, followed from ``addresses`` on."""
    config, section = admission.config, server_section(admission.config)

    def read() -> Sequence[ServerAddress]:
        listed = read_servers(section)
        check_servers_reachable(config, addresses=listed)
        return listed

    rules = RosterRules(
        read=read, admit=partial(admission.admit, is_primary=ranks.is_primary), min_servers=section.min_servers
    )
    return ServerRoster(admission.members, addresses, rules, ranks=ranks, journal=journal)


def check_dialects(servers: Sequence[RolloutServer]) -> None:
    """Raise ``dialect-not-elastic`` for a server whose weight group cannot be opened again for other members."""
    for server in servers:
        if server.dialect.name != "native":
            problem = (
                f"{server.base_url} speaks {server.dialect.name}; only servers of the native dialect join and leave"
            )
            remedy = "Name the servers in servers, or start rollmatch serve."
            raise ConfigError(problem, code="dialect-not-elastic", key=SERVERS_FILE, remedy=remedy)
