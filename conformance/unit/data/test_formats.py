"""Conversions of detection data sets: what other projects write is read, and what is written they read."""

import json

import pytest
from hypothesis import given
from hypothesis import strategies as st
from PIL import Image
from pycocotools.coco import COCO

from conformance.doubles.data_lines import NATIVE_LINE, SIZE, SWIFT_LINE, annotation, run
from conformance.doubles.refusals import refused
from rollmatch.data import load_samples
from rollmatch.data.formats import LabeledImage, LabeledObject
from rollmatch.data.formats.coco import read_coco, write_coco
from rollmatch.data.formats.native import NativeWriter, read_native, to_bins, to_pixels
from rollmatch.data.formats.swift import write_swift

ORIENTATION = 0x0112


@pytest.fixture
def coco(tmp_path):
    """One image with a box, an outline, a crowd, a box that leaves the image and one without area."""
    Image.new("RGB", SIZE, "green").save(tmp_path / "a.jpg")
    outline = [[100, 100, 200, 100, 150, 200]]
    document = {
        "images": [{"id": 7, "file_name": "a.jpg", "width": 640, "height": 480}],
        "annotations": [
            annotation(1, [10.5, 20, 100, 50]),
            annotation(2, [100, 100, 100, 100], category_id=1, segmentation=outline),
            annotation(3, [300, 300, 200, 100], iscrowd=1, segmentation={"counts": [1], "size": [480, 640]}),
            annotation(4, [600, 400, 100, 100]),
            annotation(5, [50, 50, 0, 10]),
        ],
        "categories": [{"id": 90, "name": "traffic_light"}, {"id": 1, "name": "person"}],
    }
    path = tmp_path / "instances.json"
    path.write_text(json.dumps(document))
    return path


def edit(path, change):
    document = json.loads(path.read_text())
    change(document)
    path.write_text(json.dumps(document))


def test_coco_becomes_records_that_check_accepts(coco, tmp_path, capsys):
    out = tmp_path / "train.jsonl"
    assert run(coco, out, "--from", "coco") == 0
    text = capsys.readouterr().out
    assert "1 images, 3 objects, 1 crowd regions" in text
    assert "dropped: 1 x object without area inside the image" in text
    (sample,) = load_samples(str(out), None)
    assert [one.desc for one in sample.objects] == ["traffic light", "person", "traffic light"]
    assert sample.objects[0].bins == (16, 42, 173, 146)
    assert sample.objects[2].bins == (938, 834, 999, 999)
    assert sample.metadata["crowd"] == [{"desc": "traffic light", "bbox_2d": [469, 626, 782, 834]}]
    polygons = tmp_path / "polygons.jsonl"
    assert run(coco, polygons, "--from", "coco", "--polygons") == 0
    record = json.loads(polygons.read_text())
    assert record["objects"][1] == {"desc": "person", "poly": [156, 209, 313, 209, 235, 417]}
    in_parts = tmp_path / "in_parts.jsonl"
    parts = [[100, 100, 120, 100, 110, 120], [180, 180, 200, 180, 190, 200]]
    edit(coco, lambda d: d["annotations"][1].update(segmentation=parts))  # hidden in the middle: one box, no outline
    assert run(coco, in_parts, "--from", "coco", "--polygons") == 0
    record = json.loads(in_parts.read_text())
    assert record["objects"][1] == {"desc": "person", "bbox_2d": [156, 209, 313, 417]}
    url = "http://images.cocodataset.org/train2017/a.jpg"
    edit(coco, lambda d: d["images"][0].update(file_name=None, coco_url=url))  # as LVIS names images
    (image,) = read_coco(coco, tmp_path)
    assert image.path == str(tmp_path / "train2017" / "a.jpg")


