"""Samples that bring their own question: what they become, and what is refused."""

import pytest

from rollmatch.data import BadSamples, load_samples


def loaded(path, *, system="Be brief."):
    return load_samples(path, chat_system=system)


def problems(path):
    with pytest.raises(BadSamples) as caught:
        loaded(path)
    return [(error.code, int(error.key.rpartition(":")[2])) for error in caught.value.errors]


def test_a_bare_prompt_follows_the_configured_system_message(write):
    path = write({"prompt": "What is 2 + 2?", "metadata": {"answer": "4"}})
    (sample,) = loaded(path)
    assert sample.messages == (("system", "Be brief."), ("user", "What is 2 + 2?"))
    assert (sample.images, sample.objects, sample.metadata) == ((), (), {"answer": "4"})
    assert (sample.width, sample.height) == (0, 0)
    assert loaded(path, system="")[0].messages == (("user", "What is 2 + 2?"),)


def test_messages_are_taken_as_they_are(write):
    turns = [("user", "Two?"), ("assistant", "2"), ("user", "And one more?")]
    (sample,) = loaded(write({"messages": [{"role": role, "content": text} for role, text in turns]}))
    assert sample.messages == tuple(turns)


def test_images_stand_beside_a_question(write, tmp_path):
    (sample,) = loaded(write({"prompt": "What is in <image>?", "images": ["a.png"]}))
    assert sample.images == (str(tmp_path / "a.png"),)


def test_records_with_objects_may_stand_beside_them(write, record):
    first, second = loaded(write(record, {"prompt": "Well?"}))
    assert (len(first.objects), first.messages) == (1, ())
    assert (len(second.objects), len(second.messages)) == (0, 2)


def test_without_leave_they_are_refused_as_ever(write):
    path = write({"prompt": "Well?"})
    with pytest.raises(BadSamples) as caught:
        load_samples(path)
    assert {error.code for error in caught.value.errors} == {"field-missing", "field-unknown"}
    assert loaded(path)


USER = {"role": "user", "content": "Well?"}


@pytest.mark.parametrize(
    ("bad", "code", "good"),
    [
        ({"prompt": ""}, "field-type", {"prompt": "a"}),
        ({"prompt": ["a"]}, "field-type", {"prompt": "a"}),
        ({"prompt": "a", "messages": [USER]}, "two-questions", {"messages": [USER]}),
        ({"prompt": "a", "answer": "b"}, "field-unknown", {"prompt": "a", "metadata": {"answer": "b"}}),
        ({"prompt": "a", "metadata": []}, "field-type", {"prompt": "a", "metadata": {}}),
        ({"prompt": "a", "width": 0}, "field-type", {"prompt": "a", "width": 8}),
        ({"prompt": "a", "images": "a.png"}, "field-type", {"prompt": "a", "images": ["a.png"]}),
        ({"prompt": "a", "images": ["b.png"]}, "image-missing", {"prompt": "a", "images": ["a.png"]}),
        (
            {"prompt": "a", "images": ["a.png"], "width": 9, "height": 6},
            "image-size-mismatch",
            {"prompt": "a", "images": ["a.png"], "width": 8, "height": 6},
        ),
        (
            {"prompt": "<image> <image>", "images": ["a.png"]},
            "tags-misfit",
            {"prompt": "<image> <image>", "images": ["a.png", "a.png"]},
        ),
        ({"messages": []}, "field-type", {"messages": [USER]}),
        ({"messages": ["Well?"]}, "chat-malformed", {"messages": [USER]}),
        ({"messages": [{"role": "user"}]}, "chat-malformed", {"messages": [USER]}),
        ({"messages": [USER | {"name": "x"}]}, "chat-malformed", {"messages": [USER]}),
        ({"messages": [USER | {"role": "me"}]}, "chat-malformed", {"messages": [USER]}),
        ({"messages": [USER | {"content": [{"type": "text", "text": "a"}]}]}, "chat-malformed", {"messages": [USER]}),
        ({"messages": [USER, {"role": "assistant", "content": "b"}]}, "chat-malformed", {"messages": [USER]}),
        (
            {"messages": [{"role": "system", "content": "b"}]},
            "chat-malformed",
            {"messages": [{"role": "system", "content": "b"}, USER]},
        ),
    ],
)
def test_a_bad_question_is_refused_and_a_repaired_one_taken(write, bad, code, good):
    assert problems(write(USER_LINE, bad)) == [(code, 2)]
    assert len(loaded(write(USER_LINE, good))) == 2


USER_LINE = {"prompt": "first"}
