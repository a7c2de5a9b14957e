"""Hugging Face data sets as samples: columns by name, boxes by their meaning, images of bytes; no network."""

import json
import os
from pathlib import Path

import datasets
import numpy as np
import pytest
from PIL import Image

from conformance.doubles.configs import config_with, refusal_of
from conformance.doubles.refusals import refused
from rollmatch.config.dataset import DatasetConfig
from rollmatch.data.hub import hub_digest, load_hub_samples
from rollmatch.data.jsonl import BadSamples, ReadRules, SystemMessages, load_samples
from rollmatch.errors import ConfigError

SIZE = (201, 101)
CORNERS = (50.0, 20.0, 100.0, 60.0)
BINS = (250, 200, 500, 599)
AS_BOX = {
    ("xyxy", "pixel"): CORNERS,
    ("xywh", "pixel"): (50.0, 20.0, 50.0, 40.0),
    ("cxcywh", "pixel"): (75.0, 40.0, 50.0, 40.0),
    ("xyxy", "norm1"): (50 / 201, 20 / 101, 100 / 201, 60 / 101),
    ("xywh", "norm1000"): (50e3 / 201, 20e3 / 101, 50e3 / 201, 40e3 / 101),
}


@pytest.fixture
def parquet(tmp_path, monkeypatch):
    """Writes rows of (box, ...) to a Parquet file; its images are bytes, its categories class numbers."""
    monkeypatch.setenv("ROLLMATCH_CACHE", str(tmp_path / "cache"))
    monkeypatch.setenv("HF_HUB_OFFLINE", "1")
    monkeypatch.setattr(datasets.config, "HF_DATASETS_CACHE", tmp_path / "datasets")
    objects = {"bbox": datasets.List(datasets.List(datasets.Value("float64"))),
               "category": datasets.List(datasets.ClassLabel(names=["cat", "dog"])),
               "crowd": datasets.List(datasets.Value("bool"))}  # fmt: skip
    features = datasets.Features({"photo": datasets.Image(), "objects": objects, "note": datasets.Value("string")})

    def write(*rows, crowds=None, number=1):
        made = [
            {
                "photo": Image.fromarray(np.full((SIZE[1], SIZE[0], 3), place, dtype=np.uint8)),
                "objects": {"bbox": boxes, "category": [number] * len(boxes), "crowd": crowds or [False] * len(boxes)},
                "note": f"row {place}",
            }
            for place, boxes in enumerate(rows)
        ]
        path = tmp_path / "data.parquet"
        datasets.Dataset.from_list(made, features=features).to_parquet(str(path))
        return path

    return write


def dataset(path, **fields):
    columns = {"image": "photo"} | fields.pop("columns", {})
    return DatasetConfig(**{"source": "parquet", "train": str(path), "box": "xyxy", "columns": columns} | fields)


def load(path, tmp_path, **fields):
    return load_hub_samples(dataset(path, **fields), "train", ReadRules(image_root=tmp_path))


@pytest.mark.scenario(
    "samples/a-data-set-of-the-hub-needs-no-conversion",
    clauses=["samples/data-sets-of-the-hub-are-read-as-they-are#1"],
)
@pytest.mark.parametrize(("box", "unit"), AS_BOX)
def test_boxes_have_the_meaning_that_is_configured(parquet, tmp_path, box, unit):
    (sample,) = load(parquet([AS_BOX[box, unit]]), tmp_path, box=box, unit=unit, columns={"metadata": ("note",)})
    assert [(one.desc, one.bins) for one in sample.objects] == [("dog", BINS)]
    assert (sample.width, sample.height, sample.metadata) == (*SIZE, {"note": "row 0"})
    with Image.open(sample.images[0]) as image:
        assert image.size == SIZE


@pytest.mark.scenario(clauses=["samples/data-sets-of-the-hub-are-read-as-they-are#2"])
@pytest.mark.parametrize("streaming", [False, True])
def test_the_first_rows_are_taken_in_order_and_are_the_same_each_time(parquet, tmp_path, streaming):
    path = parquet(*[[CORNERS]] * 5)
    first = load(path, tmp_path, streaming=streaming, take=3)
    assert [sample.sample_id for sample in first] == [0, 1, 2]
    assert list(first) == list(load(path, tmp_path, streaming=streaming, take=3))
    assert len({sample.images for sample in first}) == 3, "equal images would share a file"


