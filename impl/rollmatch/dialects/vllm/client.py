"""The dialect of a stock ``vllm serve``: one chat completion per prompt, many at a time."""

from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from typing import Any

from rollmatch.dialects.dialect import Post
from rollmatch.dialects.http import JSON
from rollmatch.dialects.native.client import BANNED
from rollmatch.dialects.prompt import UNSHAPED, Prompt, Reply, SamplingRules
from rollmatch.dialects.reply import chat_reply_of
from rollmatch.dialects.swift.client import text_of

ROUTE = "/v1/chat/completions"
MAX_CALLS = 64
"""At the same time; the server batches them."""


class VllmDialect:
    """OpenAI's chat with vLLM's token ids."""

    name = "vllm"
    signs = frozenset({"/v1/chat/completions", "/init_weight_transfer_engine", "/update_weights"})
    answers_while_generating = True

    def __init__(self, base_url: str) -> None:
        self.base_url = base_url

    def exchange(self, post: Post, prompts: Sequence[Prompt], sampling: SamplingRules) -> list[Reply]:
        """A call each. Errors: ``ReplyMalformed``."""

        def request(prompt: Prompt) -> object:
            return post(ROUTE, encode(prompt, sampling), JSON).body

        with ThreadPoolExecutor(min(MAX_CALLS, len(prompts))) as pool:
            return [
                chat_reply_of(body, version=None, place=place, base_url=self.base_url)
                for place, body in enumerate(pool.map(request, prompts))
            ]


def encode(prompt: Prompt, sampling: SamplingRules) -> dict[str, object]:
    """The body of a call."""
    images = iter(prompt.images)
    return {
        "messages": [_with_pictures(message, images) for message in prompt.messages],
        **sampling.values(),
        **UNSHAPED,
        "seed": prompt.seed,
        "stop_token_ids": list(sampling.stop_token_ids),
        "logit_bias": {str(token_id): BANNED for token_id in sampling.banned_token_ids},
        "return_token_ids": True,
        "skip_special_tokens": False,
        **({"logprobs": True, "top_logprobs": 0} if sampling.logprobs else {}),
    }


def _with_pictures(message: Any, images: Any) -> dict[str, Any]:
    if isinstance(message["content"], str):
        return dict(message)
    parts = [
        part
        if part["type"] == "text"
        else {"type": "image_url", "image_url": {"url": f"data:image/png;base64,{text_of(next(images))}"}}
        for part in message["content"]
    ]
    return dict(message) | {"content": parts}
