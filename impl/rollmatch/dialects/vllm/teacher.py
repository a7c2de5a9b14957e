"""Log-probabilities of given tokens by a stock ``vllm serve`` or our server: ``prompt_logprobs`` of completions."""

from collections.abc import Callable, Sequence
from math import isfinite
from typing import Annotated, NotRequired, TypedDict

import msgspec

from rollmatch.dialects.http import HttpServer, ReplyMalformed
from rollmatch.dialects.reply import read_as
from rollmatch.records import Teaching

ROUTE = "/v1/completions"
LOOK_S = 10.0
"""Longest wait for what a server says of itself."""
REMEDY = "A teacher is a vllm serve or rollmatch serve that answers prompt_logprobs, with its own ids."
CHUNK_LEN = 512
"""Ids whose text is compared by one call."""


class _Model(TypedDict):
    id: str
    max_model_len: NotRequired[Annotated[int, msgspec.Meta(ge=1)] | None]


class _Models(TypedDict):
    data: Annotated[list[_Model], msgspec.Meta(min_length=1)]


class _Text(TypedDict):
    prompt: str


class TeacherServer:
    """A server that says how likely tokens are; nothing here is repeated."""

    def __init__(self, base_url: str, *, api_key: str | None = None) -> None:
        self.http = HttpServer(base_url, api_key=api_key)
        self.base_url = self.http.base_url
        self._model: str | None = None

    def model(self) -> tuple[str, int | None]:
        """Name of the served model, and its longest sequence in tokens. Errors: those of ``HttpServer.get``."""
        body = self.http.get("/v1/models", timeout_s=LOOK_S).body
        entry = read_as(_Models, body, route="/v1/models", base_url=self.base_url)["data"][0]
        self._model = entry["id"]
        return self._model, entry.get("max_model_len")

    def text(self, token_ids: Sequence[int]) -> str:
        """What the tokens say. Errors: those of ``HttpServer.post``; ``ReplyMalformed`` for no text."""
        body = {"model": self._model or self.model()[0], "tokens": list(token_ids)}
        reply = self.http.post("/detokenize", body, timeout_s=LOOK_S).body
        return read_as(_Text, reply, route="/detokenize", base_url=self.base_url)["prompt"]

    def teach(self, token_ids: Sequence[int], prompt_len: int, *, top_k: int, timeout_s: float) -> Teaching:
        """Of the tokens from ``prompt_len`` on, each behind all before it.

        Errors: those of ``HttpServer.post``; ``ReplyMalformed`` for no log-probabilities, or those of other tokens.
        """
        body = {
            "model": self._model or self.model()[0],
            "prompt": list(token_ids),
            "max_tokens": 1,
            "temperature": 1.0,
            "prompt_logprobs": top_k,
        }
        num_tokens = len(token_ids) * (top_k + 1)
        reply = self.http.post(ROUTE, body, timeout_s=timeout_s, num_tokens=num_tokens).body
        try:
            rows = reply["choices"][0]["prompt_logprobs"]
        except (KeyError, IndexError, TypeError) as error:
            raise self._malformed("no prompt_logprobs") from error
        if not isinstance(rows, list) or len(rows) != len(token_ids):
            num = len(rows) if isinstance(rows, list) else "no"
            raise self._malformed(f"{num} log-probabilities for {len(token_ids)} tokens")
        try:
            found = [{int(token): float(entry["logprob"]) for token, entry in row.items()} for row in rows[prompt_len:]]
            own = tuple(row[token_id] for row, token_id in zip(found, token_ids[prompt_len:], strict=True))
        except (AttributeError, KeyError, TypeError, ValueError, OverflowError) as error:
            raise self._malformed(f"not the log-probabilities of these tokens: {error!r}") from error
        if not all(isfinite(value) for row in found for value in row.values()):
            raise self._malformed("a log-probability that is not finite")
        if any(len(row) < top_k for row in found):
            raise self._malformed(f"fewer than {top_k} tokens at a place")
        likeliest = (sorted(row.items(), key=lambda pair: -pair[1])[:top_k] for row in found)
        return Teaching(logprobs=own, top=tuple(map(tuple, likeliest)))

    def _malformed(self, problem: str) -> ReplyMalformed:
        return ReplyMalformed(f"{ROUTE} answered {problem}", key=self.base_url, remedy=REMEDY)


def first_difference_in_text(
    ours: Callable[[Sequence[int]], str], theirs: Callable[[Sequence[int]], str], num_ids: int
) -> int | None:
    """Smallest id below ``num_ids`` at which two vocabularies write another text; None: nowhere.

    Compares chunks, then halves the first one that differs. Ids beyond ``num_ids`` are not looked at.

    >>> first_difference_in_text(lambda ids: "".join(map(chr, ids)), lambda ids: "".join(map(str, ids)), 3)
    0
    """
    for start in range(0, num_ids, CHUNK_LEN):
        ids = range(start, min(start + CHUNK_LEN, num_ids))
        if ours(ids) == theirs(ids):
            continue
        while len(ids) > 1:
            half = ids[: len(ids) // 2]
            ids = half if ours(half) != theirs(half) else ids[len(half) :]
        return ids[0]
    return None


def num_ids_of(text: Callable[[Sequence[int]], str], *, most: int = 1 << 20) -> int:
    """Ids that write something, from 0 on without a gap at the end.

    >>> num_ids_of(lambda ids: "x" if ids[0] < 300 else "")
    300
    """
    low, high = 0, most
    while low < high:
        middle = (low + high) // 2
        low, high = (middle + 1, high) if text([middle]) else (low, middle)
    return low
