"""Weights to servers of the trl dialect and of swift, which shares its control routes: each chunk is one broadcast.

Servers of these dialects cannot prove what they hold: real ones answer before they have loaded, and answer 200 when
loading fails. An adapter alone goes to servers of the swift dialect that were started for it; ``rollout.adapter_proof``
shows before training that they apply it. Every chunk is sent once.
"""

from collections.abc import Iterable, Mapping, Sequence
from functools import partial
from typing import NamedTuple

import torch
from torch import Tensor

from rollmatch.dialects.calls import BackgroundCall, run_all
from rollmatch.dialects.native.group import Rendezvous
from rollmatch.dialects.sender import WeightSender
from rollmatch.dialects.session import RolloutServer
from rollmatch.dialects.swift.sender import ADAPTER_ROUTE, named_parts, peft_config, takes_adapters, without_effect
from rollmatch.errors import RollmatchError, SyncError
from rollmatch.weights.digest import Buffer, bytes_of
from rollmatch.weights.named_weights import Adapter
from rollmatch.weights.nccl import device_of
from rollmatch.weights.plan import Spec, outgoing, spec_of
from rollmatch.weights.stateless import StatelessGroup

BUCKET_BYTES = 512 * 2**20
"""ms-swift's own."""
AFTER_LOADING = "/process_weights_after_loading"
"""Ends a sync, where a server has it."""
_NO_DEVICE = "none"
_CPU = torch.device("cpu")


class TrlSender(WeightSender):
    """Rank 0's way to its servers; each has a group of its own at its own host and port."""

    def __init__(self, servers: Sequence[RolloutServer], rendezvous: Sequence[Rendezvous]) -> None:
        self.servers, self.rendezvous = tuple(servers), tuple(rendezvous)
        self._groups: tuple[StatelessGroup, ...] = ()
        self._blank: Adapter | None = None
        """Where an adapter was sent, which a server keeps until it is started again: one that undoes it."""

    def send(self, weights: Iterable[tuple[str, Tensor]], *, version: int) -> None:
        """All weights, to all servers at the same time; the servers count versions themselves, if they do."""
        self._undo_adapter()
        transfer = outgoing(weights, bucket_bytes=BUCKET_BYTES)
        receivers = self._receivers(() if transfer.is_streamed else transfer.tensors)
        try:
            for bucket in transfer.plan.buckets:
                specs = transfer.plan.specs[bucket.start : bucket.stop]
                tensors = transfer.tensors[bucket.start : bucket.stop]
                run_all(partial(_send_bucket, receiver, specs, tensors) for receiver in receivers)
            run_all(partial(_finish, server) for server in self.servers)
        except RollmatchError:
            self.close()
            raise

    def send_adapter(self, adapter: Adapter, *, version: int) -> None:
        """An adapter alone, in one broadcast.

        Errors: ``adapter-unproven``, ``AdapterNotSendable``, those of ``send``.
        """
        self._check_route()
        named = named_parts(adapter)
        specs, parts = [spec_of(*pair) for pair in named], [bytes_of(tensor) for _, tensor in named]
        body: dict[str, object] = {"peft_config": peft_config(adapter), "metadatas": flat_metadata(specs)}
        receivers = self._receivers([tensor for _, tensor in named])
        self._blank = without_effect(adapter)
        try:
            run_all(partial(_send_adapter, receiver, body, parts) for receiver in receivers)
        except RollmatchError:
            self.close()
            raise

    def _undo_adapter(self) -> None:
        """Put an adapter that changes nothing in place of one that was sent. Errors: ``adapter-stays``."""
        if self._blank is None:
            return
        try:
            self.send_adapter(self._blank, version=0)
        except RollmatchError as error:
            url, remedy = self.servers[0].base_url, "Start the servers again."
            problem = f"{url} was sent an adapter, which it would apply to full weights, too: {error}"
            raise SyncError(problem, code="adapter-stays", key=url, remedy=remedy) from error
        self._blank = None

    def _check_route(self) -> None:
        """Errors: ``adapter-unproven``."""
        for server in () if self._blank else self.servers:
            if not takes_adapters(server):
                raise SyncError(
                    f"{server.base_url} speaks {server.dialect.name}, and has no route for an adapter alone",
                    code="adapter-unproven",
                    key=server.base_url,
                    remedy="Set sync.mode to full, or serve with rollmatch serve, or swift rollout --vllm_enable_lora.",
                )

    def _receivers(self, tensors: Sequence[Tensor]) -> list["_Receiver"]:
        """The servers, in groups on the device of the tensors; what is queued on a GPU has been computed."""
        if not self._groups:
            device = device_of(("", tensor) for tensor in tensors)
            places = zip(self.servers, self.rendezvous)
            self._groups = tuple(run_all(partial(join, *place, device) for place in places))
        if self._groups[0].device.type == "cuda":
            torch.cuda.synchronize(self._groups[0].device)  # what computes the weights may run on another stream
        pairs = zip(self.servers, self._groups)
        return [_Receiver(server, group, Buffer(group.device)) for server, group in pairs]

    def close(self) -> None:
        """Leave all groups."""
        groups, self._groups = self._groups, ()
        if groups:
            for call in [BackgroundCall(partial(server.control, "/close_communicator")) for server in self.servers]:
                call.is_done(within_s=5.0)
        for group in groups:
            group.close()


