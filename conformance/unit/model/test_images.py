"""Prompts with images, expanded as each family's own processor expands them, and what goes to the model with them."""

import pytest
import torch
from PIL import Image

from conformance.doubles.architectures import ARCHITECTURES
from conformance.doubles.checkpoints import make_checkpoint
from conformance.doubles.records import segment_with
from conformance.doubles.refusals import refused
from rollmatch.config.training import ModelConfig, TunerConfig
from rollmatch.learn.batch import make_padded_inputs
from rollmatch.model.images import ImageProcessing
from rollmatch.model.policy import load_policy
from rollmatch.model.template import Template
from rollmatch.records import Sample

PICTURED = [name for name, known in ARCHITECTURES.items() if known.processor]
TOLERANCE = 1e-5


@pytest.fixture(scope="module", params=PICTURED)
def directory(request, tmp_path_factory):
    folder = tmp_path_factory.mktemp(request.param)
    make_checkpoint(request.param, folder)
    return folder


@pytest.fixture(scope="module")
def template(directory):
    return Template(directory, system="Look.", user="What is it?", any_chat=True)


@pytest.fixture(scope="module")
def pictures(tmp_path_factory):
    folder = tmp_path_factory.mktemp("pictures")
    paths = []
    for name, size in (("wide", (90, 50)), ("tall", (40, 70)), ("square", (64, 64))):
        Image.effect_noise(size, 40).convert("RGB").save(folder / f"{name}.png")
        paths.append(str(folder / f"{name}.png"))
    return tuple(paths)


def sample_of(*images):
    return Sample(sample_id=0, origin="train.jsonl:7", images=images)


def segment_of(template, sample):
    """Its prompt, and three tokens of a response."""
    prompt = template.expand(template.prompt_token_ids(sample), template.image_features(sample))
    target = (*template.vocabulary.encode("ab"), template.vocabulary.stop_id)
    return segment_with((*prompt, *target), sample=sample, prompt_len=len(prompt))


def test_the_size_at_which_the_model_gets_an_image_is_that_of_its_patches(template, pictures):
    sample, features = sample_of(pictures[0]), template.image_features(sample_of(pictures[0]))
    grid = features.tensors.get("image_grid_thw")
    if grid is None:
        with refused("image-size-unknown", "custom.extra.rollout_matching.answer_format"):
            template.image_size(sample)
        return
    width, height = template.image_size(sample)
    patch = template.processor.image_processor.patch_size
    assert grid[0].tolist() == [1, height // patch, width // patch]
    assert width > height


@pytest.mark.parametrize("chosen", [(0,), (1,), (0, 1), (2, 0, 1)])
def test_a_prompt_is_expanded_as_the_processor_expands_it(template, pictures, chosen):
    sample = sample_of(*(pictures[index] for index in chosen))
    template.check_expansion(sample)
    features = template.image_features(sample)
    expanded = template.expand(template.prompt_token_ids(sample), features)
    assert expanded.count(template.image_id) == sum(features.num_placeholders)
    assert len(features.num_placeholders) == len(chosen)
    grown = template.num_added_tokens(template.load_images(sample))
    assert len(expanded) == len(template.prompt_token_ids(sample)) + grown


def test_a_prompt_that_the_processor_tokenizes_otherwise_is_refused(template, pictures, monkeypatch):
    expand = template.expand
    monkeypatch.setattr(template, "expand", lambda ids, features: expand(ids, features)[1:])
    with refused("placeholders-misfit") as caught:
        template.check_expansion(sample_of(pictures[0]))
    assert type(template.processor).__name__ in caught.value.problem


def test_placeholders_are_the_only_tokens_that_rollouts_may_not_contain(template):
    words = {template.vocabulary.text([token_id]) for token_id in template.banned_ids}
    assert template.image_id in template.banned_ids
    assert len(words) <= 3
    assert not words & {"<|im_start|>", "<|im_end|>", "<|vision_start|>", "<img>"}


@torch.no_grad()
def test_the_learner_s_batch_gives_the_logits_of_the_processor_s_own(directory, template, pictures):
    """Images of several sizes, and a sample without any, in one padded batch."""
    model = load_policy(ModelConfig(model=str(directory), torch_dtype="float32"), TunerConfig()).eval()
    samples = [sample_of(pictures[0]), sample_of(), sample_of(pictures[1], pictures[2])]
    segments = [segment_of(template, sample) for sample in samples]
    images = [template.image_features(sample) for sample in samples]
    ours = model(**make_padded_inputs(segments, images=images, model=model, pad_id=template.pad_id)).logits
    for place, (sample, segment) in enumerate(zip(samples, segments, strict=True)):
        text = template.tokenizer.decode(template.prompt_token_ids(sample)) + "ab<|im_end|>"
        pictured = [template.load_images(sample)] if sample.images else None
        alone = template.processor(text=[text], images=pictured, return_tensors="pt", add_special_tokens=False)
        assert tuple(alone["input_ids"][0].tolist()) == segment.token_ids
        expected = model(**alone).logits[0]
        torch.testing.assert_close(ours[place, : segment.encoded_len], expected, rtol=0, atol=TOLERANCE)


def test_adapters_change_nothing_of_what_a_batch_holds(directory, template, pictures):
    sample = sample_of(pictures[0])
    segment, features = segment_of(template, sample), template.image_features(sample)
    tuner = TunerConfig(train_type="lora", lora_rank=2, target_regex=r".*\.q_proj")
    models = [load_policy(ModelConfig(model=str(directory)), tuner) for tuner in (TunerConfig(), tuner)]
    plain, adapted = (make_padded_inputs([segment], images=[features], model=model, pad_id=0) for model in models)
    assert plain.keys() == adapted.keys()
    for name, part in plain.items():
        assert torch.equal(part, adapted[name]) if isinstance(part, torch.Tensor) else part == adapted[name]


def test_a_processor_that_does_not_count_is_refused_by_its_name(template, directory):
    class Mute:
        tokenizer = template.tokenizer
        image_token_id = template.image_id
        image_token = "<|im_start|>"

        def __call__(self, **inputs):
            return {"input_ids": template.tokenizer([inputs["text"][0]], return_tensors="pt")["input_ids"]}

    with refused("images-not-countable", "model.model", problem="Mute"):
        ImageProcessing(Mute(), directory)
