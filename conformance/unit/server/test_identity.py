"""Which tensors a server serves, by the headers of a checkpoint and its configuration."""

import json

import pytest
import torch
from safetensors.torch import save_file

from conformance.doubles.refusals import refused
from conformance.doubles.stand_in import make_parts
from rollmatch.dialects.native.routes import identity_of
from rollmatch.server.identity import load_model_identity
from rollmatch.weights.digest import DIGEST_KINDS

EMBEDDING, HEAD = "model.embed_tokens.weight", "lm_head.weight"
TENSORS = {EMBEDDING: torch.zeros(4, 2), HEAD: torch.zeros(4, 2), "ids": torch.zeros(3, dtype=torch.int64)}


@pytest.mark.parametrize(
    ("config", "is_tied"),
    [
        ({}, False),
        ({"tie_word_embeddings": False}, False),
        ({"tie_word_embeddings": True}, True),
        ({"text_config": {"tie_word_embeddings": True}}, True),
    ],
)
def test_a_head_is_the_embedding_where_the_configuration_ties_them(tmp_path, config, is_tied):
    """Also where the file holds both."""
    save_file(TENSORS, tmp_path / "model.safetensors", metadata={"format": "pt"})
    (tmp_path / "config.json").write_text(json.dumps(config))
    model = load_model_identity(tmp_path, dtype="bfloat16")
    assert model.aliases == ({HEAD: EMBEDDING} if is_tied else {})
    assert model.tensors.keys() == TENSORS.keys() - model.aliases.keys()
    assert (model.tensors[EMBEDDING].dtype, model.tensors["ids"].dtype) == ("bfloat16", "int64")
    assert model.tensors[EMBEDDING].shape == (4, 2)


def test_a_directory_without_weights_is_refused(tmp_path):
    with refused("checkpoint-missing", "model.model"):
        load_model_identity(tmp_path, dtype="bfloat16")


@pytest.mark.parametrize(("gpus", "transports"), [((), ("gloo", "direct")), (("0", "1"), ("direct", "gloo"))])
def test_a_server_says_what_it_serves_and_by_which_transports_it_takes_weights(gpus, transports):
    parts = make_parts(gpus=gpus, data_parallel_size=2)
    identity = identity_of(parts)
    assert (identity.transports, identity.digest) == (transports, DIGEST_KINDS[transports[0]])
    assert (identity.tensor_parallel_size, identity.data_parallel_size, identity.world_size) == (1, 2, 2)
    assert (identity.adapter_merge, identity.policy_version) == (True, parts.update.policy_version)
    assert (identity.instance, identity.model_digest) == (parts.instance, parts.model.digest)
