"""Weights into a stock ``vllm serve`` on a machine without GPUs: a weight transfer engine of vLLM's own kind, on gloo.

vLLM finds it as a plug-in (entry point ``vllm.general_plugins``) under the name ``rollmatch_gloo``. The learner is rank
0. What is received is verified by digests before the first weight changes, so a transfer that fails leaves the old
weights whole. Source: vLLM 0.32 ``distributed/weight_transfer/base.py``.
"""

from dataclasses import dataclass, field

from vllm.distributed.weight_transfer.base import (
    WeightTransferEngine,
    WeightTransferInitInfo,
    WeightTransferUpdateInfo,
)

from rollmatch.errors import RollmatchError, SyncError
from rollmatch.weights.gloo import CHAIN_PROTOCOL, GlooGroup
from rollmatch.weights.group_address import GroupAddress
from rollmatch.weights.plan import Spec
from rollmatch.weights.transfer_plan import TransferPlan
from rollmatch.weights.worker.loading import has_plain_weights
from rollmatch.weights.worker.plugin import RL_ROUTES
from rollmatch.weights.worker.receiver import Receiver

LEARNER = 0


@dataclass(kw_only=True)
class StockInitInfo(WeightTransferInitInfo):  # type: ignore[misc]
    """Where the learner waits; the first names are vLLM's."""

    master_address: str
    master_port: int
    rank_offset: int
    world_size: int
    secret: str
    timeout_s: float
    join_timeout_s: float
    protocol: int = 0
    """``CHAIN_PROTOCOL`` of the learner; learners that do not name it send by gloo's own broadcast."""


@dataclass(kw_only=True)
class StockUpdateInfo(WeightTransferUpdateInfo):  # type: ignore[misc]
    """What is sent next; the first names are vLLM's."""

    names: list[str]
    dtype_names: list[str]
    shapes: list[list[int]]
    buckets: list[int] = field(default_factory=list)
    """Number of tensors of each broadcast; their digests follow the last one."""


class GlooEngine(WeightTransferEngine[StockInitInfo, StockUpdateInfo]):  # type: ignore[misc]
    """Receives beside nothing else: the server is paused meanwhile."""

    init_info_cls, update_info_cls = StockInitInfo, StockUpdateInfo
    _receiver: Receiver | None = None

    def init_transfer_engine(self, init_info: StockInitInfo) -> None:
        """Join; an older group is left. Errors: ``CommunicatorTimeout``, ``weights-packed``, ``protocol-unknown``."""
        _check_protocol(init_info.protocol)
        if not has_plain_weights():
            problem = "vLLM has packed its linear weights, of which a tied head would keep an old copy"
            raise SyncError(
                problem, code="weights-packed", key=RL_ROUTES, remedy=f"Start the server with {RL_ROUTES}=1."
            )
        self.shutdown()
        parallel = self.parallel_config
        address = GroupAddress(
            host=init_info.master_address,
            port=init_info.master_port,
            rank=init_info.rank_offset + parallel.data_parallel_index * parallel.world_size + parallel.rank,
            world_size=init_info.world_size,
            secret=init_info.secret,
            timeout_s=init_info.timeout_s,
            join_timeout_s=init_info.join_timeout_s,
        )
        self._receiver = Receiver.joining(lambda: GlooGroup.open(address, source=LEARNER))
        self._wait()

    def start_weight_update(self) -> None:
        """Nothing changes before everything has arrived."""

    def update_weights(self, update_info: dict[str, object]) -> None:
        """As ``receive_weights``; there is no device to wait for."""
        self.receive_weights(self.parse_update_info(update_info))

    def receive_weights(self, update_info: StockUpdateInfo) -> None:
        """Receive, verify, load. Errors: ``TransferFailed``, ``DigestMismatch``, ``weights-broken``."""
        shapes = map(tuple, update_info.shapes)
        specs = tuple(Spec(*fields) for fields in zip(update_info.names, update_info.dtype_names, shapes, strict=True))
        buckets = tuple(update_info.buckets or [len(specs)])
        receiver = self._needed()
        receiver.begin(TransferPlan(tensors=specs, buckets=buckets, digests_follow=True))
        self._wait()
        receiver.load_into(self.model)

    def finish_weight_update(self) -> None:
        """Nothing is left to do."""

    def shutdown(self) -> None:
        """Leave the group."""
        if self._receiver is not None:
            self._receiver.close()
        self._receiver = None

    def _wait(self) -> None:
        """Until the receiver has nothing to do; forgets what failed, which is reported once."""
        receiver = self._needed()
        receiver.wait(None)
        try:
            receiver.progress()
        except RollmatchError:
            self.shutdown()
            raise

    def _needed(self) -> Receiver:
        if self._receiver is None:
            raise SyncError(
                "no learner is connected",
                code="communicator-missing",
                remedy="Call /init_weight_transfer_engine first.",
            )
        return self._receiver


def _check_protocol(number: int) -> None:
    """Refuse before anybody joins: ranks that send in different ways wait for each other until their time limit."""
    if number != CHAIN_PROTOCOL:
        problem = f"the learner sends weights by protocol {number}, this server receives by protocol {CHAIN_PROTOCOL}"
        remedy = "Install the same rollmatch on both sides."
        raise SyncError(problem, code="protocol-unknown", key="init_info.protocol", remedy=remedy)