def test_the_digest_is_that_of_the_rows_not_of_the_file(parquet):
    def digest(path, **fields):
        return hub_digest(dataset(path, **fields), "train")

    path = parquet([CORNERS], [CORNERS])
    before = digest(path)
    os.utime(path, (0, 0))
    assert digest(path) == digest(path, streaming=True, take=2) == before
    assert len({before, digest(path, take=1), digest(parquet([CORNERS], [(50.0, 20.0, 100.0, 61.0)]))}) == 3


def test_crowd_regions_go_to_metadata(parquet, tmp_path):
    (sample,) = load(parquet([CORNERS, CORNERS], crowds=[True, False]), tmp_path, columns={"crowds": "objects.crowd"})
    assert (len(sample.objects), len(sample.metadata["crowd"])) == (1, 1)


def test_a_class_without_a_name_is_refused(parquet, tmp_path):
    """datasets writes -1 for what has no label: it became the last class."""
    with refused("row-invalid"):
        load(parquet([CORNERS], number=-1), tmp_path)


def test_a_row_needs_one_flag_for_each_box(parquet, tmp_path):
    with refused("row-invalid"):
        load(parquet([CORNERS], crowds=[True, False]), tmp_path, columns={"crowds": "objects.crowd"})


@pytest.mark.scenario(clauses=["samples/data-sets-of-the-hub-are-read-as-they-are#3"])
@pytest.mark.parametrize(
    ("box", "reason"),
    [((5, 5, 5, 9), "object without area inside the image"), ((300, 5, 400, 9), "object outside the image")],
)
def test_a_box_without_area_in_the_image_is_dropped_and_counted_as_by_the_converter(parquet, tmp_path, box, reason):
    samples = load(parquet([CORNERS, box]), tmp_path)
    assert [[one.bins for one in sample.objects] for sample in samples] == [[BINS]]
    assert (samples.num_objects, samples.dropped) == (1, {reason: 1})


def test_a_box_that_reaches_over_the_edge_is_cut_and_counted_as_by_the_converter(parquet, tmp_path):
    path = parquet([CORNERS, (50, 20, 201.5, 101)], [(-3, 20, 100, 60), (100, 50, 240, 130)])
    samples = load(path, tmp_path)
    assert [one.bins for one in samples[1].objects] == [(0, 200, 500, 599), (500, 500, 999, 999)]
    assert (samples.num_objects, samples.dropped) == (4, {"part of an object outside the image": 2})


def test_a_bad_row_is_named_and_left_out_only_on_request(parquet, tmp_path):
    path = parquet([CORNERS], [[1, 2, 3]], [])
    with refused("row-invalid", f"parquet[{path}]:1"):
        load(path, tmp_path)
    skipped = []
    samples = load_hub_samples(dataset(path), "train", ReadRules(image_root=tmp_path), skipped=skipped)
    assert ([sample.sample_id for sample in samples], samples.num_objects) == ([0, 2], 1)
    assert [error.code for error in skipped] == ["row-invalid"]


CHATS = ReadRules(image_root=Path("."), systems=SystemMessages(chats=""))


def test_questions_need_no_image(tmp_path, monkeypatch):
    monkeypatch.setattr(datasets.config, "HF_DATASETS_CACHE", tmp_path / "datasets")
    Image.new("RGB", (8, 6)).save(tmp_path / "a.png")
    rows = [{"image": str(tmp_path / "a.png"), "question": "1 + 1?"}, {"image": None, "question": "2 + 2?"}]
    datasets.Dataset.from_list(rows).to_parquet(str(tmp_path / "data.parquet"))
    columns = {"prompt": "question", "boxes": None, "descs": None}
    for image, number in (("image", 1), (None, 0)):
        config = dataset(tmp_path / "data.parquet", box=None, columns=columns | {"image": image})
        first, second = load_hub_samples(config, "train", CHATS)
        assert (len(first.images), second.images, second.messages) == (number, (), (("user", "2 + 2?"),))


