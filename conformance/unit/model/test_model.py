"""The policy, what of it learns, and its weights as the checkpoint names them."""

import copy
from functools import cache
from pathlib import Path

import pytest
import torch
from peft import PeftModel
from safetensors import safe_open
from transformers import Qwen3ForCausalLM

from conformance.doubles.adapters import perturb_adapters
from conformance.doubles.refusals import refused
from conformance.doubles.tiny_qwen3_vl import make_tiny_qwen3, make_tiny_qwen3_vl
from rollmatch.config.training import ModelConfig, TunerConfig
from rollmatch.model.adapters import model_key
from rollmatch.model.checkpoint import merged_weights
from rollmatch.model.policy import count_weights, load_policy, prepare, without_adapters

DIGITS = Path(__file__).parents[3] / "fixtures/models/digits"
EVERYWHERE = (
    r"model\.visual\.(patch_embed\.proj|(.*\.)?(attn\.(qkv|proj)|linear_fc[12]))"
    r"|model\.language_model\..*\.(q_proj|o_proj|up_proj|down_proj)"
)
"""Vision tower (its three-dimensional convolution too), projectors and language model."""


def load(directory=DIGITS, *, dtype="float32", **tuner):
    return load_policy(ModelConfig(model=str(directory), torch_dtype=dtype), TunerConfig(**tuner))


read = cache(load)
"""Once, to be copied."""
tiny_model = cache(make_tiny_qwen3_vl)


def policy(**tuner):
    """The digits model."""
    return prepare(copy.deepcopy(read()), TunerConfig(**tuner))


def tiny(*, dtype=torch.float32, **tuner):
    """Of the same parts, with two layers each."""
    return prepare(copy.deepcopy(tiny_model()).to(dtype), TunerConfig(**tuner))


@cache
def adapted(*, dtype=torch.float32, use_dora=False):
    """Adapters that have learnt something: B is not zero, and DoRA's magnitudes are not the weights' own."""
    model = tiny(dtype=dtype, train_type="lora", use_dora=use_dora, lora_rank=4, target_regex=EVERYWHERE)
    perturb_adapters(perturb_adapters(model, named="lora_B", by=0.05), named="lora_magnitude_vector")
    return model.eval()


def checkpoint_keys(directory):
    with safe_open(directory / "model.safetensors", "pt") as file:
        return {name: file.get_slice(name).get_shape() for name in file.keys()}  # noqa: SIM118  # no mapping


def part_of(name):
    if "visual.merger." in name or "visual.deepstack_merger" in name:
        return "aligner"
    return "vit" if "visual." in name else "llm"


def parts_that_learn(model):
    return {part_of(name) for name, weight in model.named_parameters() if weight.requires_grad}


def logits_of(model):
    """A prompt with one image of 4 x 4 patches, random pixels."""
    config = model.config
    ids = torch.tensor([[5, config.vision_start_token_id, *[config.image_token_id] * 4, 7, 9, 300]])
    pixels = torch.randn(16, 3 * 2 * 16 * 16, generator=torch.Generator().manual_seed(1))
    with torch.no_grad():
        return model(
            input_ids=ids,
            mm_token_type_ids=(ids == config.image_token_id).int(),
            pixel_values=pixels,
            image_grid_thw=torch.tensor([[1, 4, 4]]),
        ).logits


def test_the_directory_says_the_precision_unless_the_configuration_does():
    assert {weight.dtype for weight in load(dtype="auto").parameters()} == {torch.bfloat16}
    assert {weight.dtype for weight in read().parameters()} == {torch.float32}


def test_a_policy_is_read_frozen_and_adapted_but_never_as_a_whole():
    assert parts_that_learn(load(train_type="lora", freeze_llm=True, freeze_vit=True)) == {"aligner"}
    aligner = tiny(freeze_llm=True, freeze_vit=True)
    names = [name for name, weight in aligner.named_parameters() if weight.requires_grad]
    assert any("visual.deepstack_merger_list.0." in name for name in names)
    assert any("visual.merger." in name for name in names)
    with refused("nothing-to-train", "tuner"):
        tiny(freeze_llm=True, freeze_vit=True, freeze_aligner=True)


@pytest.mark.parametrize(
    ("wrong", "repaired"),
    [
        ({"target_regex": "up_proj"}, {"target_regex": ".*up_proj"}),
        ({"target_regex": ".*embed_tokens"}, {"target_regex": ".*k_proj"}),
        ({"target_regex": r".*visual\..*qkv", "freeze_vit": True}, {"target_regex": r".*visual\..*qkv"}),
        ({"freeze_llm": True, "freeze_vit": True, "freeze_aligner": True}, {"freeze_llm": True, "freeze_vit": True}),
    ],
)
def test_an_adapter_without_a_module_is_refused(wrong, repaired):
    with refused("adapter-targets-nothing", "tuner.target_regex"):
        tiny(train_type="lora", **wrong)
    assert isinstance(tiny(train_type="lora", **repaired), PeftModel)


