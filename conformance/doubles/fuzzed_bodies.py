"""Bodies of every route of every dialect, right ones and strategies that spoil them."""

import base64
import copy
import io

import msgspec
from hypothesis import strategies as st
from PIL import Image

IMAGE = 414


def picture(kind):
    file = io.BytesIO()
    Image.new("RGB", (40, 30), (9, 200, 30)).save(file, kind)
    return file.getvalue()


PICTURES = [picture(kind) for kind in ("PNG", "JPEG", "WEBP", "BMP", "GIF")]
TENSOR = {"name": "model.norm.weight", "dtype": "float32", "shape": [64]}
FACTOR = "base_model.model.model.language_model.layers.0.mlp.up_proj"
FACTORS = [
    {"name": f"{FACTOR}.lora_A.weight", "dtype": "float32", "shape": [4, 192], "start_idx": 0, "end_idx": 3072},
    {"name": f"{FACTOR}.lora_B.weight", "dtype": "float32", "shape": [512, 4], "start_idx": 3072, "end_idx": 11264},
]
FACTORS = [each | {"numel": each["shape"][0] * each["shape"][1]} for each in FACTORS]
"""Of an adapter of rank 4, as ms-swift's trainers announce it."""
SAMPLING = {
    "max_tokens": 2, "temperature": 1.0, "top_p": 0.9, "top_k": 5, "min_p": 0.1, "repetition_penalty": 1.1,
    "presence_penalty": 0.0, "frequency_penalty": 0.0, "min_tokens": 0, "ignore_eos": False, "stop_token_ids": [3],
    "logit_bias": {"7": -100.0}, "logprobs": True,
}  # fmt: skip
GROUP = {"host": "127.0.0.1", "port": 29000, "world_size": 3}
SYNC = {"client": "a", "sync_id": "s1", "version": 1, "tensors": [TENSOR], "buckets": [1], "digests": ["0" * 32]}
TURN = {"role": "user", "content": [{"type": "image", "image": ""}, {"type": "text", "text": "Look."}]}
TEXT = {"type": "text", "text": "Look."}
TOOL_CALL = {"id": "a", "type": "function", "function": {"name": "f", "arguments": "{}"}}
BODIES = {
    "native": [
        (
            "/native/infer/",
            {
                "requests": [{"request_id": "0", "prompt_token_ids": [5, IMAGE, 6], "images": [""], "seed": 3}],
                "sampling": SAMPLING,
            },
        ),
        ("/native/infer/", {"requests": [{"request_id": "0", "messages": [TURN], "sampling": SAMPLING}]}),
        ("/native/communicator/", GROUP | {"client": "a", "rank_offset": 0, "transport": "gloo", "timeout_s": 1.0}),
        (
            "/native/sync/",
            SYNC | {"adapter": {"merges": [{"name": "x", "lora_a": "a", "lora_b": "b", "scaling": 1.0}]}},
        ),
        ("/native/sync/", SYNC),
        ("/native/sync/again/", {"client": "a", "sync_id": "s2", "version": 2, "like": "s1", "commit": True}),
        ("/native/sync/commit/", {"client": "a", "sync_id": "s1"}),
        ("/native/sync/drop/", {"client": "a"}),
        ("/native/communicator/close/", {"client": "a", "force": False}),
    ],
    "swift": [
        (
            "/infer/",
            {
                "infer_requests": [{"messages": [TURN], "images": [{"bytes": "", "path": None}], "uuid": "u"}],
                "request_config": {"max_tokens": 2, "n": 2, "seed": 4, "stop": ["a"], "logprobs": True, "top_k": 3},
            },
        ),
        (
            "/infer/",
            {
                "infer_requests": [{"prompt_token_ids": [5, IMAGE], "images": [""], "data_dict": {"a": 1}}],
                "use_tqdm": False,
            },
        ),
        ("/init_communicator/", GROUP),
        ("/update_flattened_params/", {"metadatas": [TENSOR | {"start_idx": 0, "end_idx": 256, "numel": 64}]}),
        ("/update_adapter_flattened_param/", {"peft_config": {"lora_alpha": 8.0, "r": 4}, "metadatas": FACTORS}),
        ("/close_communicator/", {}),
        ("/get_engine_type/", {}),
    ],
    "vllm": [
        (
            "/init_weight_transfer_engine/",
            {
                "init_info": {
                    "master_address": "127.0.0.1",
                    "master_port": 1,
                    "rank_offset": 1,
                    "world_size": 3,
                    "packed": True,
                    "packed_buffer_size_bytes": 64,
                }
            },
        ),
        ("/start_weight_update/", {"is_checkpoint_format": True}),
        ("/update_weights/", {"update_info": {"names": ["x"], "dtype_names": ["float32"], "shapes": [[8, 8]]}}),
        ("/finish_weight_update/", {"weight_version": "a"}),
        ("/update_weight_version/", {"new_version": "a"}),
        ("/shutdown_weight_transfer_engine/", {}),
    ],
    "trl": [
        (
            "/generate/",
            {
                "prompts": [[5, IMAGE, 6], [7]],
                "images": [[""], None],
                "n": 2,
                "max_tokens": 2,
                "logprobs": 0,
                "generation_kwargs": {"seed": 3, "stop": ["x"], "logit_bias": {"3": 1.0}, "stop_token_ids": [3]},
            },
        ),
        ("/generate/", {"prompts": ["a text", "another"], "temperature": 0.5, "structured_outputs_regex": None}),
        ("/init_communicator/", GROUP | {"client_device_uuid": "42"}),
        ("/update_named_param/", TENSOR),
        ("/reset_prefix_cache/", {}),
        ("/process_weights_after_loading/", {}),
    ],
    "openai": [
        (
            "/v1/chat/completions/",
            {
                "messages": [
                    {"role": "system", "content": "Answer."},
                    {"role": "user", "content": [{"type": "image_url", "image_url": {"url": ""}}, TEXT]},
                    {"role": "assistant", "content": None, "tool_calls": [TOOL_CALL]},
                    {"role": "tool", "content": "4", "tool_call_id": "a"},
                ],
                "max_completion_tokens": 2,
                "n": 2,
                "seed": 3,
                "logprobs": True,
                "top_logprobs": 1,
                "tools": [{"type": "function", "function": {"name": "f", "parameters": {"type": "object"}}}],
                "tool_choice": "none",
                "stream": True,
                "stream_options": {"include_usage": True},
                "return_token_ids": True,
            },
        ),
        (
            "/v1/chat/completions/",
            {
                "messages": [{"role": "user", "content": "Look."}],
                "max_tokens": 2,
                "response_format": {"type": "json_schema", "json_schema": {"name": "a", "schema": {"type": "object"}}},
                "stop": ["a"],
                "logit_bias": {"3": 1.0},
                "top_k": 3,
                "chat_template_kwargs": {"enable_thinking": False},
            },
        ),
        (
            "/inference/v1/generate/",
            {
                "token_ids": [5, IMAGE, 6],
                "content_parts": [{"type": "image_url", "url": ""}],
                "sampling_params": {"n": 2, "logprobs": 1, "max_tokens": 2, "stop_token_ids": [3], "stop": ["x"]},
                "return_token_ids": True,
                "stream": False,
            },
        ),
        (
            "/v1/completions/",
            {
                "prompt": [[5, 6], [7]],
                "max_tokens": 2,
                "n": 2,
                "logprobs": 1,
                "temperature": 0.5,
                "bad_words": ["b"],
                "allowed_token_ids": [3, 4],
                "stream": False,
            },
        ),
        ("/v1/completions/", {"prompt": "a text", "max_tokens": 2, "structured_outputs": {"regex": "[ab]+"}}),
    ],
}
OF_GROUPS = ("communicator", "sync", "update")
"""Routes that wait for a learner, or whose weights others need; they are fuzzed over pretending engines."""
SCALARS = st.one_of(
    st.none(),
    st.booleans(),
    st.integers(),
    st.sampled_from([0, -1, 2**31, 2**32, 2**63, -(2**63) - 1, 2**64, 10**30, IMAGE, 4095, 4096, 1e308, -0.0]),
    st.floats(),
    st.text(max_size=8),
    st.sampled_from(
        ["", "<image>", "/etc/passwd", "file:///dev/zero", "data:image/png;base64,", "http://h/", "{{x}}", "\x00"]
    ),
    st.sampled_from([base64.b64encode(each).decode() for each in PICTURES]),
)
VALUES = st.recursive(
    SCALARS,
    lambda inner: st.one_of(st.lists(inner, max_size=4), st.dictionaries(st.text(max_size=6), inner, max_size=3)),
    max_leaves=8,
)