TOOL_A = {"type": "function", "function": {"name": "a", "parameters": {"properties": {"city": {"type": "string"}}}}}
TOOL_B = {"type": "function", "function": {"name": "b", "parameters": {"properties": {"days": {"enum": [1, 2]}}}}}
ARROW_ROWS = [
    {"messages": [{"role": "user", "content": "1?"}], "tools": [TOOL_A], "system": "Be brief.", "images": None},
    {"messages": [{"role": "user", "content": "2?"}], "tools": [TOOL_B], "images": ["a.png"]},
]


@pytest.mark.scenario(clauses=["samples/a-sample-is-one-json-object-on-one-line#9"])
def test_what_arrow_fills_with_null_is_missing(tmp_path):
    Image.new("RGB", (8, 6)).save(tmp_path / "a.png")
    rows = datasets.Dataset.from_list(ARROW_ROWS)
    assert rows[0]["tools"][0]["function"]["parameters"]["properties"]["days"] is None, "Arrow fills it"
    rows.to_json(str(tmp_path / "train.jsonl"))
    first, second = load_samples(tmp_path / "train.jsonl", systems=SystemMessages(chats=""))
    assert (first.tools, second.tools) == ((TOOL_A,), (TOOL_B,))
    assert (first.images, len(second.images)) == ((), 1)
    assert (first.messages, second.messages) == ((("system", "Be brief."), ("user", "1?")), (("user", "2?"),))


@pytest.mark.parametrize(
    "record",
    [
        {"prompt": "1?", "images": None, "system": None, "tools": None, "metadata": None, "width": None},
        {"messages": [{"role": "user", "content": "1?", "tool_calls": None, "name": None}], "prompt": None},
        {"messages": [{"role": "user", "content": [{"type": "text", "text": "1?", "image": None}]}]},
    ],
)
def test_null_is_missing_in_records_as_they_are_written(tmp_path, record):
    (tmp_path / "train.jsonl").write_text(json.dumps(record) + "\n")
    (sample,) = load_samples(tmp_path / "train.jsonl", systems=SystemMessages(chats=""))
    assert (sample.messages, sample.images, sample.tools, sample.metadata) == ((("user", "1?"),), (), (), {})


def test_null_in_metadata_stays_and_objects_of_two_shapes_are_read(tmp_path):
    Image.new("RGB", (8, 6)).save(tmp_path / "a.png")
    box = {"desc": "x", "bbox_2d": [1, 2, 3, 4], "poly": None}
    shapes = [box, {"desc": "y", "bbox_2d": None, "poly": [1, 1, 9, 1, 9, 9]}]
    record = {"images": ["a.png"], "width": 8, "height": 6, "objects": shapes, "metadata": {"level": None}}
    (tmp_path / "train.jsonl").write_text(json.dumps(record) + "\n")
    (sample,) = load_samples(tmp_path / "train.jsonl")
    assert ([one.bins for one in sample.objects], sample.metadata) == (
        [(1, 2, 3, 4), (1, 1, 9, 1, 9, 9)],
        {"level": None},
    )


def test_images_of_trls_form_are_those_of_the_record(tmp_path):
    Image.new("RGB", (8, 6)).save(tmp_path / "a.png")
    content = [{"type": "image", "text": None}, {"type": "text", "text": "What?"}]
    record = {"messages": [{"role": "user", "content": content}], "images": ["a.png"]}
    (tmp_path / "train.jsonl").write_text(json.dumps(record) + "\n")
    (sample,) = load_samples(tmp_path / "train.jsonl", systems=SystemMessages(chats=""))
    assert (sample.messages, len(sample.images)) == ((("user", "<image>What?"),), 1)


@pytest.mark.parametrize(
    ("columns", "key"),
    [
        ({"image": "picture"}, "columns.image"),
        ({"boxes": "objects.box"}, "columns.boxes"),
        ({"metadata": ("x",)}, "columns.metadata"),
    ],
)
def test_a_column_that_is_not_there_is_named(parquet, tmp_path, columns, key):
    path = parquet([CORNERS])
    with pytest.raises(ConfigError, match=r"objects\.bbox") as caught:
        load(path, tmp_path, columns=columns)
    assert (caught.value.code, caught.value.key) == ("column-missing", f"custom.dataset.{key}")


def test_a_data_set_that_cannot_be_read_is_named(tmp_path):
    with refused("dataset-unreadable", "custom.dataset.train"):
        load(tmp_path / "gone.parquet", tmp_path)


