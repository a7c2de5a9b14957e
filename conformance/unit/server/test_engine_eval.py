"""``rollmatch eval`` through a real engine: the figures are those of ``transformers``, float32."""

import json

import pytest

from conformance.doubles.digits import CONFIG
from conformance.doubles.instance import free_port
from conformance.doubles.started import HF, cli_command, finish

pytestmark = pytest.mark.engine

LONG = "custom.extra.rollout_matching."
SMALL = ("training.report_to=none", "training.learner_threads=1", f"{LONG}max_new_tokens=64")
NUM_SCENES = 6


def evaluated(out, *overrides):
    command = [*cli_command("eval", CONFIG, *SMALL, *overrides), "--out", str(out), "--limit", str(NUM_SCENES)]
    code, output = finish(command, out.parent / f"{out.name}.txt")
    assert code == 0, output
    record = json.loads((out / "eval.json").read_text())
    scenes = record["scenes"]
    assert len(scenes) == NUM_SCENES
    return (
        record["metrics"],
        [[one["bins"] for one in s["predicted"]] for s in scenes],
        [one["score"] for s in scenes for one in s["predicted"]],
    )


@pytest.mark.wide
def test_a_server_and_an_engine_of_its_own_evaluate_as_transformers_does(instance, tmp_path):
    served = f"{LONG}vllm.server={{base_url: '{instance.url}', group_port: {free_port()}}}"
    metrics, boxes, scores = evaluated(tmp_path / "hf", *HF, f"{LONG}max_new_tokens=64")
    for name, overrides in {"server": (f"{LONG}vllm.mode=server", served), "colocate": ()}.items():
        by_engine = evaluated(tmp_path / name, *overrides)
        assert by_engine[0] == pytest.approx(metrics, abs=1e-3), name
        assert by_engine[1] == boxes, name
        assert by_engine[2] == pytest.approx(scores, abs=1e-3), name
    assert len(scores) > NUM_SCENES
    assert 0 < min(scores) < max(scores) < 1
