"""A GRPO trainer of TRL on a machine without GPUs; not one line of it is changed.

Its communicator is gloo in place of NCCL, and the learner has no GPU whose id it could send. From 1.11 on, it joins a
stock server: as rank 0, and with buffers that vLLM's own function packs, sent one after the other instead of by CUDA's
streams. Trains on additions.

python trl_on_a_cpu.py URL GROUP_PORT MODEL STEPS DIRECTORY
"""

import os
import random
import sys
import zlib
from types import SimpleNamespace

import torch
import torch.distributed as dist
from rollmatch_cpu import BUFFER_BYTES, STORE, TIMEOUT, broadcast_on, stand_in_for_nccl

NUM_PROMPTS, MAX_TOKENS = 64, 4


def train(url, group_port, model, steps, directory):
    stand_in_for_nccl()
    torch.cuda.get_device_properties = lambda _: SimpleNamespace(uuid="none")
    meet_a_stock_server()
    from datasets import Dataset
    from trl import GRPOConfig, GRPOTrainer

    config = GRPOConfig(
        output_dir=directory,
        max_steps=steps,
        per_device_train_batch_size=8,
        num_generations=4,
        max_completion_length=MAX_TOKENS,
        temperature=2.0,  # a group of equal completions teaches nothing, and the next update would repeat the weights
        learning_rate=2e-3,
        lr_scheduler_type="constant",
        bf16=False,
        use_cpu=True,
        gradient_checkpointing=False,
        use_vllm=True,
        vllm_mode="server",
        vllm_server_base_url=url,
        vllm_group_port=group_port,
        save_strategy="no",
        report_to="none",
        model_init_kwargs={"dtype": "float32"},
    )
    draw = random.Random(1)
    data = Dataset.from_dict({"prompt": [f"{draw.randrange(90)}+{draw.randrange(90)}=" for _ in range(NUM_PROMPTS)]})
    GRPOTrainer(model=model, args=config, reward_funcs=reward, train_dataset=data).train()


def meet_a_stock_server():
    """As rank 0 of a group over gloo; older clients have nothing of this."""
    from trl.generation import vllm_client

    if not hasattr(vllm_client, "open_trainer_endpoint"):
        return
    os.environ["VLLM_HOST_IP"] = "127.0.0.1"  # the address that the client names
    join = vllm_client.VLLMClient.init_communicator
    vllm_client.VLLMClient.init_communicator = lambda client, device: join(client, device="cuda")  # refuses others
    vllm_client.open_trainer_endpoint = open_group
    vllm_client.packed_nccl_broadcast_producer = send_packed


def open_group(info):
    """Rank 0 of the server's group, with the attributes that the client lets go at the end."""
    place, size = (info["master_address"], info["master_port"]), info["world_size"]
    store = dist.TCPStore(*place, size, True, TIMEOUT, wait_for_workers=False)
    gloo = dist.ProcessGroupGloo(dist.PrefixStore(STORE, store), 0, size, TIMEOUT)
    return SimpleNamespace(gloo=gloo, group=SimpleNamespace(store=store, socket=None))


def send_packed(iterator, group, src, post_iter_func):
    from vllm.distributed.weight_transfer.packed_tensor import pack_tensors

    while chunk := pack_tensors(iterator, post_iter_func, BUFFER_BYTES):
        broadcast_on(group.gloo, chunk.packed_tensor, src)


def reward(completions, **_):
    """Another one for nearly every other text."""
    return [zlib.crc32(completion.encode()) % 1000 / 1000 for completion in completions]


if __name__ == "__main__":
    train(sys.argv[1], int(sys.argv[2]), sys.argv[3], int(sys.argv[4]), sys.argv[5])
