"""Engines that answer every response otherwise, so that a reply shows whose response stands where."""

import asyncio
from contextlib import contextmanager
from types import SimpleNamespace
from typing import NamedTuple

import msgspec
import numpy as np
from starlette.testclient import TestClient

from conformance.doubles.digits import MODEL
from conformance.doubles.request_bodies import IMAGE
from conformance.doubles.stand_in import STOP, PretendingReplica, commit
from rollmatch.dialects.http import MSGPACK, HttpReply
from rollmatch.serve.app import make_app
from rollmatch.server.replica import EngineOutput, EnginePart

TEMPLATE = (
    "{% for tool in tools or () %}{{ tool.function.name }}{{ tool.function.parameters | tojson }}{% endfor %}"
    "{{ mood }}{{ pace }}"
    "{% for m in messages %}[{{ m.role }}:{% if m.content is string %}{{ m.content }}{% else %}"
    "{% for part in m.content %}{{ part.text if part.type == 'text' else image_token }}{% endfor %}{% endif %}"
    "{% for call in m.tool_calls or () %}{{ call.id }}.{{ call.function.name }}{{ call.function.arguments | tojson }}"
    "{% endfor %}{% for name in ('name', 'tool_call_id', 'reasoning') %}"
    "{% if m[name] is defined and m[name] %}{{ name }}={{ m[name] | tojson }}{% endif %}{% endfor %}]{% endfor %}"
    "{{ reasoning_effort }}{% if add_generation_prompt %}>{% endif %}"
)
"""A chat template that shows everything it is given; ``image_token`` has to be replaced by a text."""


class Response(NamedTuple):
    """What is written for one seed: ids, whether they end by themselves, and a log-probability for each."""

    ids: list[int]
    is_stopped: bool
    logprobs: list[float]

    @property
    def reason(self):
        return "stop" if self.is_stopped else "length"

    @property
    def stop_id(self):
        return STOP if self.is_stopped else None

    def likeliest(self, num_top):
        """(id, log-probability) of each place, likeliest first: one that was not sampled stands before."""
        rows = zip(self.ids, self.logprobs, strict=True)
        return [
            [(token_id + 1, -0.125), (token_id, value)] if num_top else [(token_id, value)] for token_id, value in rows
        ]


def response_to(seed):
    """Two ids and more; every other response ends by itself."""
    length = 2 + seed % 3
    ids = [50 + 7 * seed + place for place in range(length)]
    is_stopped = seed % 2 == 1
    return Response(
        [*ids[:-1], STOP] if is_stopped else ids, is_stopped, [-0.25 - seed - place for place in range(length)]
    )


def prompt_rows(token_ids):
    """Log-probabilities of a prompt's ids; the first has none."""
    return [{}, *({token_id: SimpleNamespace(logprob=-0.5 - place, rank=place + 2, decoded_token=f"<{token_id}>")}
            for place, token_id in enumerate(token_ids[1:]))]  # fmt: skip


class DistinctReplica(PretendingReplica):
    """Writes ``response_to``, whatever was to be sampled."""

    def params_of(self, request, *, seed):
        params = super().params_of(request, seed=seed)
        params.num_prompt_top = request.num_prompt_top
        return params

    async def generate(self, prompt, params, request_id):
        self.generated.append(SimpleNamespace(prompt=prompt, params=params))
        answer = response_to(params.seed or 0)
        await asyncio.sleep(0.002 * (9 - (params.seed or 0) % 9))  # the last ones end first
        tops = [
            {token_id: SimpleNamespace(logprob=value, rank=rank) for rank, (token_id, value) in enumerate(row, 1)}
            for row in answer.likeliest(params.num_top)
        ]
        has_prompt = params.num_prompt_top is not None
        return EngineOutput(
            prompt_token_ids=prompt.token_ids,
            response_token_ids=answer.ids,
            finish_reason=answer.reason,
            stop_token_id=answer.stop_id,
            logprobs=np.array(answer.logprobs, "<f4").tobytes() if params.logprobs else None,
            top=tops if params.num_top else (),
            prompt_logprobs=prompt_rows(prompt.token_ids) if has_prompt else None,
        )