@pytest.mark.parametrize("target", ["coco", "yolo", "swift"])
def test_there_and_back_no_edge_moves_by_a_pixel(coco, tmp_path, target):
    out, back = tmp_path / "out", tmp_path / "back.jsonl"
    (tmp_path / "out.partial/labels").mkdir(parents=True)  # of a conversion that was cut off
    assert run(coco, out, "--from", "coco", "--to", target) == 0
    source = out / "data.yaml" if target == "yolo" else out
    assert run(source, back, "--from", target) == 0
    (expected,) = read_coco(coco, tmp_path)
    (found,) = read_native(back, tmp_path)
    expected = [one for one in expected.objects if one.box[2] > one.box[0]]
    if target != "coco":
        expected = [one for one in expected if not one.is_crowd]
    key = lambda one: (one.is_crowd, one.box)  # noqa: E731
    for ours, theirs in zip(sorted(found.objects, key=key), sorted(expected, key=key), strict=True):
        assert ours.desc == theirs.desc
        clipped = [min(value, SIZE[place % 2] - 1) for place, value in enumerate(theirs.box)]
        assert ours.box == pytest.approx(clipped, abs=0.5)


def test_pycocotools_reads_what_is_written(coco, tmp_path):
    out = tmp_path / "again.json"
    assert run(coco, out, "--from", "coco", "--to", "coco") == 0
    read = COCO(str(out))
    assert sorted(one["name"] for one in read.loadCats(read.getCatIds())) == ["person", "traffic light"]
    assert [one["iscrowd"] for one in read.loadAnns(read.getAnnIds())] == [0, 0, 1, 0, 0]
    assert read.loadAnns([1])[0]["bbox"] == [10.5, 20, 100, 50]


def test_data_that_was_converted_can_be_moved_with_its_images(coco, tmp_path):
    there, moved = tmp_path / "there", tmp_path / "moved"
    there.mkdir()
    for name in ("a.jpg", "instances.json"):
        (tmp_path / name).rename(there / name)
    for target in ("native", "swift", "coco"):
        out = there / "made" / target
        assert run(there / "instances.json", out, "--from", "coco", "--to", target, "--relative") == 0
        assert "../a.jpg" in out.read_text()
        assert str(tmp_path) not in out.read_text()
    there.rename(moved)
    (sample,) = load_samples(str(moved / "made/native"), None)
    assert Image.open(sample.images[0]).size == SIZE
    assert run(coco, tmp_path / "yolo", "--from", "coco", "--to", "yolo", "--relative") != 0


@pytest.mark.parametrize("target", ["coco", "swift"])
def test_paths_are_written_whole_and_lead_to_the_same_image(coco, tmp_path, monkeypatch, target):
    """``sub/..`` is not the working directory where ``sub`` is a link."""
    (tmp_path / "elsewhere/deep").mkdir(parents=True)
    (tmp_path / "elsewhere/imgs").mkdir()
    (tmp_path / "a.jpg").rename(tmp_path / "elsewhere/imgs/a.jpg")
    (tmp_path / "sub").symlink_to(tmp_path / "elsewhere/deep")
    monkeypatch.chdir(tmp_path)
    assert run(coco, tmp_path / "made", "--from", "coco", "--to", target, "--images", "sub/../imgs") == 0
    text = (tmp_path / "made").read_text()
    assert str(tmp_path / "elsewhere/imgs/a.jpg") in text
    assert ".." not in text


def test_category_ids_and_names_of_the_source_are_kept(coco, tmp_path, capsys):
    edit(coco, lambda d: d["categories"].append({"id": 3, "name": "zebra"}))
    ours, back = tmp_path / "train.jsonl", tmp_path / "back.json"
    assert run(coco, ours, "--from", "coco") == 0
    assert run(ours, back, "--from", "native", "--to", "coco", "--categories", str(coco)) == 0
    document = json.loads(back.read_text())
    assert document["categories"] == json.loads(coco.read_text())["categories"], "also one without objects"
    assert [one["category_id"] for one in document["annotations"]] == [90, 1, 90, 90]
    edit(coco, lambda d: d["categories"].pop(1))
    assert run(ours, tmp_path / "no.json", "--from", "native", "--to", "coco", "--categories", str(coco)) != 0
    assert "no category is 'person'" in capsys.readouterr().err
    assert run(ours, tmp_path / "no", "--from", "native", "--to", "swift", "--categories", str(coco)) != 0
    assert "--categories: is used with --to coco alone" in capsys.readouterr().err


