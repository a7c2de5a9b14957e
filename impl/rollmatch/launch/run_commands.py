"""Command lines of the servers and learners of one run on a cluster."""

import argparse
import json
import os
import secrets
from collections.abc import Sequence
from pathlib import Path
from urllib.parse import urlsplit

from rollmatch.config import RunConfig, load_config
from rollmatch.config.connection import LAST_PORT, base_url_of, is_loopback, listens_at
from rollmatch.config.findings import ROLLOUT_MATCHING
from rollmatch.config.servers import is_named_in_rlhf, pair_servers, server_key, server_section
from rollmatch.errors import LaunchError
from rollmatch.plan.layout import Layout
from rollmatch.server.settings import KEY_VARIABLE

SERVER = "custom.extra.rollout_server"

CHILD_VARIABLES = ("OMP_NUM_THREADS", KEY_VARIABLE)
"""Handed on from this terminal to every node."""


class RunWords:
    """Command lines of a run, once it is known where its servers are."""

    def __init__(self, *, config: RunConfig, options: argparse.Namespace, layout: Layout) -> None:
        self.config, self.options, self.layout = config, options, layout
        self.hosts: Sequence[str] = ()
        self._key = secrets.token_urlsafe(32)
        self._first = pair_servers(server_section(config))[0]

    def settle(self, hosts: Sequence[str]) -> None:
        """Give each server its address.

        Errors: those of the configuration that comes of it, ``host-elsewhere``, ``out-of-range``.
        """
        self.hosts = hosts
        self._check_host()
        num_servers = len(self.layout.servers)
        if max(self._ports(num_servers - 1)) > LAST_PORT:
            problem = f"{num_servers} servers from {self._first.base_url} and {self._first.group_port} on"
            remedy = "Name lower ports: those of the next servers count up."
            raise LaunchError(problem, code="out-of-range", key=server_key(self.config), remedy=remedy)
        load_config(self.options.config, [*self.options.overrides, *self._addresses()])

    @property
    def environment(self) -> dict[str, str]:
        """Variables of all commands; servers that others can reach get a key of this run, unless there is one."""
        given = {name: os.environ[name] for name in CHILD_VARIABLES if name in os.environ}
        if not (all(map(is_loopback, self.hosts)) or self.config.custom.extra.rollout_server.allow_no_key):
            given.setdefault(KEY_VARIABLE, self._key)
        return given

    def url(self, index: int) -> str:
        """Where a server listens."""
        return base_url_of(self.hosts[index], self._ports(index)[0])

    def server(self, index: int, gpus: Sequence[str]) -> list[str]:
        """``rollmatch serve``, behind ``rollmatch``."""
        places = gpus or [str(place) for place in range(self.layout.servers[index])]
        listen = [f"{SERVER}.host={json.dumps(self.hosts[index])}"] if is_loopback(self._host) else []
        return ["serve", *self._shared(*listen), "--server", str(index), "--gpus", ",".join(places)]

    def learner(self, gpus: Sequence[str], *, resume: bool, node: int, endpoint: str) -> list[str]:
        """``rollmatch train`` on a node of the learner, behind ``rollmatch``; the first node holds ``endpoint``."""
        num_ranks, num_nodes = self.layout.ranks_per_node, self.layout.num_learner_nodes
        if num_nodes > 1:
            where = ["--nnodes", str(num_nodes), "--node-rank", str(node), "--rdzv-endpoint", endpoint]
        else:
            where = []
        places = gpus or ([str(place) for place in range(num_ranks)] if num_ranks > 1 else [])
        flags = ["--resume"] if resume or self.options.resume else ["--overwrite"] * self.options.overwrite
        return ["train", *self._shared(), *(["--gpus", ",".join(places)] if places else []), *where, *flags]

    @property
    def _host(self) -> str:
        """Where the YAML has servers listen; at loopback, its default, they listen at their node's address."""
        return self.config.custom.extra.rollout_server.host

    def _check_host(self) -> None:
        elsewhere = [host for host in self.hosts if not (is_loopback(self._host) or listens_at(self._host, host))]
        if elsewhere:
            problem = f"is {self._host}, and a server is placed at {elsewhere[0]}, where it would not listen"
            remedy = "Leave it out: each server listens at its node's address."
            raise LaunchError(problem, code="host-elsewhere", key=f"{SERVER}.host", remedy=remedy)

    def _shared(self, *more: str) -> list[str]:
        overrides = [*self.options.overrides, *self._addresses(), *more]
        return [str(Path(self.options.config).absolute()), *(f"--set={override}" for override in overrides)]

    def _ports(self, index: int) -> tuple[int, int]:
        """HTTP and group: the ones of the YAML's first server, and from there on, as one node may hold several."""
        return (urlsplit(self._first.base_url).port or 8000) + index, self._first.group_port + index

    def _addresses(self) -> list[str]:
        http, group = zip(*map(self._ports, range(len(self.layout.servers))))
        if is_named_in_rlhf(self.config):
            names = ("host", "port", "group_port")
            listed = zip(names, (self.hosts, http, group))
            named = [f"rlhf.vllm_server_{name}={json.dumps(list(values))}" for name, values in listed]
            return ["rlhf.vllm_server_base_url=null", *named]
        section = f"{ROLLOUT_MATCHING}.vllm.server"
        servers = [{"base_url": self.url(index), "group_port": port} for index, port in enumerate(group)]
        return [f"{section}.base_url=null", f"{section}.group_port=null", f"{section}.servers={json.dumps(servers)}"]
