"""SGLang's dialect beside what its published code does; no server of its own has been judged."""

import subprocess
import sys

import torch

from conformance.doubles.judged import replying, subject_at
from conformance.judge.ports import free_port
from conformance.judge.servers.senders import PeerGroup, SglangPeer
from conformance.judge.servers.sglang import GROUP
from conformance.judge.servers.subject import find_dialect
from conformance.judge.servers.talk import Talk
from rollmatch.weights.group_address import GroupAddress

JOIN = """
import sys, torch
from datetime import timedelta
from torch.distributed import distributed_c10d as c10d
port, name = int(sys.argv[1]), sys.argv[2]
store, rank, size = next(c10d.rendezvous(f"tcp://127.0.0.1:{port}", 1, 2, timeout=timedelta(seconds=60)))
group, _ = c10d._new_process_group_helper(
    size, rank, [], c10d.Backend("gloo"), c10d.PrefixStore(name, store), group_name=name, timeout=timedelta(seconds=60)
)
c10d._world.pg_group_ranks[group] = {0: 0, 1: 1}
tensor = torch.empty(3)
torch.distributed.broadcast(tensor, src=0, group=group, async_op=True).wait()
print(tensor.tolist())
"""
"""``init_custom_process_group`` and ``receive_weights_from_distributed`` of SGLang 0.5.23."""

ENTRY = {
    "text": " is",
    "output_ids": [5, 6],
    "prompt_token_ids": [1, 2],
    "meta_info": {
        "id": "a", "finish_reason": {"type": "stop", "matched": 6}, "weight_version": "default",
        "output_token_logprobs": [[-0.5, 5, None], [-0.25, 6, None]],
    },
}  # fmt: skip
"""As its ``TokenizerManager`` writes one."""


def test_the_learner_meets_the_group_that_sglang_opens():
    port = free_port()
    worker = subprocess.Popen([sys.executable, "-c", JOIN, str(port), GROUP], stdout=subprocess.PIPE, text=True)
    address = GroupAddress(host="127.0.0.1", port=port, rank=0, world_size=2, timeout_s=60.0, join_timeout_s=60.0)
    group = PeerGroup(address, SglangPeer.keys)
    group.broadcast(torch.tensor([1.0, 2.0, 3.0]))
    output, _ = worker.communicate(timeout=60)
    group.close()
    assert output == "[1.0, 2.0, 3.0]\n"


def test_its_server_is_found_by_its_routes_though_it_speaks_openais_too():
    listed = {"/generate": {}, "/v1/completions": {}, "/init_weights_update_group": {}}
    with replying(200, {"paths": listed | {"/update_weights_from_distributed": {}}}) as url:
        assert find_dialect(url).name == "sglang"


def test_prompts_are_sent_as_ids_and_read_with_their_log_probabilities():
    with replying(200, [ENTRY]) as url:
        talk = Talk(subject_at(url, "sglang"))
        call = talk.generate("one", ["?"], max_tokens=2, temperature=1.0, seed=7, top_k=3, logprobs=True)
        [one] = talk.subject.dialect.read(call)
    sampling = {"max_new_tokens": 2, "temperature": 1.0, "sampling_seed": 7, "top_k": 3}
    assert {name: call.sent[name] for name in ("input_ids", "sampling_params", "return_logprob")} == {
        "input_ids": [[63]], "sampling_params": sampling, "return_logprob": True,
    }  # fmt: skip
    assert (one.prompt_ids, one.ids, one.logprobs, one.finish_reason) == ([1, 2], [5, 6], [-0.5, -0.25], "stop")
