"""The script that makes the detection data set of real size."""

import json
import subprocess
import sys
from pathlib import Path

import pytest
from PIL import Image
from pycocotools.coco import COCO

SCRIPT = Path(__file__).parents[3] / "fixtures/detector/make_data.py"


def make(out: Path, *, seed: int = 5) -> Path:
    command = [sys.executable, SCRIPT, out, "--seed", str(seed), "--images", "8", "--val", "2", "--workers", "1"]
    subprocess.run(list(map(str, command)), check=True, capture_output=True)
    return out


@pytest.fixture(scope="module")
def made(tmp_path_factory):
    return make(tmp_path_factory.mktemp("detector") / "a")


@pytest.mark.wide
def test_images_and_annotations_follow_from_the_seed(made, tmp_path):
    again, other = make(tmp_path / "b"), make(tmp_path / "c", seed=1)
    for name in ("train.json", "val.json", "train/00003.jpg"):
        assert (made / name).read_bytes() == (again / name).read_bytes()
        assert (made / name).read_bytes() != (other / name).read_bytes()


def test_boxes_and_areas_are_those_of_the_outlines(made, capsys):
    coco = COCO(str(made / "train.json"))
    for one in coco.dataset["annotations"]:
        mask, (left, top, width, height) = coco.annToMask(one), one["bbox"]
        assert int(mask.sum()) >= 0.9 * one["area"] - 30  # an outline has no holes, the area may have
        assert abs(int(mask[top : top + height, left : left + width].sum()) - int(mask.sum())) <= 4 * (width + height)


def test_the_set_has_what_a_real_one_has(made):
    document = json.loads((made / "train.json").read_text())
    for image in document["images"]:
        assert Image.open(made / image["file_name"]).size == (image["width"], image["height"])
        assert min(image["width"], image["height"]) >= 640
        assert max(image["width"], image["height"]) <= 1280
    annotations = document["annotations"]
    assert {one["iscrowd"] for one in annotations} == {0, 1}
    assert min(one["area"] for one in annotations) < 32**2 < 96**2 < max(one["area"] for one in annotations)


def test_digits_are_apart_inside_square_images_and_named(tmp_path):
    command = [sys.executable, SCRIPT, tmp_path, "--digits", "--images", "4", "--val", "1", "--workers", "1"]
    subprocess.run(list(map(str, command)), check=True, capture_output=True)
    document = json.loads((tmp_path / "train.json").read_text())
    assert [one["name"] for one in document["categories"]][:3] == ["zero", "one", "two"]
    by_image = {image["id"]: (image["width"], []) for image in document["images"]}
    assert all(image["width"] == image["height"] >= 640 for image in document["images"])
    for one in document["annotations"]:
        side, boxes = by_image[one["image_id"]]
        left, top, width, height = one["bbox"]
        assert left >= 0 <= top
        assert max(left + width, top + height) <= side
        assert all(left > x2 or top > y2 or left + width < x1 or top + height < y1 for x1, y1, x2, y2 in boxes)
        boxes.append((left, top, left + width, top + height))
    assert all(boxes for _, boxes in by_image.values())
