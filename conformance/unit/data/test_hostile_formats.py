"""Hostile values in data sets of other projects: each is named or left out."""

import json
import os
from itertools import pairwise

import pytest
from PIL import Image

from conformance.doubles.data_lines import NATIVE_LINE, SIZE, SWIFT_LINE, annotation, run
from rollmatch.data import load_samples

HOSTILE = [None, "x", -1, 0.5, True, [], {}, [[]], ["x"], 10**400]
HOSTILE_TEXTS = ["NaN", "1e999"]


def spoiled(tree):
    """The tree as JSON, with each of its values, in turn, replaced by each hostile one."""
    mark = "\0mark"

    def places(node):
        yield ()
        for key in node if isinstance(node, dict) else range(len(node)) if isinstance(node, list) else ():
            for rest in places(node[key]):
                yield (key, *rest)

    for place in places(tree):
        whole = {"": json.loads(json.dumps(tree))}
        node = whole
        for key in ("", *place)[:-1]:
            node = node[key]
        node[("", *place)[-1]] = mark
        for text in [*map(json.dumps, HOSTILE), *HOSTILE_TEXTS]:
            yield json.dumps(whole[""]).replace(json.dumps(mark), text)


SMALL_COCO = {
    "images": [{"id": 7, "file_name": "a.jpg", "width": 640, "height": 480}],
    "annotations": [annotation(1, [10, 20, 100, 50], segmentation=[[10, 20, 110, 20, 60, 70]])],
    "categories": [{"id": 90, "name": "cat"}],
}


@pytest.mark.parametrize("target", ["native", "coco"])
@pytest.mark.parametrize(("source", "tree"), [("coco", SMALL_COCO), ("swift", SWIFT_LINE), ("native", NATIVE_LINE)])
def test_a_hostile_value_is_named_or_left_out_and_what_is_written_can_be_learnt(tmp_path, capsys, source, tree, target):
    Image.new("RGB", SIZE).save(tmp_path / "a.jpg")
    given = tmp_path / "in.json"
    for text in spoiled(tree):
        given.write_text(text)
        for options in ([], ["--skip-bad"]):
            out = tmp_path / "out"
            if run(given, out, "--from", source, "--to", target, "--images", tmp_path, *options):
                assert "label-invalid" in capsys.readouterr().err
            elif target == "native" and out.stat().st_size:
                load_samples(str(out), None)
            out.unlink(missing_ok=True)
            (tmp_path / "out.partial").unlink(missing_ok=True)


@pytest.mark.parametrize("names", ["5", "x", "[5]", "{a: cat}", "{0: 7}", "null"])
@pytest.mark.parametrize("label", ["0 nan 0.5 0.2 0.1", "0 0.5 0.5 1e999 0.1", "0.5 0.5 0.5 0.5 0.5", "0"])
def test_hostile_classes_and_numbers_of_yolo_are_named(tmp_path, capsys, names, label):
    Image.new("RGB", (10, 10)).save(tmp_path / "a.png")
    (tmp_path / "a.txt").write_text(label)
    for described in (
        f"train: .\nnames: {names}\n",
        "train: .\nnames: [cat]\n",
        "train: 5\nnames: [cat]\n",
        "train: [",
    ):
        (tmp_path / "data.yaml").write_text(described)
        assert run(tmp_path / "data.yaml", tmp_path / "out", "--from", "yolo") == 1
        assert "label-invalid" in capsys.readouterr().err


def test_an_image_that_is_no_file_is_named_and_not_waited_for(tmp_path, capsys):
    os.mkfifo(tmp_path / "a.jpg")
    for source, tree in (("coco", SMALL_COCO), ("swift", SWIFT_LINE), ("native", NATIVE_LINE)):
        (tmp_path / "in.json").write_text(json.dumps(tree))
        assert run(tmp_path / "in.json", tmp_path / "out", "--from", source) == 1
        assert "it is not a regular file" in capsys.readouterr().err


NESTED = "[" * 100_000


@pytest.mark.parametrize(
    ("source", "text"),
    [
        ("coco", '{"images": [{"id": ' + "9" * 5000 + "}]}"),
        ("swift", NESTED),
        ("swift", "\udcff"),
        ("native", NESTED),
        ("native", "\udcff"),
        ("yolo", "names: " + NESTED),
        ("yolo", "names: [cat]\ntrain: missing.txt\n"),
        ("yolo", "names: [cat]\ntrain: zero.txt\n"),
        ("yolo", "names: [cat]\ntrain: bytes.txt\n"),
        ("yolo", "names: [cat]\ntrain: images\n"),
    ],
)
def test_a_file_of_another_project_that_is_none_is_named(tmp_path, capsys, source, text):
    (tmp_path / "zero.txt").symlink_to("/dev/zero")
    (tmp_path / "bytes.txt").write_bytes(b"\xff")
    (tmp_path / "images").mkdir()
    Image.new("RGB", (10, 10)).save(tmp_path / "images/a.png")
    (tmp_path / "labels").mkdir()
    (tmp_path / "labels/a.txt").write_bytes(b"\xff")
    (tmp_path / "in").write_bytes(text.encode("utf-8", "surrogateescape"))
    assert run(tmp_path / "in", tmp_path / "out", "--from", source) == 1
    assert "label-invalid" in capsys.readouterr().err


def test_names_that_grow_when_they_are_shown_are_not_shown_whole(tmp_path, capsys):
    letters = "abcdefgh"
    grown = "".join(f"{b}: &{b} [{', '.join([f'*{a}'] * 9)}]\n" for a, b in pairwise(letters))
    (tmp_path / "in").write_text(f"a: &a [{', '.join('x' * 9)}]\n{grown}train: .\nnames: *h\n")
    assert run(tmp_path / "in", tmp_path / "out", "--from", "yolo") == 1
    assert len(capsys.readouterr().err) < 10_000
