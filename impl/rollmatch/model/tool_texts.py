"""Tools of an environment as texts: how they are shown to a policy, and which calls it wrote. Hermes' form, as Qwen's.

A turn may hold several ``<tool_call>{"name": ..., "arguments": {...}}</tool_call>``; the rest is its content.
"""

import json
import re
from collections.abc import Mapping, Sequence
from typing import Any

_CALL = re.compile(r"<tool_call>(.*?)(?:</tool_call>|$)", re.DOTALL)
_SHOWN = """# Tools

You may call one or more functions. Their signatures are within <tools></tools>:
<tools>
{tools}
</tools>

For each call, return a JSON object within <tool_call></tool_call>:
<tool_call>
{{"name": <function-name>, "arguments": <args-json-object>}}
</tool_call>"""


def tools_text(tools: Sequence[Mapping[str, Any]]) -> str:
    """What a policy reads of its tools (JSON schemas of functions); the empty text where there are none."""
    return _SHOWN.format(tools="\n".join(json.dumps(tool) for tool in tools)) if tools else ""


def called_message(text: str) -> dict[str, Any]:
    """A turn as an assistant's message, its calls in ``tool_calls``; there is none of that name without calls.

    A call that is no JSON object keeps its text as arguments, for the environment to reply to.

    >>> message = called_message('So: <tool_call>{"name": "add", "arguments": {"a": 1}}</tool_call>')
    >>> message["content"], message["tool_calls"][0]["function"]
    ('So:', {'name': 'add', 'arguments': '{"a": 1}'})
    >>> called_message("<tool_call>add 1</tool_call>")["tool_calls"][0]["function"]
    {'name': '', 'arguments': 'add 1'}
    >>> called_message("4")
    {'role': 'assistant', 'content': '4'}
    """
    written = [found.strip() for found in _CALL.findall(text)]
    if not written:
        return {"role": "assistant", "content": text}
    calls = [
        {"id": f"call_{place}", "type": "function", "function": _function(one)} for place, one in enumerate(written)
    ]
    return {"role": "assistant", "content": _CALL.sub("", text).strip(), "tool_calls": calls}


def reply_text(message: Mapping[str, Any]) -> str:
    """A message of the environment as the policy reads it; a tool's result is marked as Qwen's chat template does.

    >>> reply_text({"role": "tool", "content": 4}), reply_text({"role": "user", "content": "no"})
    ('<tool_response>\\n4\\n</tool_response>', 'no')
    """
    text = str(message["content"])
    return f"<tool_response>\n{text}\n</tool_response>" if message["role"] == "tool" else text


def _function(written: str) -> dict[str, str]:
    try:
        read = json.loads(written)
    except ValueError:
        read = None
    if not isinstance(read, dict):
        return {"name": "", "arguments": written}
    return {"name": str(read.get("name", "")), "arguments": json.dumps(read.get("arguments", {}))}