@pytest.mark.parametrize(
    ("change", "words"),
    [
        (lambda d: d["annotations"][0].update(bbox=[1, 2, 3]), ["id 1", "bbox"]),
        (lambda d: d["annotations"][0].update(bbox=[1, 2, "3", 4]), ["id 1", "bbox"]),
        (lambda d: d["annotations"][1].update(category_id=5), ["id 2", "category_id 5"]),
        (lambda d: d["categories"][1].update(name="two  spaces"), ["desc", "two  spaces"]),
        (lambda d: d["annotations"][1].update(image_id=8), ["not listed", "8"]),
        (lambda d: d["images"].append(d["images"][0] | {"file_name": "b.jpg"}), ["two images have id 7"]),
        (lambda d: d["images"][0].update(width=None), ["id 7", "width"]),
        (
            lambda d: d["images"][0].update(file_name="gone.jpg"),
            ["/gone.jpg: cannot be opened: No such file"],
        ),
        (lambda d: d["images"][0].update(width=480), ["640 x 480"]),
    ],
)
def test_a_bad_entry_is_named_and_left_out_only_on_request(coco, tmp_path, capsys, change, words):
    edit(coco, change)
    out = tmp_path / "train.jsonl"
    assert run(coco, out, "--from", "coco") == 1
    message = capsys.readouterr().err
    assert all(word in message for word in ["label-invalid", *words])
    assert not out.exists()
    assert run(coco, out, "--from", "coco", "--skip-bad") == 0
    assert out.exists()
    assert "skipped 1 bad entries" in capsys.readouterr().out


@pytest.mark.parametrize(
    ("change", "words"),
    [
        ({"id": 90, "name": "dog"}, "two categories have id 90: 'traffic light' and 'dog'"),
        ({"id": 5, "name": "traffic light"}, "the entry with id 5 has name 'traffic light'"),
        ({"id": 5, "name": "traffic_light"}, "the entry with id 5 has name 'traffic_light', and another category is"),
        ({"id": 5, "name": None}, "the entry with id 5 has name None"),
        ({"id": 5, "name": ""}, "the entry with id 5 has name ''"),
    ],
)
def test_categories_that_mean_two_things_are_refused(coco, tmp_path, change, words):
    edit(coco, lambda d: d["categories"].append(change))
    with refused("label-invalid", str(coco), problem=words):
        list(read_coco(coco, tmp_path))


@pytest.mark.parametrize(
    ("source", "bad", "good"),
    [
        ("swift", "{", json.dumps(SWIFT_LINE)),
        ("swift", json.dumps(SWIFT_LINE | {"images": ["gone.jpg"]}), json.dumps(SWIFT_LINE)),
        ("native", "{", json.dumps(NATIVE_LINE)),
        ("native", json.dumps(NATIVE_LINE | {"images": []}), json.dumps(NATIVE_LINE)),
        ("swift", '{"images": ["b.jpg"], "images": ["a.jpg"]}', json.dumps(SWIFT_LINE)),
        ("native", json.dumps(NATIVE_LINE)[:-1] + ', "width": 640}', json.dumps(NATIVE_LINE)),
        ("yolo", "gone.jpg\n", "a.jpg"),
    ],
)
def test_a_bad_line_is_named_and_left_out_only_on_request(tmp_path, capsys, source, bad, good):
    Image.new("RGB", SIZE).save(tmp_path / "a.jpg")
    lines, out = tmp_path / ("list.txt" if source == "yolo" else "in.jsonl"), tmp_path / "out.jsonl"
    lines.write_text(f"{bad}\n{good}\n")
    (tmp_path / "data.yaml").write_text("names: [x]\ntrain: list.txt\n")
    given = tmp_path / "data.yaml" if source == "yolo" else lines
    assert run(given, out, "--from", source, "--images", tmp_path) == 1
    refusal = capsys.readouterr().err
    assert "label-invalid" in refusal
    assert source == "yolo" or f"{lines}:1" in refusal
    assert run(given, out, "--from", source, "--images", tmp_path, "--skip-bad") == 0
    assert "skipped 1 bad entries" in capsys.readouterr().out
    (record,) = map(json.loads, out.read_text().splitlines())
    assert record["images"] == [str(tmp_path / "a.jpg")]


