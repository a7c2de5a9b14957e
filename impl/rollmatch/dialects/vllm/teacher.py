"""Log-probabilities of given tokens by a stock ``vllm serve`` or our server.

``prompt_logprobs`` of a completion whose prompt is the tokens. That route takes no images: tokens behind a prompt with
some go to ``/inference/v1/generate``, which vLLM 0.28 and newer have, from 0.30 on with ``--enable-scale-out``.
"""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from math import exp, isfinite, log
from typing import TypedDict

from rollmatch.dialects.http import HttpServer, ReplyMalformed
from rollmatch.dialects.reply import MODELS, ServedModels, read_as
from rollmatch.dialects.swift.client import data_url
from rollmatch.records import Teaching

ROUTE, ROUTE_OF_IMAGES = "/v1/completions", "/inference/v1/generate"
LOOK_S = 10.0
"""Longest wait for what a server says of itself."""
REMEDY = "A teacher is a vllm serve or rollmatch serve that answers prompt_logprobs, with its own ids."
LEAST_REST = 1e-7
"""Probability that the ids which are not excluded have together, at least."""
CHUNK_LEN = 512
"""Ids whose text is compared by one call."""


class _Text(TypedDict):
    prompt: str


@dataclass(frozen=True, slots=True, kw_only=True)
class JudgedTokens:
    """Tokens that a teacher judges, behind a prompt."""

    token_ids: tuple[int, ...]
    """[L] with the prompt, its images expanded."""
    prompt_len: int
    images: tuple[bytes, ...] = ()
    """Encoded pictures of the prompt, in order."""
    sent_ids: tuple[int, ...] = ()
    """``token_ids`` with one placeholder per image; empty without images."""


class TeacherServer:
    """A server that says how likely tokens are; nothing here is repeated."""

    def __init__(self, base_url: str, *, api_key: str | None = None, excluded_ids: Sequence[int] = ()) -> None:
        """``excluded_ids``: ids that no response contains; what is judged are distributions over the others."""
        self.http = HttpServer(base_url, api_key=api_key)
        self.base_url, self.excluded_ids = self.http.base_url, excluded_ids
        self._model: str | None = None

    def model(self) -> tuple[str, int | None]:
        """Name of the served model, and its longest sequence in tokens. Errors: those of ``HttpServer.get``."""
        body = self.http.get(MODELS, timeout_s=LOOK_S).body
        entry = read_as(ServedModels, body, route=MODELS, base_url=self.base_url)["data"][0]
        self._model = entry["id"]
        return self._model, entry.get("max_model_len")

    def text(self, token_ids: Sequence[int]) -> str:
        """What the tokens say. Errors: those of ``HttpServer.post``; ``ReplyMalformed`` for no text."""
        body = {"model": self._model or self.model()[0], "tokens": list(token_ids)}
        reply = self.http.post("/detokenize", body, timeout_s=LOOK_S).body
        return read_as(_Text, reply, route="/detokenize", base_url=self.base_url)["prompt"]

    def teach(self, judged: JudgedTokens, *, top_k: int, timeout_s: float) -> Teaching:
        """Of the tokens from ``prompt_len`` on, each behind all before it.

        A server lists the likeliest of all ids: so as many more are asked for as are excluded.

        Errors: those of ``HttpServer.post``; ``ReplyMalformed`` for no log-probabilities, or those of other tokens.
        """
        token_ids, prompt_len, num_top = judged.token_ids, judged.prompt_len, self.num_asked(top_k)
        rules = {"max_tokens": 1, "temperature": 1.0, "prompt_logprobs": num_top}
        route, body = ROUTE, {"model": self._model or self.model()[0], "prompt": token_ids, **rules}
        if judged.images:
            parts = [{"type": "image_url", "url": data_url(image)} for image in judged.images]
            body = {"model": body["model"], "token_ids": judged.sent_ids, "content_parts": parts}
            route, body["sampling_params"] = ROUTE_OF_IMAGES, rules
        num_tokens = len(token_ids) * (num_top + 1)
        reply = self.http.post(route, body, timeout_s=timeout_s, num_tokens=num_tokens).body
        try:
            rows = (reply if judged.images else reply["choices"][0])["prompt_logprobs"]
        except (KeyError, IndexError, TypeError) as error:
            raise self._malformed(route, "no prompt_logprobs") from error
        if not isinstance(rows, list) or len(rows) != len(token_ids):
            num = len(rows) if isinstance(rows, list) else "no"
            raise self._malformed(route, f"{num} log-probabilities for {len(token_ids)} tokens")
        try:
            found = [{int(token): float(entry["logprob"]) for token, entry in row.items()} for row in rows[prompt_len:]]
        except (AttributeError, KeyError, TypeError, ValueError, OverflowError) as error:
            raise self._malformed(route, f"no log-probabilities by token: {error!r}") from error
        if not all(isfinite(value) for row in found for value in row.values()):
            raise self._malformed(route, "a log-probability that is not finite")
        if any(len(row) < num_top for row in found):
            raise self._malformed(route, f"fewer than {num_top} tokens at a place")
        kept = [self._without_excluded(row) for row in found]
        missing = next((i for row, i in zip(kept, token_ids[prompt_len:], strict=True) if i not in row), None)
        if missing is not None:
            raise self._malformed(route, f"no log-probability of token {missing} where it stands")
        own = tuple(row[token_id] for row, token_id in zip(kept, token_ids[prompt_len:], strict=True))
        likeliest = (sorted(row.items(), key=lambda pair: -pair[1])[:top_k] for row in kept)
        return Teaching(logprobs=own, top=tuple(map(tuple, likeliest)))

    def _without_excluded(self, row: Mapping[int, float]) -> Mapping[int, float]:
        """The distribution over all other ids; an excluded one that is not listed is less likely than any that is."""
        lost = sum(exp(min(0.0, row[token_id])) for token_id in self.excluded_ids if token_id in row)
        rest = log(max(1 - lost, LEAST_REST))
        return {token_id: value - rest for token_id, value in row.items() if token_id not in self.excluded_ids}

    def num_asked(self, top_k: int) -> int:
        """Log-probabilities at each place that a server must give for ``top_k``."""
        return top_k + len(self.excluded_ids)

    def _malformed(self, route: str, problem: str) -> ReplyMalformed:
        return ReplyMalformed(f"{route} answered {problem}", key=self.base_url, remedy=REMEDY)


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
