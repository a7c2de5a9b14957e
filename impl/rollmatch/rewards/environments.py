"""What episodes are paid by the class whose methods are their tools."""

from collections.abc import Sequence
from inspect import isawaitable
from typing import Any


async def get_reward(environments: Sequence[Any], **columns: object) -> list[float | None]:
    """What each instance's own ``get_reward()`` returns, plain or as a coroutine; None of one without the method."""
    found = []
    for one in environments:
        value = one.get_reward() if hasattr(one, "get_reward") else None
        found.append(await value if isawaitable(value) else value)
    return found
