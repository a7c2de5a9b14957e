"""Names and tensors of a model in memory stand for those of its checkpoint, bytes included."""

from math import prod

import pytest
import torch

from conformance.doubles.checkpoints import make_checkpoint
from rollmatch.model.checkpoint import merged_weights
from rollmatch.server.identity import load_model_identity
from rollmatch.server.memory_names import MemoryNames
from rollmatch.server.payloads import TensorSpec


@pytest.mark.scenario(clauses=["server-dialects/the-trl-dialect-serves-trl-and-verifiers-trainers#8"])
@pytest.mark.parametrize(
    ("name", "has_parts"), [("qwen2_vl", False), ("qwen2_5_vl", False), ("qwen3_moe", True), ("qwen3_vl_moe", False)]
)
def test_what_named_parameters_gives_is_the_checkpoint(tmp_path, name, has_parts):
    model = make_checkpoint(name, tmp_path / "model")
    identity, expected = load_model_identity(tmp_path / "model", dtype="float32"), dict(merged_weights(model))
    names, sent = MemoryNames(identity), {}
    for key, weight in model.named_parameters():
        parts = names.parts_of([TensorSpec(name=key, dtype="torch.float32", shape=tuple(weight.shape))])
        flat = weight.detach().mT if names.swapped_in(parts) else weight.detach()
        pieces = flat.flatten().split([prod(part.shape) for part in parts])
        parts = [part if len(parts) > 1 else part.model_copy(update={"shape": flat.shape}) for part in parts]
        sent |= {part.name: piece.view(part.shape) for part, piece in zip(parts, pieces, strict=True)}
    assert sent.keys() == identity.tensors.keys()
    assert all(torch.equal(sent[key], expected[key]) for key in sent)
    shapes = {key: held.shape for key, held in identity.tensors.items()}
    assert any(shapes.get(key) != tuple(weight.shape) for key, weight in model.named_parameters())
    assert (len(sent) > len(list(model.named_parameters()))) is has_parts
    other = TensorSpec(name="model.nothing", dtype="torch.float32", shape=(1,))
    assert names.parts_of([other]) == [other]
