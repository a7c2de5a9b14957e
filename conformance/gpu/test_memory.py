"""A colocated engine on one GPU gives its memory to the learner, at the shape of 8B."""

import json
import subprocess
import sys

import pytest

from conformance.doubles.digits import CONFIG, ROOT
from conformance.doubles.division import VLLM, typed
from conformance.doubles.started import finish, journal_of
from conformance.gpu.big_model import config_of, make_model
from conformance.gpu.memory_watch import MemoryWatch, read

STEPS, SHARE = 20, 0.8
TIMEOUT_S = 500
"""The engine compiles, and the 20 steps come after it: 240 s on an H200 with cold caches."""


def overrides_for(model, out):
    return (
        f"model.model={model}",
        "model.torch_dtype=bfloat16",
        "tuner.train_type=lora",
        "tuner.lora_rank=16",
        "tuner.freeze_vit=true",
        "tuner.freeze_aligner=true",
        "training.gradient_checkpointing=true",
        "training.per_device_train_batch_size=40",
        f"training.max_steps={STEPS}",
        "training.eval_scenes=16",
        "training.save_steps=1000",
        "training.report_to=none",
        f"training.output_dir={out}",
        "global_max_length=12000",
        f"{VLLM}.gpu_memory_utilization={SHARE}",
        f"{VLLM}.kv_cache_memory_mib=null",
        f"{VLLM}.sleep_level=1",
    )


@pytest.mark.gpu(1)
def test_a_learner_of_8b_uses_the_memory_that_the_engine_has_while_it_writes(tmp_path):
    """The engine takes 0.8 of the GPU; the learner needs more than what is left."""
    model, out = tmp_path / "model", tmp_path / "run"
    subprocess.run([sys.executable, "-m", "conformance.gpu.big_model", str(model)], cwd=ROOT, check=True, timeout=200)
    with MemoryWatch() as watch:
        command = typed("train", CONFIG, "0", overrides_for(model, out))
        code, text = finish(command, tmp_path / "learner.txt", timeout_s=TIMEOUT_S)
    assert code == 0, text[-3000:]
    assert len(journal_of(out, "step")) == STEPS
    shares = watch.shares()
    rests = [
        min(share for at, share in shares if begin <= at <= end)
        for timeline in journal_of(out, "timeline")
        for name, begin, end in timeline["learner"]
        if name == "learn" and any(begin <= at <= end for at, _ in shares)
    ]
    record = {"least share while learning, by step": rests, "greatest": max(share for _, share in shares)}
    (tmp_path / "shares.json").write_text(json.dumps(record))
    assert max(share for _, share in shares) > SHARE
    assert min(rests) < SHARE - 0.2


def test_the_big_model_is_one_that_loads_where_it_is_small(tmp_path):
    """The same file with small sizes, so that no GPU time is lost to a wrong one."""
    from rollmatch.config.training import ModelConfig, TunerConfig
    from rollmatch.model.policy import load_policy

    text = {"hidden_size": 64, "intermediate_size": 64, "num_hidden_layers": 2, "head_dim": 32}
    text |= {"num_attention_heads": 2, "num_key_value_heads": 1}
    vision = {"hidden_size": 32, "intermediate_size": 32, "depth": 2, "num_heads": 2, "out_hidden_size": 64}
    vision |= {"deepstack_visual_indexes": [1]}
    make_model(tmp_path / "model", device="cpu", text=text, vision=vision)
    load_policy(ModelConfig(model=str(tmp_path / "model"), torch_dtype="bfloat16"), TunerConfig())
    assert sum(config_of()["text_config"]["rope_parameters"]["mrope_section"]) == 64


def test_what_nvidia_smi_tells_is_read_by_gpu():
    assert read("10, 100\n20, 200\n") == ([10, 20], [100, 200])
    watch = MemoryWatch()
    watch.samples, watch.total_mib = [(1.0, [10, 20]), (2.0, [30, 5])], [100, 200]
    assert watch.most_mib == [30, 20]
    assert watch.shares(1) == [(1.0, 0.1), (2.0, 0.025)]