@st.composite
def broken_pictures(draw):
    """An image with some bytes changed, cut or doubled."""
    raw = bytearray(draw(st.sampled_from(PICTURES)))
    for _ in range(draw(st.integers(0, 6))):
        raw[draw(st.integers(0, len(raw) - 1))] = draw(st.integers(0, 255))
    return bytes(raw[: draw(st.integers(1, len(raw)))] if draw(st.booleans()) else raw)


def places_in(value, path=()):
    """Every place of a body, the body itself included."""
    yield path
    entries = value.items() if isinstance(value, dict) else enumerate(value) if isinstance(value, list) else ()
    for name, below in entries:
        yield from places_in(below, (*path, name))


def value_at(body, path):
    for name in path:
        body = body[name]
    return body


def set_at(body, path, value):
    if not path:
        return value
    node = body
    for name in path[:-1]:
        node = node[name]
    node[path[-1]] = value
    return body


@st.composite
def calls(draw, dialect):
    """A route and a body that was right before up to two of its places were changed."""
    route, template = draw(st.sampled_from(BODIES[dialect]))
    body = copy.deepcopy(template)
    for path in [path for path in places_in(body) if value_at(body, path) == ""]:
        set_at(body, path, base64.b64encode(draw(broken_pictures())).decode())
    for _ in range(draw(st.integers(0, 2))):
        paths = list(places_in(body))
        path = draw(st.sampled_from(paths))
        if path and isinstance(path[-1], str) and draw(st.integers(0, 9)) == 0:
            path = (*path[:-1], draw(st.text(max_size=5)))
        body = set_at(body, path, draw(VALUES))
    return route, body


