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

from rollmatch.cli.processes import FORWARDED, GRACE_S
from rollmatch.cli.ray_cluster import Need, place
from rollmatch.cli.ray_command import ActorSite, CommandReport
from rollmatch.cli.run_directory import holds_run
from rollmatch.cli.up import RunWords
from rollmatch.errors import LaunchError

LOGS = "logs"
_POLL_S, _END_S, _DYING_S = 0.2, 30.0, 60.0


@dataclass(kw_only=True)
class RunPart:
    """One command of the run, and the actor that runs it."""

    name: str
    index: int
    """Of its bundle: 0 is the learner's, the servers follow."""
    actor: ActorHandle
    call: ObjectRef | None
    """Waited for: an ``ActorSite`` once placed, a process id after a start, then many a ``CommandReport``."""
    site: ActorSite | None = None
    num_restarts: int = 0
    lost_at: float = -math.inf
    """Monotonic time at which its actor was lost."""
    code: int | None = None
    is_running: bool = False
    is_over: bool = False
    """Has ended, and is not started again."""


class RayRun:
    """Learner and rollout servers on the bundles of a placement group."""

    def __init__(self, words: RunWords, group: PlacementGroup, needs: Sequence[Need], *, max_restarts: int) -> None:
        self._words, self._group, self._max_restarts = words, group, max_restarts
        self._directory = Path(words.config.training.output_dir)
        actors = [place(group, index) for index in range(len(needs))]
        self._parts = [
            RunPart(name=need.name, index=index, actor=actor, call=actor.site.remote())
            for index, (need, actor) in enumerate(zip(needs, actors, strict=True))
        ]
        self._learner, self._servers = self._parts[0], self._parts[1:]
        self._signals: list[int] = []
        self._is_ending = False

    def run(self) -> int:
        """Until the learner has ended for good. Returns its exit code, or 128 + the signal that ended the run."""
        (self._directory / LOGS).mkdir(parents=True, exist_ok=True)
        with _recording(self._signals):
            try:
                self._watch(lambda: all(part.site for part in self._parts) or bool(self._signals))
                if not self._signals:
                    self._words.settle([part.site.host for part in self._servers if part.site])
                    for part in self._parts:
                        self._start(part)
                    self._watch(lambda: self._learner.is_over or bool(self._signals))
                self._end(self._learner, *self._signals[:1], for_s=GRACE_S)
            finally:
                for part in self._parts:  # a learner that lost its servers for good saves first
                    self._end(part, signal.SIGTERM, for_s=_END_S if part.index else GRACE_S)
        if self._learner.code is None:
            return 128 + self._signals[0]
        return self._learner.code if self._learner.code >= 0 else 128 - self._learner.code

    def _end(self, part: RunPart, number: int | None = None, *, for_s: float) -> None:
        """Signal a command and wait for its end; a second signal to us, or too long a wait, kills it."""
        self._is_ending = True
        if not part.is_running:
            return
        if number is not None:
            part.actor.signal.remote(number)
        num_signals = len(self._signals)
        self._watch(lambda: part.is_over or len(self._signals) > max(1, num_signals), for_s=for_s)
        if not part.is_over:
            ray.kill(part.actor)  # its command goes with it
            part.is_running, part.is_over = False, True

    def _watch(self, is_done: Callable[[], bool], *, for_s: float = float("inf")) -> None:
        until = time.monotonic() + for_s
        while not is_done() and time.monotonic() < until:
            calls = {part.call: part for part in self._parts if part.call is not None}
            for call in ray.wait(list(calls), num_returns=len(calls), timeout=_POLL_S)[0] if calls else []:
                self._answer(calls[call])
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
            raise _not_started(part, str(error).strip().splitlines()[-1]) from error
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
        part.site = site
        if part.num_restarts == 0 or self._is_ending:
            return
        if part.index and site.host != self._words.hosts[part.index - 1]:
            problem = f"{part.name} was at {self._words.hosts[part.index - 1]}, and Ray now offers {site.host} only"
            remedy = "Bring the node back, then continue with rollmatch up --resume."
            raise LaunchError(problem, code="server-moved", remedy=remedy)
        self._start(part)

    def _start(self, part: RunPart) -> None:
        gpus = part.site.gpus if part.site else ()
        words = (
            self._words.server(part.index - 1, gpus)
            if part.index
            else self._words.learner(gpus, resume=part.num_restarts > 0)
        )
        part.call, part.is_running = part.actor.start.remote(words, self._words.environment, os.getcwd()), True

    def _started(self, part: RunPart, pid: int) -> str:
        url = f" at {self._words.url(part.index - 1)}" if part.index else ""
        return f"rollmatch up: {part.name}{url} is process {pid} on node {part.site.node[:8] if part.site else ''}"

    def _ended(self, part: RunPart, code: int) -> None:
        """The learner's end is the run's, unless it can be resumed; a server is started again."""
        part.code, part.is_running = code, False
        if self._is_ending or self._signals or (part is self._learner and not self._is_lost(code)):
            part.is_over = True
        else:
            self._count(part, f"has ended with {code}" if code >= 0 else f"was ended by signal {-code}")
            self._start(part)

    def _is_lost(self, code: int) -> bool:
        """Whether a learner may go on from its checkpoint; one that has refused to begin may not."""
        return code < 0 or code > 128 or (code == 1 and holds_run(self._directory))

    def _replace(self, part: RunPart) -> None:
        """A new actor for one that is gone, where Ray moves its bundle; it waits until there is such a node."""
        part.is_running = False
        if self._is_ending or self._signals:
            part.is_over = True
            return
        if part.site is not None:
            self._count(part, "is gone, with its actor or its node")
            part.lost_at = time.monotonic()
        elif time.monotonic() > part.lost_at + _DYING_S:  # until then it may have met a node that is just being lost
            raise _not_started(part, "Ray cannot start its actor")
        ray.kill(part.actor)  # in case that only the way to it is gone
        part.actor, part.site = place(self._group, part.index), None
        part.call = part.actor.site.remote()

    def _count(self, part: RunPart, what: str) -> None:
        """Errors: ``lost-too-often``."""
        if part.num_restarts >= self._max_restarts:
            problem, remedy = f"{part.name} {what}", f"Read {self._log(part)}, then continue with --resume."
            raise LaunchError(problem, code="lost-too-often", key="--max-restarts", remedy=remedy)
        part.num_restarts += 1
        self._tell(part, [f"rollmatch up: {part.name} {what}; restart {part.num_restarts} of {self._max_restarts}"])

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


@contextmanager
def _recording(numbers: list[int]) -> Iterator[None]:
    """Signals to this process go into a list, in place of their effect; after Ray, which sets handlers of its own."""
    before = {number: signal.signal(number, lambda sent, _: numbers.append(sent)) for number in FORWARDED}
    try:
        yield
    finally:
        for number, handler in before.items():
            signal.signal(number, handler)
