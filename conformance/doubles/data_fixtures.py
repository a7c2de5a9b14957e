"""A data set of one good record, which tests spoil."""

import json

import pytest
from PIL import Image

from rollmatch.data import BadSamples, load_samples


@pytest.fixture
def record():
    return {"images": ["a.png"], "objects": [{"desc": "seven", "bbox_2d": [10, 20, 30, 40]}], "width": 8, "height": 6}


@pytest.fixture
def write(tmp_path):
    """Records (or raw text) -> the path of a JSONL file beside an 8 x 6 image ``a.png``."""
    Image.new("L", (8, 6)).save(tmp_path / "a.png")

    def write_file(*lines):
        path = tmp_path / "train.jsonl"
        texts = [line if isinstance(line, str) else json.dumps(line) for line in lines]
        path.write_bytes(("\n".join(texts) + "\n").encode("utf-8", "surrogatepass"))
        return path

    return write_file


@pytest.fixture
def problems_in(write):
    """Records -> [(code, line number)] of what is refused."""

    def list_problems(*lines):
        path = write(*lines)
        with pytest.raises(BadSamples) as caught:
            load_samples(path)
        assert all(error.problem and error.remedy for error in caught.value.errors)
        places = [error.key.rsplit(":", 1) for error in caught.value.errors]
        assert {file for file, _ in places} == {str(path)}
        return [(error.code, int(line)) for error, (_, line) in zip(caught.value.errors, places, strict=True)]

    return list_problems