def update_of(specs):
    """The body by which a trainer of stock servers announces tensors."""
    rows = {"names": [spec.name for spec in specs], "dtype_names": [spec.dtype for spec in specs]}
    return {"update_info": rows | {"shapes": [list(spec.shape) for spec in specs]}}


def states_of(specs):
    """State of an update by vLLM's routes -> calls that lead there, over engines that only pretend."""
    init, start, half = BODIES["vllm"][0], ("/start_weight_update/", {}), len(specs) // 2
    begun = [init, start, ("/update_weights/", update_of(specs[:half]))]
    whole = [*begun, ("/update_weights/", update_of(specs[half:]))]
    return {
        "open": [init],
        "started": [init, start],
        "half": begun,
        "whole": whole,
        "finished": [*whole, ("/finish_weight_update/", {})],
        "paused": [*begun, ("/pause/?mode=keep", {})],
    }


@st.composite
def calls_in_states(draw, specs):
    """A state, and a call that is wrong in up to two places, often about tensors to come."""
    state = draw(st.sampled_from(sorted(states_of(specs))))
    if draw(st.booleans()):
        return state, draw(calls("vllm"))
    body = update_of(draw(st.lists(st.sampled_from(specs), max_size=4)))
    for _ in range(draw(st.integers(0, 2))):
        body = set_at(body, draw(st.sampled_from(list(places_in(body)))), draw(VALUES))
    return state, ("/update_weights/", body)


def is_not_of_groups(call):
    return not any(name in call[0] for name in OF_GROUPS)


def encoded(body, form):
    """JSON or msgpack, or damaged JSON."""
    if form == "msgpack":
        try:
            return msgspec.msgpack.encode(body), "application/msgpack"
        except (OverflowError, msgspec.MsgspecError):  # whole numbers above 64 bits
            form = "json"
    raw = msgspec.json.encode(body)
    return (raw[: len(raw) // 2] + b"\xff" if form == "damaged" else raw), "application/json"
