"""The methods that vLLM's worker class gets (``worker_extension_cls``) and the server calls by ``collective_rpc``.

Importing this module makes vLLM's model one that weights can be loaded into again, before it is built. Every method
answers with a plain dictionary; what goes wrong on purpose is told under ``failure``, because an exception here would
reach the server without its code.
"""

import multiprocessing
import os
import threading
from collections.abc import Callable
from functools import wraps
from typing import Any

from rollmatch.errors import RollmatchError
from rollmatch.weights.digest_kinds import DIRECT
from rollmatch.weights.worker.frozen_weights import FrozenWeights
from rollmatch.weights.worker.groups import parse_address
from rollmatch.weights.worker.in_place import InPlaceReceiver, Served
from rollmatch.weights.worker.loading import addresses_of, keep_weights_loadable, load_into
from rollmatch.weights.worker.receiver import NothingReceived, Receiver

Told = dict[str, Any]


def _telling(method: Callable[..., Told]) -> Callable[..., Told]:
    @wraps(method)
    def tell(*arguments: Any, **keywords: Any) -> Told:
        try:
            return method(*arguments, **keywords)
        except RollmatchError as error:
            return {"failure": failure_of(error)}

    return tell


def failure_of(error: RollmatchError) -> Told:
    """An error as the server makes it whole again."""
    told = {"code": error.code, "key": error.key, "problem": error.problem, "remedy": error.remedy}
    return told | {"status": getattr(error, "status", 409)}


class WorkerExtension:
    """Mixed into the worker; the names must not clash with the worker's own."""

    rollmatch_receiver: Receiver | None = None
    rollmatch_served: Served | None = None
    rollmatch_base: FrozenWeights | None = None
    rollmatch_serves_base = True
    """Whether nothing was loaded since the start."""

    def rollmatch_describe(self) -> Told:
        """Where this worker stands among the tensor parallel ranks of its engine."""
        return {"rank": int(self.rank), "device": str(self.device)}  # type: ignore[attr-defined]

    @_telling
    def rollmatch_open(self, address: Told, transport: str) -> Told:
        """Begin to join a group as ``address['rank'] + rank``; the port is bound when this returns."""
        self.rollmatch_close()
        address = address | {"rank": address["rank"] + int(self.rank)}  # type: ignore[attr-defined]
        device = self.device  # type: ignore[attr-defined]
        if transport == DIRECT:
            self.rollmatch_served = self.rollmatch_served or Served()
            receiver: Receiver = InPlaceReceiver.start_in(
                self._rollmatch_model(), self.rollmatch_served, parse_address(address), device=device
            )
        else:
            receiver = Receiver.start(address, transport=transport, device=device)
        self.rollmatch_receiver = receiver
        return {"rank": address["rank"]}

    @_telling
    def rollmatch_receive(self, plan: Told) -> Told:
        """Begin to receive what is announced."""
        plan = self._rollmatch_needed().whole(plan)
        self._rollmatch_needed().begin(plan)
        if not plan.get("beside", True):
            self._rollmatch_forget_base()
        return {}

    @_telling
    def rollmatch_poll(self, wait_s: float = 0.0) -> Told:
        """How far joining and receiving are: ``busy``, or ``idle`` with the digests of all that came."""
        self._rollmatch_needed().wait(wait_s)
        return self._rollmatch_needed().poll()

    @_telling
    def rollmatch_whole(self) -> Told:
        """Whether the model holds the weights of one version."""
        return {"whole": self.rollmatch_served is None or self.rollmatch_served.is_whole}

    @_telling
    def rollmatch_load(self, aliases: list[str]) -> Told:
        """Put what was received into the model, but for tied tensors, which come with what they are tied to."""
        receiver, model = self._rollmatch_needed(), self._rollmatch_model()
        self._rollmatch_forget_base()
        load_into(model, {name: tensor for name, tensor in receiver.take().items() if name not in aliases})
        receiver.reuse(addresses_of(model))
        return {"loaded": True}

    @_telling
    def rollmatch_merge(self, plan: Told) -> Told:
        """Turn received adapter tensors into merged weights, ready to be loaded."""
        receiver = self._rollmatch_needed()
        if isinstance(receiver, InPlaceReceiver):
            from rollmatch.weights.worker.merging_in_place import merge_in_place

            return merge_in_place(receiver, plan, self._rollmatch_kept_base(), self._rollmatch_model())
        from rollmatch.weights.worker.merging import merge_received

        return merge_received(self._rollmatch_needed(), plan, model_runner=self.model_runner)  # type: ignore[attr-defined]

    @_telling
    def rollmatch_drop(self) -> Told:
        """Forget what was received; a transfer that runs is thrown away when it ends."""
        if self.rollmatch_receiver is not None:
            self.rollmatch_receiver.drop()
        return {}

    def rollmatch_close(self) -> Told:
        """Leave the group; a thread that is stuck in it ends with the group's timeout."""
        if self.rollmatch_receiver is not None:
            self.rollmatch_receiver.close()
        self.rollmatch_receiver = None
        return {}

    def _rollmatch_model(self) -> Any:
        """Without what vLLM wraps around it for CUDA graphs."""
        return self.model_runner.get_model()  # type: ignore[attr-defined]

    def _rollmatch_kept_base(self) -> FrozenWeights:
        """Made when first needed; what the engine was started with is the base, unless it was placeholders."""
        if self.rollmatch_base is None:
            config = self.vllm_config.model_config  # type: ignore[attr-defined]
            self.rollmatch_base = FrozenWeights(config.model, dtype=config.dtype, device=self.device)  # type: ignore[attr-defined]
            if self.rollmatch_serves_base and self.vllm_config.load_config.load_format != "dummy":  # type: ignore[attr-defined]
                self.rollmatch_base.changed = set()
        return self.rollmatch_base

    def _rollmatch_forget_base(self) -> None:
        """Something else is being loaded."""
        self.rollmatch_serves_base = False
        if self.rollmatch_base is not None:
            self.rollmatch_base.changed = None

    def _rollmatch_needed(self) -> Receiver:
        if self.rollmatch_receiver is None:
            raise NothingReceived("this worker is in no group", remedy="Open a communicator.")
        return self.rollmatch_receiver


def end_with_parent() -> None:
    """Let no worker outlive the server, whatever it dies of."""
    parent = multiprocessing.parent_process()
    if parent is None:
        return

    def wait() -> None:
        parent.join()
        os._exit(1)

    threading.Thread(target=wait, daemon=True, name="rollmatch-parent").start()


keep_weights_loadable()
end_with_parent()
