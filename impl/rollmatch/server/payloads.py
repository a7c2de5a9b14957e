"""What crosses the border in the native dialect. Needs no torch.

Bodies are msgpack or JSON; token ids are int32 bytes in the first (see ``ids``) and plain lists in the second.
"""

from typing import Annotated, Any

import numpy as np
from pydantic import BaseModel, ConfigDict, Field, GetCoreSchemaHandler, ValidationInfo, field_validator
from pydantic_core import CoreSchema

from rollmatch.data.ids import PackedIds, unpack_ids
from rollmatch.weights.group_address import MAX_WORLD_SIZE, MIN_SECRET

PROTOCOL = 5
"""Raised when a message changes in a way that an older side cannot read."""


TimeLimit = Annotated[float, Field(gt=0, le=3600)]
Int64 = Annotated[int, Field(ge=-(2**63), lt=2**63)]
"""Every integer is bounded, for 1e308 is one by JSON Schema."""
Size = Annotated[Int64, Field(ge=0)]
Shape = tuple[Size, ...]
Version = Annotated[Int64, Field(ge=1)]


def _end_with_first_error(node: object) -> None:
    if isinstance(node, dict):
        if node.get("type") in ("list", "tuple", "set", "frozenset"):
            node["fail_fast"] = True
        for child in node.values():
            _end_with_first_error(child)
    elif isinstance(node, list):
        for child in node:
            _end_with_first_error(child)


class FirstErrorEnds(BaseModel):
    """A message whose validation ends with the first wrong entry of each list: a million errors are gigabytes."""

    @classmethod
    def __get_pydantic_core_schema__(cls, source: Any, handler: GetCoreSchemaHandler) -> CoreSchema:
        schema = handler(source)
        _end_with_first_error(schema)
        return schema


class Payload(FirstErrorEnds):
    """A message or a part of one; unknown fields are refused."""

    model_config = ConfigDict(extra="forbid", frozen=True)


class Sampling(Payload):
    """How a response is sampled; names and defaults are vLLM's, but greedy."""

    max_tokens: Annotated[int, Field(ge=1, lt=2**31)]
    temperature: Annotated[float, Field(ge=0, le=2)] = 0.0
    top_p: Annotated[float, Field(gt=0, le=1)] = 1.0
    top_k: Annotated[int, Field(ge=-1, lt=2**31)] = -1
    min_p: Annotated[float, Field(ge=0, le=1)] = 0.0
    repetition_penalty: Annotated[float, Field(gt=0, allow_inf_nan=False)] = 1.0
    presence_penalty: Annotated[float, Field(ge=-2, le=2)] = 0.0
    frequency_penalty: Annotated[float, Field(ge=-2, le=2)] = 0.0
    min_tokens: Annotated[int, Field(ge=0, lt=2**31)] = 0
    ignore_eos: bool = False
    stop_token_ids: Annotated[tuple[Annotated[int, Field(ge=0, lt=2**31)], ...], Field(max_length=128)] = ()
    """At most as many as vLLM accepts."""
    logit_bias: Annotated[
        dict[Annotated[int, Field(ge=0, lt=2**31)], Annotated[float, Field(allow_inf_nan=False)]],
        Field(max_length=1024),
    ] = {}
    """At most as many as vLLM accepts."""
    logprobs: bool = False
    """Whether each sampled token's log-probability comes back."""

    @field_validator("min_tokens")
    @classmethod
    def _fits_into_max_tokens(cls, value: int, info: ValidationInfo) -> int:
        if value > info.data.get("max_tokens", value):
            raise ValueError(f"is {value}, more than max_tokens")
        return value


class InferRequest(Payload):
    """One prompt; either as ids with one placeholder per image, or as chat messages."""

    request_id: str
    prompt_token_ids: PackedIds | None = None
    messages: tuple[dict[str, Any], ...] | None = None
    images: tuple[str | bytes | Size, ...] = ()
    """Paths, data URLs, base64 text or encoded bytes; or places in the batch's ``images``."""
    seed: Int64 | None = None
    sampling: Sampling | None = None
    """Instead of the batch's."""


class InferBatch(Payload):
    """A call of ``/native/infer/``."""

    requests: tuple[InferRequest, ...]
    sampling: Sampling | None = None
    images: tuple[str | bytes, ...] = ()
    """Those of the requests, each once: the responses of a group share theirs."""


class InferResponse(Payload):
    """One response, in the place of its request."""

    request_id: str
    prompt_token_ids: PackedIds
    """As the engine saw it: image placeholders expanded."""
    response_token_ids: PackedIds
    """As sampled, with the stop token."""
    finish_reason: str
    """``stop`` or ``length``."""
    stop_token_id: int | None = None
    policy_version: int
    """The oldest that wrote in it."""
    policy_versions: tuple[tuple[int, int], ...]
    """Runs of (version, number of response tokens that it wrote), in order; one unless a sync kept the response."""
    logprobs: bytes | list[float] | None = None
    """float32 bytes; a list in JSON."""

    def listed(self) -> dict[str, Any]:
        """As JSON has it: lists in place of bytes."""
        fields = self.model_dump()
        for name in ("prompt_token_ids", "response_token_ids"):
            fields[name] = unpack_ids(fields[name]).tolist()
        if isinstance(self.logprobs, bytes):
            fields["logprobs"] = np.frombuffer(self.logprobs, dtype="<f4").tolist()
        return fields