def test_no_json_and_an_output_that_exists_are_refused(coco, tmp_path, capsys):
    assert run(coco, coco, "--from", "coco") == 1
    assert "output-exists" in capsys.readouterr().err
    coco.write_text('{"categories": [')
    assert run(coco, tmp_path / "out.jsonl", "--from", "coco") == 1
    assert str(coco) in capsys.readouterr().err


def test_a_turned_photo_is_stored_upright_and_another_size_is_dropped(tmp_path):
    photo = Image.new("RGB", (40, 20), "red")
    exif = photo.getexif()
    exif[ORIENTATION] = 6  # displayed as 20 x 40
    paths = [tmp_path / "turned.jpg", tmp_path / "too.jpg"]
    for path in paths:
        photo.save(path, exif=exif)
    labels, skipped = [*((path, 20) for path in paths), (paths[0], 40), (tmp_path / "gone.jpg", 20)], []
    writer = NativeWriter(tmp_path / "train.jsonl", polygons=False, bad=skipped.append)
    summary = writer.write(LabeledImage(path=str(path), width=wide, height=40, objects=()) for path, wide in labels)
    assert (summary.upright, [*summary.dropped.values()], len(skipped)) == (2, [1, 1], 2)
    sample, _ = load_samples(str(tmp_path / "train.jsonl"), None)
    with Image.open(sample.images[0]) as stored:
        assert stored.size == (20, 40)


@pytest.mark.parametrize(
    ("box", "reason"),
    [
        *((box, "outside") for box in ([700, 10, 20, 20], [10, 500, 20, 20], [-60, 10, 50, 50], [10, -60, 50, 50])),
        *((box, "without area inside") for box in ([50, 50, 0, 10], [500, 50, 0, 10], [50, 470, 10, 0])),
    ],
)
def test_a_category_without_a_valid_box_is_named(coco, tmp_path, capsys, box, reason):
    edit(coco, lambda d: d["annotations"][1].update(bbox=box))
    assert run(coco, tmp_path / "out.jsonl", "--from", "coco") == 0
    text = capsys.readouterr().out
    assert f"object {reason} the image" in text
    assert "no valid box: person" in text
    (sample,) = load_samples(str(tmp_path / "out.jsonl"), None)
    assert {one.desc for one in sample.objects} == {"traffic light"}
    assert sample.metadata["areas"] == [1.0, 1.0]


@pytest.mark.parametrize("number", [0, 1000])
def test_images_of_no_object_and_of_a_thousand(coco, tmp_path, number):
    boxes = [annotation(place, [place % 600, place % 400, 30, 40]) for place in range(number)]
    edit(coco, lambda d: d.update(annotations=boxes))
    out = tmp_path / "new" / "folder" / "out.jsonl"
    assert run(coco, out, "--from", "coco") == 0
    (sample,) = load_samples(str(out), None)
    assert len(sample.objects) == number


@pytest.mark.parametrize(("target", "box"), [("coco", [1.235, 2.0, 2.0, 3.0]), ("swift", [1.235, 2.0, 3.235, 5.0])])
def test_boxes_are_written_to_a_thousandth_of_a_pixel(tmp_path, target, box):
    one = LabeledObject(desc="cat", box=(1.23456, 2.0, 3.23456, 5.0004))
    image = LabeledImage(path="a.jpg", width=10, height=10, objects=(one,))
    if target == "coco":
        write_coco([image], tmp_path / "out.json")
        (written,) = json.loads((tmp_path / "out.json").read_text())["annotations"]
        assert written["bbox"] == box
        assert written["area"] == 6.001
    else:
        write_swift([image], tmp_path / "out.jsonl", prompt="Trouv\u00e9")
        assert "Trouv\u00e9" in (tmp_path / "out.jsonl").read_text()
        assert json.loads((tmp_path / "out.jsonl").read_text())["objects"]["bbox"] == [box]


@given(st.data())
def test_bins_lose_less_than_half_a_bin(data):
    size = data.draw(st.tuples(st.integers(2, 3000), st.integers(2, 3000)))
    values = [data.draw(st.floats(0, side - 1)) for side in size]
    back = to_pixels(to_bins(values, size), size)
    for value, found, side in zip(values, back, size, strict=True):
        assert abs(value - found) <= (side - 1) / 999 / 2 + 1e-9
