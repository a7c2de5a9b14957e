"""Prompts as the chat template writes them, expanded as the real processor expands them, compared with the engine's."""

import json
import shutil
from itertools import chain
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st
from PIL import Image

from conformance.doubles.records import make_rollout
from conformance.doubles.refusals import refused
from rollmatch.model.template import Template, expand_placeholders
from rollmatch.records import Sample

FIXTURES = Path(__file__).parents[3] / "fixtures"
DIGITS = FIXTURES / "models/digits"
SYSTEM, USER = "Answer with one JSON object on one line.", "List every digit."
IMAGE_TEXT = "<|vision_start|><|image_pad|><|vision_end|>"
IMAGE_ID = 99


@pytest.fixture(scope="module")
def template():
    return Template(DIGITS, system=SYSTEM, user=USER)


@pytest.fixture(scope="module")
def images(tmp_path_factory):
    """A real scene of 128 x 128, and a wide and a small grey image."""
    folder = tmp_path_factory.mktemp("images")
    for name, size in (("wide", (224, 96)), ("small", (40, 70))):
        Image.effect_noise(size, 40).save(folder / f"{name}.png")
    return str(FIXTURES / "digits/train/00000.png"), str(folder / "wide.png"), str(folder / "small.png")


def sample_of(*images):
    return Sample(sample_id=0, origin="train.jsonl:7", images=images, objects=(), width=128, height=128)


@pytest.mark.parametrize("system", [SYSTEM, ""])
def test_a_prompt_is_system_images_question_and_the_opening_of_the_answer(images, system):
    template = Template(DIGITS, system=system, user=USER)
    ids = template.prompt_token_ids(sample_of(*images[:2]))
    head = f"<|im_start|>system\n{system}<|im_end|>\n" if system else ""
    question = f"<|im_start|>user\n{IMAGE_TEXT}{IMAGE_TEXT}{USER}<|im_end|>\n<|im_start|>assistant\n"
    assert template.vocabulary.decode(ids).decode() == head + question
    assert ids.count(template.image_id) == 2
    placeholders = {template.vocabulary.encode(text)[0] for text in ("<|image_pad|>", "<|video_pad|>")}
    assert template.banned_ids == tuple(sorted(placeholders)), "a response may hold everything else"


