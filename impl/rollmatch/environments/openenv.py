"""Environments of OpenEnv servers by URL: a session over a WebSocket for each episode.

Protocol: openenv-core 0.3.0 ``env_server/http_server.py``, route ``/ws`` (its ``/reset`` and ``/step`` keep no state).
A session cannot be copied: a clone opens one of its own when it takes its first step, resets it with the same seed and
replays the actions. Leave ``environment.processes`` at 0: workers would replay every step.
"""

import asyncio
import copy
import json
from collections.abc import Hashable
from typing import Any

import numpy as np

from rollmatch.environments.environment import ActionUnparsable
from rollmatch.errors import TargetError
from rollmatch.records import Sample

_MAX_SEED = 2**31
_OWN_FIELDS = ("done", "reward", "metadata")
"""Of every observation; not shown."""


class OpenEnv:
    """An episode at a server, with ``reset`` and ``step`` as coroutines.

    A turn's text is the field ``action`` of the action. What the policy reads is the field ``observation``; None: the
    whole observation as JSON. The sample's metadata go to the server's ``reset``, which takes what it knows.
    """

    def __init__(self, url: str, *, action: str = "message", observation: str | None = None) -> None:
        self._url = f"{url.rstrip('/').replace('http', 'ws', 1)}/ws"
        self._action, self._observation = action, observation
        self._settings: dict[str, Any] = {}
        self._history: tuple[tuple[str, str], ...] = ()
        """(action, observation) since the beginning; the first action is empty."""
        self._socket: Any = None

    async def reset(self, sample: Sample, rng: np.random.Generator) -> str:
        """Open a session. Errors: what the server and the connection fail with."""
        self._settings = {**sample.metadata, "seed": int(rng.integers(_MAX_SEED))}
        self._history = (("", await self._begin()),)
        return self._history[0][1]

    async def step(self, action: str) -> tuple[str, float, bool, bool]:
        """As the protocol. Errors: ``ActionUnparsable`` where the server validates no such action."""
        if self._socket is None:
            await self._replay()
        reply = await self._ask("step", {self._action: action})
        shown, is_done = self._shown(reply), bool(reply.get("done"))
        self._history += ((action, shown),)
        if is_done:
            await self._socket.close()
        return shown, float(reply.get("reward") or 0.0), is_done, False

    def clone(self, rng: np.random.Generator) -> "OpenEnv":
        """The same history, without a session; chance is the server's, by the seed."""
        twin = copy.copy(self)
        twin._socket = None
        return twin

    def fingerprint(self) -> Hashable:
        """Seed, actions and observations so far."""
        return self._settings.get("seed"), self._history

    def __getstate__(self) -> dict[str, Any]:
        return self.__dict__ | {"_socket": None}

    def __del__(self) -> None:
        if getattr(self, "_socket", None) is not None and self._loop.is_running():
            asyncio.run_coroutine_threadsafe(self._socket.close(), self._loop)

    async def _begin(self) -> str:
        from websockets.asyncio.client import connect

        self._socket, self._loop = await connect(self._url, proxy=None), asyncio.get_running_loop()
        return self._shown(await self._ask("reset", self._settings))

    async def _replay(self) -> None:
        shown = await self._begin()
        for number, (action, observation) in enumerate(self._history):
            if number:
                shown = self._shown(await self._ask("step", {self._action: action}))
            if shown != observation:
                problem = f"{shown!r} after {action!r}, where {observation!r} was shown before"
                remedy = "Let the server's chance depend on the seed of reset alone."
                raise TargetError(problem, code="replay-differs", key="custom.extra.environment.name", remedy=remedy)

    async def _ask(self, kind: str, data: dict[str, Any]) -> dict[str, Any]:
        await self._socket.send(json.dumps({"type": kind, "data": data}))
        reply = json.loads(await self._socket.recv())
        found: dict[str, Any] = reply["data"]
        if reply["type"] == "error":
            if found.get("code") == "VALIDATION_ERROR" and kind == "step":
                raise ActionUnparsable(f"the server takes no action {data!r:.200}: {found.get('errors')!r:.200}")
            raise RuntimeError(f"{self._url}: {found.get('code')}: {found.get('message')}")
        return found

    def _shown(self, reply: dict[str, Any]) -> str:
        observation = reply["observation"]
        if self._observation is not None:
            return str(observation[self._observation])
        shown = {name: value for name, value in observation.items() if name not in _OWN_FIELDS}
        return json.dumps(shown, ensure_ascii=False)
