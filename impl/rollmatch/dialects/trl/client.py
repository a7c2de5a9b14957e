"""The dialect of ``trl vllm-serve`` up to 1.10 (token-id prompts: from 1.0 on).

All responses of a call share one seed and one set of sampling values. A prompt that occurs several times is sent
once with a number of completions: two copies of it would be answered alike.
"""

from collections.abc import Sequence

from rollmatch.dialects.dialect import Dialect, Post
from rollmatch.dialects.http import JSON, ReplyMalformed
from rollmatch.dialects.prompt import UNSHAPED, Prompt, Reply, SamplingRules
from rollmatch.dialects.reply import entries_of, field_of, filled, ids_of, logprobs_of
from rollmatch.dialects.swift.client import text_of, version_of

ROUTE = "/generate"


class TrlDialect(Dialect):
    """Ids in, ids out; the reason a response ended is read from its last token."""

    name = "trl"
    signs = frozenset({"/generate", "/init_communicator", "/update_named_param"})
    answers_while_generating = False
    takes_chats = "never"

    def exchange(self, post: Post, prompts: Sequence[Prompt], sampling: SamplingRules) -> list[Reply]:
        """One call for all prompts that occur equally often. Errors: ``ReplyMalformed``, ``reply-count-mismatch``."""
        replies: dict[int, Reply] = {}
        for places in equally_often(prompts):
            answered = self._ask(post, [prompts[copies[0]] for copies in places], sampling, num_copies=len(places[0]))
            replies |= dict(zip((place for copies in places for place in copies), answered, strict=True))
        return [replies[place] for place in range(len(prompts))]

    def _ask(self, post: Post, prompts: Sequence[Prompt], sampling: SamplingRules, *, num_copies: int) -> list[Reply]:
        answer = post(ROUTE, encode(prompts, sampling) | {"n": num_copies}, JSON)
        counts = {"prompt_ids": len(prompts), "completion_ids": len(prompts) * num_copies}
        rows = [self._rows(answer.body, name, count) for name, count in counts.items()]
        rows[0] = [row for row in rows[0] for _ in range(num_copies)]
        logprobs = field_of(answer.body, "logprobs") if sampling.logprobs else None
        return [
            Reply(
                prompt_token_ids=filled(prompt, name="prompt_ids", place=place, base_url=self.base_url),
                response_token_ids=response,
                logprobs=None
                if logprobs is None
                else logprobs_of(field_of(logprobs, place), response, place=place, base_url=self.base_url),
                finish_reason="stop" if set(sampling.stop_token_ids) & set(response) else "length",
                policy_version=version_of(answer.headers),
            )
            for place, (prompt, response) in enumerate(zip(*rows, strict=True))
        ]

    def _rows(self, body: object, name: str, num_requests: int) -> list[tuple[int, ...]]:
        rows = field_of(body, name)
        if rows is None:
            raise ReplyMalformed(f"the answer of {self.base_url} has no {name}", key=self.base_url)
        entries = entries_of(rows, base_url=self.base_url, num_requests=num_requests)
        return [ids_of(row, name=name, place=place, base_url=self.base_url) for place, row in enumerate(entries)]


def equally_often(prompts: Sequence[Prompt]) -> list[list[list[int]]]:
    """Places of prompts, by prompt, those that stand equally often together.

    >>> def prompt(token_id):
    ...     return Prompt(request_id="", prompt_token_ids=(token_id,), messages=(), images=(), seed=1)
    >>> equally_often([prompt(5), prompt(6), prompt(5), prompt(7)])
    [[[0, 2]], [[1], [3]]]
    """
    copies: dict[tuple[tuple[int, ...], tuple[bytes, ...]], list[int]] = {}
    for place, prompt in enumerate(prompts):
        copies.setdefault((prompt.prompt_token_ids, prompt.images), []).append(place)
    by_count: dict[int, list[list[int]]] = {}
    for places in copies.values():
        by_count.setdefault(len(places), []).append(places)
    return list(by_count.values())


def encode(prompts: Sequence[Prompt], sampling: SamplingRules) -> dict[str, object]:
    """The body of a call; its seed is the first request's."""
    return {
        "prompts": [list(prompt.prompt_token_ids) for prompt in prompts],
        "images": [[text_of(image) for image in prompt.images] or None for prompt in prompts],
        "n": 1,
        **sampling.values(),
        "min_p": UNSHAPED["min_p"],
        "logprobs": 0 if sampling.logprobs else None,
        "generation_kwargs": {"seed": prompts[0].seed, "stop_token_ids": list(sampling.stop_token_ids)},
    }
