"""``rollmatch check --gpus`` refuses what each learner rank would refuse after the launch."""

import pytest

from conformance.doubles.digits import CONFIG, absolute
from rollmatch.cli.main import main

VLLM = "custom.extra.rollout_matching.vllm"
ALONE = (f"{VLLM}.sync.mode=adapter", f"{VLLM}.enable_lora=true", "tuner.train_type=lora")
SERVER = (f"{VLLM}.mode=server", f"{VLLM}.server.base_url=http://127.0.0.1:1", f"{VLLM}.server.group_port=2")


@pytest.mark.parametrize(
    ("gpus", "overrides", "code"),
    [
        ("0,1", (*SERVER, *ALONE), "adapter-with-several-ranks"),
        ("0", (*SERVER, *ALONE), None),
        ("0,1", ALONE, None),
        ("0,1,2,3,4,5", (f"{VLLM}.tensor_parallel_size=4",), "tensor-parallel-mismatch"),
        ("0,1,2,3,4,5", (f"{VLLM}.tensor_parallel_size=3",), None),
        ("0,1,2,3,4,5", (*SERVER, f"{VLLM}.tensor_parallel_size=4"), None),
    ],
)
def test_what_ranks_would_refuse_is_refused_before(gpus, overrides, code, capsys):
    sets = [word for override in absolute(*overrides) for word in ("--set", override)]
    assert main(["check", str(CONFIG), "--gpus", gpus, *sets]) == (0 if code is None else 1)
    assert code is None or f"[{code}]" in capsys.readouterr().err
