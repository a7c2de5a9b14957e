"""The vllm dialect without GPUs: weights as they are sent to a stock server with the plug-in ``rollmatch_gloo``."""

from collections.abc import Mapping
from typing import Any

from conformance.judge.servers.broken.updates import LIMIT_S, RejectedUpdate, TransferGroup
from rollmatch.errors import RollmatchError
from rollmatch.weights.gloo import GlooGroup
from rollmatch.weights.group_address import GroupAddress
from rollmatch.weights.plan import Spec
from rollmatch.weights.transfer_plan import TransferPlan
from rollmatch.weights.worker.receiver import Receiver

LEARNER = 0


class PluggedGroup(TransferGroup):
    """An opening with a secret is the plug-in's; any other is answered as ever."""

    _receiver: Receiver | None = None

    def init(self, info: Mapping[str, Any]) -> None:
        """Errors: ``RejectedUpdate``."""
        if "secret" not in info:
            super().init(info)
            return
        self.shutdown()
        address = GroupAddress(
            host=info["master_address"],
            port=info["master_port"],
            rank=info["rank_offset"],
            world_size=info["world_size"],
            secret=info["secret"],
            timeout_s=LIMIT_S,
            join_timeout_s=LIMIT_S,
        )
        self._receiver = Receiver.joining(lambda: GlooGroup.open(address, source=LEARNER))
        self._wait(self._receiver)

    def update(self, info: Mapping[str, Any]) -> None:
        """Errors: ``RejectedUpdate``."""
        if self._receiver is None:
            super().update(info)
            return
        if not self._is_started:
            raise RejectedUpdate("no update was started")
        self.updates.check(info["names"], info["shapes"], info["dtype_names"])
        rows = zip(info["names"], info["dtype_names"], map(tuple, info["shapes"]), strict=True)
        specs = tuple(Spec(*fields) for fields in rows)
        plan = TransferPlan(tensors=specs, buckets=tuple(info["buckets"]), digests_follow=True)
        self._receiver.begin(plan)
        self._wait(self._receiver)
        self.updates.stage({name: tensor.clone() for name, tensor in self._receiver.take().items()})

    def shutdown(self) -> None:
        super().shutdown()
        if self._receiver is not None:
            self._receiver.close()
        self._receiver = None

    def _wait(self, receiver: Receiver) -> None:
        """Errors: ``RejectedUpdate``, after which the group is closed."""
        try:
            wait_for(receiver, 2 * LIMIT_S)
        except RejectedUpdate:
            self.shutdown()
            raise


def wait_for(receiver: Receiver, limit_s: float) -> dict[str, str]:
    """Until it has joined or received. Returns the digests by name. Errors: ``RejectedUpdate``."""
    receiver.wait(limit_s)
    try:
        progress = receiver.progress()
    except RollmatchError as error:
        raise RejectedUpdate(str(error)) from error
    if progress.is_busy:
        raise RejectedUpdate(f"the group is not ready after {limit_s:g} s")
    return progress.digests
