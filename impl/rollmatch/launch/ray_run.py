"""A run on a Ray cluster from its first process to its last: start, watch, start again, end.

One loop waits for the answers of all actors: a command that ended and an actor that is gone both arrive as one.
"""

import math
import os
import signal
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path

import ray
from ray import ObjectRef
from ray.actor import ActorHandle
from ray.exceptions import RayActorError, RayError
from ray.util.placement_group import PlacementGroup

from rollmatch.config.connection import base_url_of
from rollmatch.errors import LaunchError
from rollmatch.launch.layout import Need
from rollmatch.launch.processes import GRACE_S, forwarded
from rollmatch.launch.ray_cluster import place
from rollmatch.launch.ray_command import ActorSite, CommandReport
from rollmatch.launch.run_commands import RunWords
from rollmatch.run.directory import holds_run

LOGS = "logs"
_POLL_S, _END_S, _DYING_S = 0.2, 30.0, 60.0


@dataclass(kw_only=True)
class RunPart:
    """One command of the run, and the actor that runs it."""

    name: str
    index: int
    """Of its bundle: the learner's nodes come first, the servers follow."""
    actor: ActorHandle
    call: ObjectRef | None
    """Waited for: an ``ActorSite`` once placed, a process id after a start, then many a ``CommandReport``."""
    site: ActorSite | None = None
    is_placed: bool = False
    """Whether it may be started at ``site``."""
    num_restarts: int = 0
    lost_at: float = -math.inf
    """Monotonic time at which its actor was lost."""
    code: int | None = None
    is_running: bool = False
    is_over: bool = False
    """Has ended, and is not started again."""

    @property
    def at(self) -> ActorSite:
        """Where its actor is, once it is placed."""
        assert self.site is not None
        return self.site

    def locate(self) -> None:
        """Ask where its actor is now."""
        self.is_placed, self.call = False, self.actor.site.remote()


@dataclass(frozen=True, slots=True, kw_only=True)
class LearnerLoss:
    """The first end of a node of the learner that is the end of all, which share each gradient."""

    code: int
    is_final: bool
    """Not to be started again."""
    time: float
    """Monotonic; in seconds."""


