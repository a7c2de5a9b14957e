"""Structures that responses must have, compiled in a process that may die before an engine compiles them.

A grammar that calls itself crashes xgrammar; some regular expressions take it minutes and gigabytes. An engine compiles
in its own process, whose other structured calls wait. What is merely wrong is left to vLLM, which says what.
"""

import asyncio
import json
import resource
from collections.abc import Mapping
from concurrent.futures import Future
from functools import cached_property
from types import SimpleNamespace
from typing import Any

import psutil

from rollmatch.server.failures import Refusal
from rollmatch.server.workers import DIED, TOO_SLOW, Workers

COMPILE_S = 5.0
"""Longest time for one structure."""
_COMPILE_BYTES = 1 << 30
"""Memory of the process above what it holds at its start."""
_NUM_PROCESSES, _NUM_THREADS, _NUM_KNOWN = 2, 2, 256
KINDS = ("json", "json_object", "regex", "choice", "grammar", "structural_tag")
"""Fields of vLLM's ``structured_outputs``."""


class StructureCheck:
    """Tries the structures of one server's calls; those that it knows cost nothing."""

    def __init__(self, tokenizer: Any, *, vocabulary_size: int) -> None:
        """``tokenizer``: of transformers."""
        self._tokenizer, self._vocabulary_size = tokenizer, vocabulary_size
        self._known: dict[str, asyncio.Task[str]] = {}
        """Structure -> what is wrong with it; empty: nothing. The newest are last."""

    @cached_property
    def _workers(self) -> Workers:
        import xgrammar

        info = xgrammar.TokenizerInfo.from_huggingface(self._tokenizer, vocab_size=self._vocabulary_size)
        return Workers(_NUM_PROCESSES, begin=_begin, arguments=(info.serialize_json(),))

    async def check(self, structure: Mapping[str, object]) -> None:
        """Raise ``structure-refused`` where it cannot be compiled within the limits.

        ``structure``: value by one of ``KINDS``; a regular expression, for instance.
        """
        key = json.dumps(dict(structure), sort_keys=True)
        if key not in self._known:
            self._known[key] = asyncio.create_task(self._try(structure))
        self._known[key] = trying = self._known.pop(key)
        while len(self._known) > _NUM_KNOWN:
            del self._known[next(iter(self._known))]
        if problem := await asyncio.shield(trying):  # others may wait for it, too
            kind = next(iter(structure))
            raise Refusal(problem, code="structure-refused", key=kind, remedy="Send a simpler one.")

    async def _try(self, structure: Mapping[str, object]) -> str:
        try:
            future = await asyncio.to_thread(self._schedule, structure)
            await asyncio.wrap_future(future)
        except DIED:
            return "its compiler crashes, or takes too much memory"
        except TOO_SLOW:
            return f"it takes longer than {COMPILE_S:g} s to be compiled"
        return ""

    def _schedule(self, structure: Mapping[str, object]) -> "Future[Any]":
        return self._workers.schedule(_compile, dict(structure), timeout_s=COMPILE_S)


_process = SimpleNamespace(compiler=None)
"""What a process keeps."""


def _begin(tokenizer: str) -> None:
    """In the process, when it starts."""
    import xgrammar

    info = xgrammar.TokenizerInfo.deserialize_json(tokenizer)
    _process.compiler = xgrammar.GrammarCompiler(info, max_threads=_NUM_THREADS, cache_enabled=False)
    limit = psutil.Process().memory_info().data + _COMPILE_BYTES
    resource.setrlimit(resource.RLIMIT_DATA, (limit, limit))


def _compile(structure: dict[str, Any]) -> None:
    """In the process: as vLLM's engine does, up to the first token."""
    import xgrammar

    try:
        matcher = xgrammar.GrammarMatcher(_compiled(*structure.popitem()))
        matcher.fill_next_token_bitmask(xgrammar.allocate_token_bitmask(1, _process.compiler.tokenizer_info.vocab_size))
    except (RuntimeError, ValueError, TypeError, LookupError, AttributeError):  # wrong: vLLM finds it, too
        return


def _compiled(kind: str, value: Any) -> Any:
    compiler, text = _process.compiler, value if isinstance(value, str) else json.dumps(value)
    match kind:
        case "json_object":
            return compiler.compile_builtin_json_grammar()
        case "json":
            return compiler.compile_json_schema(text)
        case "regex":
            return compiler.compile_regex(text)
        case "choice":
            choices = value if isinstance(value, list) else json.loads(value)
            return compiler.compile_grammar("root ::= " + " | ".join(json.dumps(each) for each in choices))
        case "grammar":
            return compiler.compile_grammar(text) if "::=" in text else compiler.compile_lark(text)
        case _:
            return compiler.compile_structural_tag(text)
