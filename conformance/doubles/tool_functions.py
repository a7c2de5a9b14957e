"""Functions that tests name as tools; as a program, an MCP server of the official package at a port."""

import json
import sys
import time


def call(name, **arguments):
    """A turn's text that calls a tool."""
    return f"<tool_call>{json.dumps({'name': name, 'arguments': arguments})}</tool_call>"


def multiply(a: int, b: int) -> int:
    """
    Multiply two numbers.

    Args:
        a: The first factor.
        b: The second factor.
    """
    return a * b


async def shout(text: str) -> dict[str, str]:
    """
    Say it louder.

    Args:
        text: What to say.
    """
    return {"said": text.upper()}


def divide(a: float, b: float) -> float:
    """
    Divide two numbers.

    Args:
        a: The dividend.
        b: The divisor.
    """
    return a / b


def read(path: str) -> str:
    """
    Read a file.

    Args:
        path: Its path.
    """
    with open(path, encoding="utf-8") as file:
        return file.read()


def wait(seconds: float) -> str:
    """
    Wait.

    Args:
        seconds: For how long.
    """
    time.sleep(seconds)
    return "waited"


def leave(code: int) -> str:
    """
    Leave.

    Args:
        code: What the process ends with.
    """
    sys.exit(code)


async def leave_early(code: int) -> str:
    """
    Leave from a coroutine.

    Args:
        code: What the process ends with.
    """
    sys.exit(code)


def undescribed(a):
    return a


def right(answer, sample):
    """A reward: 1 for the sample's answer."""
    return float(answer.strip() == str(sample.metadata["answer"]))


def serve(port: int) -> None:
    """Serve ``add`` and ``fail`` over streamable HTTP."""
    from mcp.server import MCPServer

    server = MCPServer("sums")

    @server.tool()
    def add(a: int, b: int) -> int:
        """Add two numbers."""
        return a + b

    @server.tool()
    def fail() -> str:
        """Fail."""
        raise ValueError("out of order")

    server.run("streamable-http", host="127.0.0.1", port=port)


if __name__ == "__main__":
    serve(int(sys.argv[1]))
