"""What the server counts, for Prometheus."""

import asyncio
import time
from collections.abc import Callable
from functools import partial

from prometheus_client import CollectorRegistry, Counter, Gauge, Histogram, generate_latest
from prometheus_client.exposition import CONTENT_TYPE_LATEST

from rollmatch.server.communicator import Communicator
from rollmatch.server.engine_pool import EnginePool

_LOOK_S = 0.01


class Metrics:
    """One registry per server, so that two in one process do not share names."""

    content_type = CONTENT_TYPE_LATEST

    def __init__(self, pool: EnginePool, communicator: Communicator) -> None:
        self.registry = CollectorRegistry()
        named: dict[str, tuple[str, Callable[[], float]]] = {
            "running_requests": ("Responses being written or waiting", lambda: pool.num_running),
            "policy_version": ("Version of the served weights", lambda: pool.update.policy_version),
            "alive": ("1 while every worker is", lambda: float(not pool.is_dead)),
            "generated_tokens": ("Response tokens since the start", lambda: pool.num_generated_tokens),
            "restarted_requests": ("Responses generated again because of a commit", lambda: pool.num_restarted),
            "group_members": ("Members of the open weight group", lambda: communicator.num_members),
        }
        for name, (text, value) in named.items():
            Gauge(f"rollmatch_{name}", text, registry=self.registry).set_function(value)
        by_replica = Gauge("rollmatch_replica_tokens", "The same of each replica", ["replica"], registry=self.registry)
        for index in range(len(pool.replicas)):
            by_replica.labels(index).set_function(partial(pool.tokens_by_replica.__getitem__, index))
        self.requests = Counter(
            "rollmatch_requests", "Calls by route and status", ["route", "status"], registry=self.registry
        )
        self.seconds = Histogram(
            "rollmatch_request_seconds",
            "Duration of calls by route",
            ["route"],
            registry=self.registry,
            buckets=(0.01, 0.03, 0.1, 0.3, 1, 3, 10, 30, 100, 300),
        )

        buckets = (0.005, 0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1, 2.5, 5, 10, 30)
        text = "How long the event loop kept others waiting, looked at a hundred times a second"
        self.turns = Histogram("rollmatch_turn_seconds", text, registry=self.registry, buckets=buckets)
        text = "Processor time of the event loop in these waits: less where other processes had the processor"
        self.worked = Histogram("rollmatch_turn_cpu_seconds", text, registry=self.registry, buckets=buckets)

    async def watch_turns(self) -> None:
        """Runs beside the server."""
        while True:
            began, worked = time.perf_counter(), time.thread_time()
            await asyncio.sleep(_LOOK_S)
            self.turns.observe(waited := max(0.0, time.perf_counter() - began - _LOOK_S))
            self.worked.observe(min(waited, time.thread_time() - worked))

    def text(self) -> bytes:
        """In Prometheus' text format."""
        return generate_latest(self.registry)
