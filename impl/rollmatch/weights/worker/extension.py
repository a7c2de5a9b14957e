"""The methods that vLLM's worker class gets (``worker_extension_cls``) and the server calls by ``collective_rpc``.

Importing this module makes vLLM's model one that weights can be loaded into again, before it is built, and on a GPU has
its sampler compute log-probabilities with our kernel. Plans arrive as
bytes (``transfer_plan``). Every method returns plain values; an expected error is returned under ``failure``, because
an exception would reach the server without its code.
"""

import multiprocessing
import os
import threading
from collections.abc import Callable
from dataclasses import replace
from typing import Any

import torch
from torch import nn

from rollmatch.errors import RollmatchError, SyncError
from rollmatch.weights.digest import DIRECT
from rollmatch.weights.finite import first_not_finite
from rollmatch.weights.group_address import GroupAddress
from rollmatch.weights.transfer_plan import MergePlan, TransferPlan, from_wire
from rollmatch.weights.worker.in_place import InPlaceReceiver, Served
from rollmatch.weights.worker.loading import keep_weights_loadable
from rollmatch.weights.worker.merging import FrozenWeights, merge_received
from rollmatch.weights.worker.partial_prompts import draw_for_whole_prompts
from rollmatch.weights.worker.receiver import Receiver

Reply = dict[str, Any]


def _with_failure(method: Callable[..., Reply]) -> Callable[..., Reply]:
    """Return an expected error instead of raising it."""

    def call(*arguments: object, **keywords: object) -> Reply:
        try:
            return method(*arguments, **keywords)
        except RollmatchError as error:
            return {"failure": failure_of(error)}

    return call


def failure_of(error: RollmatchError) -> Reply:
    """An error as the server restores it."""
    reply = {"code": error.code, "key": error.key, "problem": error.problem, "remedy": error.remedy}
    return reply | {"status": getattr(error, "status", 409)}


