"""Address of a group, who this process is in it, and what can go wrong while it opens."""

import ipaddress
import socket
import threading
from dataclasses import dataclass
from http import HTTPStatus

from rollmatch.errors import SyncError, first_line

MIN_SECRET, MAX_WORLD_SIZE = 16, 4096


class GroupPortInUse(SyncError):
    """The worker of rank 0 cannot listen at the group's address."""

    code = "group-port-in-use"


class CommunicatorTimeout(SyncError):
    """A rank did not join the group in time."""

    code = "communicator-timeout"


class TransferFailed(SyncError):
    """A transfer did not reach every rank in time."""

    code = "transfer-failed"


class GroupAddressInvalid(SyncError):
    """A group's address lacks its secret, a rank below its world size, or finite time limits."""

    code = "group-address-invalid"
    status = HTTPStatus.BAD_REQUEST


@dataclass(frozen=True, slots=True, kw_only=True)
class GroupAddress:
    """Address of a group, and who this process is in it."""

    host: str
    port: int
    rank: int
    world_size: int
    secret: str = ""
    """At least ``MIN_SECRET`` characters; unused by groups of the swift and trl dialects, whose store has none."""
    timeout_s: float
    """Longest collective."""
    join_timeout_s: float
    source: int | None = None
    """Rank of the learner, from which weights come; None: the last one."""


def check_address(address: GroupAddress) -> None:
    """Errors: ``SyncError`` with code ``group-address-invalid``, before anything is opened."""
    limits = {
        "host": not is_wildcard(address.host),
        "secret": len(address.secret) >= MIN_SECRET,
        "world_size": 1 <= address.world_size <= MAX_WORLD_SIZE,
        "rank": 0 <= address.rank < address.world_size,
        "timeout_s": 0 < address.timeout_s < threading.TIMEOUT_MAX,
        "join_timeout_s": 0 < address.join_timeout_s < threading.TIMEOUT_MAX,
    }
    for key, holds in limits.items():
        if not holds:
            raise GroupAddressInvalid("is out of range", key=key, remedy="See CommunicatorRequest for the ranges.")


def is_wildcard(host: str) -> bool:
    """Whether a host stands for every interface.

    >>> [is_wildcard(host) for host in ("0.0.0.0", "::", "127.0.0.1", "example.org")]
    [True, True, False, False]
    """
    try:
        return ipaddress.ip_address(host).is_unspecified
    except ValueError:
        return False


def bind(host: str, port: int) -> socket.socket:
    """A socket that listens at exactly this address. Errors: ``GroupPortInUse``."""
    family = socket.AF_INET6 if ":" in host else socket.AF_INET
    listener = socket.socket(family, socket.SOCK_STREAM)
    try:
        listener.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        listener.bind((host, port))
        listener.listen()
    except OSError as error:
        listener.close()
        raise GroupPortInUse(
            f"cannot listen at {host}:{port}: {error.strerror or error}",
            key=f"group_port {port}",
            remedy="Choose a free group port on the first rollout server's machine.",
        ) from error
    return listener


def own_address(host: str, port: int) -> str:
    """The address of this machine's interface that leads to a host.

    >>> own_address("127.0.0.1", 51216)
    '127.0.0.1'
    """
    family = socket.AF_INET6 if ":" in host else socket.AF_INET
    with socket.socket(family, socket.SOCK_DGRAM) as probe:
        probe.connect((host, port))
        own: str = probe.getsockname()[0]
    return own


def not_joined(address: GroupAddress, problem: object) -> CommunicatorTimeout:
    """The error for a group that does not come about."""
    return CommunicatorTimeout(
        f"rank {address.rank} of {address.world_size} saw no complete group at {address.host}:{address.port} "
        f"(limit {address.join_timeout_s:g} s): {first_line(problem)}",
        key=f"group_port {address.port}",
        remedy="Let every server and the learner open the communicator with the same host, port and world size.",
    )
