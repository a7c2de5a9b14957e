"""A sample's own chat as a template takes it, and the errors that name a sample whose prompt cannot be used."""

from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import replace
from typing import Any

from rollmatch.data.chat import tagged_messages
from rollmatch.data.content import IMAGE_TAG
from rollmatch.errors import DataError, RollmatchError, RolloutError, kind_and_text
from rollmatch.records import Sample


class PromptMismatch(RolloutError):
    """The engine saw another prompt than the one the learner would teach on."""

    code = "prompt-mismatch"


@contextmanager
def processing(sample: Sample) -> Iterator[None]:
    """Name the sample whose image a processor refuses: each has limits of its own. Errors: ``image-not-processed``."""
    try:
        yield
    except RollmatchError as error:
        if isinstance(error, DataError):
            error.key = sample.origin  # not the file's
        raise
    except Exception as error:
        problem = f"the model's processor fails for its image: {kind_and_text(error)}"
        remedy = "Leave the sample out, or cut the image: its sides may be too short, or too different."
        raise DataError(problem, code="image-not-processed", key=sample.origin, remedy=remedy) from error


def own_messages(sample: Sample) -> list[dict[str, object]]:
    """A sample's own chat as a chat template takes it; images stand where tagged, else before the first question.

    >>> sample = Sample(sample_id=0, origin="x:1", images=("a.png",), messages=(("user", "Is <image> red?"),))
    >>> [part["type"] for part in own_messages(sample)[0]["content"]]
    ['text', 'image', 'text']
    """
    if not sample.images:
        return sample.chat()
    images = iter(sample.images)
    tagged = replace(sample, messages=tagged_messages(sample)).chat()
    return [message | {"content": list(_parts_of(message["content"], images))} for message in tagged]


def _parts_of(text: str, images: Iterator[str]) -> Iterator[dict[str, object]]:
    for place, part in enumerate(text.split(IMAGE_TAG)):
        if place:
            yield {"type": "image", "image": next(images)}
        if part:
            yield {"type": "text", "text": part}


def as_taken(message: dict[str, Any], *, takes_text: bool) -> dict[str, Any]:
    """A message as the chat template takes it: text models know no parts, and some vision models no plain text.

    >>> as_taken({"role": "user", "content": [{"type": "text", "text": "Hi"}]}, takes_text=True)
    {'role': 'user', 'content': 'Hi'}
    >>> as_taken({"role": "user", "content": "Hi"}, takes_text=False)
    {'role': 'user', 'content': [{'type': 'text', 'text': 'Hi'}]}
    """
    content = message["content"]
    if takes_text and isinstance(content, list) and all(part["type"] == "text" for part in content):
        return message | {"content": "".join(part["text"] for part in content)}
    if not takes_text and isinstance(content, str):
        return message | {"content": [{"type": "text", "text": content}]}
    return message


def left_out_of(text: str, messages: Sequence[Mapping[str, Any]], tools: Sequence[Mapping[str, Any]]) -> str:
    """What of the system's and the user's text and of the tools a rendered chat does not hold; empty if nothing.

    >>> left_out_of("<user>2+2?", [{"role": "system", "content": "Be brief."}], [])
    'the system text'
    >>> left_out_of("<user>2+2?", [], [{"type": "function", "function": {"name": "add"}}])
    'the tool add'
    >>> left_out_of("add()", [], [{"name": "add", "parameters": {"properties": {"first": {}}}}])
    'first of the tool add'
    """
    for message in messages:
        content = message["content"]
        parts = [content] if isinstance(content, str) else [part.get("text", "") for part in content]
        if message["role"] in ("system", "user") and any(part.strip() not in text for part in parts):
            return f"the {message['role']} text"
    for tool in tools:
        function = tool.get("function", tool)
        name, parameters = str(function.get("name", "")), (function.get("parameters") or {}).get("properties") or {}
        if name not in text:
            return f"the tool {name}"
        if missing := [each for each in parameters if each not in text]:
            return f"{missing[0]} of the tool {name}"
    return ""


def describe_mismatch(sample: Sample, learner: Sequence[int], engine: Sequence[int], image_id: int) -> PromptMismatch:
    """Name the first differing position, both ids, and what usually causes such a difference."""
    shorter = min(len(learner), len(engine))
    place = next((i for i in range(shorter) if learner[i] != engine[i]), shorter)
    ours, theirs = (ids[place] if place < len(ids) else None for ids in (learner, engine))
    if image_id in (ours, theirs):
        cause = "The two sides resize images differently: give both the same preprocessor_config.json."
    elif place == 0 or _ends_alike(learner, engine):
        cause = "A system message is missing on one side: pin the same chat template on both."
    else:
        cause = "The chat template or the tokenizer differs: serve the directory the learner trains."
    return PromptMismatch(
        f"prompts differ first at position {place}: learner {ours}, engine {theirs} "
        f"(lengths {len(learner)} and {len(engine)})",
        key=sample.origin,
        remedy=cause,
    )


def _ends_alike(one: Sequence[int], other: Sequence[int]) -> bool:
    """Whether the shorter list is the end of the longer one.

    >>> _ends_alike([1, 7, 1, 8], [1, 8]), _ends_alike([1, 8], [1, 7, 1, 8]), _ends_alike([1, 8], [1, 7, 1, 9])
    (True, True, False)
    """
    shorter, longer = sorted((tuple(one), tuple(other)), key=len)
    return longer[len(longer) - len(shorter) :] == shorter
