"""Ways of weights from this process to engines, each a call that returns when the weights are in place."""

import itertools
import time
from itertools import pairwise
from types import SimpleNamespace

import torch

from benchmarks.gpu.eight_billion import random_adapter, shapes
from conformance.doubles.instance import Instance, settings_for
from rollmatch.dialects.native.group import Rendezvous
from rollmatch.dialects.native.sender import NativeSender
from rollmatch.dialects.session import ClientSettings, RolloutServer
from rollmatch.weights.digest import add_mixed_of_each, mixed_digests
from rollmatch.weights.group_address import GroupAddress
from rollmatch.weights.group_store import GO
from rollmatch.weights.nccl import BUCKET_BYTES, TAIL_BYTES, open_direct
from rollmatch.weights.plan import WeightTransfer, make_plan, spec_of
from rollmatch.weights.transfer_plan import TransferPlan, to_wire
from rollmatch.weights.worker.merging import merge_named

HOST, TIMEOUT_S, SECRET = "127.0.0.1", 30.0, "between these engines only"
ENGINE = {"enforce_eager": True, "kv_cache_memory_bytes": 4 << 30, "gpu_memory_utilization": 0.3}
PHASES = ("announce", "ready", "carry", "answers")
PACKED = {"weight_transfer_config": {"backend": "nccl"}}


class Direct:
    """Straight into the engines' parameters, or ``staged`` beside them, with digests; announced through pipes."""

    in_place = True

    def __init__(self, engines, weights, *, port):
        self.engines, self.weights = engines, weights
        self.num_engines = len(engines.engines)
        world_size = self.num_engines + 1
        place = {"host": HOST, "port": port, "world_size": world_size, "secret": SECRET}
        place |= {"timeout_s": TIMEOUT_S, "join_timeout_s": TIMEOUT_S}
        for index in range(self.num_engines):
            engines.begin_one(index, "rollmatch_open", to_wire(GroupAddress(**place, rank=index)), "direct")
        engines.answers()
        device = next(iter(weights.values())).device
        self.group = open_direct(GroupAddress(**place, rank=self.num_engines), device)
        engines.call("rollmatch_poll", 30.0)
        specs = [spec_of(*pair) for pair in weights.items()]
        self.plan = make_plan(specs, bucket_bytes=BUCKET_BYTES, tail_bytes=TAIL_BYTES)
        self.counter, self.known, self.phases_s = itertools.count(), None, []

    def __call__(self):
        times = [time.perf_counter()]
        sync_id = f"s{next(self.counter)}"
        self._announce(sync_id)
        self.engines.begin("rollmatch_poll", TIMEOUT_S)
        times.append(time.perf_counter())
        self._wait_ready(sync_id)
        times.append(time.perf_counter())
        digests = self._send()
        times.append(time.perf_counter())
        self.engines.answers()
        self._check(digests, self.engines.answers())
        times.append(time.perf_counter())
        steps = zip(PHASES, pairwise(times), strict=True)
        self.phases_s.append({step: end - began for step, (began, end) in steps})

    def stage(self):
        """All weights beside those in use, which are used meanwhile; they are taken over by ``load``."""
        sync_id = f"s{next(self.counter)}"
        self.known, self.in_place = None, False
        self._announce(sync_id)
        self.engines.answers()
        self._wait_ready(sync_id)
        digests = self._send()
        while (answers := self.engines.call("rollmatch_poll", 0.0))[0][0]["state"] != "idle":
            time.sleep(0.001)
        self._check(digests, answers)
        self.known, self.in_place = None, True

    def load(self):
        """What was staged."""
        self.engines.call("rollmatch_load", [])

    def total_is_right(self):
        """Whether all parameters of every engine together hold what was sent."""
        held = self.engines.call("peer_held")
        sent = sum(int(tensor.view(torch.int16).long().sum()) for tensor in self.weights.values())
        return all(sum(sums[0].values()) == sent for sums in held) and all(sums == held[0] for sums in held)

    def _wait_ready(self, sync_id):
        deadline = time.perf_counter() + TIMEOUT_S
        while not self.group.store.is_ready(sync_id, range(self.num_engines), within_s=0.005):
            if time.perf_counter() > deadline:
                self.engines.answers()  # which say why
                raise TimeoutError("the engines are not ready")
        self.group.store.give_verdict(sync_id, GO)

    def _send(self):
        tensors = list(self.weights.values())
        transfer = WeightTransfer(plan=self.plan, tensors=tuple(tensors[index] for index in self.plan.order))
        return self.group.send(transfer, lambda: None)

    def _check(self, digests, answers):
        names = [spec.name for spec in self.plan.specs]
        for answer in answers:
            assert [answer[0]["digests"][name] for name in names] == list(digests)

    def _announce(self, sync_id):
        """All of it once; afterwards by its name, as over HTTP."""
        if self.known is not None:
            self.engines.begin("rollmatch_receive_again", sync_id, self.known)
            return
        self.known = sync_id
        buckets = tuple(bucket.stop - bucket.start for bucket in self.plan.buckets)
        plan = TransferPlan(
            tensors=self.plan.specs,
            buckets=buckets,
            sync_id=sync_id,
            digests_follow=True,
            may_repeat=True,
            in_place=self.in_place,
        )
        self.engines.begin("rollmatch_receive", to_wire(plan))


class Floor:
    """So many bytes from one piece of memory into another, on the same group."""

    NUM_PIECES = 16

    def __init__(self, direct, num_bytes):
        self.direct, self.piece_bytes = direct, num_bytes // self.NUM_PIECES
        self.memory = torch.zeros(self.piece_bytes, dtype=torch.uint8, device=direct.group.device)

    def __call__(self):
        group = self.direct.group
        self.direct.engines.begin("peer_floor", self.piece_bytes, self.NUM_PIECES)
        for _ in range(self.NUM_PIECES):
            group.broadcast_group([self.memory])
        group.wait(group.mark())
        self.direct.engines.answers()

    def forget(self):
        self.memory = None
        self.direct.engines.call("peer_forget")


