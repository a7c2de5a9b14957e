"""HTTP calls that run while the caller does something else.

``BackgroundCall`` runs anything in a thread. ``PostCall`` needs no thread: it sends a POST at once and reads the reply
when its result is wanted. While weights travel, the threads of one interpreter wait for each other; three calls that
are only sent delay the third server less than three threads and sessions.
"""

import http.client
import queue
import select
import socket
import threading
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Generic, Protocol, TypeVar, cast

from rollmatch.errors import RollmatchError

Result = TypeVar("Result")
Outcome = TypeVar("Outcome", covariant=True)


class RunningCall(Protocol[Outcome]):
    """A call that may still be running."""

    def is_done(self, *, within_s: float = 0.0) -> bool:
        """Whether it has ended, after waiting for so long at most."""

    def result(self) -> Outcome:
        """Wait for its result, or raise its error."""


@dataclass(frozen=True, slots=True, kw_only=True)
class PostRequest:
    """Path, body, headers and timeouts of a POST."""

    path: str
    data: bytes | None
    headers: Mapping[str, str]
    connect_timeout_s: float
    timeout_s: float | None


class PostCall(Generic[Result]):
    """A POST over a connection of its own; a ``RunningCall``."""

    def __init__(
        self,
        where: tuple[str, int | None],
        question: PostRequest,
        *,
        read: Callable[[http.client.HTTPResponse], Result],
        failed: Callable[[Exception, bool], RollmatchError],
    ) -> None:
        """``read`` makes the result of a reply; ``failed`` makes the error of a broken call, by whether it was sent."""
        self._read, self._failed = read, failed
        self._deadline = None if question.timeout_s is None else time.monotonic() + question.timeout_s
        self._outcome: tuple[Result | None, RollmatchError | None] | None = None
        self._connection = http.client.HTTPConnection(*where, timeout=question.connect_timeout_s)
        self._poll = select.poll()
        try:
            self._connection.request("POST", question.path, question.data, question.headers)
        except (OSError, http.client.HTTPException) as error:
            self._end(None, failed(error, False))
        else:
            self._poll.register(self._socket, select.POLLIN)

    def is_done(self, *, within_s: float = 0.0) -> bool:
        """As the protocol; an answer that has begun is waited for."""
        if self._outcome is None and self._poll.poll(within_s * 1000):
            self._finish()
        return self._outcome is not None

    def result(self) -> Result:
        """As the protocol."""
        if self._outcome is None:
            self._finish()
        assert self._outcome is not None
        result, error = self._outcome
        if error is not None:
            raise error
        return cast(Result, result)

    @property
    def _socket(self) -> socket.socket:
        found = cast(socket.socket | None, self._connection.sock)
        assert found is not None
        return found

    def _finish(self) -> None:
        left_s = None if self._deadline is None else max(0.001, self._deadline - time.monotonic())
        self._socket.settimeout(left_s)
        try:
            self._end(self._read(self._connection.getresponse()), None)
        except RollmatchError as error:
            self._end(None, error)
        except (OSError, http.client.HTTPException) as error:
            self._end(None, self._failed(error, True))

    def _end(self, result: Result | None, error: RollmatchError | None) -> None:
        self._outcome = result, error
        self._connection.close()


class BackgroundCall(Generic[Result]):
    """A call in a daemon thread: starts at once, and cannot keep the process from ending."""

    def __init__(self, call: Callable[[], Result]) -> None:
        self._arrivals: queue.SimpleQueue[tuple[Result | None, Exception | None]] = queue.SimpleQueue()
        self._outcome: tuple[Result | None, Exception | None] | None = None
        threading.Thread(target=self._run, args=(call,), daemon=True).start()

    def is_done(self, *, within_s: float = 0.0) -> bool:
        """Whether it has ended, after waiting for so long at most."""
        if self._outcome is None:
            try:
                self._outcome = self._arrivals.get(block=within_s > 0, timeout=within_s or None)
            except queue.Empty:
                return False
        return True

    def result(self) -> Result:
        """What it returned, or its error; waits without limit."""
        if self._outcome is None:
            self._outcome = self._arrivals.get()
        result, error = self._outcome
        if error is not None:
            raise error
        return cast(Result, result)

    def _run(self, call: Callable[[], Result]) -> None:
        outcome: tuple[Result | None, Exception | None] = (
            None,
            RuntimeError("a call failed; see its thread's traceback"),
        )
        try:
            outcome = (call(), None)
        except RollmatchError as error:
            outcome = (None, error)
        finally:  # whatever it was: the caller must not wait for ever
            self._arrivals.put(outcome)


def raise_failures(calls: Sequence[RunningCall[object]]) -> None:
    """Errors: that of the first call that has ended with one."""
    for call in calls:
        if call.is_done():
            call.result()
