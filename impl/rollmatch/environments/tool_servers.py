"""Tools of MCP servers, whose replies are bounded: a server may write without end, or pack a gigabyte into a megabyte.

Needs the package ``mcp`` and its HTTP client.
"""

from collections.abc import AsyncIterator, Mapping
from contextlib import asynccontextmanager
from typing import Any

import httpx2
from mcp import Client, MCPError
from mcp.client.streamable_http import streamable_http_client

from rollmatch.errors import kind_and_text

_MAX_REPLY_BYTES = 16 << 20
"""Of one reply, unpacked; an observation is shorter (``max_observation_bytes``)."""
_TIMEOUT = httpx2.Timeout(30.0, read=300.0)
"""As the package's own client."""


class _BoundedStream(httpx2.AsyncByteStream):
    def __init__(self, stream: httpx2.AsyncByteStream) -> None:
        self._stream = stream

    async def __aiter__(self) -> AsyncIterator[bytes]:
        num_left = _MAX_REPLY_BYTES
        async for part in self._stream:
            num_left -= len(part)
            if num_left < 0:
                raise httpx2.ReadError(f"a reply of more than {_MAX_REPLY_BYTES:,} bytes")
            yield part

    async def aclose(self) -> None:
        await self._stream.aclose()


class _BoundedTransport(httpx2.AsyncHTTPTransport):
    async def handle_async_request(self, request: httpx2.Request) -> httpx2.Response:
        response = await super().handle_async_request(request)
        assert isinstance(response.stream, httpx2.AsyncByteStream)
        if "content-encoding" in response.headers:
            await response.aclose()
            raise httpx2.ReadError("a packed reply, which was not asked for")
        response.stream = _BoundedStream(response.stream)
        return response


@asynccontextmanager
async def _client_of(url: str) -> AsyncIterator[Client]:
    bounded = httpx2.AsyncClient(
        transport=_BoundedTransport(), headers={"accept-encoding": "identity"}, timeout=_TIMEOUT
    )
    async with bounded, Client(streamable_http_client(url, http_client=bounded)) as client:
        yield client


async def tools_of(url: str) -> list[Any]:
    """What the server offers. Errors: ``ConnectionError``."""
    try:
        async with _client_of(url) as client:
            return list((await client.list_tools()).tools)
    except Exception as error:
        raise _failed(url, error) from error


async def call_tool(url: str, name: str, arguments: Mapping[str, Any], instance: object = None) -> object:
    """The reply's text. Errors: ``ConnectionError``."""
    try:
        async with _client_of(url) as client:
            try:
                result = await client.call_tool(name, dict(arguments))
            except MCPError as error:  # for example: arguments that the server does not take
                return kind_and_text(error)
    except Exception as error:
        raise _failed(url, error) from error
    return "\n".join(part.text if part.type == "text" else f"[{part.type}]" for part in result.content)


def _failed(url: str, error: Exception) -> ConnectionError:
    """The package raises groups of its transports' errors."""
    while isinstance(error, ExceptionGroup):
        error = error.exceptions[0]
    return ConnectionError(f"{url}: {kind_and_text(error)}")