class DistinctVllm(PretendingReplica):
    """What vLLM's OpenAI classes need of an engine: vLLM's own configuration and renderer; nothing is generated.

    Every choice is ``response_to`` of its seed.
    """

    def __init__(self, index, *, tokenizer, **fields):
        """``tokenizer``: its directory."""
        super().__init__(index, **fields)
        if index == 0:
            self.engine = _frontend(tokenizer)

    async def stream(self, prompt, params, request_id, **options):
        from vllm import CompletionOutput, RequestOutput
        from vllm.logprobs import Logprob
        from vllm.sampling_params import RequestOutputKind

        self.generated.append(SimpleNamespace(prompt=prompt, params=params, options=options))

        def rows_of(answer):
            return [
                {
                    token_id: Logprob(logprob=value, rank=rank, decoded_token=f"<{token_id}>")
                    for rank, (token_id, value) in enumerate(row, 1)
                }
                for row in answer.likeliest(params.logprobs)
            ]

        outputs = [
            CompletionOutput(
                index=index, text=f"text {(params.seed or 0) + index}", token_ids=answer.ids, cumulative_logprob=None,
                logprobs=None if params.logprobs is None else rows_of(answer), finish_reason=answer.reason,
            )
            for index, answer in enumerate(response_to((params.seed or 0) + index) for index in range(params.n))
        ]  # fmt: skip
        rows = None if params.prompt_logprobs is None else prompt_rows(prompt.token_ids)
        is_whole = params.output_kind == RequestOutputKind.FINAL_ONLY
        for part in [outputs] if is_whole else [[output] for output in outputs]:
            output = RequestOutput(
                request_id=request_id, prompt=None, prompt_token_ids=prompt.token_ids, prompt_logprobs=rows,
                outputs=part, finished=part[-1] is outputs[-1],
            )  # fmt: skip
            num_tokens = sum(len(one.token_ids) for one in part)
            yield EnginePart(output=output, num_tokens=num_tokens, is_last=output.finished)


def _frontend(tokenizer):
    """Of vLLM's engine, the parts that run in the server's process."""
    from vllm.engine.arg_utils import AsyncEngineArgs
    from vllm.renderers import renderer_from_config
    from vllm.v1.engine.input_processor import InputProcessor

    arguments = AsyncEngineArgs(model=str(MODEL), tokenizer=tokenizer, dtype="float32", max_model_len=512)
    config = arguments.create_engine_config()
    renderer = renderer_from_config(config)
    parts = {"input_processor": InputProcessor(config, renderer), "renderer": renderer}
    return SimpleNamespace(vllm_config=config, model_config=config.model_config, **parts)


@contextmanager
def serving(parts, *, version):
    """A server's parts and a client of its application; its chat template shows everything it is given."""
    asyncio.run(commit(parts.pool, version, drain_s=0.0))
    tokenizer, template = parts.prompts.tokenizer, parts.prompts.tokenizer.chat_template
    tokenizer.chat_template = TEMPLATE.replace("image_token", repr(tokenizer.decode([IMAGE])))
    with TestClient(make_app(parts)) as client:
        yield parts, client
    tokenizer.chat_template = template


def ids_of(text, parts):
    """Of a prompt's text, in which ``<image>`` is a placeholder."""
    tokenizer = parts.prompts.tokenizer
    return tokenizer.encode(text.replace("<image>", tokenizer.decode([IMAGE])), add_special_tokens=False)


def asked_of(parts, call):
    """What engines are asked to write by a call, and what it returns."""
    for replica in parts.pool.replicas:
        replica.generated.clear()
    returned = call()
    return [draw for replica in parts.pool.replicas for draw in replica.generated], returned


def posted_to(client):
    """A dialect's ``Post`` to the application of a test client."""

    def post(route, body, content_type):
        encoding = msgspec.msgpack if content_type == MSGPACK else msgspec.json
        reply = client.post(f"{route}/", content=encoding.encode(body), headers={"content-type": content_type})
        assert reply.status_code == 200, reply.text
        return HttpReply(body=encoding.decode(reply.content), headers=reply.headers)

    return post
