"""Records that bring their own question, as messages or as a bare prompt; images and metadata may stand beside it."""

from collections.abc import Iterator, Mapping
from difflib import get_close_matches
from typing import Any

from rollmatch.data.content import IMAGE_TAG
from rollmatch.data.fields import check_images, check_metadata, check_names, check_prompting, check_sides
from rollmatch.data.place import Place, image_path, wrong_type
from rollmatch.errors import DataError
from rollmatch.records import Sample

ROLES = ("system", "user", "assistant", "tool")
FURTHER = ("tool_calls", "tool_call_id", "name", "reasoning_content")
"""What a message may hold beside role and content, for the chat template."""
OPTIONAL = ("images", "width", "height", "metadata", "system", "tools")
NO_COLUMNS = ("messages", "prompt", "objects", *OPTIONAL)
CLOSE = 0.85
"""Likeness of two names, as difflib has it, from which one counts as the other mistyped: tool and tools, but not weight
and height."""

ANSWERS = ("answer", "response", "output", "target", "solution", "label")
"""What others call a completion."""


def is_chat(record: object) -> bool:
    """Whether a record brings its own question."""
    return isinstance(record, dict) and ("messages" in record or "prompt" in record)


def with_completion(record: Any) -> Any:
    """A record of prompt and completion, each a text or a chat, as one of messages; any other record as it is.

    >>> with_completion({"prompt": "2 + 2?", "completion": "4"})
    {'messages': [{'role': 'user', 'content': '2 + 2?'}, {'role': 'assistant', 'content': '4'}]}
    """
    if not isinstance(record, dict) or not {"prompt", "completion"} <= set(record) or "messages" in record:
        return record
    rest = {name: value for name, value in record.items() if name not in ("prompt", "completion")}
    sides = ("user", record["prompt"]), ("assistant", record["completion"])
    chats = [value if isinstance(value, list) else [{"role": role, "content": value}] for role, value in sides]
    return rest | {"messages": [*chats[0], *chats[1]]}


def with_columns(record: Any) -> Any:
    """A record with its own question whose unknown fields are metadata; a chat below ``prompt`` is ``messages``.

    A name that a field's was probably meant to be stays, to be refused.

    >>> with_columns({"prompt": "1 + 1?", "answer": "2", "metadata": {"level": 3}})
    {'prompt': '1 + 1?', 'metadata': {'level': 3, 'answer': '2'}}
    >>> with_columns({"prompt": [{"role": "user", "content": "1 + 1?"}], "image": "a.png"})
    {'image': 'a.png', 'messages': [{'role': 'user', 'content': '1 + 1?'}]}
    """
    if not isinstance(record, dict) or not is_chat(record):
        return record
    columns = {
        name: value
        for name, value in record.items()
        if name not in NO_COLUMNS and not get_close_matches(name, NO_COLUMNS, cutoff=CLOSE)
    }
    made = {name: value for name, value in record.items() if name not in columns}
    prompt = record.get("prompt")
    if record.get("messages") is None and isinstance(prompt, list) and all(isinstance(one, dict) for one in prompt):
        made = {name: value for name, value in made.items() if name != "prompt"} | {"messages": prompt}
    given = record.get("metadata") or {}
    return made | {"metadata": given | columns} if columns and isinstance(given, dict) else made


def check_chat(record: Mapping[str, object], place: Place) -> Iterator[DataError]:
    """Broken rules of one record."""
    key = place.key
    yield from check_names(record, ("messages", "prompt", *(("completion",) if place.answered else ()), *OPTIONAL), key)
    yield from check_question(record, key, answered=place.answered)
    yield from check_sides(record, key)
    yield from check_images(record, place, at_least_one=False)
    yield from check_metadata(record, key)


def make_chat_sample(record: Mapping[str, Any], place: Place) -> Sample:
    """A sample from a record that breaks no rule."""
    answer = None
    if place.answered:
        *asked, answer = record["messages"]
        system = [{"role": "system", "content": place.system}] if place.system and asked[0]["role"] != "system" else []
        record = {**record, "messages": [*system, *asked]}
    return Sample(
        sample_id=place.sample_id,
        origin=place.key,
        images=tuple(image_path(image, place.image_root) for image in record.get("images", ())),
        width=record.get("width", 0),
        height=record.get("height", 0),
        has_text_prompt="prompt" in record,
        messages=messages_of(record, place),
        message_fields=_fields_of(record),
        tools=tuple(record.get("tools", ())),
        answer=answer,
        metadata=record.get("metadata", {}),
    )


def messages_of(record: Mapping[str, Any], place: Place) -> tuple[tuple[str, str], ...]:
    """(role, text) of a record's own chat; a bare prompt follows its system message, or the configured one."""
    if "prompt" not in record:
        return tuple((message["role"], message.get("content") or "") for message in record["messages"])
    system = record.get("system", place.system)
    return (*((("system", system),) if system else ()), ("user", record["prompt"]))


