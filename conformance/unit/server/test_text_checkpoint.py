"""A text model whose files name a processor with images, as Gemma 3's text models do."""

import json
import shutil

import pytest

from rollmatch.server.images import ImageReader
from rollmatch.server.prompts import PromptMaker

TEXT = "fixtures/models/arithmetic"


@pytest.mark.parametrize("named", ["Gemma3Processor", "Qwen3VLProcessor"])
def test_a_processor_without_its_image_part_is_the_tokenizer_alone(tmp_path, named):
    model = shutil.copytree(TEXT, tmp_path / "model")
    described = json.loads((model / "tokenizer_config.json").read_text())
    (model / "tokenizer_config.json").write_text(json.dumps(described | {"processor_class": named}))
    made, plain = (PromptMaker(str(each), vocabulary_size=999, reader=ImageReader(())) for each in (model, TEXT))
    assert made.image_id is None
    assert made.tokenizer.encode("17 + 25 =") == plain.tokenizer.encode("17 + 25 =")
