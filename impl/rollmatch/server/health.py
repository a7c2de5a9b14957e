"""The answer of ``/health/``, which may be read from any thread."""

import time
from http import HTTPStatus

from rollmatch.records import rounded
from rollmatch.server.failures import WorkerDead, failure_of
from rollmatch.server.replica import dead
from rollmatch.server.state import ServerState

STALLED_S = 120.0
"""Silence of the event loop after which the server says that it is stalled."""


def health_of(server: ServerState) -> tuple[int, dict[str, object]]:
    """HTTP status and body: 200, or 503 where a worker is dead or the event loop does not turn any more."""
    pool = server.pool
    lag_s = max(0.0, time.monotonic() - pool.turned_at)
    about = {
        "status": "ok",
        "state": pool.update.word,
        "policy_version": pool.update.policy_version,
        "replicas": len(pool.replicas),
        "world_size": server.settings.world_size,
        "running": pool.num_running,
        "progress": pool.num_generated_tokens + pool.num_unfinished_tokens,
        "calls": pool.progress.idle_s(),
        "lag_s": rounded(lag_s),
        "instance": server.instance,
        "gpus": list(server.settings.gpus),
    }
    if pool.is_dead or any(replica.is_dead() for replica in pool.replicas):
        return HTTPStatus.SERVICE_UNAVAILABLE, about | failure_of(dead()).model_dump() | {"status": "dead"}
    if lag_s > STALLED_S:
        return HTTPStatus.SERVICE_UNAVAILABLE, about | stalled_failure(f"for {lag_s:.0f} s")
    return HTTPStatus.OK, about


def stalled_failure(how_long: str = "for too long") -> dict[str, object]:
    """What health says of a server that does nothing any more."""
    stalled = WorkerDead(
        f"the event loop has not turned {how_long}", key="worker", remedy="Restart the server, then sync."
    )
    return failure_of(stalled).model_dump() | {"status": "stalled"}
