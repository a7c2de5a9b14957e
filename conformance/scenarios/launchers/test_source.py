"""Models by directory, hub id and adapter; the settings of their chat template and processor."""

import json

import huggingface_hub.constants
import pytest
import torch
from transformers import AutoModelForCausalLM

from conformance.doubles.adapters import perturb_adapters
from conformance.doubles.checkpoints import make_checkpoint
from conformance.doubles.digits import load_digits
from conformance.doubles.refusals import refused
from rollmatch.config.training import ModelConfig, TunerConfig
from rollmatch.model.checkpoint import merged_weights
from rollmatch.model.policy import load_adapters, load_policy, unwrap
from rollmatch.model.source import MANIFEST, local_model
from rollmatch.model.template import Template, TemplateOptions
from rollmatch.records import Sample
from rollmatch.run.assemble import _engine_arguments

COMMIT = "0123456789abcdef0123456789abcdef01234567"


@pytest.fixture(scope="module")
def directory(tmp_path_factory):
    folder = tmp_path_factory.mktemp("llama")
    make_checkpoint("llama", folder)
    return folder


@pytest.fixture
def cache(tmp_path, monkeypatch, directory):
    """A hub cache that holds the checkpoint as org/tiny, and no network."""
    monkeypatch.setattr(huggingface_hub.constants, "HF_HUB_CACHE", str(tmp_path))
    monkeypatch.setattr(huggingface_hub.constants, "HF_HUB_OFFLINE", True)
    snapshots = tmp_path / "models--org--tiny/snapshots"
    snapshots.mkdir(parents=True)
    (snapshots / COMMIT).symlink_to(directory)
    for name in ("main", "v2"):
        refs = tmp_path / "models--org--tiny/refs"
        refs.mkdir(exist_ok=True)
        (refs / name).write_text(COMMIT)
    return tmp_path


@pytest.mark.scenario("launchers/a-cached-hub-id-needs-no-network")
@pytest.mark.parametrize("revision", [None, "v2", COMMIT])
def test_a_hub_id_is_read_from_the_cache(cache, revision):
    found = local_model(ModelConfig(model="org/tiny", revision=revision))
    assert found.model.endswith(f"snapshots/{COMMIT}")
    assert load_policy(found, TunerConfig()) is not None


@pytest.mark.parametrize("wrong", [{"model": "org/absent"}, {"model": "org/tiny", "revision": "v3"}])
def test_a_hub_id_that_cannot_be_read_is_refused(cache, wrong):
    with refused("model-directory-missing", "model.model"):
        local_model(ModelConfig(**wrong))


@pytest.mark.parametrize("name", ["nowhere", "/nowhere/tiny", "a/b/c"])
def test_what_is_no_hub_id_stays_for_the_check_of_files(cache, name):
    assert local_model(ModelConfig(model=name)).model == name


@pytest.fixture(scope="module")
def adapter(directory, tmp_path_factory):
    folder = tmp_path_factory.mktemp("adapter")
    adapted = load(directory, tuner={"train_type": "lora", "lora_rank": 3})
    perturb_adapters(adapted).save_pretrained(folder)
    return folder, dict(merged_weights(adapted))


def load(directory, tuner, **model):
    config = local_model(ModelConfig(model=str(directory), torch_dtype="float32", **model))
    return load_policy(config, TunerConfig(**tuner))


def test_a_run_stands_for_its_newest_whole_checkpoint(tmp_path):
    def local(path):
        return local_model(ModelConfig(model=str(path))).model

    for step, is_whole in ((20, True), (100, True), (120, False)):
        (tmp_path / f"checkpoint-{step}").mkdir()
        if is_whole:
            (tmp_path / f"checkpoint-{step}" / MANIFEST).touch()
    assert local(tmp_path) == str(tmp_path / "checkpoint-100")
    assert local(tmp_path / "checkpoint-20") == str(tmp_path / "checkpoint-20")
    (tmp_path / "config.json").touch()
    assert local(tmp_path) == str(tmp_path)