def test_an_image_that_is_missing_or_broken_is_named_once(tmp_path, monkeypatch):
    monkeypatch.setattr(datasets.config, "HF_DATASETS_CACHE", tmp_path / "datasets")
    row = {"image": "gone.png", "objects": {"bbox": [[1.0, 2.0, 30.0, 40.0]], "category": ["cat"]}}
    datasets.Dataset.from_list([row, row | {"image": "broken.png"}]).to_parquet(str(tmp_path / "d.parquet"))
    (tmp_path / "broken.png").write_text("no image")
    with pytest.raises(BadSamples) as caught:
        load(tmp_path / "d.parquet", tmp_path, columns={"image": "image"})
    assert [error.code for error in caught.value.errors] == ["image-missing", "image-unreadable"]
    for error, name in zip(caught.value.errors, ("gone.png", "broken.png"), strict=True):
        assert str(error).count(str(tmp_path / name)) == 1


@pytest.mark.parametrize(
    ("name", "kind", "text"),
    [("q.csv", "csv", "question,answer\n1 + 1?,2\n"), ("q.jsonl", "json", '{"question": "1 + 1?", "answer": 2}\n')],
)
def test_a_file_is_no_source_and_what_the_remedy_says_is_read(tmp_path, monkeypatch, name, kind, text):
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(datasets.config, "HF_DATASETS_CACHE", tmp_path / "datasets")
    (tmp_path / name).write_text(text)
    columns = {"prompt": "question", "metadata": ["answer"]}
    with refused("dataset-unreadable", "custom.dataset.source", remedy=f"source: {kind}, and train: its path"):
        load_hub_samples(DatasetConfig(source=name, columns=columns), "train", CHATS)
    (sample,) = load_hub_samples(DatasetConfig(source=kind, train=name, columns=columns), "train", CHATS)
    assert (sample.messages[-1][1], sample.metadata) == ("1 + 1?", {"answer": 2})


@pytest.mark.parametrize("source", ["text", "imagefolder", "q.txt"])
def test_a_format_that_is_not_read_here_reads_no_working_directory(tmp_path, monkeypatch, source):
    monkeypatch.chdir(tmp_path)
    (tmp_path / "q.txt").write_text("1 + 1?\n")
    with refused("dataset-unreadable", "custom.dataset.source", remedy="parquet, arrow, json, csv are read"):
        load("train", tmp_path, source=source)


BARE = ("custom.train_jsonl=null", "custom.val_jsonl=null", "custom.dataset.source=cppe-5")


@pytest.mark.parametrize(
    ("overrides", "code", "key"),
    [
        ((), "missing-key", "dataset.box"),
        (("box=xywh", "streaming=true"), "missing-key", "dataset.take"),
        (("box=xywh", "columns.prompt=question"), "question-not-used", "dataset.columns.prompt"),
    ],
)
def test_what_a_data_set_needs_is_checked_with_the_configuration(overrides, code, key):
    assert refusal_of(*BARE, *(f"custom.dataset.{override}" for override in overrides)) == (code, f"custom.{key}")
    assert config_with(*BARE, "custom.dataset.box=xywh").custom.dataset.source == "cppe-5"


def test_files_and_a_data_set_exclude_each_other():
    both = ("custom.val_jsonl=null", "custom.dataset={source: cppe-5, box: xywh}")
    assert refusal_of(*both) == ("two-data-sets", "custom.train_jsonl")


def test_text_data_sets_need_no_columns_of_images_and_boxes(tmp_path, monkeypatch):
    """By ``image: null`` or without, and chats below ``prompt``, as data sets for TRL have them."""
    monkeypatch.setattr(datasets.config, "HF_DATASETS_CACHE", tmp_path / "datasets")
    chat = [{"role": "system", "content": "Be brief."}, {"role": "user", "content": "1 + 1?"}]
    rows = [{"question": "1 + 1?", "chat": chat, "answer": "2"}]
    datasets.Dataset.from_list(rows).to_parquet(str(tmp_path / "text.parquet"))
    for columns in ({"prompt": "question"}, {"prompt": "question", "image": None}, {"prompt": "chat"}):
        named = {"source": "parquet", "train": str(tmp_path / "text.parquet"), "val": None}
        config = DatasetConfig(**named, columns=columns | {"metadata": ["answer"]})
        (sample,) = load_hub_samples(config, "train", CHATS)
        assert (sample.messages[-1], sample.images) == (("user", "1 + 1?"), ())
        assert len(sample.messages) == (2 if columns["prompt"] == "chat" else 1)
        assert sample.metadata == {"answer": "2"}
    named = dataset(tmp_path / "text.parquet", box=None, columns={"prompt": "question", "image": "picture"})
    with refused("column-missing", "custom.dataset.columns.image"):
        load_hub_samples(named, "train", CHATS)


