"""YOLO's labels: boxes, outlines, oriented boxes and keypoints."""

import json

import pytest
from PIL import Image

from conformance.doubles.refusals import refused
from rollmatch.cli.main import main
from rollmatch.data.formats import LabeledImage, LabeledObject
from rollmatch.data.formats.yolo import read_yolo, write_yolo


def test_yolo_reads_boxes_outlines_and_images_without_labels(tmp_path):
    """Also in directories below that of the split, and in linked ones; no hidden files."""
    (tmp_path / "elsewhere" / "two").mkdir(parents=True)
    (tmp_path / "images" / "train").mkdir(parents=True)
    (tmp_path / "images" / "train" / "one").symlink_to(tmp_path / "elsewhere")
    for name in ("a", "b", "one/c", "one/two/d"):
        Image.new("RGB", (100, 200)).save(tmp_path / "images" / "train" / f"{name}.png")
    (tmp_path / "images" / "train" / "._a.png").touch()
    (tmp_path / "labels" / "train" / "one" / "two").mkdir(parents=True)
    (tmp_path / "labels" / "train" / "a.txt").write_text("0 0.5 0.5 0.2 0.1\n\n1 0.1 0.1 0.3 0.1 0.2 0.4\n")
    (tmp_path / "labels" / "train" / "one" / "two" / "d.txt").write_text("1 0.5 0.5 0.2 0.1\n")
    (tmp_path / "data.yaml").write_text("path: .\ntrain: images/train\nnames: [cat, dog]\n")
    first, second, third, fourth = read_yolo(tmp_path / "data.yaml", "train")
    assert [(one.desc, one.box) for one in first.objects] == [
        ("cat", pytest.approx((40, 90, 60, 110))),
        ("dog", pytest.approx((10, 20, 30, 80))),
    ]
    assert second.objects == third.objects == ()
    assert [one.desc for one in fourth.objects] == ["dog"]


POSE = "0 0.5 0.5 0.2 0.4 0.1 0.1 2 0.9 0.9 2"
BOX_OF_POSE = "0 0.5 0.5 0.2 0.4"
FLAT_POSE = "0 0.5 0.5 0.2 0.4 0.1 0.1 0.9 0.9"
ORIENTED = "0 0.4 0.3 0.6 0.3 0.6 0.7 0.4 0.7"


@pytest.mark.parametrize(
    ("shape", "line", "has_outline"),
    [("[2, 3]", POSE, False), ("[2, 2]", FLAT_POSE, False), ("null", ORIENTED, True), ("null", BOX_OF_POSE, False)],
)
def test_keypoints_of_yolo_are_no_outline(tmp_path, shape, line, has_outline):
    Image.new("RGB", (200, 100)).save(tmp_path / "a.png")
    (tmp_path / "a.txt").write_text(line)
    (tmp_path / "data.yaml").write_text(f"train: .\nnames: [cat]\nkpt_shape: {shape}\n")
    assert main(["data", "convert", str(tmp_path / "data.yaml"), str(tmp_path / "out.jsonl"), "--from", "yolo"]) == 0
    assert json.loads((tmp_path / "out.jsonl").read_text())["objects"][0]["bbox_2d"] == [402, 303, 602, 706]
    (image,) = read_yolo(tmp_path / "data.yaml", "train")
    assert bool(image.objects[0].polygon) == has_outline


@pytest.mark.parametrize(
    ("described", "line", "words"),
    [
        ("names: [cat]\nkpt_shape: [2, 3]", "0 0.5 0.5 0.2 0.4", "has 4 numbers"),
        ("names: [cat]\nkpt_shape: [3, 3]", POSE, "has 10 numbers"),
        ("names: [cat]\nkpt_shape: 17", POSE, "kpt_shape 17"),
        ("names: [cat]", POSE, "holds 2, which is not in 0..1"),
        ("names: [cat]", "0 0.5 0.5 0.2 0.4 0.9", "has 5 numbers"),
        ("names: [cat, cat]", BOX_OF_POSE, "names two classes 'cat'"),
        ("names: {0: cat, 0: dog}", BOX_OF_POSE, "0 stands twice"),
    ],
)
def test_labels_of_yolo_that_mean_something_else_are_refused(tmp_path, described, line, words):
    Image.new("RGB", (200, 100)).save(tmp_path / "a.png")
    (tmp_path / "a.txt").write_text(line)
    (tmp_path / "data.yaml").write_text(f"train: .\n{described}\n")
    with refused("label-invalid", problem=words):
        list(read_yolo(tmp_path / "data.yaml", "train"))


def test_yolo_gets_the_part_of_a_box_inside_the_image(tmp_path):
    Image.new("RGB", (200, 100)).save(tmp_path / "a.png")
    objects = tuple(LabeledObject(desc="cat", box=box) for box in ((100, -20, 260, 50), (210, 0, 260, 50)))
    write_yolo([LabeledImage(path=str(tmp_path / "a.png"), width=200, height=100, objects=objects)], tmp_path / "out")
    assert (tmp_path / "out/labels/000000-a.txt").read_text() == "0 0.750000 0.250000 0.500000 0.500000\n"


def test_yolo_classes_are_numbered_as_they_come_and_readable(tmp_path):
    Image.new("RGB", (100, 200)).save(tmp_path / "a.png")
    objects = tuple(LabeledObject(desc=desc, box=(0, 0, 50, 50)) for desc in ("na\u00efve", "cat", "na\u00efve"))
    image = LabeledImage(path=str(tmp_path / "a.png"), width=100, height=200, objects=objects)
    write_yolo([image], tmp_path / "new" / "yolo")
    names = "names:\n  0: na\u00efve\n  1: cat\n"
    assert (tmp_path / "new/yolo/data.yaml").read_text() == f"path: .\ntrain: images\n{names}"
    label = "0.250000 0.125000 0.500000 0.250000"
    assert (tmp_path / "new/yolo/labels/000000-a.txt").read_text() == f"0 {label}\n1 {label}\n0 {label}\n"


def test_a_bad_label_of_yolo_names_file_and_line(tmp_path):
    Image.new("RGB", (10, 10)).save(tmp_path / "a.png")
    (tmp_path / "a.txt").write_text("0 0.5 0.5 0.2 0.1\n7 0.5 0.5 0.2 0.1\n")
    (tmp_path / "data.yaml").write_text("train: .\nnames: {0: cat}\n")
    with refused("label-invalid", f"{tmp_path / 'a.txt'}:2"):
        list(read_yolo(tmp_path / "data.yaml", "train"))
