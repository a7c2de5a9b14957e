"""A call that is under way without a thread: sent at once, read by whoever asks for its answer.

While weights travel threads of one interpreter wait for each other; three calls that are only sent cost the third
server less than one that a session and a thread are made for.
"""

import http.client
import select
import socket
import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any, Generic, Protocol, TypeVar, cast

from rollmatch.errors import RollmatchError

Result = TypeVar("Result")
Told = TypeVar("Told", covariant=True)


class Call(Protocol[Told]):
    """A call under way."""

    def is_done(self, *, within_s: float = 0.0) -> bool:
        """Whether it has ended, after waiting for so long at most."""

    def result(self) -> Told:
        """What came of it, or its error."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Question:
    """What is sent, and how long it may take."""

    path: str
    data: bytes | None
    headers: Mapping[str, str]
    connect_timeout_s: float
    timeout_s: float | None


class Asked(Generic[Result]):
    """A POST over a connection of its own; a ``Call``."""

    def __init__(
        self,
        where: tuple[str, int | None],
        question: Question,
        *,
        read: Callable[[http.client.HTTPResponse], Result],
        failed: Callable[[Exception, bool], RollmatchError],
    ) -> None:
        """``read`` and ``failed`` make an answer's result, and of a broken call its error, told whether it was sent."""
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
        found: Any = self._connection.sock
        assert isinstance(found, socket.socket)
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
