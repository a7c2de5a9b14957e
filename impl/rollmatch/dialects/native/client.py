"""The native dialect: ids in, ids out, as bytes."""

from collections.abc import Sequence

import numpy as np

from rollmatch.data.ids import pack_ids, unpack_ids
from rollmatch.dialects.dialect import Dialect, Post
from rollmatch.dialects.http import MSGPACK, HttpReply, ReplyMalformed
from rollmatch.dialects.prompt import Prompt, Reply, SamplingRules
from rollmatch.dialects.reply import entries_of, field_of, filled, logprobs_of, reason_of

ROUTE = "/native/infer"
BANNED = -100.0
"""Logit bias of a token that may not be sampled."""


class NativeDialect(Dialect):
    """Our own server's."""

    name = "native"
    signs = frozenset({"/native/infer", "/native/sync", "/native/communicator"})
    answers_while_generating = True
    takes_chats = "never"

    def exchange(self, post: Post, prompts: Sequence[Prompt], sampling: SamplingRules) -> list[Reply]:
        """One call for all. Errors: ``ReplyMalformed``, ``reply-count-mismatch``."""
        return self._read(post(ROUTE, encode(prompts, sampling), MSGPACK), prompts)

    def _read(self, answer: HttpReply, prompts: Sequence[Prompt]) -> list[Reply]:
        body = field_of(answer.body, "responses")
        entries = entries_of(body, base_url=self.base_url, num_requests=len(prompts))
        for place, (entry, prompt) in enumerate(zip(entries, prompts, strict=True)):
            if field_of(entry, "request_id") != prompt.request_id:
                problem = f"entry {place} of the answer of {self.base_url} is not for request {prompt.request_id}"
                raise ReplyMalformed(problem, key=self.base_url)
        return [self._reply(entry, place) for place, entry in enumerate(entries)]

    def _logprobs(self, entry: object, response: Sequence[int], place: int) -> tuple[float, ...] | None:
        packed = field_of(entry, "logprobs")
        if packed is None:
            return None
        is_whole = isinstance(packed, bytes) and len(packed) % 4 == 0
        values = np.frombuffer(packed, dtype="<f4").tolist() if is_whole else packed
        return logprobs_of(values, response, place=place, base_url=self.base_url)

    def _reply(self, entry: object, place: int) -> Reply:
        version = field_of(entry, "policy_version")
        if type(version) is not int:
            raise ReplyMalformed(f"entry {place} of {self.base_url} has no policy_version", key=self.base_url)
        prompt = self._ids(entry, "prompt_token_ids", place)
        response = self._ids(entry, "response_token_ids", place)
        return Reply(
            prompt_token_ids=filled(prompt, name="prompt_token_ids", place=place, base_url=self.base_url),
            response_token_ids=response,
            logprobs=self._logprobs(entry, response, place),
            finish_reason=reason_of(field_of(entry, "finish_reason"), place=place, base_url=self.base_url),
            policy_version=version,
            policy_versions=self._runs(entry, len(response), place) or ((version, len(response)),),
        )

    def _runs(self, entry: object, num_tokens: int, place: int) -> tuple[tuple[int, int], ...] | None:
        """Of versions; None where the server names one only."""
        runs = field_of(entry, "policy_versions")
        if runs is None:
            return None
        is_read = isinstance(runs, list) and all(
            isinstance(run, list) and len(run) == 2 and all(type(number) is int and number >= 0 for number in run)
            for run in runs
        )
        if not is_read or sum(length for _, length in runs) != num_tokens:
            problem = f"policy_versions of entry {place} of {self.base_url} do not add up to its {num_tokens} tokens"
            raise ReplyMalformed(problem, key=self.base_url)
        return tuple((version, length) for version, length in runs)

    def _ids(self, entry: object, name: str, place: int) -> tuple[int, ...]:
        packed = field_of(entry, name)
        if not isinstance(packed, bytes) or len(packed) % 4:
            raise ReplyMalformed(f"entry {place} of the answer of {self.base_url} has no {name}", key=self.base_url)
        return tuple(unpack_ids(packed).tolist())


def encode(prompts: Sequence[Prompt], sampling: SamplingRules) -> dict[str, object]:
    """The body of a call; an image of several prompts is in it once."""
    places: dict[bytes, int] = {}
    return {
        "requests": [
            {
                "request_id": prompt.request_id,
                "prompt_token_ids": pack_ids(prompt.prompt_token_ids),
                "images": [places.setdefault(image, len(places)) for image in prompt.images],
                "seed": prompt.seed,
            }
            | ({} if prompt.max_tokens is None else {"sampling": _values(sampling, prompt.max_tokens)})
            for prompt in prompts
        ],
        "sampling": _values(sampling, sampling.max_tokens),
        "images": list(places),
    }


def _values(sampling: SamplingRules, max_tokens: int) -> dict[str, object]:
    return {
        **sampling.values(),
        "max_tokens": max_tokens,
        "stop_token_ids": list(sampling.stop_token_ids),
        "logit_bias": dict.fromkeys(sampling.banned_token_ids, BANNED),
        **({"logprobs": True} if sampling.logprobs else {}),
    }
