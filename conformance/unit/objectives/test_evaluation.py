"""An evaluation says what was there, what was found, and which stands for which."""

import json
from pathlib import Path

import pytest

from conformance.doubles.answers import BOX, FAR_BOX, answer, box, element, ids, poly
from conformance.doubles.records import make_rollout
from conformance.doubles.tokenizer import make_vocabulary
from rollmatch.objectives.rollout_matching.match import MatchRules, TransportRules
from rollmatch.objectives.rollout_matching.objective import describe_scene, parts_of, summarize
from rollmatch.objectives.rollout_matching.target import RolloutMatching
from rollmatch.records import Sample
from rollmatch.training.evaluation import write_evaluation

VOCABULARY = make_vocabulary()
RULES = MatchRules(maskiou_gate=0.5)
MATCHING = RolloutMatching(VOCABULARY, RULES, TransportRules())


def sample(*objects, sample_id=4):
    size = {"width": 64, "height": 48}
    return Sample(sample_id=sample_id, origin="val.jsonl:5", images=("/a.png", "/b.png"), objects=objects, **size)


def rollout(text):
    return make_rollout(ids(text), policy_version=2)


def describe(text, *objects, rules=RULES):
    one, written = sample(*objects), rollout(text)
    matched = RolloutMatching(VOCABULARY, rules, TransportRules()).match(one, written)
    return describe_scene(one, written, matched, VOCABULARY)


def test_a_scene_names_its_image_its_truth_and_the_raw_answer():
    text = answer(element())
    scene = describe(text, box(), poly())
    assert (scene["sample_id"], scene["image"], scene["width"], scene["height"]) == (4, "/a.png", 64, 48)
    assert scene["truth"] == [
        {"desc": "seven", "geometry": "bbox_2d", "bins": [100, 100, 300, 300]},
        {"desc": "leaf", "geometry": "poly", "bins": [100, 100, 300, 100, 300, 300]},
    ]
    assert (scene["response_text"], scene["invalid"]) == (text, False)
    scene = describe("I see a seven", box())
    assert (scene["invalid"], scene["predicted"], scene["response_text"]) == (True, [], "I see a seven")


def test_each_prediction_names_its_partner_and_how_well_it_fits():
    text = answer(element(0, 0, 50, 50, desc="two"), element(*FAR_BOX), element(desc="six"))
    scene = describe(text, box(), box(*FAR_BOX))
    assert scene["predicted"] == [
        {"desc": "two", "geometry": "bbox_2d", "bins": [0, 0, 50, 50], "partner": None, "iou": None},
        {"desc": "seven", "geometry": "bbox_2d", "bins": list(FAR_BOX), "partner": 1, "iou": 1.0},
        {"desc": "six", "geometry": "bbox_2d", "bins": list(BOX), "partner": 0, "iou": 1.0},
    ]
    half = answer(element(100, 100, 300, 200))
    loose, strict = (describe(half, box(), rules=MatchRules(maskiou_gate=gate))["predicted"][0] for gate in (0.4, 0.6))
    assert (loose["partner"], loose["iou"]) == (0, pytest.approx(0.5, abs=0.02))
    assert (strict["partner"], strict["iou"]) == (None, None)


def test_scores_are_over_all_scenes():
    samples = [sample(box(), box(*FAR_BOX)), sample(box(), sample_id=5)]
    _, reports = MATCHING.make_segments(samples, [rollout(answer(element())), rollout("nothing")])
    metrics, parts = summarize(reports), parts_of(reports)
    assert (metrics["precision"], metrics["recall"], metrics["f1"]) == (1.0, 1 / 3, 2 / 4)
    assert (metrics["invalid_rate"], metrics["malformed_rate"]) == (0.5, 0.0)
    bad = answer(element(), element(9, 9, 2, 2), element(desc=""))
    assert summarize(MATCHING.make_segments(samples[:1], [rollout(bad)])[1])["malformed_rate"] == 2 / 3
    assert (parts["f1"], parts["invalid_rate"]) == ([(2, 3), (0, 1)], [(0, 1), (1, 1)])
    assert {type(value) for value in metrics.values()} == {float}


def test_a_record_is_named_after_its_step_and_comes_back_from_json(tmp_path):
    scenes = [describe(answer(element()), box())]
    name = write_evaluation(tmp_path, step=20, metrics={"f1": 0.5}, record={"iou_threshold": 0.5, "scenes": scenes})
    assert name == "evaluations/step-000020.json"
    expected = {"step": 20, "iou_threshold": 0.5, "metrics": {"f1": 0.5}, "scenes": scenes}
    assert json.loads((tmp_path / name).read_text()) == expected
    assert [path.name for path in (tmp_path / "evaluations").iterdir()] == ["step-000020.json"]


def test_a_write_that_is_cut_leaves_the_last_whole_record(tmp_path, monkeypatch):
    name = write_evaluation(tmp_path, step=1, metrics={"f1": 0.1})
    write_text = Path.write_text

    def cut(path, text, **options):
        write_text(path, text[: len(text) // 2], **options)
        raise OSError("no space left on device")

    monkeypatch.setattr(Path, "write_text", cut)
    with pytest.raises(OSError, match="no space"):
        write_evaluation(tmp_path, step=1, metrics={"f1": 0.9})
    assert json.loads((tmp_path / name).read_text())["metrics"] == {"f1": 0.1}
