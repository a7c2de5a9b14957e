"""Requests and replies of the dialects."""

import base64
import json
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from conformance.judge.servers.broken.engine import TinyEngine, TinyPrompt, TinyResponse, TinySampling, Unserved

FIELDS = ("max_tokens", "temperature", "top_k", "top_p", "min_p", "n", "repetition_penalty")


def sampling_of(*given: Mapping[str, Any]) -> tuple[TinySampling, int | None]:
    """Sampling and the call's seed. Errors: ``Unserved``."""
    found = {name: values[name] for values in given for name in FIELDS if values.get(name) is not None}
    stop = [text for values in given for text in values.get("stop") or ()]
    wants_logprobs = any(not (values.get("logprobs") is None or values["logprobs"] is False) for values in given)
    seed = next((values["seed"] for values in given if values.get("seed") is not None), None)
    if found.get("max_tokens", 1) < 1:
        raise Unserved("sampling-value-invalid: max_tokens must be at least 1")
    bias = tuple((int(i), value) for values in given for i, value in (values.get("logit_bias") or {}).items())
    return TinySampling(**{"max_tokens": 16} | found, stop=tuple(stop), logprobs=wants_logprobs, bias=bias), seed


def read_call(path: str, body: Any, engine: TinyEngine) -> tuple[list[TinyPrompt], TinySampling, list[int | None]]:
    """Prompts, how they are sampled, and the seed of each prompt. Errors: ``Unserved``."""
    reader = {"infer": _swift, "generate": _trl, "native/infer": _native, "v1/completions": _completions}
    reader |= {"inference/v1/generate": _tokens_in, "sglang": _sglang}
    return reader.get(path, _chat)(body, engine)


def _counted(
    seed: int | None, prompts: Sequence[TinyPrompt], sampling: TinySampling, engine: TinyEngine
) -> list[int | None]:
    if seed is None or (sampling.temperature <= 1 and engine.broken("the seed is ignored")):
        return [None] * len(prompts)
    if sampling.max_tokens < 100 and engine.broken("every seed is the same"):
        seed = 0
    if seed >= 2**16 and engine.broken("seeds are cut to 16 bits"):
        seed %= 2**16
    are_copies = len({prompt.ids for prompt in prompts}) < len(prompts)
    step = 0 if are_copies and engine.broken("copies share one seed") else 1000
    return [seed + place * step for place in range(len(prompts))]


def _swift(body: Any, engine: TinyEngine) -> Any:
    sampling, seed = sampling_of(body.get("request_config") or {})
    prompts = [_spoken(one, one.get("images"), str(one.get("uuid")), engine) for one in body["infer_requests"]]
    return prompts, sampling, _counted(seed, prompts, sampling, engine)


def _trl(body: Any, engine: TinyEngine) -> Any:
    sampling, seed = sampling_of(body, body.get("generation_kwargs") or {})
    pictures = body.get("images") or [None] * len(body["prompts"])
    prompts = [_of_ids(ids, images, "", engine) for ids, images in zip(body["prompts"], pictures, strict=True)]
    return prompts, sampling, _counted(seed, prompts, sampling, engine)


def _sglang(body: Any, engine: TinyEngine) -> Any:
    given = body["sampling_params"]
    named = {"max_tokens": given.get("max_new_tokens"), "seed": given.get("sampling_seed")}
    sampling, seed = sampling_of(given, named, {"logprobs": body.get("return_logprob", False)})
    pictures = body.get("image_data") or [None] * len(body["input_ids"])
    prompts = [_of_ids(ids, images, "", engine) for ids, images in zip(body["input_ids"], pictures, strict=True)]
    return prompts, sampling, _counted(seed, prompts, sampling, engine)


def _native(body: Any, engine: TinyEngine) -> Any:
    sampling, _ = sampling_of(body.get("sampling") or {})
    requests = body["requests"]
    prompts = [_of_ids(one["prompt_token_ids"], one.get("images"), one["request_id"], engine) for one in requests]
    return prompts, sampling, [one.get("seed") for one in requests]