def test_an_expression_adapts_modules_by_their_whole_name_and_none_all_linear_layers_but_the_head():
    def adapted_by(**tuner):
        model = tiny(train_type="lora", **tuner)
        learning = (name for name, weight in model.named_parameters() if weight.requires_grad)
        return {model_key(name.partition(".lora_")[0]) for name in learning}

    expression = r".*(layers\.0\..*up_proj|patch_embed\.proj)"
    matched = {"model.language_model.layers.0.mlp.up_proj", "model.visual.patch_embed.proj"}
    assert adapted_by(target_regex=expression) == matched
    linear = {name for name, module in tiny_model().named_modules() if isinstance(module, torch.nn.Linear)}
    assert adapted_by() == linear - {"lm_head"}


@pytest.mark.parametrize("expression", ["lm_head", ".*"])
def test_a_head_that_is_the_embedding_gets_no_adapter(expression):
    with refused("tied-head-adapted", "tuner.target_regex"):
        policy(train_type="lora", target_regex=expression)
    headless = policy(train_type="lora", target_regex="(?!lm_head$).*")
    assert dict(merged_weights(headless)).keys() == checkpoint_keys(DIGITS).keys()


def test_a_head_of_its_own_is_adapted_where_named(tmp_path):
    config = make_tiny_qwen3().config
    config.tie_word_embeddings = False
    Qwen3ForCausalLM(config).save_pretrained(tmp_path)
    model = load(tmp_path, train_type="lora", target_regex="lm_head")
    assert {"lm_head" in name for name, weight in model.named_parameters() if weight.requires_grad} == {True}
    assert dict(merged_weights(model)).keys() == checkpoint_keys(tmp_path).keys()
    assert "lm_head.weight" in checkpoint_keys(tmp_path)


def test_weights_are_counted_once_each_and_those_that_learn():
    shapes = checkpoint_keys(DIGITS).values()
    total = sum(torch.Size(shape).numel() for shape in shapes)
    assert count_weights(read()) == (total, total)
    assert count_weights(policy(freeze_llm=True, freeze_vit=True))[0] == total
    adapter = policy(train_type="lora", lora_rank=3, target_regex=r".*layers\.0\.mlp\.up_proj")
    assert count_weights(adapter) == (total + 3 * (192 + 512), 3 * (192 + 512))


@pytest.mark.parametrize("use_dora", [False, True])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_merged_weights_are_bit_equal_to_what_peft_merges(dtype, use_dora):
    model = adapted(dtype=dtype, use_dora=use_dora)
    before = {name: weight.clone() for name, weight in merged_weights(tiny(dtype=dtype))}
    ours = dict(merged_weights(model))
    merging = copy.deepcopy(model)
    merging.merge_adapter()
    theirs = {model_key(name): w for name, w in merging.named_parameters() if "lora_" not in name}
    assert ours.keys() == theirs.keys()
    assert [name for name, weight in ours.items() if not torch.equal(weight, theirs[name])] == []
    changed = {name for name, weight in ours.items() if not torch.equal(weight, before[name])}
    assert {"model.visual.patch_embed.proj.weight", "model.language_model.layers.1.mlp.down_proj.weight"} <= changed
    assert len(changed) == sum("lora_A" in name for name, _ in model.named_parameters())
    assert {weight.dtype for weight in ours.values()} == {weight.dtype for weight in before.values()}


@pytest.mark.parametrize("use_dora", [False, True])
def test_merging_leaves_the_model_bit_for_bit_as_it_was(use_dora):
    model = adapted(use_dora=use_dora)
    weights = {name: (weight.clone(), weight.requires_grad) for name, weight in model.named_parameters()}
    logits = logits_of(model)
    for _ in merged_weights(model):
        pass
    after = dict(model.named_parameters())
    assert after.keys() == weights.keys()
    assert all(torch.equal(after[name], w) and after[name].requires_grad == g for name, (w, g) in weights.items())
    assert torch.equal(logits_of(model), logits)


def test_a_policy_without_adapters_is_no_reference_of_itself():
    model = make_tiny_qwen3()
    with without_adapters(model, wanted=False):
        assert not isinstance(model, PeftModel)
    with refused("reference-missing", "tuner.train_type"), without_adapters(model, wanted=True):
        pass
