"""Settings of the engine alone that bias ratios: the check says by how much, and it is that much."""

import pytest

from conformance.doubles.configs import GRPO, config_with
from conformance.doubles.digits import ROOT
from rollmatch.config import load_config
from rollmatch.config.objective_rules import find_sampling_bias
from rollmatch.run.preflight import load_checked

SECTION = "custom.extra.rollout_matching."


def checked(folder, *overrides):
    """As ``rollmatch check`` reads the arithmetic run."""
    fixture = ROOT / "fixtures/arithmetic"
    paths = (
        f"model.model={ROOT}/fixtures/models/arithmetic",
        f"custom.train_jsonl={fixture}/train.jsonl",
        f"custom.val_jsonl={fixture}/val.jsonl",
        f"training.output_dir={folder}",
    )
    load_checked(load_config(fixture / "grpo.yaml", [*paths, *overrides]))


@pytest.mark.scenario(
    "grpo-server-mode/nucleus-sampling", clauses=["grpo-server-mode/sampling-that-biases-ratios-is-named#1,2"]
)
def test_nucleus_sampling_is_warned_of_with_the_size_of_its_effect(tmp_path, capsys):
    checked(tmp_path, f"{SECTION}decoding.top_p=0.6", f"{SECTION}max_new_tokens=4")
    warning = capsys.readouterr().err
    for part in ("decoding.top_p: 0.6", "by 0.6 to 1 for a token", "0.13 for a response of 4", "top_p 1"):
        assert part in warning
    checked(tmp_path, f"{SECTION}decoding.temperature=0.6")
    assert "warning" not in capsys.readouterr().err


@pytest.mark.scenario(clauses=["grpo-server-mode/sampling-that-biases-ratios-is-named#1"])
@pytest.mark.parametrize(
    ("setting", "warns"),
    [
        ("~.decoding.top_k=20", True),
        ("~.repetition_penalty=1.1", True),
        ("~.decoding.top_k=-1", False),
        ("~.decoding.temperature=0.5", False),
    ],
)
def test_other_settings_of_the_engine_alone_are_warned_of(setting, warns):
    bias = find_sampling_bias(config_with(*GRPO, setting))
    assert (bias is not None) == warns
    assert find_sampling_bias(config_with(setting)) is None, "rollout matching has no ratio"


def test_a_divergence_has_no_ratio():
    distill = (
        "custom.trainer_variant=distill",
        "custom.extra.distill.teachers=[{model: a}]",
        "~.decoding.temperature=1",
    )
    divergence = tuple(f"custom.extra.distill.{pair}" for pair in ("loss=divergence", "beta=0", "top_k=4"))
    assert find_sampling_bias(config_with(*distill, "~.decoding.top_p=0.9")) is not None
    assert find_sampling_bias(config_with(*distill, *divergence, "~.decoding.top_p=0.9")) is None
