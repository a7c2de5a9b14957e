"""Settings, rates and splits that forecasts are made of."""

from rollmatch.plan.workload import Split

RULES = "custom.extra.rollout_matching"
LARGE = (
    *("model.torch_dtype=auto", "tuner.train_type=lora", "training.packing=true"),
    *("global_max_length=12000", "training.gradient_checkpointing=true", "training.bf16=true"),
    *(f"{RULES}.max_new_tokens=1000", f"{RULES}.vllm.max_model_len=4096", f"{RULES}.vllm.max_num_seqs=256"),
    *("training.per_device_train_batch_size=16", "training.gradient_accumulation_steps=4"),
)
"""An 8B model's, three rollout servers to one learner or any other way."""


def split(num_serving, num_learning, **others):
    return Split(num_serving=num_serving, num_learning=num_learning, **others)


ROUND = {
    "decoded": {"weight_bytes": 16.38e9, "kv_bytes_per_token": 147_456, "context": 2000},
    "gpus": {"G": {"memory_bytes": 1e11, "copy_bytes_s": 1e12, "matmul_flops_s": 1e15, "decode_tok_s": {1: 100}}},
    "links": {"inside_node_bytes_s": 1e11, "between_nodes_bytes_s": 1e10},
    "learn_share": 0.5,
}
