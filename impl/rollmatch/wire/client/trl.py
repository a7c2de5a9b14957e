"""The dialect of ``trl vllm-serve`` up to 1.10 (token-id prompts: from 1.0 on).

All responses of a call share one seed and one set of sampling values.
"""

from collections.abc import Sequence
from typing import Any

from rollmatch.wire.client.dialect import Post
from rollmatch.wire.client.http import JSON, ReplyMalformed
from rollmatch.wire.client.prompt import Prompt, Reply, SamplingRules
from rollmatch.wire.client.reply import entries_of, field_of, filled, ids_of
from rollmatch.wire.client.swift import text_of, version_of

ROUTE = "/generate"


class TrlDialect:
    """Ids in, ids out; the reason a response ended is read from its last token."""

    name = "trl"
    answers_while_generating = False

    def __init__(self, base_url: str) -> None:
        self.base_url = base_url

    def exchange(self, post: Post, prompts: Sequence[Prompt], sampling: SamplingRules) -> list[Reply]:
        """One call for all. Errors: ``ReplyMalformed``, ``ReplyCountMismatch``."""
        answer = post(ROUTE, encode(prompts, sampling), JSON)
        rows = [self._rows(answer.body, name, len(prompts)) for name in ("prompt_ids", "completion_ids")]
        return [
            Reply(
                prompt_token_ids=filled(prompt, name="prompt_ids", place=place, base_url=self.base_url),
                response_token_ids=response,
                finish_reason="stop" if set(sampling.stop_token_ids) & set(response) else "length",
                policy_version=version_of(answer.headers),
            )
            for place, (prompt, response) in enumerate(zip(*rows, strict=True))
        ]

    def _rows(self, body: Any, name: str, num_requests: int) -> list[tuple[int, ...]]:
        rows = field_of(body, name)
        if rows is None:
            raise ReplyMalformed(f"the answer of {self.base_url} has no {name}", key=self.base_url)
        entries = entries_of(rows, base_url=self.base_url, num_requests=num_requests)
        return [ids_of(row, name=name, place=place, base_url=self.base_url) for place, row in enumerate(entries)]


def encode(prompts: Sequence[Prompt], sampling: SamplingRules) -> dict[str, Any]:
    """The body of a call; its seed is the first request's."""
    return {
        "prompts": [list(prompt.prompt_token_ids) for prompt in prompts],
        "images": [[text_of(image) for image in prompt.images] or None for prompt in prompts],
        "n": 1,
        "max_tokens": sampling.max_tokens,
        "temperature": sampling.temperature,
        "top_p": sampling.top_p,
        "top_k": sampling.top_k,
        "repetition_penalty": sampling.repetition_penalty,
        "logprobs": None,
        "generation_kwargs": {"seed": prompts[0].seed, "stop_token_ids": list(sampling.stop_token_ids)},
    }
