"""The same request in each dialect, without any client of ours."""

from collections.abc import Mapping, Sequence
from typing import Any

from conformance.judge.servers.exchange import RecordedCall
from conformance.judge.servers.protocol import Generated, ServerDialect, reply_reader
from conformance.judge.servers.question import DATA_URL, Question
from conformance.judge.servers.sglang import Sglang


def _set_of(words: str) -> frozenset[str]:
    return frozenset(words.split())


VLLM_RESTS: Mapping[str, Sequence[tuple[str, Any]]] = {
    **{f"pause, {mode}": [(f"/pause?mode={mode}", {})] for mode in ("keep", "wait", "abort")},
    "resume": [("/resume", {})],
    "sleep": [("/sleep?level=1", {})],
    "wake, at once": [("/wake_up", {})],
    "wake, by tags": [("/wake_up?tags=weights", {}), ("/wake_up?tags=kv_cache", {})],
    "deep sleep": [("/sleep?level=2", {})],
    "wake, weights": [("/wake_up?tags=weights", {})],
    "finish": [("/finish_weight_update", {})],
    "wake, rest": [("/wake_up?tags=kv_cache", {})],
}


class Swift(ServerDialect):
    """``swift rollout``."""

    name = family = "swift"
    transports = ("gloo", "nccl")
    health_path, generate_path = "/health/", "/infer/"
    quick_call = ("POST", "/process_weights_after_loading/")
    control_paths = ("/init_communicator/", "/update_flattened_params/", "/update_adapter_flattened_param/")
    signs = _set_of("/infer /init_communicator /update_flattened_params")
    picture_path = generate_path
    incomplete = ("/init_communicator/", {"host": "127.0.0.1", "port": 1}, "world_size")
    routes = _set_of(
        "/health/ /infer/ /get_world_size/ /init_communicator/ /update_flattened_params/ "
        "/reset_prefix_cache/ /update_adapter_flattened_param/ /close_communicator/ /get_engine_type/ "
    )

    def body(self, prompts: Sequence[Question], **options: Any) -> dict[str, Any]:
        config = {"max_tokens": 8, "temperature": 0.0, "return_details": True} | options
        requests = [
            {"messages": prompt.messages, "uuid": f"q-{i}"}
            | ({"images": [DATA_URL + one for one in prompt.pictures]} if prompt.picture else {})
            for i, prompt in enumerate(prompts)
        ]
        return {"infer_requests": requests, "request_config": config}

    def spoilt(self, prompts: Sequence[Question]) -> dict[str, Any]:
        body = self.body(prompts)
        body["infer_requests"][-1]["messages"] = [{"role": "user"}]
        return body

    @reply_reader
    def read(self, call: RecordedCall) -> list[Generated]:
        return [
            _chat_choice(response["prompt_token_ids"], choice)
            for response in (entry.get("response") or entry for entry in call.reply)
            for choice in response["choices"]
        ]


