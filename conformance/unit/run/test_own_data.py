"""A user's own JSONL: other names, own images, polygons; and a bad record of it, refused before anything starts."""

import json
import shutil
from itertools import chain

import pytest

from conformance.doubles.digits import ROOT
from conformance.doubles.started import HF, finish, journal_of, train_command
from rollmatch.data import load_samples

NAMES = {"zero": "Knopf, groß", "one": 'a "thin" stick', "two": "swan", "three": "眼鏡", "four": "chair"}
DECODING = {"temperature": 0.6, "top_p": 0.9, "top_k": 20}
MAX_NEW_TOKENS = 16
NUM_RECORDS = 6


def own_record(line):
    """The digits' record with own names and places, every second object an outline."""
    record = json.loads(line)
    record["images"] = [f"photos of mine/{image.rpartition('/')[2]}" for image in record["images"]]
    record["metadata"] = {"camera": "phone"}
    record["objects"] = [own_object(place, item) for place, item in enumerate(record["objects"])]
    return record


def own_object(place, item):
    desc, (x1, y1, x2, y2) = NAMES.get(item["desc"], "small thing"), item["bbox_2d"]
    middle = (x1 + x2) // 2
    shape = {"poly": [middle, y1, x2, y2, middle, y2 - 1, x1, y2]} if place % 2 else {"bbox_2d": [x1, y1, x2, y2]}
    return {"desc": desc, **shape}


@pytest.fixture
def folder(tmp_path):
    """``train.jsonl``, ``val.jsonl`` and the images of both."""
    (tmp_path / "photos of mine").mkdir()
    lines = (ROOT / "fixtures/digits/train.jsonl").read_text().splitlines()[:NUM_RECORDS]
    for line in lines:
        for image in json.loads(line)["images"]:
            shutil.copy(ROOT / "fixtures/digits" / image, tmp_path / "photos of mine")
    records = [json.dumps(own_record(line), ensure_ascii=False) for line in lines]
    (tmp_path / "train.jsonl").write_text("\n".join(records) + "\n")
    (tmp_path / "val.jsonl").write_text("\n".join(records[:2]) + "\n")
    return tmp_path


def command_of(folder, *overrides):
    own = (f"custom.train_jsonl={folder}/train.jsonl", f"custom.val_jsonl={folder}/val.jsonl")
    small = (f"training.output_dir={folder}/run", "training.max_steps=1", "training.per_device_train_batch_size=6")
    return train_command(*own, *small, *overrides)


def test_own_records_train_with_their_own_decoding(folder):
    decoding = [f"custom.extra.rollout_matching.decoding.{name}={value}" for name, value in DECODING.items()]
    decoding.append(f"custom.extra.rollout_matching.max_new_tokens={MAX_NEW_TOKENS}")
    code, output = finish(command_of(folder, *HF, *decoding), folder / "output.txt")
    assert code == 0, output
    samples = load_samples(folder / "train.jsonl")
    assert {truth.geometry for sample in samples for truth in sample.objects} == {"bbox_2d", "poly"}
    for line in journal_of(folder / "run", "requested"):
        assert {name: line["decoding"][name] for name in DECODING} == DECODING
        assert line["decoding"]["max_new_tokens"] == MAX_NEW_TOKENS
    (step,) = journal_of(folder / "run", "step")
    assert step["loss_ce"] > 0
    assert step["loss_coord"] > 0
    assert step["appended"] > 0
    (packed,) = journal_of(folder / "run", "packed")
    assert sorted(chain(*packed["sample_ids"])) == list(range(NUM_RECORDS))
    scenes = json.loads((folder / "run/evaluations/step-000001.json").read_text())["scenes"]
    assert [scene["truth"] for scene in scenes] == [
        [{"desc": o.desc, "geometry": o.geometry, "bins": list(o.bins)} for o in sample.objects]
        for sample in samples[:2]
    ]
    assert (folder / "run/run.html").exists()


def broken(record):
    """One record, wrong in two ways."""
    record["objects"][0] = {"desc": "swan  ", "bbox_2d": [1, 2, 3]}
    return record


def test_a_bad_record_is_refused_before_anything_starts(folder):
    """Also with the default backend: no engine, no run directory; every problem with file, line and reason."""
    lines = (folder / "train.jsonl").read_text().splitlines()
    lines[2] = json.dumps(broken(json.loads(lines[2])))
    lines[4] = lines[4][:-1]
    (folder / "train.jsonl").write_text("\n".join(lines) + "\n")
    code, output = finish(command_of(folder), folder / "output.txt")
    assert code == 1
    assert "Traceback" not in output
    assert "rollmatch: 3 problems" in output
    assert f"[desc-spacing] {folder}/train.jsonl:3: objects[0]" in output
    assert f"[geometry-length] {folder}/train.jsonl:3: objects[0]" in output
    assert f"[line-not-json] {folder}/train.jsonl:5: " in output
    assert not (folder / "run").exists()