def test_an_adapter_s_directory_stands_for_its_base_and_itself(adapter, directory):
    folder, _ = adapter
    found = local_model(ModelConfig(model=str(folder)))
    assert (found.model, found.adapter) == (str(directory), str(folder))


@pytest.mark.parametrize(
    ("start", "tuner", "num_trained"),
    [("merge", {}, 21), ("merge", {"train_type": "lora"}, 28), ("continue", {"train_type": "lora"}, 28)],
)
def test_a_run_starts_from_an_adapter(adapter, directory, start, tuner, num_trained):
    folder, expected = adapter
    policy = load(directory, tuner, adapter=str(folder), adapter_start=start)
    ours = dict(merged_weights(policy))
    assert ours.keys() == expected.keys()
    assert all(torch.allclose(ours[name], weight, atol=1e-6) for name, weight in expected.items())
    assert sum(weight.requires_grad for weight in policy.parameters()) == num_trained
    if start == "continue":
        assert unwrap(policy).model.layers[0].mlp.up_proj.lora_A["default"].weight.shape[0] == 3


def test_a_run_s_adapter_lies_on_what_the_run_started_from(adapter, directory, tmp_path):
    """A checkpoint holds the adapter that was trained, and not the one that was merged into the base before."""
    folder, expected = adapter
    model = local_model(ModelConfig(model=str(folder), torch_dtype="float32"))
    checkpoint, tuner = tmp_path / "checkpoint-1", TunerConfig(train_type="lora")
    policy = load_policy(model, tuner)
    policy.save_pretrained(checkpoint)
    base = AutoModelForCausalLM.from_pretrained(directory, dtype=torch.float32)
    ours = dict(merged_weights(load_adapters(base, checkpoint, model, tuner)))
    assert all(torch.allclose(ours[name], weight, atol=1e-6) for name, weight in expected.items())
    tree = {"model": {"model": str(directory), "adapter": str(folder)}, "tuner": {"train_type": "lora"}}
    (tmp_path / "resolved.yaml").write_text(json.dumps(tree))
    with refused("adapter-on-adapter", "model.model", remedy=f"rollmatch export {tmp_path} OUT"):
        local_model(ModelConfig(model=str(checkpoint)))
    tree["model"]["adapter_start"] = "continue"
    (tmp_path / "resolved.yaml").write_text(json.dumps(tree))
    assert local_model(ModelConfig(model=str(checkpoint))).adapter == str(checkpoint)


def test_quantized_weights_are_refused(directory, tmp_path):
    config = (directory / "config.json").read_text()
    (tmp_path / "config.json").write_text(config[:-2] + ', "quantization_config": {"quant_method": "gptq", "bits": 4}}')
    with refused("base-quantized", "model.model"):
        load(tmp_path, {})


def test_variables_of_the_chat_template_reach_it(directory):
    sample = Sample(sample_id=0, origin="x:1", images=())
    texts = []
    for thinks in (True, False):
        options = TemplateOptions(chat={"enable_thinking": thinks})
        template = Template(directory, system="", user="Hi", any_chat=True, options=options)
        template.tokenizer.chat_template = "{{ messages[0].content }} {{ enable_thinking }}"
        texts.append(template.vocabulary.text(template.prompt_token_ids(sample)))
    assert texts == ["Hi True", "Hi False"]


def test_settings_of_the_processor_reach_it(tmp_path):
    make_checkpoint("qwen2_vl", tmp_path)
    small, large = (
        Template(tmp_path, system="", user="Hi", options=TemplateOptions(processor={"max_pixels": 28 * 28 * patches}))
        for patches in (4, 64)
    )
    assert small.images.growth(((200, 200),)) < large.images.growth(((200, 200),))
    arguments = _engine_arguments(load_digits("model.processor_kwargs={max_pixels: 784}"))
    assert arguments["mm_processor_kwargs"] == {"max_pixels": 784}
