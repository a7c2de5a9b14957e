"""Chat models of any kind: without images, without coordinate tokens, with a stop token of their own."""

import json
import shutil
from pathlib import Path

import pytest

from rollmatch.model.images import NO_IMAGES
from rollmatch.model.template import ImagesNotSupported, Template, TurnsNotRendered
from rollmatch.model.vocabulary import CoordTokensMissing, Vocabulary
from rollmatch.records import Sample

MODELS = Path(__file__).parents[2] / "fixtures/models"
TEXT, DIGITS = MODELS / "arithmetic", MODELS / "digits"
ASKED = Sample(sample_id=0, origin="x:1", images=(), messages=(("system", "Be brief."), ("user", "2+2?")))


@pytest.fixture(scope="module")
def template():
    return Template(TEXT, system="", user="unused", any_chat=True)


def test_a_text_model_needs_no_coordinates(template):
    with pytest.raises(CoordTokensMissing):
        Template(TEXT, system="", user="unused")
    assert template.vocabulary.coord_ids == ()


def test_a_samples_own_messages_are_what_the_chat_template_writes(template):
    text = template.vocabulary.text(template.prompt_token_ids(ASKED))
    messages = [{"role": "system", "content": "Be brief."}, {"role": "user", "content": "2+2?"}]
    assert text == template.tokenizer.apply_chat_template(messages, tokenize=False, add_generation_prompt=True)


def test_a_sample_without_images_has_no_features(template):
    assert template.image_features(ASKED) is NO_IMAGES
    prompt = template.prompt_token_ids(ASKED)
    assert template.expand(prompt, NO_IMAGES) == prompt


def test_images_for_a_text_model_are_refused(template):
    pictured = Sample(sample_id=0, origin="x:7", images=("a.png",), messages=ASKED.messages)
    with pytest.raises(ImagesNotSupported) as caught:
        template.image_features(pictured)
    assert (caught.value.code, caught.value.key) == ("images-not-supported", "x:7")


def test_a_vision_model_takes_samples_with_and_without_images():
    template = Template(DIGITS, system="", user="unused", any_chat=True)
    picture = str(MODELS.parent / "digits/train/00000.png")
    messages = (("user", "Is <image> red?"),)
    pictured = Sample(sample_id=0, origin="x:1", images=(picture,), messages=messages)
    text = template.vocabulary.text(template.prompt_token_ids(pictured))
    assert "Is <|vision_start|><|image_pad|><|vision_end|> red?" in text
    assert len(template.image_features(pictured).expansions) == 1
    assert template.image_features(ASKED) is NO_IMAGES
    assert len(template.vocabulary.coord_ids) == 1000


def test_untagged_images_stand_before_the_first_question():
    template = Template(DIGITS, system="", user="unused", any_chat=True)
    messages = (("system", "Be brief."), ("user", "Red?"), ("assistant", "No."), ("user", "Blue?"))
    pictured = Sample(sample_id=0, origin="x:1", images=("a.png",), messages=messages)
    content = [message["content"] for message in template.messages(pictured)]
    kinds = [[part["type"] for part in parts] for parts in content]
    assert kinds == [["text"], ["image", "text"], ["text"], ["text"]]


def test_the_stop_token_is_the_models_own(tmp_path):
    folder = shutil.copytree(TEXT, tmp_path / "model")
    path = folder / "tokenizer.json"
    path.write_text(path.read_text().replace("<|im_end|>", "<|eot_id|>"))
    (folder / "tokenizer_config.json").write_text(json.dumps({"eos_token": {"content": "<|eot_id|>"}}))
    vocabulary = Vocabulary.load(folder, coordinates=False)
    assert vocabulary.text([vocabulary.stop_id]) == "<|eot_id|>"


@pytest.mark.parametrize("name", ["arithmetic", "digits"])
@pytest.mark.parametrize("is_stopped", [True, False])
def test_a_reply_between_turns_is_what_the_chat_template_writes_there(name, is_stopped):
    template = Template(MODELS / name, system="", user="unused", any_chat=True)
    chat = [{"role": "user", "content": "2+2?"}, {"role": "assistant", "content": "5"}]
    chat.append({"role": "user", "content": "no"})
    whole = template.tokenizer.apply_chat_template(chat, tokenize=False, add_generation_prompt=True)
    asked = Sample(sample_id=0, origin="x:1", images=(), messages=(("user", "2+2?"),))
    turn = template.vocabulary.encode("5" + "<|im_end|>" * is_stopped)
    told = template.vocabulary.text((*template.prompt_token_ids(asked), *turn))
    told += template.vocabulary.text(template.reply_token_ids("no", is_stopped))
    assert told == whole


def test_a_template_of_one_turn_is_refused(template):
    single = Template(TEXT, system="", user="unused", any_chat=True)
    single.tokenizer.chat_template = "{{ messages[0].content }}"
    with pytest.raises(TurnsNotRendered) as caught:
        single.reply_token_ids("no", True)
    assert (caught.value.code, caught.value.key) == ("turns-not-rendered", "model.model")
    assert "text" in caught.value.remedy
    assert single.text_token_ids("no", True) == single.vocabulary.encode("no")
    assert template.reply_token_ids("no", True)