class InferReply(Payload):
    """The answer of ``/native/infer/``."""

    instance: str
    policy_version: int
    responses: tuple[InferResponse, ...]


class TensorSpec(Payload):
    """Name, type and shape of one tensor."""

    name: str
    dtype: str
    """As torch writes it, without ``torch.``"""
    shape: Shape


class Identity(Payload):
    """What a server serves."""

    protocol: int = PROTOCOL
    instance: str
    """New at every start."""
    model: str
    model_digest: str
    """Over names, types and shapes of all tensors."""
    policy_version: int
    tensors: tuple[TensorSpec, ...]
    aliases: dict[str, str]
    """Names of tied tensors -> the tensor they are tied to."""
    tensor_parallel_size: int
    data_parallel_size: int
    world_size: int
    max_model_len: int
    vllm_version: str
    transports: tuple[str, ...]
    digest: str
    adapter_merge: bool
    keep: bool
    """Whether a sync may keep responses that are under way."""


class CommunicatorRequest(Payload):
    """A learner opens the group that transfers weights; it is the last rank and the source."""

    client: Annotated[str, Field(min_length=1)]
    host: str
    port: Annotated[int, Field(ge=1, le=65535)]
    """Bound by the worker of rank 0."""
    world_size: Annotated[int, Field(ge=2, le=MAX_WORLD_SIZE)]
    secret: Annotated[str, Field(min_length=MIN_SECRET, max_length=256)]
    """Made by the learner for this group; every member proves that it knows it."""
    rank_offset: Annotated[int, Field(ge=0, lt=MAX_WORLD_SIZE)] = 0
    transport: str = "gloo"
    timeout_s: TimeLimit = 30.0
    """Longest collective."""
    join_timeout_s: TimeLimit = 60.0
    replace: bool = False
    """Close an older communicator of the same client first."""


class CommunicatorClose(Payload):
    """A learner leaves; ``force`` closes another client's communicator."""

    client: str = ""
    force: bool = False


class AnnouncedMerge(Payload):
    """One weight made from its base and the adapter tensors of these names."""

    name: str
    lora_a: str
    lora_b: str
    magnitude: str | None = None
    """Set for DoRA."""
    scaling: Annotated[float, Field(allow_inf_nan=False)]


class AdapterPlan(Payload):
    """The tensors of the sync are an adapter's, merged on the server."""

    merges: Annotated[tuple[AnnouncedMerge, ...], Field(min_length=1)]
    merged_digests: dict[str, str] | None = None
    """Of the learner's own merge. None: it compares those of the reply; with transport direct they follow in the group.
    """


class SyncRequest(Payload):
    """All tensors of one sync."""

    client: str
    sync_id: Annotated[str, Field(min_length=1, pattern="^[^/]*$")]
    version: Version
    tensors: Annotated[tuple[TensorSpec, ...], Field(min_length=1)]
    buckets: Annotated[tuple[Annotated[Size, Field(ge=1)], ...], Field(min_length=1)]
    """Number of tensors of each broadcast, in order."""
    digests: tuple[Annotated[str, Field(pattern="^[0-9a-f]{32}$")], ...] | None = None
    """None: they follow in the group, after the last bucket."""
    commit: bool = True
    keep: bool = False
    """Whether responses of the native dialect that are under way at the commit are written on by the new weights, with
    keys and values computed again. False: they end first, or are begun again."""
    adapter: AdapterPlan | None = None


class SyncAgain(Payload):
    """A sync that is announced as an earlier one of the same group was: the same tensors in the same buckets."""

    client: str
    sync_id: Annotated[str, Field(min_length=1, pattern="^[^/]*$")]
    version: Version
    like: str
    """``sync_id`` of the last one that was announced in full, without digests, and received."""
    commit: bool = True
    keep: bool = False


class SyncChoice(Payload):
    """Commit or drop what is staged."""

    client: str
    sync_id: str | None = None


class SyncReply(Payload):
    """What became of a sync."""

    instance: str
    policy_version: int
    committed: bool
    digests: tuple[str, ...]
    """Of the received tensors, as the workers computed them."""
    merged_digests: dict[str, str] = {}
    receive_s: float
    commit_s: float = 0.0
    restarted: int = 0
    """Requests that were generated again because of the commit."""


class Failure(Payload):
    """An error, in every dialect."""

    code: str
    key: str = ""
    item: int | None = None
    """Index in the batch."""
    problem: str
    remedy: str = ""
    detail: str = ""
    """All of it on one line."""
