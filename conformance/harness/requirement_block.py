"""A requirement as a block of lines, the unit that a merge moves about."""

from collections.abc import Sequence
from dataclasses import dataclass
from itertools import pairwise

from conformance.harness.markdown_lines import fence_mask, pattern, rstrip, strip

TOP_HEADER = pattern("##<s>+")
REQUIREMENT_HEADER = pattern("###<s>*Requirement:<s>*(<c>+)<s>*", any_case=True)
SCENARIO_HEADER = pattern("####<s>+")
_CLOSING_MARKS = pattern(r"[ \t]+#+[ \t]*\Z")
_SCENARIO_WORD = pattern(r"\AScenario:<s>*", any_case=True)
_SPACES = pattern("<s>+")


@dataclass(frozen=True, slots=True, kw_only=True)
class RequirementBlock:
    """A requirement from its header to the line before the next one."""

    name: str
    text: str
    """Without white space at its end."""
    line: int
    """Of the header, from 1."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Lines:
    """A stretch of a file."""

    texts: tuple[str, ...]
    mask: tuple[bool, ...]
    """Whether a line is fenced, seen from the whole file."""
    first: int
    """Line number of the first one, from 1."""

    @classmethod
    def of(cls, texts: Sequence[str]) -> "Lines":
        return cls(texts=tuple(texts), mask=tuple(fence_mask(texts)), first=1)

    def between(self, start: int, end: int) -> "Lines":
        """Indices count from the start of this stretch."""
        return Lines(texts=self.texts[start:end], mask=self.mask[start:end], first=self.first + start)

    def unfenced(self) -> list[tuple[int, str]]:
        return [(index, text) for index, text in enumerate(self.texts) if not self.mask[index]]


def clean_name(name: str) -> str:
    """A name without closing marks.

    >>> clean_name("Foo ## "), clean_name("Use C#")
    ('Foo', 'Use C#')
    """
    return strip(_CLOSING_MARKS.sub("", name))


def fold_name(name: str) -> str:
    """What two spellings of one name have in common.

    >>> fold_name("Foo  BAR") == fold_name("foo bar")
    True
    """
    return _SPACES.sub(" ", clean_name(name).lower())


def requirement_name(line: str) -> str | None:
    """The name in a requirement's header, None for any other line."""
    header = REQUIREMENT_HEADER.fullmatch(line)
    return None if header is None else clean_name(header.group(1))


def split_blocks(lines: Lines) -> tuple[list[str], list[RequirementBlock]]:
    """The lines before the first requirement, and the requirements; a top header ends a block."""
    headers = [(index, name) for index, text in lines.unfenced() if (name := requirement_name(text)) is not None]
    tops = [index for index, text in lines.unfenced() if TOP_HEADER.match(text)]
    blocks = []
    for (start, name), (end, _) in pairwise([*headers, (len(lines.texts), "")]):
        end = min([end, *(index for index in tops if index > start)])
        text = rstrip("\n".join(lines.texts[start:end]))
        blocks.append(RequirementBlock(name=name, text=text, line=lines.first + start))
    preamble = lines.texts[: headers[0][0]] if headers else lines.texts
    return list(preamble), blocks


def scenario_names(block_text: str) -> list[str]:
    """Names of all level-4 headers of a block.

    >>> scenario_names("### Requirement: A\\n#### Scenario: one\\n#### Two ####\\n```\\n#### three\\n```")
    ['one', 'Two']
    """
    lines = Lines.of(block_text.split("\n"))
    return [scenario_name(text) for _, text in lines.unfenced() if SCENARIO_HEADER.match(text)]


def scenario_name(header: str) -> str:
    title = SCENARIO_HEADER.sub("", header, count=1)
    return strip(_SCENARIO_WORD.sub("", _CLOSING_MARKS.sub("", title)))
