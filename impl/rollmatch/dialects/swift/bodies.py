"""Bodies of the swift dialect. A process that reads large bodies imports this module: it needs no torch and no vLLM."""

import math
from typing import Annotated, Any

from pydantic import ConfigDict, Field

from rollmatch.data.ids import PackedIds
from rollmatch.dialects.trl.bodies import FlatTensor
from rollmatch.server.payloads import FirstErrorEnds, Int64, Payload
from rollmatch.server.sampling import GivenSampling, StopTexts
from rollmatch.server.unserved import Unserved, UnservedFactor


class SwiftImage(Payload):
    """ms-swift's second form of an image."""

    bytes: str | bytes | None = None
    path: str | None = None


class SwiftInferRequest(Payload):
    """One prompt."""

    messages: list[dict[str, Any]] | None = None
    prompt_token_ids: PackedIds | None = None
    """Not in ms-swift: ids in place of messages."""
    images: tuple[str | bytes | SwiftImage, ...] = ()
    uuid: str | None = None
    audios: Unserved = None
    videos: Unserved = None
    tools: Unserved = None
    objects: Unserved = None
    chat_template_kwargs: Unserved = None
    data_dict: dict[str, Any] | None = None
    """Further columns of the sample; rewards read them at the trainer, the server does not."""
    add_eos: bool | str | None = None
    """For conversations of several turns, which the trainer continues itself."""


class SwiftRequestConfig(GivenSampling):
    """How responses are sampled; None leaves it to the model's generation config."""

    max_tokens: Int64 | None = None
    seed: Int64 | None = None
    stop: StopTexts | str | None = None
    n: Annotated[Int64, Field(ge=1)] = 1
    logprobs: bool = False
    return_details: bool = False
    num_beams: UnservedFactor = None
    stream: Unserved = None
    top_logprobs: Unserved = None
    prompt_logprobs: Unserved = None
    best_of: UnservedFactor = None
    length_penalty: UnservedFactor = None
    structured_outputs_regex: Unserved = None


class SwiftBatch(Payload):
    """A call of ``/infer/``; the last three fields are in every body of ms-swift's client."""

    infer_requests: list[SwiftInferRequest]
    request_config: SwiftRequestConfig | None = None
    metrics: Unserved = None
    adapter_request: Unserved = None
    use_tqdm: bool | None = None
    """Without effect: a progress bar of ms-swift's server."""


class PeftConfig(FirstErrorEnds):
    """What of peft's ``LoraConfig`` decides how weights are merged; ranks are read from the tensors."""

    model_config = ConfigDict(extra="allow")

    lora_alpha: float = Field(gt=0, allow_inf_nan=False)
    use_rslora: bool = False
    bias: str = "none"

    def scaling(self, rank: int) -> float:
        """Of an adapter of this rank."""
        return self.lora_alpha / (math.sqrt(rank) if self.use_rslora else rank)


class FlatAdapter(FirstErrorEnds):
    """``/update_adapter_flattened_param/``."""

    peft_config: PeftConfig
    metadatas: list[FlatTensor]