class Trl(ServerDialect):
    """``trl vllm-serve``, up to 1.10."""

    name = family = "trl"
    transports = ("gloo", "nccl")
    health_path, generate_path = "/health/", "/generate/"
    quick_call = ("POST", "/reset_prefix_cache/")
    signs = _set_of("/generate /init_communicator /update_named_param")
    picture_path = generate_path
    incomplete = ("/init_communicator/", {"host": "127.0.0.1", "port": 1, "client_device_uuid": "no"}, "world_size")
    routes = _set_of(
        "/health/ /generate/ /get_world_size/ /init_communicator/ /update_named_param/ "
        "/reset_prefix_cache/ /close_communicator/ "
    )

    def body(self, prompts: Sequence[Question], **options: Any) -> dict[str, Any]:
        fields = {"max_tokens": 8, "temperature": 0.0} | options
        further = {name: fields.pop(name) for name in ("seed", "stop") if name in fields}
        fields["logprobs"] = 0 if fields.get("logprobs") else None
        if any(prompt.picture for prompt in prompts):
            fields["images"] = [prompt.pictures or None for prompt in prompts]
        return {"prompts": [prompt.ids for prompt in prompts], "generation_kwargs": further} | fields

    def spoilt(self, prompts: Sequence[Question]) -> dict[str, Any]:
        body = self.body(prompts)
        body["prompts"][-1] = [10**6]
        return body

    @reply_reader
    def read(self, call: RecordedCall) -> list[Generated]:
        rows, prompts = call.reply["completion_ids"], call.reply["prompt_ids"]
        each = max(1, len(rows) // max(1, len(prompts)))
        logprobs = call.reply.get("logprobs") or [None] * len(rows)
        return [
            Generated(prompt_ids=prompts[place // each], ids=row, logprobs=fields and [one[0] for one in fields])
            for place, (row, fields) in enumerate(zip(rows, logprobs, strict=True))
        ]


class Vllm(ServerDialect):
    """A stock ``vllm serve`` with its routes for training."""

    name = family = "vllm"
    transports = ("gloo", "nccl")
    health_path, generate_path = "/health", "/v1/completions"
    quick_call = ("POST", "/reset_prefix_cache")
    control_paths = (
        *("/init_weight_transfer_engine", "/update_weights", "/collective_rpc"),
        *("/pause?mode=keep", "/resume"),
    )
    signs = _set_of("/v1/chat/completions /init_weight_transfer_engine /update_weights")
    picture_path = "/v1/chat/completions"
    incomplete = ("/init_weight_transfer_engine", {}, "init_info")
    routes = _set_of(
        "/health /v1/completions /v1/chat/completions /get_world_size /init_weight_transfer_engine "
        "/start_weight_update /update_weights /finish_weight_update /pause /resume /reset_prefix_cache "
    )
    rests = VLLM_RESTS
    version_of_weights = ("/weight_info", "weight_version")
    model: str | None = None
    """As the server calls it; None leaves it to the server, which most take for the only one they serve."""

    def body(self, prompts: Sequence[Question], **options: Any) -> dict[str, Any]:
        """A picture needs a chat, which takes one prompt."""
        fields = {"max_tokens": 8, "temperature": 0.0} | options
        named = {"model": self.model} if self.model else {}
        if any(prompt.picture for prompt in prompts):
            [prompt] = prompts
            return named | {"messages": prompt.parts, "return_token_ids": True} | fields
        fields["logprobs"] = 0 if fields.get("logprobs") else None
        return named | {"prompt": [prompt.ids for prompt in prompts], "return_token_ids": True} | fields

    def spoilt(self, prompts: Sequence[Question]) -> dict[str, Any]:
        body = self.body(prompts)
        body["prompt"][-1] = [10**6]
        return body

    @reply_reader
    def read(self, call: RecordedCall) -> list[Generated]:
        if call.path == self.picture_path:
            return [_chat_choice(call.reply["prompt_token_ids"], choice) for choice in call.reply["choices"]]
        return [
            Generated(
                prompt_ids=choice["prompt_token_ids"],
                ids=choice["token_ids"],
                logprobs=choice.get("logprobs") and choice["logprobs"]["token_logprobs"],
                text=choice["text"],
                finish_reason=choice["finish_reason"],
            )
            for choice in sorted(call.reply["choices"], key=lambda choice: choice["index"])
        ]


class Native(ServerDialect):
    """``rollmatch serve``'s own."""

    name = family = "native"
    health_path, generate_path = "/health/", "/native/infer/"
    quick_call = ("GET", "/health/")
    control_paths = ("/native/communicator/", "/native/sync/", "/native/sync/commit/", "/native/sync/drop/")
    signs = _set_of("/native/infer /native/sync /native/communicator")
    picture_path = generate_path
    incomplete = (
        "/native/communicator/",
        {"client": "judge", "port": 1, "world_size": 2, "secret": "of the judge's group"},
        "host",
    )
    routes = _set_of(
        "/health/ /get_world_size/ /native/infer/ /native/identity/ /native/sync/ /native/communicator/ "
        "/native/communicator/close/ /native/sync/commit/ /native/sync/drop/ "
    )

    def body(self, prompts: Sequence[Question], **options: Any) -> dict[str, Any]:
        sampling = {"max_tokens": 8, "temperature": 0.0} | options
        seed = sampling.pop("seed", None)
        requests = [
            {
                "request_id": f"q-{i}",
                "prompt_token_ids": prompt.ids,
                "seed": None if seed is None else seed + i,
                "images": prompt.pictures,
            }
            for i, prompt in enumerate(prompts)
        ]
        return {"requests": requests, "sampling": sampling}

    def spoilt(self, prompts: Sequence[Question]) -> dict[str, Any]:
        body = self.body(prompts)
        body["requests"][-1]["prompt_token_ids"] = [10**6]
        return body

    @reply_reader
    def read(self, call: RecordedCall) -> list[Generated]:
        return [
            Generated(
                prompt_ids=one["prompt_token_ids"],
                ids=one["response_token_ids"],
                logprobs=one["logprobs"],
                finish_reason=one["finish_reason"],
            )
            for one in call.reply["responses"]
        ]


def _chat_choice(prompt_ids: list[int], choice: Mapping[str, Any]) -> Generated:
    logprobs = choice.get("logprobs") and [one["logprob"] for one in choice["logprobs"]["content"]]
    return Generated(
        prompt_ids=prompt_ids,
        ids=choice["token_ids"],
        logprobs=logprobs,
        text=choice["message"]["content"],
        finish_reason=choice["finish_reason"],
    )


DIALECTS: Mapping[str, type[Any]] = {kind.name: kind for kind in (Native, Swift, Trl, Sglang, Vllm)}
"""In this order: a server may speak several, and the first one whose signs it shows is used."""
