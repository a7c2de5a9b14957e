"""Names and tensors of a model in memory stand for those of its checkpoint, bytes included."""

from math import prod

import pytest
import torch

from conformance.doubles.checkpoints import make_checkpoint
from rollmatch.model.checkpoint import merged_weights
from rollmatch.server.identity import load_model_identity
from rollmatch.server.memory_names import MemoryNames
from rollmatch.server.payloads import TensorSpec


@pytest.mark.parametrize(("name", "has_parts"), [("qwen2_vl", False), ("qwen2_5_vl", False), ("qwen3_moe", True)])
def test_what_named_parameters_gives_is_the_checkpoint(tmp_path, name, has_parts):
    model = make_checkpoint(name, tmp_path / "model")
    identity, expected = load_model_identity(tmp_path / "model", dtype="float32"), dict(merged_weights(model))
    names, sent = MemoryNames(identity), {}
    for key, weight in model.named_parameters():
        parts = names.parts_of([TensorSpec(name=key, dtype="torch.float32", shape=tuple(weight.shape))])
        pieces = weight.detach().flatten().split([prod(part.shape) for part in parts])
        sent |= {part.name: piece.view(part.shape) for part, piece in zip(parts, pieces, strict=True)}
    assert sent.keys() == identity.tensors.keys()
    assert all(torch.equal(sent[key], expected[key]) for key in sent)
    assert any(key not in identity.tensors for key, _ in model.named_parameters())
    assert (len(sent) > len(list(model.named_parameters()))) is has_parts
    other = TensorSpec(name="model.nothing", dtype="torch.float32", shape=(1,))
    assert names.parts_of([other]) == [other]
