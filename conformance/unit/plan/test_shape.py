"""What is counted from a config.json is what the model has."""

import json
from math import prod
from types import SimpleNamespace

import pytest
from safetensors import safe_open

from conformance.doubles.digits import MODEL
from conformance.doubles.refusals import refused
from conformance.doubles.shapes import QWEN3_8B, QWEN3_30B, VISION, model_directory
from rollmatch.plan.memory import gathered_bytes, learning_weights
from rollmatch.plan.shape import read_shape


def test_a_checkpoints_weights_are_counted_but_for_norms_and_biases():
    with safe_open(MODEL / "model.safetensors", "pt") as file:
        written = sum(prod(file.get_slice(name).get_shape()) for name in file.keys())  # noqa: SIM118
    shape = read_shape(str(MODEL))
    assert 0.99 * written <= shape.num_weights < written
    assert shape.dtype == "bfloat16"
    assert read_shape(str(MODEL), dtype="float32").dtype == "float32"


@pytest.mark.parametrize(
    ("settings", "billions", "active", "cache"),
    [
        (QWEN3_8B, 8.19, 6.95, 147_456),
        ({"text_config": QWEN3_8B, "vision_config": VISION}, 8.77, 6.95, 147_456),
        (QWEN3_30B, 30.5, 2.74, 98_304),
    ],
)
def test_known_models_have_their_known_sizes(settings, billions, active, cache, tmp_path):
    shape = read_shape(model_directory(tmp_path, settings))
    assert shape.num_weights / 1e9 == pytest.approx(billions, rel=0.01)
    assert shape.active_weights / 1e9 == pytest.approx(active, rel=0.01)
    assert shape.kv_bytes_per_token == cache


def test_adapters_have_two_thin_matrices_and_dora_a_length_per_output(tmp_path):
    shape = read_shape(model_directory(tmp_path, QWEN3_8B))
    per_layer = (4096 + 4096) + 2 * (4096 + 1024) + (4096 + 4096) + 3 * (4096 + 12_288)
    outputs = 4096 + 2 * 1024 + 4096 + 2 * 12_288 + 4096
    assert shape.adapter_weights(rank=16, is_dora=False, with_vision=True) == 36 * 16 * per_layer
    assert shape.adapter_weights(rank=16, is_dora=True, with_vision=True) == 36 * (16 * per_layer + outputs)


def test_a_frozen_vision_tower_has_no_adapters(tmp_path):
    shape = read_shape(model_directory(tmp_path, {"text_config": QWEN3_8B, "vision_config": VISION}))
    tuner = SimpleNamespace(train_type="lora", lora_rank=4, use_dora=False, freeze_vit=True)
    text = shape.adapter_weights(rank=4, is_dora=False, with_vision=False)
    assert learning_weights(SimpleNamespace(tuner=tuner), shape) == text
    tuner.freeze_vit = False
    assert learning_weights(SimpleNamespace(tuner=tuner), shape) > text


@pytest.mark.parametrize("bf16", [True, False])
def test_a_rank_with_a_part_of_the_weights_gathers_two_layers_and_what_no_layer_has(tmp_path, bf16):
    """Head and embedding of 151,936 x 4,096 each; the weights of a layer as they are counted by hand."""
    shape = read_shape(model_directory(tmp_path, {"text_config": QWEN3_8B, "vision_config": VISION}), dtype="float32")
    layer = 4096 * 4096 * 2 + 2 * 4096 * 1024 + 3 * 4096 * 12_288
    outside = 2 * 151_936 * 4096 + shape.vision_weights
    gathered = gathered_bytes(SimpleNamespace(training=SimpleNamespace(bf16=bf16)), shape)
    assert gathered == (2 if bf16 else 4) * (2 * 2 * layer + outside)


@pytest.mark.parametrize("lost", ["hidden_size", "num_hidden_layers", "num_attention_heads", "vocab_size"])
def test_a_model_of_unknown_form_is_refused(lost, tmp_path):
    settings = {name: value for name, value in QWEN3_8B.items() if name != lost}
    with refused("shape-unknown", "model.model", problem=lost):
        read_shape(model_directory(tmp_path, settings))
    with refused("shape-unknown", "model.model", problem=lost):
        read_shape(model_directory(tmp_path, settings | {lost: 0}))
    read_shape(model_directory(tmp_path, QWEN3_8B))


def test_a_directory_without_a_readable_config_is_refused(tmp_path):
    for text in (None, "{"):
        if text:
            (tmp_path / "config.json").write_text(text)
        with refused("shape-unknown", "model.model"):
            read_shape(str(tmp_path))
    (tmp_path / "config.json").write_text(json.dumps(QWEN3_8B))
    read_shape(str(tmp_path))


def test_the_dtype_is_that_of_the_model_then_that_of_its_text(tmp_path):
    bare = {name: value for name, value in QWEN3_8B.items() if name != "dtype"}
    written = [{"dtype": "float16"}, {"torch_dtype": "float16"}, {"text_config": bare | {"dtype": "float16"}}, {}]
    dtypes = [read_shape(model_directory(tmp_path, bare | fields)).dtype for fields in written]
    assert dtypes == ["float16", "float16", "float16", "float32"]


def test_the_matrices_of_a_vision_tower_are_counted(tmp_path):
    """Blocks, patches, positions; four projectors, three of them for deeper layers."""
    blocks = 27 * (4 * 1152 * 1152 + 2 * 1152 * 4304)
    by_hand = blocks + 3 * 2 * 16 * 16 * 1152 + 2304 * 1152 + 4 * (4608 * 4608 + 4608 * 4096)
    usual = {name: VISION[name] for name in VISION if name not in ("patch_size", "temporal_patch_size", "in_channels")}
    del usual["spatial_merge_size"]
    for vision in (VISION, usual):
        settings = {"text_config": QWEN3_8B, "vision_config": vision}
        assert read_shape(model_directory(tmp_path, settings)).vision_weights == by_hand
    bare = {name: VISION[name] for name in ("depth", "hidden_size", "intermediate_size")}
    settings = {"text_config": QWEN3_8B, "vision_config": bare}
    by_hand = blocks + 3 * 2 * 16 * 16 * 1152 + 4608 * 4608 + 4608 * 1152
    assert read_shape(model_directory(tmp_path, settings)).vision_weights == by_hand, "no positions, one projector"


def test_the_matrices_of_experts_are_counted_and_a_token_meets_eight(tmp_path):
    shape = read_shape(model_directory(tmp_path, QWEN3_30B))
    attention = 48 * 2048 * (2 * 4096 + 2 * 512)
    expert, router = 3 * 2048 * 768, 2048 * 128
    assert shape.text_weights - shape.embedding_weights == attention + 48 * (128 * expert + router)
    assert shape.active_weights == attention + 48 * (8 * expert + router)


def test_embedding_and_head_are_two_matrices_unless_tied(tmp_path):
    bare = {name: value for name, value in QWEN3_8B.items() if name != "tie_word_embeddings"}
    tied = [{}, {"tie_word_embeddings": True}, {"text_config": bare | {"tie_word_embeddings": True}}]
    found = [read_shape(model_directory(tmp_path, bare | fields)).embedding_weights for fields in tied]
    assert found == [2 * 151_936 * 4096, 151_936 * 4096, 151_936 * 4096]