class RayRun:
    """Learner and rollout servers on the bundles of a placement group."""

    def __init__(self, words: RunWords, group: PlacementGroup, needs: Sequence[Need], *, max_restarts: int) -> None:
        self._words, self._group, self._max_restarts = words, group, max_restarts
        self._directory = Path(words.config.training.output_dir)
        actors = [place(group, index) for index in range(len(needs))]
        self._parts = [
            RunPart(name=need.name, index=index, actor=actor, call=actor.site.remote())
            for index, (need, actor) in enumerate(zip(needs, actors))
        ]
        count = words.layout.num_learner_nodes
        self._learners, self._servers = self._parts[:count], self._parts[count:]
        self._loss: LearnerLoss | None = None
        self._signals: list[int] = []
        self._is_ending = False

    def run(self) -> int:
        """Until the learner has ended for good. Returns its exit code, or 128 + the signal that ended the run."""
        (self._directory / LOGS).mkdir(parents=True, exist_ok=True)
        with _recording(self._signals):
            try:
                self._watch(lambda: all(part.is_placed for part in self._parts) or bool(self._signals))
                if not self._signals:
                    self._words.settle([part.at.host for part in self._servers])
                    for part in self._servers:
                        self._start(part)
                    self._start_learner()
                    self._watch(lambda: all(part.is_over for part in self._learners) or bool(self._signals))
                self._end(self._learners, *self._signals[:1], for_s=GRACE_S)
            finally:
                self._end(self._learners, signal.SIGTERM, for_s=GRACE_S)  # one that lost its servers saves first
                self._end(self._servers, signal.SIGTERM, for_s=_END_S)
        if any(part.code is None for part in self._learners):
            return 128 + self._signals[0]
        code = self._loss.code if self._loss else next((part.code for part in self._learners if part.code), 0)
        return code if code >= 0 else 128 - code

    def _end(self, parts: Sequence[RunPart], number: int | None = None, *, for_s: float) -> None:
        """Signal commands and wait for their end; a second signal to us, or too long a wait, kills them."""
        self._is_ending = True
        running = [part for part in parts if part.is_running]
        for part in running if number is not None else ():
            part.actor.signal.remote(number)
        num_signals = len(self._signals)

        def is_done() -> bool:
            return all(part.is_over for part in running) or len(self._signals) > max(1, num_signals)

        self._watch(is_done, for_s=for_s)
        for part in running:
            ray.kill(part.actor)  # a command that has not ended goes with it
            part.is_running = False

    def _watch(self, is_done: Callable[[], bool], *, for_s: float = float("inf")) -> None:
        until = time.monotonic() + for_s
        while not is_done() and time.monotonic() < until:
            calls = {part.call: part for part in self._parts if part.call is not None}
            for call in ray.wait(list(calls), num_returns=len(calls), timeout=_POLL_S)[0] if calls else []:
                self._answer(calls[call])
            self._kill_waiting_ranks()
            time.sleep(_POLL_S)

    def _answer(self, part: RunPart) -> None:
        """Take what an actor says, and ask the next question. Errors: ``command-not-started``."""
        call, part.call = part.call, None
        try:
            answer = ray.get(call)
        except RayActorError:
            self._replace(part)
            return
        except RayError as error:
            raise _not_started(part, _last_line(error)) from error
        if isinstance(answer, ActorSite):
            self._take_site(part, answer)
            return
        lines, code = (
            (answer.lines, answer.code) if isinstance(answer, CommandReport) else ((self._started(part, answer),), None)
        )
        self._tell(part, lines)
        if code is None:
            part.call = part.actor.report.remote()
        else:
            self._ended(part, code)

    def _take_site(self, part: RunPart, site: ActorSite) -> None:
        """A part that comes back continues where it is now. Errors: ``server-moved``."""
        part.site, part.is_placed = site, True
        if part.num_restarts == 0 or self._is_ending or not self._words.hosts:
            return
        if part in self._learners:
            self._start_learner()
            return
        before = self._words.hosts[self._servers.index(part)]
        if site.host != before:
            problem = f"{part.name} was at {before}, and Ray now offers {site.host} only"
            remedy = "Bring the node back, then continue with rollmatch up --resume."
            raise LaunchError(problem, code="server-moved", remedy=remedy)
        self._start(part)

    def _start(self, part: RunPart) -> None:
        gpus = part.at.gpus
        if part in self._servers:
            words = self._words.server(self._servers.index(part), gpus)
        else:
            resume, first = part.num_restarts > 0, self._learners[0].at
            endpoint = base_url_of(first.host, first.port).removeprefix("http://")
            words = self._words.learner(gpus, resume=resume, node=part.index, endpoint=endpoint)
        part.call, part.is_running = part.actor.start.remote(words, self._words.environment, os.getcwd()), True

    def _started(self, part: RunPart, pid: int) -> str:
        url = f" at {self._words.url(self._servers.index(part))}" if part in self._servers else ""
        return f"rollmatch up: {part.name}{url} is process {pid} on node {part.at.node[:8]}"

    def _ended(self, part: RunPart, code: int) -> None:
        """The learner's end is the run's, unless it can be resumed; a server is started again."""
        part.code, part.is_running = code, False
        what = f"has ended with {code}" if code >= 0 else f"was ended by signal {-code}"
        if self._is_ending or self._signals:
            part.is_over = True
        elif part in self._learners:
            self._lose(part, what, code=code)
        else:
            self._count(part, what, together=[part])
            self._start(part)

    def _lose(self, part: RunPart, what: str, *, code: int) -> None:
        """A node of the learner has ended. All others end with it, and are started again together."""
        if code and self._loss is None:
            is_lost = code < 0 or code > 128 or (code == 1 and holds_run(self._directory))
            self._loss = LearnerLoss(code=code, is_final=not is_lost, time=time.monotonic())
            if is_lost:
                self._count(part, what, together=self._learners)
        if any(one.is_running for one in self._learners):
            return
        for one in self._learners:
            if self._loss is None or self._loss.is_final:
                one.is_over = True
            elif one.call is None:
                one.locate()  # a port that was free is so no longer

    def _kill_waiting_ranks(self) -> None:
        """Kill what is left of a learner that has lost a node: its ranks may wait for the others for long."""
        if self._loss is not None and time.monotonic() > self._loss.time + _END_S:
            for part in self._learners:
                if part.is_running:
                    part.actor.kill.remote()

    def _start_learner(self) -> None:
        """On all its nodes, as soon as they are there and nothing runs on them."""
        if all(one.is_placed and not one.is_running for one in self._learners):
            self._loss = None
            for one in self._learners:
                self._start(one)

    def _replace(self, part: RunPart) -> None:
        """A new actor for one that is gone, where Ray moves its bundle; it waits until there is such a node."""
        part.is_running = False
        if self._is_ending or self._signals:
            part.is_over = True
            return
        what, was_placed = "is gone, with its actor or its node", part.site is not None
        if not was_placed and time.monotonic() > part.lost_at + _DYING_S:
            raise _not_started(part, "Ray cannot start its actor")  # before, it may have had a node that is being lost
        if was_placed:
            part.lost_at = time.monotonic()
        ray.kill(part.actor)  # in case that only the way to it is gone
        part.actor, part.site = place(self._group, part.index), None
        part.locate()
        if was_placed and part in self._learners:
            self._lose(part, what, code=-signal.SIGKILL)
        elif was_placed:
            self._count(part, what, together=[part])

    def _count(self, lost: RunPart, what: str, *, together: Sequence[RunPart]) -> None:
        """Count a restart of all parts that start again with the lost one. Errors: ``lost-too-often``."""
        if lost.num_restarts >= self._max_restarts:
            problem, remedy = f"{lost.name} {what}", f"Read {self._log(lost)}, then continue with --resume."
            raise LaunchError(problem, code="lost-too-often", key="--max-restarts", remedy=remedy)
        for part in together:
            part.num_restarts += 1
        self._tell(lost, [f"rollmatch up: {lost.name} {what}; restart {lost.num_restarts} of {self._max_restarts}"])

    def _log(self, part: RunPart) -> Path:
        return self._directory / LOGS / f"{part.name}.txt"

    def _tell(self, part: RunPart, lines: Sequence[str]) -> None:
        """In the terminal, with the name of the part, and in its file."""
        if lines:
            print("\n".join(f"[{part.name}] {line}" for line in lines), flush=True)
            with self._log(part).open("a", encoding="utf-8") as file:
                file.write("".join(f"{line}\n" for line in lines))


def _not_started(part: RunPart, problem: str) -> LaunchError:
    remedy = "Every node needs the same packages and the same paths."
    return LaunchError(f"{part.name}: {problem}", code="command-not-started", remedy=remedy)


def _last_line(error: Exception) -> str:
    """What remains of an error that Ray reports with the traceback of another process.

    >>> _last_line(RuntimeError("ray::start()\\n  File a.py\\nOSError: no such file\\n")), _last_line(RuntimeError())
    ('OSError: no such file', 'RuntimeError')
    """
    return (str(error).strip() or type(error).__name__).splitlines()[-1]


@contextmanager
def _recording(numbers: list[int]) -> Iterator[None]:
    """Signals to this process go into a list, in place of their effect; after Ray, which sets handlers of its own."""
    before = {number: signal.signal(number, lambda sent, _: numbers.append(sent)) for number in forwarded()}
    try:
        yield
    finally:
        for number, handler in before.items():
            signal.signal(number, handler)
