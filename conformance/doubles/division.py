"""Commands of a machine whose GPUs are divided between servers and learner, as people type them."""

from conformance.doubles.digits import ROOT
from conformance.doubles.started import cli_command

VLLM = "custom.extra.rollout_matching.vllm"
MATCHING = ROOT / "fixtures/digits/3v1.yaml"
GRPO = ROOT / "fixtures/digits/grpo-6v2.yaml"
WEIGHT_FILES = ("*.safetensors", "*.bin", "*.pt", "*.pth")
SMALL = (
    f"{VLLM}.kv_cache_memory_mib=64",
    "training.save_steps=1000",
    "training.eval_scenes=6",
    "training.report_to=none",
    "training.learner_threads=1",
)
BESIDE_DOUBLES = (
    f"{VLLM}.mode=server",
    f"{VLLM}.max_model_len=512",
    "custom.extra.rollout_matching.max_new_tokens=4",
    "training.per_device_train_batch_size=2",
    "training.eval_scenes=2",
    "training.save_steps=1000",
    "training.optim=sgd",
    "training.learner_threads=1",
    "training.report_to=none",
)
"""Of a learner whose servers answer by transformers."""


def named(config, http, group):
    """The server, as each YAML names it."""
    if config == GRPO:
        return (
            f"model.model={ROOT}/fixtures/models/digits-summary",
            f"rlhf.vllm_server_port=[{http}]",
            f"rlhf.vllm_server_group_port={group}",
            "training.per_device_train_batch_size=2",
        )
    return (
        f"{VLLM}.mode=server",
        f"{VLLM}.server.base_url=http://127.0.0.1:{http}",
        f"{VLLM}.server.group_port={group}",
        "training.per_device_train_batch_size=3",
        "custom.extra.rollout_matching.max_new_tokens=24",
    )


def typed(name, config, gpus, overrides, *flags):
    """A command line as one would type it."""
    return [*cli_command(name, config, *overrides), "--gpus", gpus, *flags]
