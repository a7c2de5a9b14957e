"""ms-swift's grounding lines: which ref describes which box, and what is left out."""

import json

import pytest
from PIL import Image

from conformance.doubles.refusals import refused
from rollmatch.data.formats.native import NativeWriter
from rollmatch.data.formats.swift import read_swift


def test_swift_norm1_boxes_are_shares_of_the_image(tmp_path):
    Image.new("RGB", (100, 200)).save(tmp_path / "a.png")
    objects = {"ref": ["cat"], "bbox": [[0.1, 0.1, 0.5, 0.5]], "bbox_type": "norm1"}
    (tmp_path / "train.jsonl").write_text(json.dumps({"images": ["a.png"], "objects": objects}) + "\n")
    (image,) = read_swift(tmp_path / "train.jsonl", tmp_path)
    assert image.objects[0].box == pytest.approx((10, 20, 50, 100))


@pytest.mark.parametrize(
    "objects",
    [
        {"ref": ["cat"], "bbox": []},
        {"ref": [], "bbox": [], "bbox_type": "norm1000"},
        {"ref": ["cat"], "bbox": [3]},
        {"ref": [1], "bbox": [[1, 2, 3, 4]]},
        {"ref": ["cat", "dog"], "bbox": [[1, 2, 3, 4]] * 3},
    ],
)
def test_a_bad_line_of_swift_is_named(tmp_path, objects):
    Image.new("RGB", (100, 200)).save(tmp_path / "a.png")
    path = tmp_path / "train.jsonl"
    path.write_text("\n" + json.dumps({"images": ["a.png"], "objects": objects}) + "\n")
    with refused("label-invalid", f"{path}:2"):
        list(read_swift(path, tmp_path))


REF_BOX = "<ref-object><bbox>"
ONE, TWO, THREE = [10, 20, 30, 40], [50, 60, 70, 80], [15, 25, 35, 45]


@pytest.mark.parametrize(
    ("objects", "text", "descs", "dropped"),
    [
        ({"ref": ["sheep"], "bbox": [ONE, TWO]}, "<bbox><bbox>", ["sheep", "sheep"], ()),
        ({"ref": ["a", "b"], "bbox": [ONE, TWO, THREE]}, f"{REF_BOX}, {REF_BOX}<bbox>", ["a", "b", "b"], ()),
        ({"ref": [], "bbox": [ONE]}, "click(start_box='<bbox>')", [], ("box without a ref",)),
        ({"ref": [], "bbox": [[615, 226]]}, "click(start_box='<bbox>')", [], ("point in place of a box",)),
        ({"ref": ["a", "b"], "bbox": [ONE, [6, 2]]}, "", ["a"], ("point in place of a box",)),
        ({"ref": [], "bbox": []}, "none", [], ()),
        ({"ref": None, "bbox": None, "bbox_type": None}, "none", [], ()),
    ],
)  # fmt: skip
def test_refs_of_swift_describe_the_boxes_that_the_documentation_says(tmp_path, objects, text, descs, dropped):
    Image.new("RGB", (100, 200)).save(tmp_path / "a.png")
    messages = [{"role": "user", "content": "<image>Find them."}, {"role": "assistant", "content": text}]
    path = tmp_path / "train.jsonl"
    path.write_text(json.dumps({"messages": messages, "images": ["a.png"], "objects": objects}) + "\n")
    (image,) = read_swift(path, tmp_path)
    assert ([one.desc for one in image.objects], image.dropped) == (descs, dropped)
    summary = NativeWriter(tmp_path / "out.jsonl", polygons=False).write([image])
    assert [*summary.dropped.elements()] == [*dropped]
