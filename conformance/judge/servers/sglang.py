"""SGLang's server, as its published code (sglang 0.5.23 on PyPI) reads requests; not yet seen on a running one.

``srt/entrypoints/http_server.py``: routes. ``srt/managers/io_struct.py``, ``srt/sampling/sampling_params.py``: their
bodies. ``srt/managers/scheduler_components/weight_updater.py``: an update lies between ``/begin_weight_update`` and
``/end_weight_update``; each of its calls is loaded at once. What was not released cannot be resumed. A seed counts with
``--enable-deterministic-inference``; memory is released with ``--enable-memory-saver``.
"""

from collections.abc import Mapping, Sequence
from typing import Any

from conformance.judge.servers.exchange import RecordedCall
from conformance.judge.servers.protocol import Generated, ServerDialect, reply_reader
from conformance.judge.servers.question import DATA_URL, Question

GROUP = "judge"
"""Name of the weight group, and of the keys in its store."""
OTHER_ROUTE = "the check calls a route of vLLM"
NOT_APPLICABLE = {
    "world-size-is-returned": "the size is in /server_info, as tp_size",
    "request-name-comes-back": "a call of several prompts has a name for each",
    "a-reset-returns-its-success": "/flush_cache returns its success as the status",
    **dict.fromkeys(
        (
            *("routes-read-a-prompt-alike", "a-stream-is-the-whole-response", "an-adapter-is-served-by-its-name"),
            *("a-replaced-adapter-is-served", "an-unloaded-adapter-is-gone", "a-stream-survives-an-update"),
            *("an-adapter-of-too-high-a-rank-is-refused", "a-response-names-the-weights-that-wrote-it"),
        ),
        OTHER_ROUTE,
    ),
}
PAUSE, CONTINUE = "/pause_generation", "/continue_generation"
RELEASE, OCCUPY = "/release_memory_occupation", "/resume_memory_occupation"
CACHE = ["kv_cache", "cuda_graph"]
"""Tags of what a server releases that keeps its weights."""
RESTS: Mapping[str, Sequence[tuple[str, Any]]] = {
    "pause, keep": [(PAUSE, {"mode": "in_place"})],
    "pause, wait": [(PAUSE, {"mode": "retract"})],
    "pause, abort": [(PAUSE, {"mode": "abort"})],
    "resume": [(CONTINUE, {})],
    "sleep": [(RELEASE, {"tags": CACHE})],
    "wake, at once": [(OCCUPY, {"tags": CACHE})],
    "wake, by tags": [(OCCUPY, {"tags": [tag]}) for tag in reversed(CACHE)],
    "deep sleep": [(RELEASE, {})],
    "wake, weights": [(OCCUPY, {"tags": ["weights"]})],
    "finish": [("/end_weight_update", {})],
    "wake, rest": [(OCCUPY, {"tags": CACHE})],
}
SAMPLING = {"max_tokens": "max_new_tokens", "seed": "sampling_seed"}
"""The judge's name -> SGLang's, where they differ."""


class Sglang(ServerDialect):
    """``python -m sglang.launch_server``; its learner is rank 0, as vLLM's is."""

    name, family = "sglang", "vllm"
    health_path, generate_path = "/health", "/generate"
    picture_path = generate_path
    quick_call = ("GET", "/model_info")
    control_paths = ("/init_weights_update_group", "/update_weights_from_distributed", "/update_weight_version")
    signs = frozenset({"/generate", "/init_weights_update_group", "/update_weights_from_distributed"})
    incomplete = (
        "/init_weights_update_group",
        {"master_address": "127.0.0.1", "master_port": 1, "rank_offset": 1},
        "world_size",
    )
    routes = signs | {
        *("/health", "/model_info", "/server_info", "/flush_cache", PAUSE, CONTINUE, RELEASE, OCCUPY),
        *("/begin_weight_update", "/end_weight_update", "/update_weight_version", "/destroy_weights_update_group"),
    }
    rests = RESTS
    version_of_weights = ("/model_info", "weight_version")
    not_applicable = NOT_APPLICABLE

    def body(self, prompts: Sequence[Question], **options: Any) -> dict[str, Any]:
        """Several prompts make a list of replies, also where it is one."""
        fields = {"max_tokens": 8, "temperature": 0.0} | options
        wants_logprobs, stream = bool(fields.pop("logprobs", False)), fields.pop("stream", False)
        sampling = {SAMPLING.get(name, name): value for name, value in fields.items()}
        body = {"input_ids": [prompt.ids for prompt in prompts], "sampling_params": sampling}
        body |= {"return_logprob": wants_logprobs, "return_prompt_token_ids": True, "stream": stream}
        if any(prompt.picture for prompt in prompts):
            body["image_data"] = [[DATA_URL + one for one in prompt.pictures or ()] for prompt in prompts]
        return body

    def spoilt(self, prompts: Sequence[Question]) -> dict[str, Any]:
        body = self.body(prompts)
        body["input_ids"][-1] = [10**6]
        return body

    @reply_reader
    def read(self, call: RecordedCall) -> list[Generated]:
        """``output_token_logprobs``: [log-probability, id, text or null] of each id."""
        return [_read(one) for one in call.reply]

    def make_peer(self, talk: Any) -> Any:
        from conformance.judge.servers.senders import SglangPeer  # loads torch

        return SglangPeer(talk)


def _read(one: Mapping[str, Any]) -> Generated:
    about = one["meta_info"]
    values = about.get("output_token_logprobs")
    return Generated(
        prompt_ids=one["prompt_token_ids"],
        ids=one["output_ids"],
        logprobs=values and [value for value, *_ in values],
        text=one.get("text"),
        finish_reason=about["finish_reason"]["type"],
    )
