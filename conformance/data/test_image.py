import pytest
from PIL import Image

from rollmatch.data import load_samples
from rollmatch.data.image import check_image

KEY = "train.jsonl:1"


def codes(path, size=(8, 6)):
    found = list(check_image(str(path), size=size, key=KEY))
    assert all(error.key == KEY for error in found)
    return [error.code for error in found]


@pytest.mark.parametrize("suffix", ["png", "jpg", "webp"])
def test_width_comes_first(tmp_path, suffix):
    path = tmp_path / f"a.{suffix}"
    Image.new("RGB", (8, 6)).save(path)
    assert codes(path) == []
    assert codes(path, (6, 8)) == ["image-size-mismatch"]


@pytest.mark.scenario(
    "samples/an-image-that-is-not-there-is-refused", clauses=["samples/a-sample-is-one-json-object-on-one-line#7"]
)
def test_what_is_no_image_is_refused(tmp_path):
    path = tmp_path / "a.png"
    path.write_text("text")
    assert codes(path) == ["image-unreadable"]
    assert codes(tmp_path) == ["image-unreadable"]
    assert codes(tmp_path / "b.png") == ["image-missing"]
    assert codes("a\x00b.png") == ["image-unreadable"]


@pytest.mark.scenario(
    "samples/an-image-that-is-not-there-is-refused", clauses=["samples/a-sample-is-one-json-object-on-one-line#7"]
)
def test_an_image_that_is_to_be_turned_is_refused(tmp_path):
    exif = Image.Exif()
    exif[0x0112] = 6
    Image.new("RGB", (8, 6)).save(tmp_path / "turned.jpg", exif=exif)
    exif[0x0112] = 1
    Image.new("RGB", (8, 6)).save(tmp_path / "upright.jpg", exif=exif)
    assert codes(tmp_path / "turned.jpg") == ["image-turned"]
    assert codes(tmp_path / "upright.jpg") == []


def test_a_wrong_size_in_the_record_hides_no_missing_image(tmp_path):
    assert codes(tmp_path / "b.png", None) == ["image-missing"]


def test_only_the_header_is_read(tmp_path):
    path = tmp_path / "a.png"
    Image.effect_noise((64, 64), 50).save(path)
    path.write_bytes(path.read_bytes()[:100])
    assert codes(path, (64, 64)) == []


def test_image_root_replaces_the_directory_of_the_file(write, record, tmp_path):
    path = write({**record, "images": ["b.png"]})
    (tmp_path / "root").mkdir()
    Image.new("L", (8, 6)).save(tmp_path / "root" / "b.png")
    (sample,) = load_samples(path, tmp_path / "root")
    assert sample.images == (str(tmp_path / "root" / "b.png"),)


def test_relative_files_give_absolute_image_paths(write, record, tmp_path, monkeypatch):
    path = write(record)
    monkeypatch.chdir(tmp_path)
    (sample,) = load_samples(path.name)
    assert sample.images == (str(tmp_path / "a.png"),)
