"""Weights into other people's rollout servers on a machine without GPUs; not one line of theirs is changed.

vLLM loads plugins (entry points of the group ``vllm.general_plugins``, chosen by ``VLLM_PLUGINS``) in every process it
starts. This folder holds a distribution by hand, so that a place on ``PYTHONPATH`` is all the installation it needs.

``gloo_for_nccl``, for servers that hold a ``PyNcclCommunicator`` (swift rollout, trl vllm-serve). On a CPU that class
does not refuse: it switches itself off, and its broadcasts do nothing. Four things are replaced:

- the communicator, by gloo on the same store, with the same attributes;
- the CPU build's packing of linear weights, which leaves empty tensors behind that nothing can be loaded into;
- ``torch.cuda.current_stream`` and ``torch.cuda.synchronize``, by nothing to wait for.

``gloo_transfer``, for a stock ``vllm serve``: registers a weight transfer backend of that name, as vLLM offers it.

``fork_engines``, for trl vllm-serve and vllm serve: on GPUs vLLM forks its engine and workers by itself; on a CPU it
asks for new interpreters, each of which imports torch and vLLM again. Forked, a server starts in half the time. Not for
swift rollout: before plugins are loaded it has imported the communicator by name, and what is forked keeps it.

What this shows is the protocol and the loading; not NCCL's ordering of streams, nor its speed.
"""

from dataclasses import dataclass
from datetime import timedelta

TIMEOUT = timedelta(seconds=60)
BUFFER_BYTES = 2**30
"""vLLM's default: a buffer is sent as soon as it holds more."""
STORE = "gloo"
"""Prefix in the group's store; that of the learner."""


def stand_in_for_nccl():
    """Entry point."""
    import torch
    import torch.distributed as dist
    import torch.nn.functional as functional
    from vllm.distributed.device_communicators import pynccl
    from vllm.model_executor.layers import utils as linear

    class GlooCommunicator:
        def __init__(self, group, device=None, library_path=None):
            self.group, self.rank, self.world_size = group, group.rank, group.world_size
            self.device, self.available, self.disabled = torch.device("cpu"), True, False
            place = dist.PrefixStore(STORE, group.store)
            self._gloo = dist.ProcessGroupGloo(place, self.rank, self.world_size, TIMEOUT)

        def broadcast(self, tensor, src, stream=None):
            whole = tensor.contiguous()
            broadcast_on(self._gloo, whole, src)
            if whole is not tensor and src != self.rank:
                tensor.copy_(whole)

    def keep_weights(layer, remove_weight=False):
        layer.cpu_linear = functional.linear

    pynccl.PyNcclCommunicator = GlooCommunicator
    linear.dispatch_cpu_unquantized_gemm = keep_weights
    torch.cuda.current_stream = lambda *_, **__: None
    torch.cuda.synchronize = lambda *_, **__: None


def add_transfer_engine():
    """Entry point; vLLM may load plugins twice in one process."""
    from vllm.distributed.weight_transfer import WeightTransferEngineFactory
    from vllm.distributed.weight_transfer.base import WeightTransferEngine

    class PeerGlooEngine(GlooReceiver, WeightTransferEngine):
        init_info_cls, update_info_cls = _messages()

    if "gloo" not in WeightTransferEngineFactory._registry:
        WeightTransferEngineFactory.register_engine("gloo", PeerGlooEngine)


def fork_engines():
    """Entry point."""
    from vllm import envs

    envs.environment_variables["VLLM_WORKER_MULTIPROC_METHOD"] = lambda: "fork"


def _messages():
    """What ``/init_weight_transfer_engine`` and ``/update_weights`` get; vLLM refuses other fields by these."""
    from vllm.distributed.weight_transfer import base as transfer

    @dataclass
    class PeerRendezvous(transfer.WeightTransferInitInfo):
        master_address: str
        master_port: int
        rank_offset: int
        world_size: int
        packed: bool = False  # whether tensors come in buffers, as TRL sends them

    @dataclass
    class Announcement(transfer.WeightTransferUpdateInfo):
        names: list
        dtype_names: list
        shapes: list

    return PeerRendezvous, Announcement


class GlooReceiver:
    """A worker's end; vLLM's engine class gives it its model. Rank 0, the learner, holds the store."""

    def init_transfer_engine(self, init_info):
        import torch.distributed as dist

        places = self.parallel_config
        rank = init_info.rank_offset + places.data_parallel_index * places.world_size + places.rank
        address, size = (init_info.master_address, init_info.master_port), init_info.world_size
        self._packed = init_info.packed
        self._store = dist.TCPStore(*address, size, False, TIMEOUT, wait_for_workers=False)
        self._gloo = dist.ProcessGroupGloo(dist.PrefixStore(STORE, self._store), rank, size, TIMEOUT)

    def start_weight_update(self):
        """Layers take weights as a checkpoint has them until the update is finished."""
        from vllm.model_executor.model_loader.reload import initialize_layerwise_reload

        initialize_layerwise_reload(self.model)

    def update_weights(self, update_info):
        """vLLM's own would wait for an accelerator."""
        self.receive_weights(self.parse_update_info(update_info))

    def receive_weights(self, update_info):
        import torch

        rows = zip(update_info.names, update_info.dtype_names, update_info.shapes, strict=True)
        waiting = []
        for name, dtype, shape in rows:
            waiting.append((name, torch.empty(shape, dtype=getattr(torch, dtype))))
            if not self._packed or sum(tensor.nbytes for _, tensor in waiting) > BUFFER_BYTES:
                self._receive(waiting)
                waiting = []
        if waiting:
            self._receive(waiting)

    def _receive(self, named):
        """All in one broadcast."""
        import torch

        memory = torch.empty(sum(tensor.nbytes for _, tensor in named), dtype=torch.uint8)
        broadcast_on(self._gloo, memory, 0)
        parts = memory.split([tensor.nbytes for _, tensor in named])
        for (_, tensor), part in zip(named, parts):
            tensor.view(-1).view(torch.uint8).copy_(part)
        self.model.load_weights(named)

    def finish_weight_update(self):
        from vllm.model_executor.model_loader.reload import finalize_layerwise_reload

        finalize_layerwise_reload(self.model, self.model_config)

    def shutdown(self):
        self._gloo = self._store = None

    @staticmethod
    def trainer_send_weights(iterator, trainer_args):
        """Declared by vLLM before 0.28; learners send by themselves."""
        raise NotImplementedError


def broadcast_on(gloo, tensor, source):
    """In place."""
    from torch.distributed import BroadcastOptions

    options = BroadcastOptions()
    options.rootRank, options.rootTensor = source, 0
    gloo.broadcast([tensor], options).wait()
