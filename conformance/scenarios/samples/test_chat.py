"""Samples that bring their own question: what they become, and what is refused."""

import pytest

from conformance.doubles.refusals import refused
from rollmatch.data import BadSamples, SystemMessages, load_samples


def loaded(path, *, system="Be brief."):
    return load_samples(path, systems=SystemMessages(chats=system))


def test_a_bare_prompt_follows_the_configured_system_message(write):
    path = write({"prompt": "What is 2 + 2?", "metadata": {"answer": "4"}})
    (sample,) = loaded(path)
    assert sample.messages == (("system", "Be brief."), ("user", "What is 2 + 2?"))
    assert (sample.images, sample.objects, sample.metadata) == ((), (), {"answer": "4"})
    assert (sample.width, sample.height) == (0, 0)
    assert loaded(path, system="")[0].messages == (("user", "What is 2 + 2?"),)
    with refused("field-missing", remedy="if the answers are text, set rollout.answer_format to text"):
        load_samples(path)  # without leave


COLUMNS = "columns: {prompt: question}"


@pytest.mark.parametrize(
    ("line", "part"),
    [
        ({"question": "1 + 1?", "answer": "2"}, "Rename question to prompt"),
        ({"question": "1 + 1?", "answer": "2"}, COLUMNS),
        ({"promt": "1 + 1?", "answer": "2"}, "Rename promt to prompt."),
        ({"message": [{"role": "user", "content": "1?"}]}, "Rename message to messages."),
        ({"conversations": [{"from": "human", "value": "1?"}]}, "Write conversations as messages"),
    ],
)
def test_a_question_by_another_name_is_named_and_no_image_is_missed(write, line, part):
    with pytest.raises(BadSamples) as caught:
        loaded(write(line))
    [error] = caught.value.errors
    assert error.code == "field-missing"
    assert part in error.remedy


def test_messages_images_and_records_with_objects_stand_beside_each_other(write, record, tmp_path):
    turns = [("user", "Two?"), ("assistant", "2"), ("user", "And one more?")]
    chat = {"messages": [{"role": role, "content": text} for role, text in turns]}
    one, two, three = loaded(write(chat, {"prompt": "What is in <image>?", "images": ["a.png"]}, record))
    assert one.messages == tuple(turns)
    assert (two.images, len(two.messages), two.objects) == ((str(tmp_path / "a.png"),), 2, ())
    assert (len(three.objects), three.messages) == (1, ())


def test_lists_of_content_become_texts_with_tags_and_a_record_has_its_own_system_message_and_tools(write, tmp_path):
    tools, image = [{"type": "function", "function": {"name": "f"}}], str(tmp_path / "a.png")
    kinds = (PICTURED, {**PICTURED, "content": [{"type": "image", "image": f"file://{image}"}]})
    listed, named = loaded(write(*({"messages": [kind], "system": "Look.", "tools": tools} for kind in kinds)))
    assert listed.messages == (("system", "Look."), ("user", "Is <image> red?"))
    assert named.messages == (("system", "Look."), ("user", "<image>"))
    assert listed.images == named.images == (image,)
    assert listed.tools == tuple(tools)
    (asked,) = loaded(write({"prompt": "Well?", "system": "Look."}))
    assert asked.messages == (("system", "Look."), ("user", "Well?"))


def test_an_empty_system_message_of_a_record_is_none(write, record):
    """Also where one is configured."""
    turn = {"messages": [{"role": "user", "content": "Well?"}]}
    for sample in loaded(write(*(one | {"system": ""} for one in ({"prompt": "Well?"}, turn)))):
        assert sample.messages == (("user", "Well?"),)
    (sample,) = load_samples(write(record | turn | {"system": ""}), systems=SystemMessages(objects="Be brief."))
    assert sample.messages == (("user", "Well?"),)


@pytest.mark.scenario(
    "samples/a-sample-of-rollout-matching-has-its-own-question",
    clauses=["samples/a-sample-is-one-json-object-on-one-line#8"],
)
def test_records_with_objects_have_their_own_question(write, record):
    own = record | {"messages": [{"role": "user", "content": "Where is it?"}]}
    bare = {"prompt": "List them.", "objects": record["objects"]}
    path = write(own, bare, record | {"system": "Look."}, record)
    first, second, third, fourth = load_samples(path, systems=SystemMessages(objects="Be brief."))
    assert (first.messages, len(first.images), len(first.objects)) == ((("user", "Where is it?"),), 1, 1)
    assert second.messages == (("system", "Be brief."), ("user", "List them."))
    assert (second.images, second.width, len(second.objects)) == ((), 0, 1)
    assert (third.messages, third.system, fourth.system) == ((), "Look.", None)