def test_images_come_in_three_channels_and_one_of_128_pixels_takes_16_placeholders(template, images):
    assert [image.mode for image in template.load_images(sample_of(*images))] == ["RGB"] * 3
    sample = sample_of(images[0])
    expanded = template.expand(template.prompt_token_ids(sample), template.image_features(sample))
    assert expanded.count(template.image_id) == (128 // 32) ** 2


@pytest.mark.parametrize("lost", ["preprocessor_config.json", "text only"])
def test_a_directory_that_does_not_say_how_images_are_prepared_is_refused(tmp_path, lost):
    folder = tmp_path / "model"
    ignored = shutil.ignore_patterns("*.safetensors", "*preprocessor*" if lost == "text only" else lost)
    shutil.copytree(DIGITS, folder, ignore=ignored)
    if lost == "text only":
        (folder / "config.json").write_text(json.dumps({"model_type": "qwen3"}))
    with refused("images-not-supported", "model.model"):
        Template(folder, system="", user=USER)
    for name in ("config.json", "preprocessor_config.json", "video_preprocessor_config.json"):
        shutil.copy(DIGITS / name, folder)
    assert Template(folder, system="", user=USER).images is not None


def test_rows_are_padded_by_the_pad_token_or_where_there_is_none_by_the_stop_token(template, tmp_path):
    assert template.vocabulary.piece(template.pad_id) == b"<|endoftext|>"
    shutil.copytree(DIGITS, tmp_path, ignore=shutil.ignore_patterns("*.safetensors"), dirs_exist_ok=True)
    described = json.loads((tmp_path / "tokenizer_config.json").read_text())
    del described["pad_token"]
    (tmp_path / "tokenizer_config.json").write_text(json.dumps(described))
    assert Template(tmp_path, system="", user=USER).pad_id == template.vocabulary.stop_id


def check(template, learner, engine):
    template.check_alignment(sample_of("a.png"), learner, make_rollout((), prompt_token_ids=tuple(engine)))


@pytest.mark.scenario(
    "rollout-backends/one-differing-id-stops-the-run",
    "rollout-backends/a-shorter-engine-prompt-stops-the-run",
    "rollout-backends/equal-prompts-are-accepted",
    clauses=["rollout-backends/learner-and-engine-see-the-same-prompt#1,2,3"],
)
@pytest.mark.parametrize(
    ("learner", "engine", "place", "ids", "cause"),
    [
        ((1, 2, 3), (1, 5, 3), 1, "learner 2, engine 5", "chat template or the tokenizer"),
        ((1, 2, 3), (1, 2, 4), 2, "learner 3, engine 4", "chat template or the tokenizer"),
        ((1, 2), (1, 2, 3), 2, "learner None, engine 3", "chat template or the tokenizer"),
        ((1, 2, 3), (1, 2), 2, "learner 3, engine None", "chat template or the tokenizer"),
        ((1, "image", "image", 8), (1, "image", 8), 2, "learner {image}, engine 8", "resize images differently"),
        ((1, "image", 8), (1, "image", "image", 8), 2, "learner 8, engine {image}", "resize images differently"),
        ((1, 6, 7, 1, 8), (1, 8), 1, "learner 6, engine 8", "system message is missing"),
        ((1, 8), (1, 6, 7, 1, 8), 1, "learner 8, engine 6", "system message is missing"),
        ((4, 8), (5, 8), 0, "learner 4, engine 5", "system message is missing"),
    ],
)
def test_another_prompt_is_refused_by_its_first_difference(template, learner, engine, place, ids, cause):
    learner, engine = (
        tuple(template.image_id if each == "image" else each for each in side) for side in (learner, engine)
    )
    with refused(
        "prompt-mismatch", "train.jsonl:7", problem=f"position {place}: {ids.format(image=template.image_id)} "
    ) as caught:
        check(template, learner, engine)
    assert f"(lengths {len(learner)} and {len(engine)})" in caught.value.problem
    check(template, learner, learner)
    check(template, list(engine), engine)


def test_a_prompt_that_spells_a_placeholder_is_refused(images):
    template = Template(DIGITS, system=SYSTEM, user="What is <|image_pad|>?")
    sample = sample_of(images[0])
    with refused("placeholders-misfit", "custom.prompts", problem="2 image placeholders for 1 images"):
        template.expand(template.prompt_token_ids(sample), template.image_features(sample))


@pytest.mark.parametrize("counts", [[], [1], [1, 2, 3]])
def test_placeholders_and_images_are_as_many(counts):
    with refused("placeholders-misfit", "custom.prompts"):
        expand_placeholders([5, IMAGE_ID, IMAGE_ID], [(IMAGE_ID,) * n for n in counts], placeholder_id=IMAGE_ID)
    expansions = [(IMAGE_ID,), (1, IMAGE_ID, 2)]
    expanded = expand_placeholders([5, IMAGE_ID, IMAGE_ID], expansions, placeholder_id=IMAGE_ID)
    assert expanded == (5, IMAGE_ID, 1, IMAGE_ID, 2)


WORDS = st.lists(st.integers(0, 9), max_size=4)


@given(st.lists(st.tuples(WORDS, st.integers(0, 5)), max_size=5), WORDS)
def test_each_placeholder_is_repeated_in_place_and_nothing_else_moves(parts, end):
    """A prompt is words and a placeholder, again and again, then words; any of the words may be none."""
    prompt = [*chain.from_iterable([*words, IMAGE_ID] for words, _ in parts), *end]
    expected = (*chain.from_iterable([*words, *[IMAGE_ID] * count] for words, count in parts), *end)
    expansions = [(IMAGE_ID,) * count for _, count in parts]
    assert expand_placeholders(prompt, expansions, placeholder_id=IMAGE_ID) == expected


def damage(path):
    """Bytes of the middle of a JPEG or PNG are lost: header and end are there."""
    raw = path.read_bytes()
    path.write_bytes(raw[: len(raw) // 2] + raw[len(raw) // 2 + 500 :])


@pytest.mark.scenario(clauses=["samples/bad-records-stop-a-run-before-training#6"])
def test_whatever_fails_for_a_sample_names_its_line(template, tmp_path):
    Image.effect_noise((128, 128), 50).save(tmp_path / "damaged.png")
    damage(tmp_path / "damaged.png")
    Image.new("RGB", (2048, 9)).save(tmp_path / "flat.png")
    damaged, flat = (sample_of(str(tmp_path / name)) for name in ("damaged.png", "flat.png"))
    for call, code in (
        (lambda: template.load_images(damaged), "image-unreadable"),
        (lambda: template.image_features(damaged), "image-unreadable"),
        (lambda: template.check_expansion(damaged), "image-unreadable"),
        (lambda: template.preparation.collect([damaged]), "image-unreadable"),
        (lambda: template.prompt_length(flat), "image-not-processed"),
        (lambda: template.image_size(flat), "image-not-processed"),
        (lambda: template.image_features(flat), "image-not-processed"),
    ):
        with refused(code, "train.jsonl:7"):
            call()


@pytest.mark.scenario(clauses=["samples/bad-records-stop-a-run-before-training#6"])
@pytest.mark.parametrize(
    "body", ["{{ raise_exception('Only one turn.') }}", "{{ messages[0].no.such }}", "{{ 1 / 0 }}"]
)
def test_a_chat_template_that_fails_names_the_line(template, monkeypatch, body):
    monkeypatch.setattr(template.tokenizer, "chat_template", body)
    with refused("prompt-not-rendered", "train.jsonl:7"):
        template.prompt_token_ids(sample_of())
