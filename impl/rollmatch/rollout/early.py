"""Work on a window's rollouts by the weights that wrote them, while the learner learns from an earlier window.

One thread of each rank takes windows in their order. It waits for a window's rollouts, then works, and may call the
rollout side meanwhile; ranks exchange what they need in a process group of their own. A sync of newer weights waits for
it. Where a server was restarted, the window's rollouts and the work are made again by the weights of the next sync.
"""

from collections.abc import Callable, Sequence
from concurrent.futures import Future
from dataclasses import replace
from queue import SimpleQueue
from threading import Lock
from typing import Any

from rollmatch.records import Rollout, Sample
from rollmatch.rollout.prefetch import Prefetch
from rollmatch.rollout.retry import ServerRestarted
from rollmatch.rollout.source import RolloutSource, together

Work = Callable[[RolloutSource, int, Sequence[Sample], Sequence[Rollout]], Any]
"""(where to generate more, step, samples, their rollouts) -> what the window's targets are made of."""


class EarlyWork:
    """``work`` on windows of ``prefetch``. Its methods are the main thread's; all ranks call them alike."""

    def __init__(self, source: RolloutSource, prefetch: Prefetch, work: Work) -> None:
        self.gate = Lock()
        """Held by each call of the thread, and by syncs."""
        self.prefetch, self.work = prefetch, work
        self._source = replace(source, ranks=source.ranks.apart(), gate=self.gate, num_threads=None)
        self._tasks: SimpleQueue[tuple[Future[Any], int, Sequence[Sample]]] = SimpleQueue()
        self._begun: dict[int, Future[Any]] = {}
        self._lost: set[int] = set()
        prefetch.monitor.start(self._run, name="early-work")

    def begin(self, step: int, samples: Sequence[Sample]) -> None:
        """Work on the window of ``step`` as soon as its rollouts are there, unless that has begun."""
        if step not in self._begun:
            self._begun[step] = Future()
            self._tasks.put((self._begun[step], step, samples))

    def wait(self) -> None:
        """Until what has begun is done, before weights change. Errors: those of the work, but for restarts."""
        for step, result in list(self._begun.items()):
            try:
                result.result()
            except ServerRestarted:
                del self._begun[step]
                self._lost.add(step)

    def is_lost(self, step: int) -> bool:
        """Whether weights have changed since the window's rollouts, and the work is not done."""
        return step in self._lost

    def take(self, step: int) -> Any:
        """What was made of the window. Errors: those of the work, ``ServerRestarted``; it may begin again then."""
        result = self._begun[step]
        try:
            return result.result()
        finally:
            del self._begun[step]
            self._lost.discard(step)

    def _run(self) -> None:
        """The thread's life."""
        while True:
            result, step, samples = self._tasks.get()
            try:
                result.set_result(self._work_on(step, samples))
            except BaseException as error:  # noqa: BLE001  # handed on, whatever it is: the learner waits for it
                result.set_exception(error)

    def _work_on(self, step: int, samples: Sequence[Sample]) -> Any:
        together(lambda: self.prefetch.wait_for(step), ranks=self._source.ranks)
        return self.work(self._source, step, samples, self.prefetch.windows[step].taken())
