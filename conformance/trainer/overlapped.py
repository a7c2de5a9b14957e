"""A trainer whose rollouts are made beside it: servers that are a copy of the policy, in this process."""

import copy
import dataclasses
import threading

from conformance.trainer.small_run import make_trainer
from rollmatch.rollout.fence import Fence
from rollmatch.rollout.hf import HfBackend
from rollmatch.rollout.phase import Ahead, Lockstep, Stream
from rollmatch.rollout.prefetch import Prefetch, PrefetchRules


class CopyServers:
    """Two servers that share one copy of the policy; ``before_call`` is told (server, sample ids) in the caller's
    thread, ``events`` are syncs and calls in the order they began and ended."""

    num_servers = 2

    def __init__(self, trainer):
        self.policy = trainer.model
        self.held = HfBackend(copy.deepcopy(trainer.model).eval(), trainer.source.template, batch_size=8)
        self.lock, self.events = threading.Lock(), []
        self.before_call = lambda server, ids: None
        self.is_well = lambda: True

    @property
    def policy_version(self):
        return self.held.policy_version

    def rest(self):
        pass

    def push(self, weights, *, version):
        self.events.append(("sync", version))
        self.held.model.load_state_dict(self.policy.state_dict())
        self.held.push(weights, version=version)

    def is_current(self):
        return self.is_well()

    def generate(self, requests, decoding):
        self.events.append(("whole", self.policy_version, [request.sample.sample_id for request in requests]))
        return self._write(requests, decoding)

    def _write(self, requests, decoding):
        with self.lock:
            return self.held.generate(requests, decoding)

    def generate_on(self, server_index, requests, decoding, *, start):
        ids = [request.sample.sample_id for request in requests]
        self.events.append(("call", self.policy_version, ids))
        self.before_call(server_index, ids)
        rollouts = self._write(requests, decoding)
        self.events.append(("answer", self.policy_version, ids))
        return rollouts


def overlapped(folder, mode, *overrides, max_staleness=1, lead=None, pieces=1, callers=4, **arguments):
    """The trainer and its servers; ``mode`` as in the configuration."""
    trainer = make_trainer(folder, *overrides, **arguments)
    servers = CopyServers(trainer)
    lead = max_staleness if lead is None else lead
    fence = Fence(servers, trainer.source.ranks, trainer.source.journal)
    if mode != "off":
        rules = PrefetchRules(
            max_windows=1 if mode == "stream" else lead + 1, callers_per_server=callers, pieces_per_server=pieces
        )
        prefetch = Prefetch(servers, trainer.source.decoding, rules)
        fence.quiet = prefetch.quiet
    source = trainer.source = dataclasses.replace(trainer.source, fence=fence)
    if mode == "ahead":
        trainer.overlap = Ahead(source, prefetch, max_staleness=max_staleness, lead=lead)
    else:
        trainer.overlap = Stream(source, prefetch) if mode == "stream" else Lockstep(source)
    return trainer, servers
