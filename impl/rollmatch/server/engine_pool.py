"""All replicas behind one interface: where each request runs, and what keeps a response under one version."""

import asyncio
import itertools
import time
from collections.abc import AsyncGenerator, AsyncIterator, Callable, Coroutine, Sequence
from contextlib import aclosing, asynccontextmanager
from dataclasses import replace
from functools import partial
from typing import TYPE_CHECKING, Any, TypeVar

from rollmatch.records import joined_runs
from rollmatch.server.failures import Refusal, WorkerFailure
from rollmatch.server.progress import CallProgress
from rollmatch.server.prompts import EnginePrompt, GenerateRequest
from rollmatch.server.replica import EngineOutput, EnginePart, VllmReplica, dead
from rollmatch.server.update import Served, UpdateState

if TYPE_CHECKING:
    from vllm import SamplingParams

_WATCH_S, _ABORT_S = 0.5, 30.0
_T = TypeVar("_T")


class EnginePool:
    """Generate responses on the replicas. All methods run on one event loop."""

    def __init__(self, replicas: Sequence[VllmReplica], *, weights_set: bool = True) -> None:
        self.replicas = tuple(replicas)
        self.update = UpdateState(weights_set=weights_set)
        self.died = asyncio.Event()
        """Set as soon as a replica is dead."""
        self.tokens_by_replica = [0] * len(self.replicas)
        """Response tokens that each has written since the start."""
        self.num_restarted = 0
        self.progress = CallProgress()
        self.turned_at = time.monotonic()
        """When the event loop last ran ``watch``."""
        self._loads = [0] * len(self.replicas)
        self._running: set[asyncio.Task[Any]] = set()
        self._restarted: set[asyncio.Task[Any]] = set()
        self._aborted: set[asyncio.Task[Any]] = set()
        self._moving: set[asyncio.Task[Any]] = set()
        """Those of the running ones that newer weights may continue."""
        self._past_versions: list[int] = []
        """Served when the engines were emptied for the first time, the second time, ..."""
        self._counter = itertools.count()

    @property
    def is_dead(self) -> bool:
        """Whether ``watch`` has found a replica dead."""
        return self.died.is_set()

    @property
    def num_generated_tokens(self) -> int:
        """Of all replicas."""
        return sum(self.tokens_by_replica)

    @property
    def num_unfinished_tokens(self) -> int:
        """Of responses that are being written. Any thread may read it."""
        return sum(sum(replica.unfinished_tokens().values()) for replica in self.replicas)

    @property
    def num_running(self) -> int:
        """Responses that are being written, or wait to be."""
        return sum(self._loads)

    def check(self) -> None:
        """Raise unless responses can be generated. Errors: ``WorkerDead``; as ``UpdateState.check_served``."""
        if self.is_dead or any(replica.is_dead() for replica in self.replicas):
            raise dead()
        self.update.check_served()

    async def generate_all(
        self, requests: Sequence[tuple[EnginePrompt, "SamplingParams"]], *, call_id: str = "", may_move: bool = False
    ) -> list[tuple[EngineOutput, int]]:
        """One response to each prompt, with the oldest version that wrote in it, in order; all or none.

        Errors also: ``Refusal``. ``call_id``: under which ``progress`` follows the responses. ``may_move``: as of
        ``GenerateRequest``.
        """
        self.check()
        places = self.place(len(requests))
        for index in places:  # at once: another call may be placed before all of these have begun
            self._loads[index] += 1
        tasks: list[asyncio.Task[tuple[EngineOutput, int]]] = []
        try:
            for (prompt, params), index in zip(requests, places, strict=True):
                work = self._generate_whole(prompt, params, index, call_id, may_move=may_move)
                tasks.append(asyncio.create_task(work))
                tasks[-1].add_done_callback(partial(self._unload, index))
                await asyncio.sleep(0)  # vLLM prepares a request on the event loop: others get a turn between two
            if tasks:
                await asyncio.wait(tasks, return_when=asyncio.FIRST_EXCEPTION)
            for item, task in enumerate(tasks):
                _raise_failure(task, item)
            return [task.result() for task in tasks]
        finally:
            for index in places[len(tasks) :]:
                self._unload(index)
            for task in tasks:
                task.cancel()
            await asyncio.gather(*tasks, return_exceptions=True)

    def _unload(self, index: int, _: object = None) -> None:
        self._loads[index] -= 1

    def params_of(self, request: GenerateRequest, *, seed: int | None) -> "SamplingParams":
        """As the replicas'; they are alike."""
        return self.replicas[0].params_of(request, seed=seed)

    async def stream(
        self, prompt: EnginePrompt, params: "SamplingParams", *, num_responses: int, **options: Any
    ) -> AsyncGenerator[tuple[EnginePart, int]]:
        """Parts of a call as they are written, and the version that wrote them, which is one for all.

        A call that a commit ends is begun again, unless a part of it was already taken.

        Errors: ``WorkerDead``; ``Refusal``, then with ``policy-changed``.
        """
        (index,) = self.place(1)
        self._loads[index] += num_responses
        try:
            is_whole = has_begun = False
            while not is_whole:
                if has_begun:
                    raise _policy_changed(self.update.policy_version)
                await self.update.resumed.wait()
                self.check()
                version = self.update.policy_version
                writing = partial(self.replicas[index].stream, prompt, params, **options)
                async with aclosing(self._parts(writing, index)) as parts:
                    async for part in parts:
                        has_begun, is_whole = True, part.is_last
                        yield part, version
        finally:
            self._loads[index] -= num_responses

    def place(self, num_requests: int) -> list[int]:
        """Replica of each request: even contiguous blocks, the first ones to the replicas with the least to do.

        Which block goes where depends on nothing but the loads, so that an idle server repeats itself.
        """
        order = sorted(range(len(self.replicas)), key=lambda index: (self._loads[index], index))
        share, extra = divmod(num_requests, len(order))
        blocks = [[index] * (share + (place < extra)) for place, index in enumerate(order)]
        return list(itertools.chain.from_iterable(blocks))

    async def call_all(self, method: str, *arguments: Any) -> list[dict[str, Any]]:
        """Call every worker, in order of rank. Errors: ``WorkerFailure``, ``WorkerDead``."""
        calls = [self._while_alive(replica.call, method, *arguments) for replica in self.replicas]
        return _checked(itertools.chain.from_iterable(await asyncio.gather(*calls)))

    async def call_one(self, index: int, method: str, *arguments: Any) -> list[dict[str, Any]]:
        """Call the workers of one replica. Errors: as ``call_all``."""
        return _checked(await self._while_alive(self.replicas[index].call, method, *arguments))

    async def drain(self, *, within_s: float | None, keep: bool = False) -> int:
        """End the responses that are being written, in a pause; those not done by then are begun again after it.

        ``within_s``: None waits for all. ``keep``: those that may move stay where they are, until ``resuming`` ends.
        Returns how many are begun again.
        """
        staying = self._moving if keep else frozenset()
        if ending := self._running - staying:
            await asyncio.wait(ending, timeout=within_s)
        left = self._being_written() - staying
        self._restarted.update(left)
        await _cancelled(left)
        self.num_restarted += len(left)
        if keep:
            await asyncio.gather(*(self._while_alive(replica.pause) for replica in self.replicas))
        return len(left)

    async def abort(self) -> None:
        """End the responses that are being written; their callers get ``generation-aborted``."""
        ending = self._being_written()
        self._aborted.update(ending)
        await _cancelled(ending)

    def _being_written(self) -> set[asyncio.Task[Any]]:
        """One that is read slowly may be written already."""
        return {task for task in self._running if not task.done()}

    @asynccontextmanager
    async def resuming(self, *, keep: bool) -> AsyncIterator[None]:
        """At its end the served weights continue responses that a ``drain`` kept; where none are served, these end.

        What is served has to be known by then.
        """
        try:
            yield
        finally:
            if keep:
                if self.update.served is Served.BROKEN:
                    await self.drain(within_s=0.0)
                await asyncio.gather(*(self._while_alive(replica.resume) for replica in self.replicas))

    async def reset_caches(self, *, keep: bool = False) -> bool:
        """Forget what older weights computed, on all replicas. ``keep``: after a ``drain`` that kept responses."""
        if keep:
            self._past_versions.append(self.update.policy_version)
        calls = [replica.empty_caches if keep else replica.reset_caches for replica in self.replicas]
        return all(await asyncio.gather(*map(self._while_alive, calls)))

    async def watch(self) -> None:
        """Runs beside the server: a dead replica ends all that waits for it."""
        while not any(replica.is_dead() for replica in self.replicas):
            self.turned_at = time.monotonic()
            self.progress.look([replica.unfinished_tokens() for replica in self.replicas], self.tokens_by_replica)
            await asyncio.sleep(_WATCH_S)
        self.died.set()
        for task in list(self._running):
            task.cancel()

    async def _generate_whole(
        self, prompt: EnginePrompt, params: "SamplingParams", index: int, call_id: str, *, may_move: bool
    ) -> tuple[EngineOutput, int]:
        """Generate until a response was written under one version, or under several if it may move."""
        while True:
            await self.update.resumed.wait()
            self.check()
            version, request_id = self.update.policy_version, f"{next(self._counter)}"
            self.progress.begin(request_id, call_id, index)
            task = asyncio.create_task(self.replicas[index].generate(prompt, params, request_id))
            try:
                output = await self._kept(task, may_move=may_move)
            finally:
                self.progress.end(request_id)
            if output is not None:
                self.tokens_by_replica[index] += len(output.response_token_ids)
                runs = self._versions_in(output) or ((version, len(output.response_token_ids)),)
                return replace(output, policy_versions=runs), min(version for version, _ in runs)

    async def _parts(
        self, stream: Callable[[str], AsyncGenerator[EnginePart]], index: int
    ) -> AsyncGenerator[EnginePart]:
        """Parts as the engine writes them, however slowly they are taken; fewer where a commit ends the call."""
        parts: asyncio.Queue[EnginePart | None] = asyncio.Queue()

        async def write() -> None:
            num_tokens = 0
            async for part in stream(f"{next(self._counter)}"):
                num_tokens += part.num_tokens
                parts.put_nowait(part)
            self.tokens_by_replica[index] += num_tokens

        task = asyncio.create_task(write())
        self._running.add(task)
        task.add_done_callback(lambda _: parts.put_nowait(None))
        try:
            while (part := await parts.get()) is not None:
                yield part
            await self._kept(task)
        finally:
            task.cancel()
            for tasks in (self._running, self._restarted, self._aborted):
                tasks.discard(task)

    def _versions_in(self, output: EngineOutput) -> tuple[tuple[int, int], ...]:
        """Versions in place of how often the engine had been emptied; only the last time since may be another one's."""
        past = self._past_versions
        versions = [past[num] if num < len(past) else self.update.policy_version for num, _ in output.runs]
        lengths = [length for _, length in output.runs]
        return tuple(joined_runs(list(zip(versions, lengths, strict=True))))

    async def _kept(self, task: asyncio.Task[_T], *, may_move: bool = False) -> _T | None:
        """The task's result; None where a commit ended it. Errors: ``WorkerDead``."""
        self._running.add(task)
        if may_move:
            self._moving.add(task)
        try:
            return await task
        except asyncio.CancelledError:
            if _is_cancelled_itself():
                raise
            if self.is_dead:
                raise dead() from None
            if task in self._aborted:
                raise _aborted() from None
            if task in self._restarted:
                return None
            raise
        finally:
            for tasks in (self._running, self._moving, self._restarted, self._aborted):
                tasks.discard(task)

    async def _while_alive(self, call: Callable[..., Coroutine[Any, Any, _T]], *arguments: Any) -> _T:
        """A call's result; a call to an engine that dies may never end by itself. Errors: ``WorkerDead``."""
        task = asyncio.create_task(call(*arguments))
        try:
            while not task.done():
                await asyncio.wait([task], timeout=_WATCH_S)
                if not task.done() and (self.is_dead or any(replica.is_dead() for replica in self.replicas)):
                    raise dead()
            return task.result()
        finally:
            task.cancel()


