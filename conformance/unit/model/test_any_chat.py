"""Chat models of any kind: without images, without coordinate tokens, with a stop token of their own."""

import json
import shutil
from dataclasses import replace
from pathlib import Path

import pytest

from conformance.doubles.refusals import refused
from rollmatch.config import load_config
from rollmatch.errors import ErrorList
from rollmatch.model.images import NO_IMAGES
from rollmatch.model.template import Template, TemplateOptions
from rollmatch.model.vocabulary import Vocabulary
from rollmatch.records import Sample
from rollmatch.run.plugins import with_first_observations
from rollmatch.run.vineppo_objective import make_world

MODELS = Path(__file__).parents[3] / "fixtures/models"
TEXT, DIGITS = MODELS / "arithmetic", MODELS / "digits"
ASKED = Sample(sample_id=0, origin="x:1", images=(), messages=(("system", "Be brief."), ("user", "2+2?")))


@pytest.fixture(scope="module")
def template():
    return Template(TEXT, system="", user="unused", any_chat=True)


def test_a_text_model_needs_no_coordinates_and_takes_no_images(template):
    with refused("coord-tokens-missing"):
        Template(TEXT, system="", user="unused", options=TemplateOptions(images=False))
    with refused("images-not-supported", "model.model"):
        Template(TEXT, system="", user="unused", options=TemplateOptions(coordinates=False))
    with refused("coord-tokens-missing"):
        Vocabulary.load(TEXT)
    assert template.vocabulary.coord_ids == ()
    prompt = template.prompt_token_ids(ASKED)
    messages = [{"role": "system", "content": "Be brief."}, {"role": "user", "content": "2+2?"}]
    written = template.tokenizer.apply_chat_template(messages, tokenize=False, add_generation_prompt=True)
    assert template.vocabulary.decode(prompt).decode() == written
    assert template.image_features(ASKED) is NO_IMAGES
    assert template.expand(prompt, NO_IMAGES) == prompt
    assert template.prompt_length(ASKED) == len(prompt)
    with refused("images-not-supported", "x:7"):
        template.image_features(replace(ASKED, origin="x:7", images=("a.png",)))


def test_a_samples_system_message_and_tools_reach_the_chat_template():
    template = Template(TEXT, system="ours", user="2+2?", any_chat=True)
    content = "{{ m.content if m.content is string else m.content[-1].text }}"
    template.tokenizer.chat_template = f"{{{{ tools }}}}{{% for m in messages %}}|{content}{{% endfor %}}"
    configured = replace(ASKED, messages=())
    cases = (({}, "|ours|2+2?"), ({"system": "own"}, "|own|2+2?"), ({"system": ""}, "|2+2?"))
    written = [template.vocabulary.text(template.prompt_token_ids(replace(configured, **own))) for own, _ in cases]
    assert [text.removeprefix("None") for text in written] == [text for _, text in cases]
    tooled = template.prompt_token_ids(replace(ASKED, tools=({"name": "f"},)))
    assert template.vocabulary.text(tooled) == "[{'name': 'f'}]|Be brief.|2+2?"


def test_a_vision_model_takes_samples_with_and_without_images():
    template = Template(DIGITS, system="", user="unused", any_chat=True)
    picture = str(MODELS.parent / "digits/train/00000.png")
    messages = (("user", "Is <image> red?"),)
    pictured = Sample(sample_id=0, origin="x:1", images=(picture,), messages=messages)
    text = template.vocabulary.decode(template.prompt_token_ids(pictured)).decode()
    assert "Is <|vision_start|><|image_pad|><|vision_end|> red?" in text
    assert len(template.image_features(pictured).expansions) == 1
    assert template.image_features(ASKED) is NO_IMAGES
    assert len(template.vocabulary.coord_ids) == 1000
    turns = (("system", "Be brief."), ("user", "Red?"), ("assistant", "No."), ("user", "Blue?"))
    untagged = template.messages(replace(pictured, messages=turns))
    kinds = [[part["type"] for part in message["content"]] for message in untagged]
    assert kinds == [["text"], ["image", "text"], ["text"], ["text"]], "before the first question"


def test_the_stop_token_is_the_models_own(tmp_path):
    folder = shutil.copytree(TEXT, tmp_path / "model")
    path = folder / "tokenizer.json"
    path.write_text(path.read_text().replace("<|im_end|>", "<|eot_id|>"))
    path = folder / "chat_template.jinja"
    path.write_text(path.read_text().replace("<|im_end|>", "<|eot_id|>"))
    (folder / "tokenizer_config.json").write_text(json.dumps({"eos_token": "<|eot_id|>"}))
    vocabulary = Vocabulary.load(folder, coordinates=False)
    assert vocabulary.stop_texts == ("<|eot_id|>",)


@pytest.mark.parametrize("name", ["arithmetic", "digits"])
@pytest.mark.parametrize("is_stopped", [True, False])
def test_a_reply_between_turns_is_what_the_chat_template_writes_there(name, is_stopped):
    template = Template(MODELS / name, system="", user="unused", any_chat=True)
    chat = [{"role": "user", "content": "2+2?"}, {"role": "assistant", "content": "5"}]
    chat.append({"role": "user", "content": "no"})
    whole = template.tokenizer.apply_chat_template(chat, tokenize=False, add_generation_prompt=True)
    asked = Sample(sample_id=0, origin="x:1", images=(), messages=(("user", "2+2?"),))
    turn = template.vocabulary.encode("5" + "<|im_end|>" * is_stopped)
    reply = template.reply_token_ids("no", is_stopped)
    assert template.vocabulary.decode((*template.prompt_token_ids(asked), *turn, *reply)).decode() == whole


def test_a_template_of_one_turn_is_refused(template):
    single = Template(TEXT, system="", user="unused", any_chat=True)
    single.tokenizer.chat_template = "{{ messages[0].content }}"
    with refused("turns-not-rendered", "model.model", remedy="text"):
        single.reply_token_ids("no", True)
    with refused("turns-not-rendered"):
        make_world(
            load_config(MODELS.parent / "tasks/treasures.yaml", ["custom.extra.environment.observations=chat"]), single
        )
    assert single.text_token_ids("no", True) == single.vocabulary.encode("no")
    assert template.reply_token_ids("no", True)


@pytest.mark.parametrize(("observations", "method"), [("chat", "reply_token_ids"), ("text", "text_token_ids")])
def test_observations_are_written_as_configured(template, observations, method):
    named = f"custom.extra.environment.observations={observations}"
    world = make_world(load_config(MODELS.parent / "tasks/treasures.yaml", [named]), template)
    assert world.reply("no", True) == getattr(template, method)("no", True)
    assert world.reply("no", True) is world.reply("no", True), "the same words come again and again"


@pytest.mark.parametrize(("system", "before"), [("Be brief.", [("system", "Be brief.")]), ("", [])])
def test_a_sample_without_messages_is_asked_the_configured_ones_and_shown_what_comes_first(system, before):
    prompts = [f"custom.prompts.system='{system}'", "custom.prompts.user=Go."]
    config = load_config(MODELS.parent / "tasks/treasures.yaml", prompts)
    played = replace(ASKED, messages=(), metadata={"start": 5, "near": 4, "far": 15})
    (shown,) = with_first_observations(config, [played])
    *first, (role, text) = shown.messages
    assert (first, role, text.startswith("Go.\n")) == (before, "user", True)
    with pytest.raises(ErrorList):
        with_first_observations(config, [played, replace(played, metadata={})])