class OneByOne:
    """One call, one broadcast and one load per tensor, without HTTP."""

    def __init__(self, direct):
        self.direct = direct

    def __call__(self):
        group, engines = self.direct.group, self.direct.engines
        for name, tensor in self.direct.weights.items():
            engines.begin("peer_load_one", name, list(tensor.shape))
            group.broadcast_group([tensor])
            group.wait(group.mark())
            engines.answers()


class Packed:
    """vLLM's own weight transfer."""

    def __init__(self, engines, weights, *, port):
        from vllm.distributed.weight_transfer.nccl_common import trainer_init

        self.engines, self.weights = engines, weights
        world_size = len(engines.engines) + 1
        rendezvous = {"master_address": HOST, "master_port": port, "world_size": world_size}
        for index in range(world_size - 1):
            body = {"init_info": rendezvous | {"rank_offset": index + 1}}
            engines.begin_one(index, "llm.init_weight_transfer_engine", body)
        self.group = trainer_init(rendezvous)
        engines.answers()

    def __call__(self):
        from vllm.distributed.weight_transfer.nccl_engine import NCCLWeightTransferEngine

        self.engines.call("llm.start_weight_update")
        names, shapes_ = list(self.weights), [list(tensor.shape) for tensor in self.weights.values()]
        about = {"names": names, "dtype_names": ["bfloat16"] * len(names), "shapes": shapes_, "packed": True}
        self.engines.begin("llm.update_weights", {"update_info": about})
        how = {"group": self.group, "packed": True}
        NCCLWeightTransferEngine.trainer_send_weights(iter(self.weights.items()), how)
        self.engines.answers()
        self.engines.call("llm.finish_weight_update")


class OurServers:
    """Over HTTP, as a run does it."""

    def __init__(self, directory, num_servers, folder, arguments=ENGINE, **fields):
        """``arguments``: vLLM's; ``fields``: further settings of the servers."""
        given = {"model": str(directory), "dtype": "bfloat16", "max_model_len": 2048, "load_format": "dummy"}
        given |= {"engine_arguments": arguments, "drain_s": 0.0, **fields}
        gpus = range(num_servers) if torch.cuda.is_available() else [None] * num_servers
        settings = [settings_for(**given, gpus=() if gpu is None else (str(gpu),)) for gpu in gpus]
        pairs = enumerate(settings)
        self.instances = [Instance(one, folder / f"server{place}.log") for place, one in pairs]
        self.versions = itertools.count(1)

    def connect(self, weights, places=None, *, bucket_bytes=0):
        """``places``: of those that take part; otherwise all. The first sync in the new group sets things up."""
        self.weights = weights
        chosen = self.instances if places is None else [self.instances[place] for place in places]
        clients = [RolloutServer(instance.wait_ready().url, ClientSettings(timeout_s=240)) for instance in chosen]
        for client in clients:
            client.connect()
        rendezvous = Rendezvous(
            host=HOST, port=settings_for().port, client="learner", timeout_s=TIMEOUT_S, join_timeout_s=60.0
        )
        self.sender = NativeSender(clients, rendezvous, transport="direct", bucket_bytes=bucket_bytes, stage=False)
        self.sender.send(self.weights.items(), version=next(self.versions))
        self.phases_s, self._ends = [], []
        source = self.sender._group.source
        self.sender._wait_ready = self._stamped(self.sender._wait_ready)
        source.send = self._stamped(source.send, at_end=True)

    def __call__(self):
        self.time(self.sender.send, self.weights.items())

    def time(self, send, weights):
        """One sync, by phase."""
        times, self._ends = [time.perf_counter()], []
        send(weights, version=next(self.versions))
        times += [*self._ends, time.perf_counter()]
        steps = zip(PHASES, pairwise(times), strict=True)
        self.phases_s.append({step: end - began for step, (began, end) in steps})

    def _stamped(self, call, *, at_end=False):
        """The call, whose beginning ends a phase."""

        def stamped(*arguments):
            self._ends.append(time.perf_counter())
            result = call(*arguments)
            if at_end:
                self._ends.append(time.perf_counter())
            return result

        return stamped

    def end(self):
        for instance in self.instances:
            instance.end()


class Adapters:
    """A DoRA on every linear, merged by our servers. The base is all zeros: the directory's file is a hole."""

    def __init__(self, servers, num_layers):
        self.servers = servers
        self.device = next(iter(servers.weights.values())).device
        self.tensors, self.merges = random_adapter(self.device, num_layers)
        whole = shapes(num_layers)
        self.base = {
            merge.name: torch.zeros(whole[merge.name], dtype=torch.bfloat16, device=self.device)
            for merge in self.merges
        }
        self.num_bytes = sum(tensor.nbytes for _, tensor in self.tensors)

    def made(self):
        """Weights of the learner's own merge, each made when its turn comes."""
        parts = dict(self.tensors)
        for merge in self.merges:
            yield merge_named(merge, self.base[merge.name], parts)

    def prove(self):
        """The learner's part beside the servers' merge: its own, and the digests."""
        sums = torch.zeros(len(self.merges), 2, dtype=torch.int64, device=self.device)
        add_mixed_of_each(self.made(), sums)
        mixed_digests(sums)

    def __call__(self):
        adapter = SimpleNamespace(tensors=self.tensors, merges=self.merges, merged=self.made())
        self.servers.time(self.servers.sender.send_adapter, adapter)