def _completions(body: Any, engine: TinyEngine) -> Any:
    sampling, seed = sampling_of(body)
    given = [body["prompt"]] if body["prompt"] and isinstance(body["prompt"][0], int) else body["prompt"]
    prompts = [_of_ids(ids, None, str(body.get("request_id")), engine) for ids in given]
    return prompts, sampling, _counted(seed, prompts, sampling, engine)


def _tokens_in(body: Any, engine: TinyEngine) -> Any:
    sampling, seed = sampling_of(body["sampling_params"])
    prompts = [_of_ids(body["token_ids"], None, "", engine)]
    return prompts, sampling, _counted(seed, prompts, sampling, engine)


def _chat(body: Any, engine: TinyEngine) -> Any:
    sampling, seed = sampling_of(body)
    contents = [message["content"] for message in body["messages"]]
    parts = [part for content in contents if not isinstance(content, str) for part in content]
    images = [part["image_url"]["url"] for part in parts if part["type"] == "image_url"]
    ids = engine.encode(body["messages"])
    if not images and engine.broken("a chat begins twice"):
        ids = ids[:1] + ids
    if not images and engine.broken("a chat loses its end"):
        ids = ids[:-1]
    prompts = [TinyPrompt(ids=ids, picture=_picture(images), name=str(body.get("request_id")))]
    return prompts, sampling, _counted(seed, prompts, sampling, engine)


def _spoken(request: Mapping[str, Any], images: Any, name: str, engine: TinyEngine) -> TinyPrompt:
    messages = []
    for message in request["messages"]:
        if "content" not in message:
            raise Unserved(f"a message of {name} has no content")
        first, tag, rest = message["content"].rpartition("<image>")
        content = [{"type": "image"}, {"type": "text", "text": first + rest}] if tag else message["content"]
        messages.append({"role": message["role"], "content": content})
    return TinyPrompt(ids=engine.encode(messages), picture=_picture(images), name=name)


def _of_ids(ids: Sequence[int], images: Any, name: str, engine: TinyEngine) -> TinyPrompt:
    if not ids or max(ids) >= engine.num_ids:
        raise Unserved("a prompt has ids that the model does not know")
    return TinyPrompt(ids=tuple(ids), picture=_picture(images), name=name)


def _picture(images: Any) -> bytes | None:
    """Of the first one: base64, a data URL, or a path, as ms-swift's trainer sends it."""
    if not images:
        return None
    _, comma, rest = images[0].rpartition(",")
    if not comma and Path(rest).is_absolute() and Path(rest).is_file():
        return Path(rest).read_bytes()
    return base64.b64decode(rest)


def reply(path: str, groups: Sequence[Sequence[TinyResponse]], sampling: TinySampling, engine: TinyEngine) -> Any:
    """``groups``: the responses to each prompt."""
    flat = [one for group in groups for one in group]
    if path == "infer":
        return [{"response": _chat_reply(group, sampling, engine)} for group in groups]
    if path == "generate":
        sampled: dict[str, Any] = {"logprobs": None, "logprob_token_ids": None}
        if sampling.logprobs:
            sampled["logprobs"] = [[[value] for value in one.logprobs] for one in flat]
            sampled["logprob_token_ids"] = [[[token] for token in one.ids] for one in flat]
        prompts = [group[0].prompt_ids for group in groups]
        return {"prompt_ids": prompts, "completion_ids": [one.ids for one in flat]} | sampled
    if path == "sglang":
        return [_sglang_entry(one, sampling, engine) for one in flat]
    if path == "native/infer":
        return {"responses": [_native_entry(one, sampling) for one in flat]}
    if path in ("v1/completions", "inference/v1/generate"):
        choices = [_completion(one, place, sampling, engine) for place, one in enumerate(flat)]
        return {"id": _name(flat[0], engine) if flat else "", "choices": choices}
    return _chat_reply(flat, sampling, engine)


def _name(response: TinyResponse, engine: TinyEngine) -> str:
    name = response.prompt.name
    is_own = name.startswith("q-")  # as checks of other things name them
    return "" if not is_own and engine.broken("requests lose their names") else name


