"""uvicorn's HTTP protocol with a limit on every byte and every second of a connection, in each part of a call."""

import asyncio
import time

from uvicorn.protocols.http.httptools_impl import HttpToolsProtocol

from rollmatch.config.limits import LimitsConfig
from rollmatch.server.front import MAX_HEAD_BYTES

FRAMING_PER_BYTE = 8
"""Bytes that may frame one byte of a body, beside ``MAX_HEAD_BYTES`` of a call: a chunk of one byte has five."""
MIN_BYTES_PER_S = 1024
"""Slower bodies, and callers that read their response more slowly, are given up."""


class BoundedHttpProtocol(HttpToolsProtocol):
    """A head, chunk sizes or trailers that are too long or too slow end the connection; so does a caller that does not
    read its response. ``BoundedBody`` times bodies, whose callers get an answer.
    """

    limits: LimitsConfig
    began = 0.0
    """When the connection, or its last call, began."""
    is_serving = False
    """Whether a call is whole and not yet answered."""
    _num_bytes = 0
    _num_body_bytes = 0
    _reading: asyncio.TimerHandle | None = None
    _writing: asyncio.TimerHandle | None = None

    def connection_made(self, transport: asyncio.Transport) -> None:  # type: ignore[override]
        """Time the first head from here."""
        super().connection_made(transport)
        self._begin_head()

    def connection_lost(self, exc: Exception | None) -> None:
        """As uvicorn's."""
        self._end_head()
        self.resume_writing()
        super().connection_lost(exc)

    def data_received(self, data: bytes) -> None:
        """As uvicorn's, while not too much of it is no body."""
        self._num_bytes += len(data)
        if self.cycle is None or self.cycle.response_complete:
            self._begin_head()
        super().data_received(data)
        framing = self._num_bytes - self._num_body_bytes
        if framing > MAX_HEAD_BYTES + FRAMING_PER_BYTE * self._num_body_bytes:
            self.transport.abort()

    def on_headers_complete(self) -> None:
        """The head is whole."""
        self._end_head()
        super().on_headers_complete()

    def on_body(self, body: bytes) -> None:
        """As uvicorn's."""
        self._num_body_bytes += len(body)
        super().on_body(body)

    def on_message_complete(self) -> None:
        """Count the next call from 0."""
        self._num_bytes = self._num_body_bytes = 0
        self.is_serving = True
        super().on_message_complete()

    def on_response_complete(self) -> None:
        """As uvicorn's; what a caller still sends of a body that nobody reads is not waited for."""
        is_whole, self.is_serving = self.is_serving, False
        self.began = time.monotonic()
        super().on_response_complete()
        if not is_whole:
            self.transport.close()

    def pause_writing(self) -> None:
        """Watch how the caller reads."""
        super().pause_writing()
        if self._writing is None:
            self._watch_reader()

    def _watch_reader(self, left_before: int | None = None) -> None:
        """End a connection whose caller has read too little of the response since the last look."""
        left, pause_s = self.transport.get_write_buffer_size(), self.limits.idle_timeout_s
        if left_before is not None and left_before - left < MIN_BYTES_PER_S * pause_s:
            self.transport.abort()
            return
        self._writing = self.loop.call_later(pause_s, self._watch_reader, left)

    def resume_writing(self) -> None:
        """The caller reads."""
        if self._writing is not None:
            self._writing.cancel()
            self._writing = None
        super().resume_writing()

    def give_up(self) -> None:
        """Make room for another connection."""
        self.transport.abort()

    def received(self) -> int:
        """Bytes of the call that is not yet whole."""
        return self._num_bytes

    def _begin_head(self) -> None:
        if self._reading is None:
            self.began = time.monotonic()
            self._reading = self.loop.call_later(self.limits.head_timeout_s, self.transport.abort)

    def _end_head(self) -> None:
        if self._reading is not None:
            self._reading.cancel()
            self._reading = None


def protocol_with(limits: LimitsConfig) -> type[BoundedHttpProtocol]:
    """The protocol class of a server with these limits."""
    return type("ServerHttpProtocol", (BoundedHttpProtocol,), {"limits": limits})