@pytest.mark.scenario(clauses=["samples/a-sample-is-one-json-object-on-one-line#10"])
def test_columns_beside_a_question_are_metadata(write):
    chat = [{"role": "user", "content": "2 + 2?"}]
    path = write(
        {"prompt": "2 + 2?", "answer": "4", "level": None, "metadata": {"answer": "5", "source": "b"}},
        {"prompt": chat, "solution": ["4"], "messages": None},
        {"messages": chat, "weight": 0.5},
    )
    samples = loaded(path)
    assert [sample.messages[-1] for sample in samples] == [("user", "2 + 2?")] * 3
    metadata = [{"answer": "4", "source": "b", "level": None}, {"solution": ["4"]}, {"weight": 0.5}]
    assert [sample.metadata for sample in samples] == metadata


USER = {"role": "user", "content": "Well?"}
FIRST = {"prompt": "first"}
SIZED = {"prompt": "a", "images": ["a.png"], "height": 6}
TAGGED = {"prompt": "<image> <image>", "images": ["a.png"]}
SYSTEM = {"role": "system", "content": "b"}
PICTURE = {"type": "image_url", "image_url": {"url": "a.png"}}
PICTURED = {"role": "user", "content": [{"type": "text", "text": "Is "}, PICTURE, {"type": "text", "text": " red?"}]}
UNUSABLE = ("a", {"type": "text"}, {"type": "image_url", "image_url": {"url": "https://x/a.png"}}, {"type": "audio"})


@pytest.mark.parametrize(
    ("bad", "code", "good"),
    [
        ({"prompt": ""}, "field-type", {"prompt": "a"}),
        ({"prompt": ["a"]}, "field-type", {"prompt": "a"}),
        ({"prompt": "a", "messages": [USER]}, "two-questions", {"messages": [USER]}),
        ({"prompt": "a", "image": "a.png"}, "field-unknown", {"prompt": "a", "images": ["a.png"]}),
        ({"prompt": "a", "objects": []}, "field-unknown", {"prompt": "a", "object_ids": [1]}),
        ({"prompt": "a", "answer": "b", "metadata": 3}, "field-type", {"prompt": "a", "answer": "b", "metadata": None}),
        ({"prompt": "a", "metadata": []}, "field-type", {"prompt": "a", "metadata": {}}),
        ({"prompt": "a", "width": 0}, "field-type", {"prompt": "a", "width": 8}),
        ({"prompt": "a", "images": "a.png"}, "field-type", {"prompt": "a", "images": ["a.png"]}),
        ({"prompt": "a", "images": ["b.png"]}, "image-missing", {"prompt": "a", "images": ["a.png"]}),
        (SIZED | {"width": 9}, "image-size-mismatch", SIZED | {"width": 8}),
        (TAGGED, "tags-misfit", TAGGED | {"images": ["a.png", "a.png"]}),
        ({"messages": []}, "field-type", {"messages": [USER]}),
        ({"messages": ["Well?"]}, "chat-malformed", {"messages": [USER]}),
        ({"messages": [{"role": "user"}]}, "chat-malformed", {"messages": [USER]}),
        ({"messages": [USER | {"mood": "x"}]}, "chat-malformed", {"messages": [USER]}),
        ({"messages": [USER | {"role": "me"}]}, "chat-malformed", {"messages": [USER]}),
        ({"messages": [USER | {"content": 3}]}, "chat-malformed", {"messages": [USER]}),
        *[({"messages": [USER | {"content": [part]}]}, "content-unusable", {"messages": [USER]}) for part in UNUSABLE],
        ({"messages": [PICTURED], "images": ["a.png"]}, "content-unusable", {"messages": [PICTURED]}),
        ({"messages": [SYSTEM, USER], "system": "b"}, "content-unusable", {"messages": [USER], "system": "b"}),
        ({"prompt": "a", "system": 1}, "field-type", {"prompt": "a", "system": "b"}),
        ({"prompt": "a", "tools": ["f"]}, "field-type", {"prompt": "a", "tools": [{"name": "f"}]}),
        ({"messages": [USER, {"role": "assistant", "content": "b"}]}, "chat-malformed", {"messages": [USER]}),
        ({"messages": [SYSTEM]}, "chat-malformed", {"messages": [SYSTEM, USER]}),
    ],
)
def test_a_bad_question_is_refused_and_a_repaired_one_taken(write, bad, code, good):
    path = write(FIRST, bad)
    with refused(code, f"{path}:2"):
        loaded(path)
    assert len(loaded(write(FIRST, good))) == 2