class WorkerExtension:
    """Mixed into the worker; the names must not clash with the worker's own."""

    rank: int
    device: torch.device
    model_runner: Any
    vllm_config: Any
    rollmatch_receiver: Receiver | None = None
    rollmatch_left: tuple[Receiver, ...] = ()
    """Receivers of groups that were closed while a thread waited in them."""
    rollmatch_served: Served | None = None
    rollmatch_base: FrozenWeights | None = None
    rollmatch_serves_base = True
    """Whether nothing was loaded since the start."""
    rollmatch_may_be_nan = True
    """Whether cached keys and values may be NaN: those of weights that the engine was started with."""

    @_with_failure
    def rollmatch_open(self, address: bytes, transport: str) -> Reply:
        """Begin to join a ``GroupAddress``, whose rank is the engine's first; the port is bound when this returns."""
        self.rollmatch_close()
        first = from_wire(address, GroupAddress)
        mine = replace(first, rank=first.rank + int(self.rank))
        if transport == DIRECT:
            self.rollmatch_served = self.rollmatch_served or Served()
            self.rollmatch_receiver = InPlaceReceiver.start_in(
                self._rollmatch_model(), self.rollmatch_served, mine, device=self.device
            )
        else:
            self.rollmatch_receiver = Receiver.start(mine, transport=transport, device=self.device)
        if self.vllm_config.quant_config is not None:
            self.rollmatch_receiver.reload = self.model_runner.reload_weights
        return {"rank": mine.rank}

    @_with_failure
    def rollmatch_receive(self, plan: bytes) -> Reply:
        """Begin to receive a ``TransferPlan``."""
        return self._rollmatch_begin(from_wire(plan, TransferPlan))

    @_with_failure
    def rollmatch_receive_again(self, sync_id: str, like: str) -> Reply:
        """Begin to receive what was announced in full as ``like``."""
        return self._rollmatch_begin(self._rollmatch_needed().known_plan(sync_id, like=like))

    @_with_failure
    def rollmatch_poll(self, wait_s: float) -> Reply:
        """How far joining and receiving are: ``busy``, or ``idle`` with the digests of all that has arrived."""
        self._rollmatch_needed().wait(wait_s)
        progress = self._rollmatch_needed().progress()
        state = "busy" if progress.is_busy else "idle"
        return {"state": state, "share": progress.share, "digests": progress.digests}

    def rollmatch_members(self) -> Reply:
        """Whether a member of the group has died."""
        return {"lost": self.rollmatch_receiver is not None and self.rollmatch_receiver.has_lost_a_member()}

    def rollmatch_whole(self) -> Reply:
        """Whether the model holds the weights of one version."""
        return {"whole": self.rollmatch_served is None or self.rollmatch_served.is_whole}

    @_with_failure
    def rollmatch_load(self, aliases: list[str]) -> Reply:
        """Put what was received into the model, except tied tensors, which come with what they are tied to."""
        receiver = self._rollmatch_needed()
        merged = receiver.merged
        self._rollmatch_clear_blocks()
        self._rollmatch_forget_base()
        receiver.load_into(self._rollmatch_model(), aliases=aliases)
        if merged is not None:
            self._rollmatch_kept_base().changed = set(merged)
        return {"loaded": True}

    @_with_failure
    def rollmatch_merge(self, plan: bytes) -> Reply:
        """Turn received adapter tensors into merged weights by a ``MergePlan``, ready to be loaded."""
        merge_plan = from_wire(plan, MergePlan)
        return {"digests": merge_received(self._rollmatch_needed(), merge_plan, self._rollmatch_kept_base())}

    def rollmatch_drop(self) -> Reply:
        """Forget what was received; a transfer under way is thrown away when it ends."""
        if self.rollmatch_receiver is not None:
            self.rollmatch_receiver.drop()
        return {}

    def rollmatch_close(self) -> Reply:
        """Leave the group; a thread that is stuck in it ends with the group's timeout. Whether there is one."""
        if self.rollmatch_receiver is not None:
            self.rollmatch_receiver.close()
            self.rollmatch_left += (self.rollmatch_receiver,)
        self.rollmatch_receiver = None
        self.rollmatch_left = tuple(receiver for receiver in self.rollmatch_left if receiver.is_in_group)
        return {"leaving": bool(self.rollmatch_left)}

    def _rollmatch_begin(self, plan: TransferPlan) -> Reply:
        receiver = self._rollmatch_needed()
        if isinstance(receiver, InPlaceReceiver):
            receiver.base = self._rollmatch_kept_base() if plan.merge else None
        receiver.begin(plan)
        if plan.in_place:
            self._rollmatch_clear_blocks()
        if plan.in_place and not plan.merge:
            self._rollmatch_forget_base()
        return {}

    def _rollmatch_clear_blocks(self) -> None:
        """Clear keys and values that weights with NaN or infinity have made; nothing is generated meanwhile.

        Attention multiplies what it masks by 0, which leaves NaN as it is. Only weights that the engine was started
        with may be such: others are refused.
        """
        if self.rollmatch_may_be_nan and first_not_finite(self._rollmatch_model().named_parameters()):
            for block in self.model_runner.kv_caches:
                block.zero_()
        self.rollmatch_may_be_nan = False

    def _rollmatch_model(self) -> nn.Module:
        """Without what vLLM wraps around it for CUDA graphs."""
        model: nn.Module = self.model_runner.get_model()
        return model

    def _rollmatch_kept_base(self) -> FrozenWeights:
        """Made when first needed; what the engine was started with is the base, unless it was placeholders.

        Errors: ``merge-quantized``.
        """
        if self.vllm_config.quant_config is not None:
            problem, remedy = "an engine that quantizes its weights merges no adapters", "Set sync.mode to full."
            raise SyncError(problem, code="merge-quantized", key="adapter", remedy=remedy)
        if self.rollmatch_base is None:
            config = self.model_runner.model_config
            self.rollmatch_base = FrozenWeights(config.model, dtype=config.dtype, device=self.device)
            if self.rollmatch_serves_base and self.vllm_config.load_config.load_format != "dummy":
                self.rollmatch_base.changed = set()
        return self.rollmatch_base

    def _rollmatch_forget_base(self) -> None:
        """Something else is being loaded."""
        self.rollmatch_serves_base = False
        if self.rollmatch_base is not None:
            self.rollmatch_base.changed = None

    def _rollmatch_needed(self) -> Receiver:
        if self.rollmatch_receiver is None:
            raise SyncError("this worker is in no group", code="communicator-missing", remedy="Open a communicator.")
        return self.rollmatch_receiver


def end_with_parent() -> None:
    """Let no worker outlive the server, whatever ends it."""
    parent = multiprocessing.parent_process()
    if parent is None:
        return

    def wait() -> None:
        parent.join()
        os._exit(1)

    threading.Thread(target=wait, daemon=True, name="rollmatch-parent").start()


keep_weights_loadable()
draw_for_whole_prompts()
if torch.cuda.is_available():
    from rollmatch.weights.worker.logprob_kernel import install

    install()
end_with_parent()