def _fields_of(record: Mapping[str, Any]) -> tuple[Mapping[str, Any], ...]:
    """Further fields of each message; empty where none has any."""
    fields = tuple(
        {name: message[name] for name in FURTHER if name in message} for message in record.get("messages", ())
    )
    return fields if any(fields) else ()


def tagged_messages(sample: Sample) -> tuple[tuple[str, str], ...]:
    """(role, text) of a sample's own chat, with a tag for each image: before the first question where none is tagged.

    >>> sample = Sample(sample_id=0, origin="x:1", images=("a.png",), messages=(("user", "Is it red?"),))
    >>> tagged_messages(sample)
    (('user', '<image>Is it red?'),)
    """
    if any(IMAGE_TAG in text for _, text in sample.messages):
        return sample.messages
    first = next(place for place, (role, _) in enumerate(sample.messages) if role == "user")
    role, text = sample.messages[first]
    question = (role, IMAGE_TAG * len(sample.images) + text)
    return (*sample.messages[:first], question, *sample.messages[first + 1 :])


def check_question(record: Mapping[str, object], key: str, *, answered: bool = False) -> Iterator[DataError]:
    """Messages or prompt, with system message and tools; ``answered``: messages that end with the answer."""
    if answered and "messages" not in record:
        metadata = record.get("metadata")  # of further columns
        given = metadata if isinstance(metadata, dict) else {}
        column = next((name for name in ANSWERS if name in given), None)
        whole = "Write messages that end with the assistant's, or prompt and completion."
        remedy = whole if column is None else f"Rename {column} to completion."
        yield DataError("there is no answer", code="chat-malformed", key=key, remedy=remedy)
        return
    if "messages" in record and "prompt" in record:
        yield DataError("there are messages and a prompt", code="two-questions", key=key, remedy="Keep one of them.")
    yield from check_prompting(record, key)
    if "prompt" in record and not (isinstance(record["prompt"], str) and record["prompt"]):
        yield wrong_type("prompt", "a text that is not empty", record["prompt"], key)
        return
    messages = record.get("messages", [{"role": "user", "content": record.get("prompt")}])
    if not isinstance(messages, list) or not messages:
        yield wrong_type("messages", "a list of one or more messages", messages, key)
        return
    found = [error for index, message in enumerate(messages) for error in _check_message(message, index, key)]
    yield from found
    if found:
        return
    if answered and messages[-1]["role"] != "assistant":
        remedy = "Let the assistant's message be the last one: it is what is taught."
        yield DataError(
            f"the last message is of role {messages[-1]['role']}", code="chat-malformed", key=key, remedy=remedy
        )
    if not answered and messages[-1]["role"] == "assistant":
        remedy = "Remove it, or put it below metadata: the policy writes the answer."
        yield DataError("the last message is the assistant's", code="chat-malformed", key=key, remedy=remedy)
    if all(message["role"] != "user" for message in messages):
        yield DataError("no message is the user's", code="chat-malformed", key=key, remedy="Add a message of the user.")
    yield from _check_tags(record, "".join(message.get("content") or "" for message in messages), key)


def _check_message(message: object, index: int, key: str) -> Iterator[DataError]:
    remedy = 'Write {"role": "user", "content": "..."}.'
    if not isinstance(message, dict) or not {"role"} <= set(message) <= {"role", "content", *FURTHER}:
        problem = f"messages[{index}] is not a mapping of role and content, and at most {', '.join(FURTHER)}"
        yield DataError(problem, code="chat-malformed", key=key, remedy=remedy)
        return
    if message["role"] not in ROLES:
        problem = f"messages[{index}].role is {message['role']!r}, none of {', '.join(ROLES)}"
        yield DataError(problem, code="chat-malformed", key=key, remedy=remedy)
    if not isinstance(message.get("content") if "tool_calls" not in message else message.get("content") or "", str):
        problem = f"messages[{index}].content is no text"
        yield DataError(
            problem,
            code="chat-malformed",
            key=key,
            remedy=f"Name pictures in images, and mark their places by {IMAGE_TAG}.",
        )


def _check_tags(record: Mapping[str, object], text: str, key: str) -> Iterator[DataError]:
    images, num_tags = record.get("images", []), text.count(IMAGE_TAG)
    if isinstance(images, list) and images and num_tags not in (0, len(images)):
        problem = f"{num_tags} tags {IMAGE_TAG} for {len(images)} images"
        yield DataError(
            problem,
            code="tags-misfit",
            key=key,
            remedy="Tag each image once, or none: then they stand before the question.",
        )
