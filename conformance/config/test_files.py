import json

import pytest

from rollmatch.config import check_files
from rollmatch.errors import ErrorList


@pytest.fixture
def place(tmp_path, monkeypatch):
    """A directory with all that the required keys name."""
    monkeypatch.chdir(tmp_path)
    (tmp_path / "models" / "tiny").mkdir(parents=True)
    (tmp_path / "models/tiny/config.json").write_text(json.dumps({"text_config": {"max_position_embeddings": 1024}}))
    (tmp_path / "models/tiny/tokenizer.json").write_text("{}")
    for name in ("train.jsonl", "val.jsonl"):
        (tmp_path / name).write_text("{}\n")
    return tmp_path


def problems(config):
    with pytest.raises(ErrorList) as caught:
        check_files(config)
    return [(error.code, error.key) for error in caught.value.errors]


def test_what_is_there_is_accepted(place, make_with):
    check_files(make_with())
    (place / "images").mkdir()
    check_files(make_with("custom.image_root=images"))


def test_a_hub_id_is_refused_and_not_downloaded(place, make_with):
    with pytest.raises(ErrorList) as caught:
        check_files(make_with("model.model=Qwen/Qwen3-VL-2B-Instruct"))
    (error,) = caught.value.errors
    assert (error.code, error.key) == ("model-directory-missing", "model.model")
    assert "hub ids are not downloaded" in error.remedy


@pytest.mark.parametrize("name", ["config.json", "tokenizer.json"])
def test_a_model_needs_its_files(place, make_with, name):
    (place / "models/tiny" / name).unlink()
    assert problems(make_with()) == [("model-file-missing", "model.model")]


@pytest.mark.parametrize("text", ["{", ""])
def test_an_unreadable_model_config_is_refused(place, make_with, text):
    (place / "models/tiny/config.json").write_text(text)
    assert problems(make_with()) == [("model-file-missing", "model.model")]


@pytest.mark.parametrize("nested", [True, False])
def test_segments_fit_the_models_positions(place, make_with, nested):
    limits = {"max_position_embeddings": 1023}
    (place / "models/tiny/config.json").write_text(json.dumps({"text_config": limits} if nested else limits))
    assert problems(make_with()) == [("model-too-short", "global_max_length")]
    check_files(make_with("global_max_length=1023"))


def test_everything_missing_is_told_at_once(tmp_path, monkeypatch, make_with):
    monkeypatch.chdir(tmp_path)
    assert problems(make_with("custom.image_root=gone")) == [
        ("model-directory-missing", "model.model"),
        ("data-file-missing", "custom.train_jsonl"),
        ("data-file-missing", "custom.val_jsonl"),
        ("image-root-missing", "custom.image_root"),
    ]
