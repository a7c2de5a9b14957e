"""Bodies of the trl dialect. A process that reads large bodies imports this module: it needs no torch and no vLLM."""

from typing import Annotated, Any

from pydantic import Field

from rollmatch.data.ids import PackedIds
from rollmatch.server.payloads import FirstErrorEnds, Int64, Payload, Shape, Size
from rollmatch.server.sampling import GivenVllmSampling, StopTexts
from rollmatch.server.unserved import Unserved
from rollmatch.weights.group_address import MAX_WORLD_SIZE


class TrlGenerationKwargs(GivenVllmSampling):
    """vLLM sampling parameters beside those that are fields of the body; they win over these."""

    max_tokens: Int64 | None = None
    logit_bias: dict[int, float] | None = None
    seed: Int64 | None = None
    stop: StopTexts | Annotated[str, Field(min_length=1)] | None = None


class TrlSampling(Payload):
    """What both calls have."""

    n: Annotated[Int64, Field(ge=1)] = 1
    repetition_penalty: float = 1.0
    temperature: float = 1.0
    top_p: float = 1.0
    top_k: Int64 = -1
    min_p: float = 0.0
    max_tokens: Int64 = 16
    logprobs: Annotated[int, Field(ge=0, le=20)] | None = 0
    generation_kwargs: TrlGenerationKwargs = TrlGenerationKwargs()
    structured_outputs_regex: Annotated[str, Field(min_length=1, max_length=4096)] | None = None
    guided_decoding_regex: Unserved = None
    truncate_prompt_tokens: Unserved = None


class TrlBatch(TrlSampling):
    """A call of ``/generate/``."""

    prompts: list[PackedIds] | list[str]
    images: list[list[str] | str | None] | None = None


class TrlChats(TrlSampling):
    """A call of ``/chat/``."""

    messages: list[list[dict[str, Any]]]
    chat_template_kwargs: dict[str, Any] = Field(default_factory=dict)
    tools: list[dict[str, Any]] | None = None


class CommunicatorInit(FirstErrorEnds):
    """``/init_communicator/``; TRL also sends ``client_device_uuid``."""

    host: str
    port: int = Field(ge=1, le=65535)
    world_size: int = Field(ge=1, le=MAX_WORLD_SIZE)


class NamedParam(FirstErrorEnds):
    """``/update_named_param/``."""

    name: str
    dtype: str
    shape: Shape


class FlatTensor(NamedParam):
    """One tensor of a bucket; places count bytes."""

    start_idx: Size
    end_idx: Size
    numel: Size


class FlatBucket(FirstErrorEnds):
    """``/update_flattened_params/``."""

    metadatas: list[FlatTensor]
