"""The dialect of a stock ``vllm serve``: one completion per prompt, many at a time.

A prompt goes as its ids; one with images as a chat, because ids cannot carry images there.
"""

from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from typing import Any

from rollmatch.dialects.dialect import Dialect, Post
from rollmatch.dialects.http import JSON
from rollmatch.dialects.native.client import BANNED
from rollmatch.dialects.prompt import UNSHAPED, Prompt, Reply, SamplingRules
from rollmatch.dialects.reply import chat_reply_of, completion_reply_of
from rollmatch.dialects.swift.client import data_url

ROUTE, ROUTE_OF_IDS = "/v1/chat/completions", "/v1/completions"
MAX_CALLS = 64
"""At the same time; the server batches them."""


class VllmDialect(Dialect):
    """OpenAI's chat with vLLM's token ids."""

    name = "vllm"
    signs = frozenset({"/v1/chat/completions", "/init_weight_transfer_engine", "/update_weights"})
    answers_while_generating = True
    takes_chats = "with images"

    def exchange(self, post: Post, prompts: Sequence[Prompt], sampling: SamplingRules) -> list[Reply]:
        """A call each. Errors: ``ReplyMalformed``."""

        def request(place: int) -> Reply:
            prompt = prompts[place]
            if not prompt.images:
                body = post(ROUTE_OF_IDS, encode_ids(prompt, sampling), JSON).body
                return completion_reply_of(body, place=place, base_url=self.base_url)
            body = post(ROUTE, encode(prompt, sampling), JSON).body
            return chat_reply_of(body, version=None, place=place, base_url=self.base_url)

        with ThreadPoolExecutor(min(MAX_CALLS, len(prompts))) as pool:
            return list(pool.map(request, range(len(prompts))))


def encode(prompt: Prompt, sampling: SamplingRules) -> dict[str, object]:
    """The body of a call with a chat."""
    images = iter(prompt.images)
    messages = [_with_pictures(message, images) for message in prompt.messages]
    labels = {"logprobs": True, "top_logprobs": 0} if sampling.logprobs else {}
    values = {"chat_template_kwargs": dict(prompt.template_values)} if prompt.template_values else {}
    return {"messages": messages, **_sampled(prompt, sampling), **labels, **values}


def encode_ids(prompt: Prompt, sampling: SamplingRules) -> dict[str, object]:
    """The body of a call with ids, which has no images."""
    labels = {"logprobs": 0} if sampling.logprobs else {}
    return {"prompt": list(prompt.prompt_token_ids), **_sampled(prompt, sampling), **labels}


def _sampled(prompt: Prompt, sampling: SamplingRules) -> dict[str, object]:
    return {
        **sampling.values(),
        **UNSHAPED,
        "seed": prompt.seed,
        "stop_token_ids": list(sampling.stop_token_ids),
        "logit_bias": {str(token_id): BANNED for token_id in sampling.banned_token_ids},
        "return_token_ids": True,
        "skip_special_tokens": False,
    }


def _with_pictures(message: Any, images: Any) -> dict[str, Any]:
    if isinstance(message["content"], str):
        return dict(message)
    parts = [
        part if part["type"] == "text" else {"type": "image_url", "image_url": {"url": data_url(next(images))}}
        for part in message["content"]
    ]
    return dict(message) | {"content": parts}
