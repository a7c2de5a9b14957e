"""Every kind of peft's adapters: a plain model with the merged weights answers as the adapted one, or it is refused."""

import copy

import pytest
import torch
from peft import (
    AdaLoraConfig,
    IA3Config,
    LoHaConfig,
    LoKrConfig,
    LoraConfig,
    OFTConfig,
    PromptTuningConfig,
    TrainableTokensConfig,
    get_peft_model,
)
from transformers import Qwen2Config, Qwen2ForCausalLM, Qwen3MoeConfig, Qwen3MoeForCausalLM

from conformance.doubles.refusals import refused
from rollmatch.model.checkpoint import checkpoint_tensors, merged_weights
from rollmatch.weights.named_weights import adapter_of

SIZES = {"vocab_size": 64, "hidden_size": 32, "intermediate_size": 48, "num_hidden_layers": 2}
SIZES |= {"num_attention_heads": 2, "num_key_value_heads": 2}
IDS = torch.arange(24).reshape(2, 12)
QV, CLOSE = ["q_proj", "v_proj"], 2e-5


def model_of(*, tied=False, experts=False):
    torch.manual_seed(0)
    if experts:
        config = Qwen3MoeConfig(**SIZES, moe_intermediate_size=16, num_experts=4, num_experts_per_tok=2, head_dim=16)
        return Qwen3MoeForCausalLM(config).eval()
    return Qwen2ForCausalLM(Qwen2Config(**SIZES, tie_word_embeddings=tied)).eval()


def adapted(settings, **kind):
    """With an adapter all of whose tensors do something."""
    torch.manual_seed(1)
    model = get_peft_model(model_of(**kind), settings).eval()
    with torch.no_grad():
        for weight in model.parameters():
            if weight.requires_grad:
                weight += 0.2 * torch.randn_like(weight)
    return model


def logits_of(model):
    with torch.no_grad():
        return model(input_ids=IDS).logits


def assert_sent(model, **kind):
    """A plain model with the merged weights answers as ``model``, which stays as it is."""
    expected, listed = logits_of(model), [name for name, _ in checkpoint_tensors(model)]
    sent = {name: weight.clone() for name, weight in merged_weights(model)}
    assert sorted(sent) == sorted(listed)
    torch.testing.assert_close(logits_of(model), expected, rtol=0, atol=0)
    plain = model_of(**kind)
    names = {name for name, _ in merged_weights(plain)}
    assert set(sent) == names
    with torch.no_grad():
        for name, weight in sent.items():
            plain.get_parameter(name).copy_(weight)
    torch.testing.assert_close(logits_of(plain), expected, rtol=0, atol=CLOSE)
    return expected


KINDS = {
    "lora": LoraConfig(r=2, target_modules=QV),
    "dora": LoraConfig(r=2, target_modules=QV, use_dora=True),
    "rslora": LoraConfig(r=4, target_modules=QV, use_rslora=True),
    "lora-bias": LoraConfig(r=2, target_modules=QV, lora_bias=True),
    "own-biases": LoraConfig(r=2, target_modules=QV, bias="all"),
    "modules": LoraConfig(r=2, target_modules=QV, modules_to_save=["lm_head", "norm"]),
    "tokens": LoraConfig(r=2, target_modules=QV, trainable_token_indices={"embed_tokens": [3, 5], "lm_head": [5]}),
    "embedding": LoraConfig(r=2, target_modules=["embed_tokens", "q_proj"]),
    "adalora": AdaLoraConfig(r=2, target_modules=QV, total_step=10),
    "ia3": IA3Config(target_modules=["k_proj", "down_proj"], feedforward_modules=["down_proj"]),
    "loha": LoHaConfig(r=2, target_modules=QV),
    "lokr": LoKrConfig(r=2, target_modules=QV),
    "oft": OFTConfig(oft_block_size=8, r=0, target_modules=QV),
    "tokens-alone": TrainableTokensConfig(token_indices=[3, 5], target_modules=["embed_tokens"]),
}