@pytest.mark.scenario(clauses=["samples/data-sets-of-the-hub-are-read-as-they-are#4"])
def test_other_columns_of_questions_are_metadata(parquet, tmp_path):
    """As in JSONL and in TRL; images are none, and a list names which."""
    path = parquet([CORNERS])
    for columns, expected in (({}, {"objects"}), ({"metadata": ()}, set()), ({"metadata": ("note",)}, {"note"})):
        config = DatasetConfig(source="parquet", train=str(path), columns={"prompt": "note", "image": None} | columns)
        (sample,) = load_hub_samples(config, "train", CHATS)
        assert sample.metadata.keys() == expected
    boxes = dataset(path, columns={"boxes": "objects.bbox", "descs": "objects.category"})
    assert load_hub_samples(boxes, "train", ReadRules(image_root=tmp_path))[0].metadata == {}


@pytest.mark.parametrize(
    ("source", "remedy"),
    [
        ("AI-MO/NuminaMath-TIR#1000", "Write source: AI-MO/NuminaMath-TIR, take: 1000. take uses the first records"),
        ("HF::org/x:sub", "Write source: org/x, name: sub."),
        ("swift/self-cognition#5", "Run modelscope download --dataset swift/self-cognition --local_dir DIR"),
        ("MS::org/x", "Run modelscope download --dataset org/x --local_dir DIR"),
    ],
)
def test_an_id_as_ms_swift_writes_it_is_answered_by_keys(source, remedy):
    config = DatasetConfig(source=source, columns={"prompt": "problem"})
    with refused("dataset-unreadable", "custom.dataset.source", remedy=remedy):
        load_hub_samples(config, "train", ReadRules(image_root=Path(".")))


def test_a_data_set_is_loaded_as_named(tmp_path, monkeypatch):
    """Configuration, revision and split; streamed where it is to be."""
    monkeypatch.setattr(datasets.config, "HF_DATASETS_CACHE", tmp_path / "cache")
    called, load = [], datasets.load_dataset
    monkeypatch.setattr(datasets, "load_dataset", lambda *given, **named: called.append(named) or load(*given, **named))
    card = "---\nconfigs:\n"
    for name in ("easy", "hard"):
        lines = [json.dumps({"question": f"{name} {number}"}) for number in (0, 1)]
        (tmp_path / f"{name}.jsonl").write_text("\n".join(lines))
        card += f"- {{config_name: {name}, data_files: [{{split: held, path: {name}.jsonl}}]}}\n"
    (tmp_path / "README.md").write_text(f"{card}---\n")
    named = {"source": str(tmp_path), "name": "hard", "columns": {"prompt": "question"}, "revision": "abc"}
    (sample,) = load_hub_samples(DatasetConfig(**named, val="held[1:]"), "val", CHATS)
    assert sample.messages == (("user", "hard 1"),)
    (sample,) = load_hub_samples(DatasetConfig(**named, val="held", streaming=True, take=1), "val", CHATS)
    assert sample.messages == (("user", "hard 0"),)
    assert [(one["revision"], one["streaming"]) for one in called] == [("abc", False), ("abc", True)]


def test_descriptions_are_those_of_the_named_column(tmp_path, monkeypatch):
    monkeypatch.setattr(datasets.config, "HF_DATASETS_CACHE", tmp_path / "cache")
    Image.new("RGB", SIZE).save(tmp_path / "a.png")
    rows = [{"photo": "a.png", "places": [CORNERS], "texts": ["a cat"], "objects": {"category": ["dog"]}}]
    datasets.Dataset.from_list(rows).to_parquet(str(tmp_path / "data.parquet"))
    columns = {"boxes": "places", "descs": "texts"}
    (sample,) = load(tmp_path / "data.parquet", tmp_path, columns=columns)
    assert [(one.desc, one.bins) for one in sample.objects] == [("a cat", BINS)]