def join(server: RolloutServer, rendezvous: Rendezvous, device: torch.device = _CPU) -> StatelessGroup:
    """Join a server's workers, as the last rank: by NCCL from a GPU, by gloo from a CPU.

    Errors: the server's, ``CommunicatorTimeout``, also where one side has a GPU and the other has none.
    """
    world_size = server.world_size() + 1
    server.control("/close_communicator")
    body = {
        "host": rendezvous.host,
        "port": rendezvous.port,
        "world_size": world_size,
        "client_device_uuid": uuid_of(device),
    }
    server.control("/init_communicator", body, timeout_s=rendezvous.join_timeout_s)
    return StatelessGroup(rendezvous.address(rank=world_size - 1, world_size=world_size), device=device)


def uuid_of(device: torch.device) -> str:
    """By which TRL's workers see that the learner has another GPU than they have.

    >>> uuid_of(torch.device("cpu"))
    'none'
    """
    return str(torch.cuda.get_device_properties(device).uuid) if device.type == "cuda" else _NO_DEVICE


def send_named(server: RolloutServer, group: StatelessGroup, spec: Spec, tensor: Tensor) -> None:
    """One tensor, TRL's way: announced, broadcast, waited for."""
    body = {"name": spec.name, "dtype": f"torch.{spec.dtype}", "shape": list(spec.shape)}
    server.control("/update_named_param", body)
    group.broadcast(tensor.detach().to(group.device).contiguous())


class _Receiver(NamedTuple):
    """A server with its group, and the memory that a bucket goes through."""

    server: RolloutServer
    group: StatelessGroup
    buffer: Buffer


@torch.no_grad()
def _send_bucket(receiver: _Receiver, specs: Sequence[Spec], tensors: Sequence[Tensor]) -> None:
    """Consecutive tensors: one broadcast for a server of swift, one each for others."""
    server, group, buffer = receiver
    if server.dialect.name == "swift":
        server.control("/update_flattened_params", {"metadatas": flat_metadata(specs)})
        group.broadcast(buffer.fill([bytes_of(tensor.to(group.device)) for tensor in tensors]))
    else:
        for spec, tensor in zip(specs, tensors, strict=True):
            send_named(server, group, spec, tensor)


def _send_adapter(receiver: _Receiver, body: Mapping[str, object], parts: Sequence[Tensor]) -> None:
    """Announced, broadcast, and what was computed with the one before forgotten."""
    server, group, buffer = receiver
    server.control(ADAPTER_ROUTE, body)
    group.broadcast(buffer.fill([part.to(group.device) for part in parts]))
    server.empty_caches()


def _finish(server: RolloutServer) -> None:
    if AFTER_LOADING in server.routes:
        server.control(AFTER_LOADING)
    server.empty_caches()


def flat_metadata(specs: Sequence[Spec]) -> list[dict[str, object]]:
    """Where each tensor lies in a bucket, in bytes (ms-swift from 4.2 on).

    >>> [(one["start_idx"], one["end_idx"]) for one in
    ...  flat_metadata([Spec("a", "bfloat16", (6,)), Spec("b", "float32", (2,))])]
    [(0, 12), (12, 20)]
    """
    described, start = [], 0
    for spec in specs:
        stop = start + spec.num_bytes
        described.append(
            {
                "name": spec.name,
                "dtype": f"torch.{spec.dtype}",
                "shape": list(spec.shape),
                "start_idx": start,
                "end_idx": stop,
                "numel": spec.num_bytes,
            }
        )
        start = stop
    return described
