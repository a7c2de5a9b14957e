"""Calls of the native dialect that travel as msgpack, as JSON has them, so that records and routes read one form."""

import base64
from collections.abc import Mapping
from typing import Any

import msgspec
import numpy as np

from rollmatch.data.ids import pack_ids, unpack_ids


def listed(body: Mapping[str, Any]) -> dict[str, Any]:
    """Ids as lists, and with each request its images as base64. Errors: ``KeyError``, ``TypeError``, ``IndexError``.

    >>> listed({"requests": [{"prompt_token_ids": pack_ids([5]), "images": [0]}], "images": [b"ab"]})
    {'requests': [{'prompt_token_ids': [5], 'images': ['YWI=']}]}
    """
    pictures, requests = body.get("images") or (), []
    for one in body["requests"]:
        ids = one["prompt_token_ids"]
        shown = [_text(pictures[image] if isinstance(image, int) else image) for image in one.get("images") or ()]
        made = {"prompt_token_ids": unpack_ids(ids).tolist() if isinstance(ids, bytes) else ids, "images": shown}
        requests.append({**one, **made})
    return {name: value for name, value in body.items() if name != "images"} | {"requests": requests}


def _text(image: str | bytes) -> str:
    return image if isinstance(image, str) else base64.b64encode(image).decode("ascii")


def packed(reply: Any) -> bytes:
    """msgpack, with ids and log-probabilities as bytes.

    >>> entry = {"prompt_token_ids": [5], "response_token_ids": [], "logprobs": [-0.5]}
    >>> msgspec.msgpack.decode(packed({"responses": [entry]}))["responses"][0]["logprobs"]
    b'\\x00\\x00\\x00\\xbf'
    """
    if isinstance(reply, dict) and "responses" in reply:
        reply = reply | {"responses": [_packed_entry(one) for one in reply["responses"]]}
    return msgspec.msgpack.encode(reply)


def _packed_entry(entry: Mapping[str, Any]) -> dict[str, Any]:
    made = {name: pack_ids(entry[name]) for name in ("prompt_token_ids", "response_token_ids")}
    if entry["logprobs"] is not None:
        made["logprobs"] = np.asarray(entry["logprobs"], dtype="<f4").tobytes()
    return {**entry, **made}
