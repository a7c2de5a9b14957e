"""Hugging Face data sets as samples: columns by name, boxes by their meaning, images of bytes; no network."""

import datasets
import numpy as np
import pytest
from PIL import Image

from conformance.doubles.configs import config_with, refusal_of
from conformance.doubles.refusals import refused
from rollmatch.config.dataset import DatasetConfig
from rollmatch.data.hub import load_hub_samples
from rollmatch.data.jsonl import ReadRules
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

    def write(*rows, crowds=None):
        made = [
            {
                "photo": Image.fromarray(np.full((SIZE[1], SIZE[0], 3), place, dtype=np.uint8)),
                "objects": {"bbox": boxes, "category": [1] * len(boxes), "crowd": crowds or [False] * len(boxes)},
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


def test_crowd_regions_go_to_metadata(parquet, tmp_path):
    (sample,) = load(parquet([CORNERS, CORNERS], crowds=[True, False]), tmp_path, columns={"crowds": "objects.crowd"})
    assert (len(sample.objects), len(sample.metadata["crowd"])) == (1, 1)


def test_a_row_needs_one_flag_for_each_box(parquet, tmp_path):
    with refused("row-invalid"):
        load(parquet([CORNERS], crowds=[True, False]), tmp_path, columns={"crowds": "objects.crowd"})


@pytest.mark.parametrize(
    ("boxes", "code"),
    [([[5, 5, 5, 9]], "box-without-area"), ([[300, 5, 400, 9]], "box-without-area"), ([[1, 2, 3]], "row-invalid")],
)
def test_a_bad_row_is_named_and_left_out_only_on_request(parquet, tmp_path, boxes, code):
    path = parquet([CORNERS], boxes, [])
    with refused(code, f"parquet[{path}]:1"):
        load(path, tmp_path)
    skipped = []
    samples = load_hub_samples(dataset(path), "train", ReadRules(image_root=tmp_path), skipped=skipped)
    assert ([sample.sample_id for sample in samples], samples.num_objects) == ([0, 2], 1)
    assert [error.code for error in skipped] == [code]


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
