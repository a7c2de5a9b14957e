"""``rollmatch check --gpus`` refuses what each learner rank would refuse after the launch."""

import pytest

from conformance.doubles.digits import CONFIG, absolute, load_model
from rollmatch.cli.main import main
from rollmatch.config.training import TunerConfig

VLLM = "custom.extra.rollout_matching.vllm"
ALONE = (f"{VLLM}.sync.mode=adapter", f"{VLLM}.enable_lora=true", "tuner.train_type=lora")
LANGUAGE = ("tuner.freeze_vit=true", "tuner.freeze_aligner=true")
SERVER = (f"{VLLM}.mode=server", f"{VLLM}.server.base_url=http://127.0.0.1:1", f"{VLLM}.server.group_port=2")


@pytest.mark.parametrize(
    ("gpus", "overrides", "code"),
    [
        ("0,1", (*SERVER, *ALONE), "adapter-with-several-ranks"),
        ("0", (*SERVER, *ALONE), None),
        ("0,1", (*ALONE, *LANGUAGE), None),
        ("0,1,2,3,4,5", (f"{VLLM}.tensor_parallel_size=4",), "tensor-parallel-mismatch"),
        ("0,1,2,3,4,5", (f"{VLLM}.tensor_parallel_size=3",), None),
        ("0,1,2,3,4,5", (*SERVER, f"{VLLM}.tensor_parallel_size=4"), None),
    ],
)
def test_what_ranks_would_refuse_is_refused_before(gpus, overrides, code, capsys):
    sets = [word for override in absolute(*overrides) for word in ("--set", override)]
    assert main(["check", str(CONFIG), "--gpus", gpus, *sets]) == (0 if code is None else 1)
    assert code is None or f"[{code}]" in capsys.readouterr().err


AUTO = (*ALONE, f"{VLLM}.sync.mode=auto")
TOWER = "tuner.target_regex=.*visual.blocks.0.mlp.linear_fc1"


@pytest.mark.scenario(clauses=["weight-sync/the-sync-mode-is-chosen-in-yaml#7"])
@pytest.mark.parametrize(
    ("overrides", "named"),
    [
        (ALONE, "vision tower"),
        ((*ALONE, "tuner.freeze_vit=true"), "projector"),
        ((*ALONE, *LANGUAGE), None),
        ((*AUTO, f"{VLLM}.sync.fallback_to_full=false", TOWER), "vision tower"),
        (AUTO, None),
        ((*ALONE, *SERVER), None),
        ((*ALONE, f"{VLLM}.sync.mode=full"), None),
    ],
)
def test_an_adapter_that_a_colocated_engine_leaves_out_is_refused_before(overrides, named, capsys):
    sets = [word for override in absolute(*overrides) for word in ("--set", override)]
    assert main(["check", str(CONFIG), *sets]) == (0 if named is None else 1)
    assert named is None or f"[adapter-not-applied] tuner.target_regex: the {named}" in capsys.readouterr().err


def test_an_adapter_that_is_continued_is_looked_at_too(tmp_path, capsys):
    for name, target in (("tower", "visual.blocks.0.mlp.linear_fc1"), ("language", "layers.0.self_attn.q_proj")):
        policy = load_model(TunerConfig(train_type="lora", target_regex=f".*{target}"))
        policy.save_pretrained(tmp_path / name)
    sets = [word for override in absolute(*ALONE, "model.adapter_start=continue") for word in ("--set", override)]
    assert main(["check", str(CONFIG), *sets, "--set", f"model.adapter={tmp_path / 'tower'}"]) == 1
    assert "[adapter-not-applied]" in capsys.readouterr().err
    assert main(["check", str(CONFIG), *sets, "--set", f"model.adapter={tmp_path / 'language'}"]) == 0
