"""Evaluation files, read back."""

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from conformance.report.runs import box, found, scene, write_evaluation
from rollmatch.report.evaluations import Evaluation, EvaluationFileBroken, load_evaluation


def load(run_dir, **changes) -> Evaluation:
    content = {"truth": [box()], "predicted": [found()]} | changes
    return load_evaluation(write_evaluation(run_dir, 3, [scene(7, **content)]))


def test_a_scene_comes_back_as_written(tmp_path):
    evaluation = load(tmp_path, response_text="<b>")
    (one,) = evaluation.scenes
    assert (evaluation.step, one.sample_id, one.response_text) == (3, 7, "<b>")
    assert one.truth[0].bins == (100, 200, 400, 600)
    assert (one.predicted[0].partner, one.predicted[0].iou, one.f1) == (0, 0.87, 1.0)


@pytest.mark.parametrize(
    ("broken", "mended", "place"),
    [
        ({"truth": [box(bins=(1, 2, 3))]}, {"truth": [box(bins=(1, 2, 3, 4))]}, "scenes.0.truth.0"),
        ({"truth": [box(bins=(1, 2, 3, 1000))]}, {"truth": [box(bins=(1, 2, 3, 999))]}, "scenes.0.truth.0.bins.3"),
        ({"truth": [box(bins=(-1, 2, 3, 4))]}, {"truth": [box(bins=(0, 2, 3, 4))]}, "scenes.0.truth.0.bins.0"),
        (
            {"truth": [box(bins=(1, 2, 3, 4), geometry="poly")]},
            {"truth": [box(bins=(1, 2, 3, 4, 5, 6), geometry="poly")]},
            "scenes.0.truth.0",
        ),
        (
            {"truth": [box(bins=(1, 2, 3, 4, 5, 6, 7), geometry="poly")]},
            {"truth": [box(bins=(1, 2, 3, 4, 5, 6, 7, 8), geometry="poly")]},
            "scenes.0.truth.0",
        ),
        ({"predicted": [found(partner=1)]}, {"predicted": [found(partner=0)]}, "scenes.0"),
        ({"predicted": [found(partner=-1)]}, {"predicted": [found(partner=0)]}, "scenes.0.predicted.0.partner"),
        ({"width": 0}, {"width": 1}, "scenes.0.width"),
    ],
)
def test_a_broken_scene_is_named_by_its_place(tmp_path, broken, mended, place):
    with pytest.raises(EvaluationFileBroken) as caught:
        load(tmp_path, **broken)
    path = tmp_path / "evaluations/step-000003.json"
    assert (caught.value.code, caught.value.key) == ("evaluation-file-broken", f"{path}:{place}")
    assert len(load(tmp_path, **mended).scenes) == 1


def test_a_file_that_is_no_json_is_named(tmp_path):
    path = write_evaluation(tmp_path, 0, [])
    path.write_text('{"step": 0', encoding="utf-8")
    with pytest.raises(EvaluationFileBroken) as caught:
        load_evaluation(path)
    assert (caught.value.code, caught.value.key) == ("evaluation-file-broken", str(path))
    path.write_text('{"step": 0, "scenes": []}', encoding="utf-8")
    assert load_evaluation(path).scenes == ()


@settings(deadline=None)
@given(num_truth=st.integers(0, 4), num_found=st.integers(0, 4), num_wrong=st.integers(0, 4))
def test_a_scene_scores_twice_the_found_over_all_objects(tmp_path_factory, num_truth, num_found, num_wrong):
    num_found = min(num_found, num_truth)
    predicted = [found(partner=place) for place in range(num_found)] + [found(partner=None)] * num_wrong
    evaluation = load(tmp_path_factory.mktemp("run"), truth=[box()] * num_truth, predicted=predicted)
    total = num_truth + num_found + num_wrong
    assert evaluation.scenes[0].f1 == (2 * num_found / total if total else 1.0)