@pytest.mark.scenario(clauses=["weight-sync/full-sync-sends-every-weight-merged#8"])
@pytest.mark.parametrize("kind", KINDS)
def test_merged_weights_are_the_policy(kind):
    model = adapted(KINDS[kind])
    expected = assert_sent(model)
    with model.disable_adapter():
        off = logits_of(model)
    assert (off - expected).abs().max() > 100 * CLOSE, "the adapter does something"


@pytest.mark.parametrize("kind", ["lora", "dora", "lora-bias", "adalora", "ia3", "tokens"])
def test_adapters_that_are_merged_already_count_once(kind):
    model = adapted(KINDS[kind])
    expected = logits_of(model)
    model.merge_adapter()
    torch.testing.assert_close(assert_sent(model), expected, rtol=0, atol=CLOSE)


@pytest.mark.parametrize("kind", ["lora", "ia3", "modules", "tokens"])
def test_adapters_that_are_off_do_not_count(kind):
    model = adapted(KINDS[kind])
    with model.disable_adapter():
        assert_sent(model)


def test_a_second_adapter_may_be_on_other_layers():
    model = adapted(KINDS["lora"])
    model.add_adapter("other", LoraConfig(r=3, target_modules=["down_proj", "q_proj"], init_lora_weights=False))
    for names in (["default", "other"], ["other"], ["default"]):
        model.base_model.set_adapter(names)
        assert_sent(model)


def test_an_adapter_that_transformers_has_put_on_is_merged_too():
    model = model_of()
    model.add_adapter(LoraConfig(r=2, target_modules=QV, init_lora_weights=False))
    assert_sent(model)


def test_parameters_of_experts_are_merged():
    parameters = ["mlp.experts.gate_up_proj", "mlp.experts.down_proj"]
    settings = LoraConfig(r=2, target_modules=["q_proj"], target_parameters=parameters)
    model = adapted(settings, experts=True)
    sent = {name: weight.clone() for name, weight in merged_weights(model)}
    merged = copy.deepcopy(model).merge_and_unload()
    theirs = dict(merged_weights(merged))
    assert sent.keys() == theirs.keys()
    assert [name for name in sent if not torch.allclose(sent[name], theirs[name], atol=CLOSE)] == []
    before = dict(merged_weights(model_of(experts=True)))
    assert sum(not torch.equal(sent[name], before[name]) for name in sent) == 2 * (1 + 3 * 4)


@pytest.mark.parametrize("kind", [{"embed_tokens": [3, 5]}, [3, 5]])
def test_rows_of_a_tied_embedding_are_the_heads_too(kind):
    assert_sent(adapted(LoraConfig(r=2, target_modules=QV, trainable_token_indices=kind), tied=True), tied=True)


def test_copies_of_tied_weights_are_tied_or_refused():
    for tying in (True, False):
        settings = LoraConfig(r=2, target_modules=QV, modules_to_save=["embed_tokens"], ensure_weight_tying=tying)
        model = adapted(settings, tied=True)
        if tying:
            assert_sent(model, tied=True)
        else:
            with refused("tied-head-adapted"):
                list(merged_weights(model))


@pytest.mark.parametrize(
    ("settings", "code"),
    [
        (LoraConfig(r=2, target_modules=QV, trainable_token_indices={"lm_head": [3]}), "tied-head-adapted"),
        (LoraConfig(r=2, target_modules=["lm_head"]), "tied-head-adapted"),
        (LoraConfig(r=2, target_modules=["embed_tokens"]), "tied-head-adapted"),
        (LoraConfig(r=2, target_modules=QV, modules_to_save=["lm_head"]), "tied-head-adapted"),
        (LoraConfig(r=2, target_modules=["o_proj"], lora_bias=True), "adapter-not-mergeable"),
        (PromptTuningConfig(task_type="CAUSAL_LM", num_virtual_tokens=2), "adapter-not-mergeable"),
    ],
)
def test_what_no_plain_weight_can_express_is_refused(settings, code):
    with refused(code):
        list(merged_weights(adapted(settings, tied=True)))


@pytest.mark.parametrize("kind", ["lora-bias", "adalora", "ia3", "embedding", "modules"])
def test_an_adapter_that_servers_cannot_merge_is_not_sent_alone(kind):
    with refused("adapter-incomplete"):
        adapter_of(adapted(KINDS[kind]).requires_grad_(False))
