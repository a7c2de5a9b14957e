"""Bodies of vLLM's routes for weights. A process that reads large bodies imports this module: it needs no torch."""

from typing import Annotated, Literal

from pydantic import Field

from rollmatch.server.payloads import Payload, Shape
from rollmatch.server.unserved import Unserved
from rollmatch.weights.group_address import MAX_WORLD_SIZE

BUFFER_BYTES = 2**30
"""vLLM's default, on both sides."""


class Packing(Payload):
    """Whether tensors come in buffers, several in one broadcast. Up to vLLM 0.27 updates say it, later their group."""

    packed: bool = False
    packed_buffer_size_bytes: Annotated[int, Field(ge=1, lt=2**63)] = BUFFER_BYTES
    packed_num_buffers: Annotated[int, Field(ge=1, lt=2**31)] = 2
    """Without effect: how many are on their way is the sender's business."""


class InitInfo(Packing):
    """Where the learner, rank 0, holds the group's store."""

    master_address: str
    master_port: Annotated[int, Field(ge=1, le=65535)]
    rank_offset: Annotated[int, Field(ge=1, lt=MAX_WORLD_SIZE)]
    """Rank of the server's first worker."""
    world_size: Annotated[int, Field(ge=2, le=MAX_WORLD_SIZE)]
    nccl_unique_id_b64: Unserved = None


class InitBody(Payload):
    """``/init_weight_transfer_engine``."""

    init_info: InitInfo


class StartBody(Payload):
    """``/start_weight_update``."""

    is_checkpoint_format: Literal[True] = True


class UpdateInfo(Payload):
    """Tensors in the order in which they are broadcast; all fields have the same length."""

    names: list[str]
    dtype_names: list[str]
    shapes: list[Shape]
    packed: bool | None = None
    packed_buffer_size_bytes: Annotated[int, Field(ge=1, lt=2**63)] = BUFFER_BYTES
    packed_num_buffers: Annotated[int, Field(ge=1, lt=2**31)] = 2

    def packing(self, of_group: Packing) -> Packing:
        """This update's, or that of its group."""
        if self.packed is None:
            return of_group
        return Packing(packed=self.packed, packed_buffer_size_bytes=self.packed_buffer_size_bytes)


class UpdateBody(Payload):
    """``/update_weights``."""

    update_info: UpdateInfo


WeightVersion = Annotated[str, Field(max_length=1024)]
"""The learner's name of its weights."""


class PauseQuery(Payload):
    """What stands behind ``/pause?``."""

    mode: Literal["abort", "wait", "keep"] = "abort"
    """``wait``: responses end first. ``keep``: they are written again after the pause. ``abort``: they fail."""
    clear_cache: bool = True


class FinishBody(Payload):
    """``/finish_weight_update``."""

    weight_version: WeightVersion | None = None


class WeightVersionBody(Payload):
    """``/update_weight_version``."""

    new_version: WeightVersion
