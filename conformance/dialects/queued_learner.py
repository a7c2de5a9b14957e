"""A learner as ms-swift's and TRL's trainers are one: announce, broadcast, barrier, piece by piece.

Groups are vLLM's ``StatelessProcessGroup`` as theirs; gloo takes the place of NCCL.
"""

from datetime import timedelta

import torch
import torch.distributed as dist

from conformance.dialects.flat_bucket import flat_metadata
from rollmatch.weights.digest import bytes_of


class QueuedLearner:
    def __init__(self, server, *, port, num_workers=2):
        self.server, self.port, self.rank = server, port, num_workers

    def init(self, **fields):
        wish = {"host": "127.0.0.1", "port": self.port, "world_size": self.rank + 1, "client_device_uuid": "cpu"}
        return self.server.post("/init_communicator/", wish | fields)

    def join(self):
        from vllm.distributed.utils import StatelessProcessGroup  # vLLM takes a second to load

        self.group = StatelessProcessGroup.create("127.0.0.1", self.port, self.rank, self.rank + 1, store_timeout=20)
        place = dist.PrefixStore("gloo", self.group.store)
        self.gloo = dist.ProcessGroupGloo(place, self.rank, self.rank + 1, timedelta(seconds=20))

    def open(self):
        answer = self.init()
        self.join()
        return answer

    def close(self):
        self.group = self.gloo = None
        return self.server.post("/close_communicator/")

    def broadcast(self, tensor):
        options = dist.BroadcastOptions()
        options.rootRank, options.rootTensor = self.rank, 0
        self.gloo.broadcast([tensor], options).wait()
        self.group.barrier()

    def update_named(self, name, tensor, **fields):
        """TRL's way; the refusal, or None."""
        told = {"name": name, "dtype": str(tensor.dtype), "shape": list(tensor.shape)} | fields
        status, body = self.server.post("/update_named_param/", told)
        if status != 200:
            return status, body
        self.broadcast(tensor.contiguous())
        return None

    def update_flattened(self, tensors, **fields):
        """ms-swift's way: one bucket of bytes; the refusal, or None."""
        told = {"metadatas": flat_metadata(tensors, **fields)}
        status, body = self.server.post("/update_flattened_params/", told)
        if status != 200:
            return status, body
        self.broadcast(torch.cat([bytes_of(tensor) for tensor in tensors.values()]))
        return None
