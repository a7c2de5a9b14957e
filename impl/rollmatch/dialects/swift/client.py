"""The dialect of ms-swift's ``swift rollout`` 4.x.

Its ``RequestConfig`` has no way to ban tokens and one seed for a whole call: request i samples from the call's seed
in a way that depends on the server's replicas, so sampled (not greedy) rollouts are repeatable per set-up only.
"""

import base64
from collections.abc import Mapping, Sequence
from typing import Any

from rollmatch.data.content import IMAGE_TAG
from rollmatch.dialects.dialect import Dialect, Post
from rollmatch.dialects.http import JSON
from rollmatch.dialects.prompt import UNSHAPED, Prompt, Reply, SamplingRules
from rollmatch.dialects.reply import chat_reply_of, entries_of, field_of

ROUTE = "/infer"
VERSION_HEADER = "x-policy-version"


class SwiftDialect(Dialect):
    """Messages in, ids out (``return_details``)."""

    name = "swift"
    signs = frozenset({"/infer", "/init_communicator", "/update_flattened_params"})
    answers_while_generating = False
    takes_chats = "always"

    def exchange(self, post: Post, prompts: Sequence[Prompt], sampling: SamplingRules) -> list[Reply]:
        """One call for all. Errors: ``ReplyMalformed``, ``reply-count-mismatch``."""
        answer = post(ROUTE, encode(prompts, sampling), JSON)
        entries = entries_of(answer.body, base_url=self.base_url, num_requests=len(prompts))
        version = version_of(answer.headers)
        bodies = [field_of(entry, "response") or entry for entry in entries]  # some versions wrap each once more
        return [
            chat_reply_of(body, version=version, place=place, base_url=self.base_url)
            for place, body in enumerate(bodies)
        ]


def encode(prompts: Sequence[Prompt], sampling: SamplingRules) -> dict[str, object]:
    """The body of a call; its seed is the first request's."""
    return {
        "infer_requests": [
            {
                "messages": [tagged(message) for message in prompt.messages],
                "images": [data_url(image) for image in prompt.images],
                "uuid": prompt.request_id,
            }
            for prompt in prompts
        ],
        "request_config": {
            **sampling.values(),
            **UNSHAPED,
            "stop": list(sampling.stop_texts),
            "seed": prompts[0].seed,
            "n": 1,
            "return_details": True,
            **({"logprobs": True} if sampling.logprobs else {}),
        },
    }


def tagged(message: Mapping[str, Any]) -> dict[str, Any]:
    """A message with its pictures as tags in the text.

    >>> tagged({"role": "user", "content": [{"type": "image", "image": "a.png"}, {"type": "text", "text": "Look."}]})
    {'role': 'user', 'content': '<image>Look.'}
    """
    content = message["content"]
    if not isinstance(content, str):
        content = "".join(part["text"] if part["type"] == "text" else IMAGE_TAG for part in content)
    return dict(message) | {"content": content}


def text_of(image: bytes) -> str:
    """Base64."""
    return base64.b64encode(image).decode("ascii")


def data_url(image: bytes) -> str:
    """An encoded picture as a URL; readers look at its bytes, not at the type that this names."""
    return f"data:image/png;base64,{text_of(image)}"


def version_of(headers: Mapping[str, str]) -> int | None:
    """The policy version in the header of our servers' replies; None from other servers."""
    value = headers.get(VERSION_HEADER, "")
    return int(value) if value.isdecimal() else None