async def _cancelled(tasks: set[asyncio.Task[Any]]) -> None:
    """End them, for as long as an engine may take to do so."""
    for task in tasks:
        task.cancel()
    if tasks:
        await asyncio.wait(tasks, timeout=_ABORT_S)


def _aborted() -> Refusal:
    problem, remedy = "a learner paused the server and gave it up", "Send the request again."
    return Refusal(problem, code="generation-aborted", key="pause", remedy=remedy)


def _policy_changed(version: int) -> Refusal:
    problem = f"weights of version {version} were committed while it was being written"
    remedy = "Send the request again, without stream: true, or raise custom.extra.rollout_server.drain_s."
    return Refusal(problem, code="policy-changed", key="stream", remedy=remedy)


def _checked(replies: Any) -> list[dict[str, Any]]:
    answers = list(replies)
    for answer in answers:
        if "failure" in answer:
            raise WorkerFailure(answer["failure"])
    return answers


def _raise_failure(task: asyncio.Task[Any], item: int) -> None:
    """Raise what a task failed with, saying which item it was; one that still runs has not failed."""
    error = task.exception() if task.done() and not task.cancelled() else None
    if isinstance(error, Refusal):
        error.item = item
    if error is not None:
        raise error


def _is_cancelled_itself() -> bool:
    current = asyncio.current_task()
    return current is not None and current.cancelling() > 0
