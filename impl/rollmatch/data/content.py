"""Other ways to write a record: OpenAI's lists of content, a system message of its own, and null for what is missing.

Arrow fills the fields of a struct that a row does not have with null: rows of the package datasets, and what it writes
as JSON, have the fields of all rows.
"""

from collections.abc import Iterator, Mapping
from typing import Any

from rollmatch.errors import DataError

IMAGE_TAG = "<image>"
"""Where an image stands in a chat's text."""
_FILE = "file://"


def plain_record(record: Any, key: str) -> tuple[Any, list[DataError]]:
    """A record whose messages have texts with tags, whose images are listed, and whose system message is the first.

    Fields that are null are left out, except in metadata.

    >>> content = [{"type": "text", "text": "Is "}, {"type": "image_url", "image_url": {"url": "a.png"}}]
    >>> plain_record({"system": "Be brief.", "messages": [{"role": "user", "content": content}]}, "x:1")[0]["messages"]
    [{'role': 'system', 'content': 'Be brief.'}, {'role': 'user', 'content': 'Is <image>'}]
    """
    if not isinstance(record, dict):
        return record, []
    record = {
        name: value if name == "metadata" else without_nulls(value)
        for name, value in record.items()
        if value is not None
    }
    images: list[str] = []
    errors: list[DataError] = []
    messages = record.get("messages")
    if isinstance(messages, list):
        messages = [_plain_message(message, images, errors, key) for message in messages]
        record = record | {"messages": messages}
    if images and record.get("images"):
        remedy = "Name each image once: in images, or in the content."
        errors.append(
            DataError("images are named in the content and in images", code="content-unusable", key=key, remedy=remedy)
        )
    system = record.get("system")
    if isinstance(messages, list) and isinstance(system, str):
        if messages and isinstance(messages[0], dict) and messages[0].get("role") == "system":
            problem = "there is a system message, and system beside it"
            errors.append(DataError(problem, code="content-unusable", key=key, remedy="Keep one of them."))
        record = {name: value for name, value in record.items() if name != "system"}
        record["messages"] = [*([{"role": "system", "content": system}] if system else []), *messages]
    return (record | {"images": images} if images else record), errors


def without_nulls(value: Any) -> Any:
    """The value without the fields of mappings that are null, at any depth; items of lists stay.

    >>> without_nulls({"a": None, "b": [{"c": None, "d": 1}, None]})
    {'b': [{'d': 1}, None]}
    """
    if isinstance(value, dict):
        return {name: without_nulls(inner) for name, inner in value.items() if inner is not None}
    return [without_nulls(inner) for inner in value] if isinstance(value, list) else value


def _plain_message(message: Any, images: list[str], errors: list[DataError], key: str) -> Any:
    if not isinstance(message, dict) or not isinstance(message.get("content"), list):
        return message
    texts: list[str] = []
    for part in message["content"]:
        try:
            texts += _text_of(part, images)
        except ValueError as error:
            remedy = 'Write {"type": "text", "text": ...} or {"type": "image_url", "image_url": {"url": "a file"}}.'
            errors.append(DataError(str(error), code="content-unusable", key=key, remedy=remedy))
    return message | {"content": "".join(texts)}


def _text_of(part: Any, images: list[str]) -> Iterator[str]:
    """A part's text, or a tag for its image, which goes to ``images``. Errors: ``ValueError``."""
    kind = part.get("type") if isinstance(part, Mapping) else None
    if kind == "text" and isinstance(part.get("text"), str):
        yield part["text"]
        return
    if kind == "image" and len(part) == 1:  # TRL's form: the record's images name it
        yield IMAGE_TAG
        return
    named = part.get(kind) if kind in ("image_url", "image") else None
    url = named.get("url") if isinstance(named, Mapping) else named
    if not isinstance(url, str) or not url:
        raise ValueError(f"a part of a message's content is neither text nor image: {part!r:.80}")
    path = url.removeprefix(_FILE)
    if "://" in path or path.startswith("data:"):
        raise ValueError(f"an image is no file: {url[:80]}")
    images.append(path)
    yield IMAGE_TAG
