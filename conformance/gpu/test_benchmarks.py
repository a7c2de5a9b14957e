"""The benchmarks of the learner, small enough for a CPU: every form runs, agrees, and is written down."""

import json

import pytest

from benchmarks.gpu import learner
from benchmarks.gpu.measure import judge, take_turns


@pytest.fixture(scope="module")
def told(tmp_path_factory):
    folder = tmp_path_factory.mktemp("results")
    assert learner.main(["--tiny", "--rounds", "2", "--out", str(folder)]) == 0
    return {name: json.loads((folder / f"{name}-tiny.json").read_text()) for name in learner.PATHS}


def test_all_forms_of_the_masked_loss_agree(told):
    for share in told["masked_loss"]["shares"].values():
        losses = share["losses"]
        plain = losses["whole_logits_of_transformers"]
        assert [losses["ours"], losses["kept_logits"]] == pytest.approx([plain] * 2, rel=1e-5)
        assert all(len(one["samples_s"]) == 2 for one in share["measured"].values())


def test_all_ways_of_the_pass_have_one_loss_and_one_gradient(told):
    packed = told["packed_pass"]
    assert list(packed["losses"].values()) == pytest.approx([packed["losses"]["alone"]] * 4, rel=1e-5)
    assert (
        set(packed["measured"]) == set(packed["losses"]) == {"packed_segment_by_segment", "packed", "padded", "alone"}
    )
    assert max(packed["gradient_differences"].values()) < 1e-4


def test_hardware_and_versions_stand_beside_the_samples(told):
    for one in told.values():
        assert one["on"]["versions"]["torch"]
        assert one["on"]["gpu"] is None
        assert one["taken"].endswith("Z")


def test_without_a_gpu_only_tiny_runs(capsys, monkeypatch):
    monkeypatch.setattr(learner, "on_gpu", lambda: False)
    with pytest.raises(SystemExit) as caught:
        learner.main([])
    assert caught.value.code == 2
    assert "not testable: needs a GPU" in capsys.readouterr().err


def test_calls_take_turns_and_stop_when_time_is_over():
    order = []
    told = take_turns({name: lambda name=name: order.append(name) for name in "ab"}, rounds=3, limit_s=60)
    assert order == list("aabb" + "ab" * 3)
    assert [len(one["samples_s"]) for one in told.values()] == [3, 3]
    assert len(take_turns({"a": lambda: None}, rounds=9, limit_s=0)["a"]["samples_s"]) == 2


def test_a_bar_is_met_or_missed(capsys):
    bars = {}
    judge(bars, "fast", 5.0, at_least=5.0)
    judge(bars, "small", 6.0, at_most=5.0)
    assert [bar["met"] for bar in bars.values()] == [True, False]
    assert "MISSED small" in capsys.readouterr().out