def _text(response: TinyResponse, engine: TinyEngine) -> str:
    is_brief = 8 < len(response.ids) <= 12  # few checks ask for so many
    return " " * (is_brief and engine.broken("texts begin with a space")) + engine.decode(response.ids)


def _chat_reply(group: Sequence[TinyResponse], sampling: TinySampling, engine: TinyEngine) -> dict[str, Any]:
    choices = [
        {
            "index": place,
            "token_ids": one.ids,
            "message": {"role": "assistant", "content": _text(one, engine)},
            "finish_reason": one.finish_reason,
            "logprobs": {"content": [{"logprob": v} for v in one.logprobs]} if sampling.logprobs else None,
        }
        for place, one in enumerate(group)
    ]
    counts = len(group[0].prompt_ids), sum(len(one.ids) for one in group)
    usage = {"prompt_tokens": counts[0], "completion_tokens": counts[1], "total_tokens": sum(counts)}
    head = {"id": _name(group[0], engine), "object": "chat.completion", "created": 0, "model": "policy"}
    return head | {"prompt_token_ids": group[0].prompt_ids, "choices": choices, "usage": usage}


def stream_of(whole: Mapping[str, Any], engine: TinyEngine) -> str:
    """A reply of ``v1/completions`` as server-sent events, one id each."""
    events = []
    for choice in whole["choices"]:
        ids, values = choice["token_ids"], (choice["logprobs"] or {"token_logprobs": []})["token_logprobs"]
        for place, token in enumerate(ids):
            is_last = place == len(ids) - 1
            is_told = is_last and not engine.broken("a stream ends without a reason")
            is_valued = values and not engine.broken("a stream has no log-probabilities")
            logprobs = {"token_logprobs": values[place : place + 1]} if is_valued else None
            event = {"index": choice["index"], "token_ids": [token], "logprobs": logprobs}
            event["finish_reason"] = choice["finish_reason"] if is_told else None
            count = 2 if is_last and engine.broken("a stream repeats its end") else 1
            count = 0 if place == 1 and engine.broken("a stream leaves out an id") else count
            events += [json.dumps({"choices": [event]})] * count
    return "".join(f"data: {event}\n\n" for event in [*events, "[DONE]"])


def _native_entry(one: TinyResponse, sampling: TinySampling) -> dict[str, Any]:
    return {
        "request_id": one.prompt.name,
        "prompt_token_ids": one.prompt_ids,
        "response_token_ids": one.ids,
        "finish_reason": one.finish_reason,
        "logprobs": one.logprobs if sampling.logprobs else None,
    }


def _sglang_entry(one: TinyResponse, sampling: TinySampling, engine: TinyEngine) -> dict[str, Any]:
    """As ``TokenizerManager`` of SGLang 0.5.23 writes it."""
    ended = {"type": one.finish_reason} | ({"length": len(one.ids)} if one.finish_reason == "length" else {})
    about: dict[str, Any] = {"finish_reason": ended, "prompt_tokens": len(one.prompt_ids)}
    if sampling.logprobs:
        about["output_token_logprobs"] = [[v, i, None] for v, i in zip(one.logprobs, one.ids, strict=False)]
    whole = {"text": _text(one, engine), "output_ids": one.ids, "meta_info": about}
    return whole | {"prompt_token_ids": one.prompt_ids}


def _completion(one: TinyResponse, place: int, sampling: TinySampling, engine: TinyEngine) -> dict[str, Any]:
    return {
        "index": place,
        "text": _text(one, engine),
        "token_ids": one.ids,
        "prompt_token_ids": one.prompt_ids,
        "finish_reason": one.finish_reason,
        "logprobs": _valued(one) if sampling.logprobs else None,
    }


def _valued(one: TinyResponse) -> dict[str, Any]:
    names = [f"token_id:{token}" for token in one.ids]
    tops = [{name: value} for name, value in zip(names, one.logprobs, strict=False)]
    return {"tokens": names, "token_logprobs": one.logprobs, "top_logprobs": tops}
