"""Learner ranks on several machines, by torchrun's words: ``--nnodes``, ``--node-rank``, ``--rdzv-endpoint``.

The rendezvous is torchrun's static one: its store listens at the endpoint on node 0 for launchers and ranks, so that
the only port is known in advance. Ranks are numbered by ``--node-rank``. Imports no torch.
"""

import argparse
import os
import socket
from collections.abc import Mapping
from dataclasses import dataclass
from urllib.parse import urlsplit

import psutil

from rollmatch.config.connection import is_loopback
from rollmatch.errors import LaunchError

GLOO_INTERFACE = "GLOO_SOCKET_IFNAME"
WORDS = ("--nnodes", "--node-rank", "--rdzv-endpoint")
_FORM = "Write the host and port of node 0, such as 10.0.0.1:29500, node0:29500 or [fd00::1]:29500."


@dataclass(frozen=True, slots=True, kw_only=True)
class Nodes:
    """This machine among those of the learner."""

    nnodes: int
    node_rank: int
    host: str
    """Of node 0, as the user wrote it, without brackets."""
    port: int

    @property
    def torchrun_words(self) -> list[str]:
        """Its address as torchrun's argument."""
        host = f"[{self.host}]" if ":" in self.host else self.host
        words = zip(WORDS, (str(self.nnodes), str(self.node_rank), f"{host}:{self.port}"))
        return ["--rdzv-backend", "static", *(part for pair in words for part in pair)]


@dataclass(frozen=True, slots=True, kw_only=True)
class Placement:
    """Where the learner's processes run: one per GPU of this machine, and as many on each other machine."""

    gpus: tuple[str, ...] = ()
    """Empty: one process, which sees all of them."""
    nodes: Nodes | None = None
    """None: this machine only."""

    @property
    def num_processes(self) -> int:
        """On this machine."""
        return max(1, len(self.gpus))

    @property
    def world_size(self) -> int:
        """On all machines."""
        return self.num_processes * (1 if self.nodes is None else self.nodes.nnodes)

    @property
    def is_launched(self) -> bool:
        """Whether torchrun starts the processes."""
        return self.num_processes > 1 or self.nodes is not None


def nodes_of(options: argparse.Namespace) -> Nodes | None:
    """The machines that options name, or None.

    Errors: ``LaunchError`` with ``nodes-incomplete``, ``out-of-range``, ``rdzv-endpoint-invalid``.
    """
    given = dict(zip(WORDS, (options.nnodes, options.node_rank, options.rdzv_endpoint)))
    missing = [word for word, value in given.items() if value is None]
    if len(missing) == len(WORDS):
        return None
    if missing:
        problem = f"is missing, but {' and '.join(word for word in WORDS if word not in missing)} is set"
        remedy = "Start every machine with --nnodes N --node-rank R --rdzv-endpoint HOST:PORT; only R differs."
        raise LaunchError(problem, code="nodes-incomplete", key=missing[0], remedy=remedy)
    if options.nnodes < 1:
        raise LaunchError(f"is {options.nnodes}", code="out-of-range", key="--nnodes", remedy="Write 1 or more.")
    if not 0 <= options.node_rank < options.nnodes:
        remedy = f"Number the machines from 0 to {options.nnodes - 1}."
        raise LaunchError(f"is {options.node_rank}", code="out-of-range", key="--node-rank", remedy=remedy)
    host, port = _parse_endpoint(options.rdzv_endpoint)
    return Nodes(nnodes=options.nnodes, node_rank=options.node_rank, host=host, port=port)


def _parse_endpoint(text: str) -> tuple[str, int]:
    """Host and port. Errors: ``rdzv-endpoint-invalid``.

    >>> _parse_endpoint("[fd00::1]:29500"), _parse_endpoint("node0:29500")
    (('fd00::1', 29500), ('node0', 29500))
    """
    try:
        url = urlsplit(f"//{text}")
        host, port = url.hostname or "", url.port or 0
        is_exact = text in (f"{host}:{port}", f"[{host}]:{port}") or text.lower() == f"{host}:{port}"
    except ValueError:  # a port that is no number, a bracket that is not closed
        host, port, is_exact = "", 0, False
    if not (host and port and is_exact) or (":" in host) != text.startswith("["):
        raise LaunchError(f"is {text!r}", code="rdzv-endpoint-invalid", key="--rdzv-endpoint", remedy=_FORM)
    return host, port


def check_endpoint(nodes: Nodes) -> str:
    """Look the endpoint up; returns the name of this machine's interface that leads there.

    Errors: ``LaunchError`` with ``rdzv-endpoint-unknown`` where no address belongs to the name,
    ``rdzv-endpoint-elsewhere`` on node 0 where the address is another machine's, or a name's loopback address (many
    systems list their own name with 127.0.1.1), ``port-in-use``.
    """
    key, shown = "--rdzv-endpoint", f"{nodes.host}:{nodes.port}"
    try:
        family, kind, _, _, address = socket.getaddrinfo(nodes.host, nodes.port, type=socket.SOCK_STREAM)[0]
        with socket.socket(family, socket.SOCK_DGRAM) as probe:
            probe.connect(address)
            own = probe.getsockname()[0]
    except OSError as error:
        problem = f"{shown} cannot be reached from here: {error.strerror or error}"
        remedy = "Name machine 0 as this machine knows it, or by its address."
        raise LaunchError(problem, code="rdzv-endpoint-unknown", key=key, remedy=remedy) from error
    if nodes.node_rank == 0:
        at = str(address[0])
        is_near = is_loopback(at)
        if (is_near and not is_loopback(nodes.host)) or (own != at and not is_near):
            problem = f"{shown} is {at} here, which {'others cannot reach' if is_near else 'is another machine'}"
            remedy = "Start node rank 0 on the machine that the endpoint names, by an address that all others reach."
            raise LaunchError(problem, code="rdzv-endpoint-elsewhere", key=key, remedy=remedy)
        _check_free(family, kind, address)
    interfaces = psutil.net_if_addrs().items()
    return next((name for name, held in interfaces if any(one.address.split("%")[0] == own for one in held)), "")


def _check_free(family: int, kind: int, address: tuple[object, ...]) -> None:
    with socket.socket(family, kind) as probe:
        probe.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        try:
            probe.bind(address)
        except OSError as error:
            problem, remedy = f"port {address[1]} is taken: {error.strerror or error}", "Choose a free port."
            raise LaunchError(problem, code="port-in-use", key="--rdzv-endpoint", remedy=remedy) from error


def interface_variables(interface: str) -> Mapping[str, str]:
    """The interface that gloo listens at, unless the user has set one or the machines are one: gloo would else take
    the address of the machine's name, which many systems map to loopback."""
    return {GLOO_INTERFACE: interface} if interface and not os.environ.get(GLOO_INTERFACE) else {}
