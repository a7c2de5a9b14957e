"""Names, shapes and values of all weights are those that ``save_pretrained`` writes, for every architecture."""

import json

import pytest
import torch
from peft import LoraConfig, get_peft_model
from safetensors.torch import load_file
from transformers.core_model_loading import Chunk, WeightConverter

from conformance.doubles.adapters import perturb_adapters
from conformance.doubles.architectures import ARCHITECTURES
from conformance.doubles.checkpoints import make_checkpoint
from rollmatch.config.training import ModelConfig, TunerConfig
from rollmatch.model.checkpoint import checkpoint_names, checkpoint_tensors, merged_weights, model_tensors
from rollmatch.model.policy import load_policy

TRANSPOSED = {"qwen3_vl_moe"}
"""transformers writes experts of these in another layout than published files have, which vLLM cannot read."""

ADAPTED_TOGETHER = {"deepseek_v3"}
"""peft adapts all experts of a layer by one adapter, and files hold them one by one."""


@pytest.fixture(scope="module", params=ARCHITECTURES)
def checkpoint(request, tmp_path_factory):
    """(name, directory, model as it was made)."""
    directory = tmp_path_factory.mktemp(request.param)
    return request.param, directory, make_checkpoint(request.param, directory)


def files_of(directory):
    return {name: tensor for path in directory.glob("*.safetensors") for name, tensor in load_file(path).items()}


def assert_equal(ours, theirs):
    assert {name: weight.shape for name, weight in ours.items()} == {name: w.shape for name, w in theirs.items()}
    assert [name for name, weight in ours.items() if not torch.equal(weight, theirs[name])] == []


def load(directory, **tuner):
    config = ModelConfig(model=str(directory), torch_dtype="float32")
    return load_policy(config, TunerConfig(**tuner), attn_implementation="eager")  # gpt-oss has no other


def test_weights_are_those_of_the_files_that_were_loaded_and_tied_ones_are_sent_once(checkpoint):
    _, directory, _ = checkpoint
    model, files = load(directory), files_of(directory)
    weights = list(merged_weights(model))
    assert_equal(dict(weights), files)
    metas = {name: (meta.shape, meta.dtype) for name, meta in checkpoint_tensors(model)}
    assert metas == {name: (weight.shape, weight.dtype) for name, weight in files.items()}
    assert len(weights) == len(dict(weights))
    if json.loads((directory / "config.json").read_text()).get("tie_word_embeddings"):
        assert not [name for name, _ in weights if name.endswith("lm_head.weight")]


def test_weights_are_those_that_transformers_writes(checkpoint, tmp_path):
    name, directory, made = checkpoint
    for model in (made, load(directory)):
        model.save_pretrained(tmp_path)
        written = files_of(tmp_path)
        if name in TRANSPOSED:
            written = {k: w.transpose(1, 2) if ".experts." in k else w for k, w in written.items()}
        assert_equal(dict(merged_weights(model)), written)


def test_adapters_are_merged_under_the_same_names(checkpoint):
    name, directory, _ = checkpoint
    plain = load(directory)
    adapted = perturb_adapters(load(directory, train_type="lora"))
    ours, before = dict(merged_weights(adapted)), dict(merged_weights(plain))
    assert {key: w.shape for key, w in ours.items()} == {key: w.shape for key, w in before.items()}
    changed = [key for key, weight in ours.items() if not torch.equal(weight, before[key])]
    num_adapted = sum("lora_A" in key for key, _ in adapted.named_parameters())
    assert len(changed) > num_adapted if name in ADAPTED_TOGETHER else len(changed) == num_adapted


def fused_llama(directory):
    """A model whose checkpoint holds gate and up in one tensor."""
    make_checkpoint("llama", directory)
    model = load(directory)
    model._weight_conversions = [
        WeightConverter(
            source_patterns="mlp.gate_up_proj.weight",
            target_patterns=["mlp.gate_proj.weight", "mlp.up_proj.weight"],
            operations=[Chunk(dim=0)],
        )
    ]
    return model


def test_tensors_that_are_one_in_the_checkpoint_are_joined(tmp_path):
    model = fused_llama(tmp_path)
    sent, mlp = dict(merged_weights(model)), model.model.layers[1].mlp
    joined = torch.cat([mlp.gate_proj.weight, mlp.up_proj.weight])
    assert torch.equal(sent["model.layers.1.mlp.gate_up_proj.weight"], joined)
    assert not [name for name in sent if "gate_proj" in name]
    assert checkpoint_names(model).name_of("model.layers.1.mlp.gate_proj.weight") is None
    assert (
        checkpoint_names(model).name_of("model.layers.1.mlp.down_proj.weight") == "model.layers.1.mlp.down_proj.weight"
    )


def test_names_follow_the_loaded_files_and_not_the_family(tmp_path):
    """A directory in the new names of Qwen2.5-VL is sent by its new names."""
    made = make_checkpoint("qwen2_5_vl", tmp_path)
    old = set(files_of(tmp_path))
    made.save_pretrained(tmp_path, save_original_format=False)
    new = set(files_of(tmp_path))
    assert {"visual.merger.ln_q.weight"} <= old
    assert {"model.visual.merger.ln_q.weight"} <= new
    assert dict(merged_weights(load(tmp_path))).keys() == new


def test_weights_are_converted_one_by_one(tmp_path):
    """No copy of the whole model: what is only renamed is the model's own tensor, experts are cut layer by layer."""
    make_checkpoint("qwen3_moe", tmp_path)
    model = load(tmp_path)
    own = {weight.data_ptr() for _, weight in model_tensors(model)}
    copied = [name for name, weight in merged_weights(model) if weight.data_ptr() not in own]
    assert copied
    assert all(".experts." in name for name in copied)


def test_buffers_that_are_saved_are_sent(tmp_path):
    make_checkpoint("llama", tmp_path)
    model = load(tmp_path)
    model.model.register_buffer("correction", torch.ones(3))
    assert dict(merged_weights(model))["model.correction"].tolist() == [1.0, 1.0, 1.0]


@pytest.mark.parametrize("is_tied", [False, True])
@pytest.mark.parametrize(
    "kept", [{"modules_to_save": ["embed_tokens"]}, {"trainable_token_indices": {"embed_tokens": [5, 7]}}]
)
def test_trained_embeddings_are_merged(tmp_path, kept, is_tied):
    make_checkpoint("gemma3_text" if is_tied else "llama", tmp_path)
    settings = LoraConfig(target_modules=["q_proj"], ensure_weight_tying=is_tied, **kept)
    adapted = perturb_adapters(get_peft_model(load(tmp_path), settings))
    for marked in ("modules_to_save", "trainable_tokens_delta"):
        perturb_adapters(adapted, named=marked)
    ours = {name: weight.clone() for name, weight in merged_weights(adapted)}
    merged = adapted.merge_and_unload()
    theirs = dict(merged_weights(merged))
    assert ours.keys() == theirs.keys()
    assert [name for name in ours if not torch.allclose(ours[name], theirs[name], atol=1e-6)] == []
    assert not torch.equal(
        ours["model.embed_tokens.weight"], dict(merged_weights(load(tmp_path)))["model.embed_tokens.weight"]
    )
