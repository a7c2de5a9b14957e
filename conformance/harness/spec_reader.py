"""A capability's specification as data: requirements, their sentences, scenarios and steps, each with its line.

Ids are made of names, never of places: ``capability/requirement``, ``capability/requirement/scenario``.
"""

import re
from collections.abc import Iterator
from dataclasses import dataclass
from itertools import pairwise

from conformance.harness.markdown_lines import pattern, split_lines, strip
from conformance.harness.purpose import read_purpose
from conformance.harness.requirement_block import SCENARIO_HEADER, Lines, requirement_name, scenario_name

VERB = re.compile(r"\b(MUST NOT|SHALL NOT|SHOULD NOT|MUST|SHALL|SHOULD|MAY)\b")
_STEP = re.compile(r"- \*\*(GIVEN|WHEN|THEN|AND)\*\* (\S.*)")
_CODE_SPAN = re.compile(r"`[^`]*`")
_HEADER = pattern("#{1,6}<s>")


@dataclass(frozen=True, slots=True, kw_only=True)
class Sentence:
    """One line of a requirement's body."""

    text: str
    line: int

    @property
    def verbs(self) -> tuple[str, ...]:
        """Normative verbs outside code spans.

        >>> Sentence(text="A `MUST` in code MUST NOT count.", line=1).verbs
        ('MUST NOT',)
        """
        return tuple(VERB.findall(without_code(self.text)))


@dataclass(frozen=True, slots=True, kw_only=True)
class Step:
    """One bullet of a scenario."""

    word: str
    """GIVEN, WHEN, THEN or AND; empty where the line has no such form."""
    text: str
    line: int


@dataclass(frozen=True, slots=True, kw_only=True)
class Scenario:
    scenario_id: str
    name: str
    header: str
    line: int
    steps: tuple[Step, ...]


@dataclass(frozen=True, slots=True, kw_only=True)
class Requirement:
    requirement_id: str
    name: str
    line: int
    sentences: tuple[Sentence, ...]
    scenarios: tuple[Scenario, ...]

    @property
    def clauses(self) -> tuple[Sentence, ...]:
        """Sentences with a normative verb."""
        return tuple(sentence for sentence in self.sentences if sentence.verbs)


@dataclass(frozen=True, slots=True, kw_only=True)
class Spec:
    """One file. Made by ``read_spec``, eaten by the rules and the catalogue."""

    capability: str
    path: str
    text: str
    purpose: str
    requirements: tuple[Requirement, ...]


def slug(name: str) -> str:
    """A name as part of an id.

    >>> slug("A `GET /health/` answers, always")
    'a-get-health-answers-always'
    """
    return re.sub(r"[^a-z0-9]+", "-", name.lower()).strip("-")


def without_code(text: str) -> str:
    """A line whose code spans are blank, so that what they quote counts for nothing."""
    return _CODE_SPAN.sub("``", text)


def read_spec(text: str, *, capability: str, path: str) -> Spec:
    """Read a main specification, or a delta for the requirements that it adds or modifies."""
    lines = Lines.of(split_lines(text))
    headers = [(i, name) for i, line in lines.unfenced() if (name := requirement_name(line)) is not None]
    bounds = pairwise([*headers, (len(lines.texts), "")])
    return Spec(
        capability=capability,
        path=path,
        text=text,
        purpose=read_purpose(text),
        requirements=tuple(
            _requirement(lines.between(start, end), name=name, capability=capability)
            for (start, name), (end, _) in bounds
        ),
    )


def _requirement(lines: Lines, *, name: str, capability: str) -> Requirement:
    """A requirement that begins at the first line; a top header ends it."""
    tops = (index for index, line in lines.unfenced() if index and re.match(r"##?\s", line))
    lines = lines.between(0, next(tops, len(lines.texts)))
    requirement_id = f"{capability}/{slug(name)}"
    headers = [index for index, line in lines.unfenced() if SCENARIO_HEADER.match(line)]
    body_end = next((index for index, line in lines.unfenced() if index and _HEADER.match(line)), len(lines.texts))
    return Requirement(
        requirement_id=requirement_id,
        name=name,
        line=lines.first,
        sentences=tuple(Sentence(text=text, line=line) for text, line in _written(lines.between(1, body_end))),
        scenarios=tuple(
            _scenario(lines.between(start, end), requirement_id)
            for start, end in pairwise([*headers, len(lines.texts)])
        ),
    )


def _scenario(lines: Lines, requirement_id: str) -> Scenario:
    name = scenario_name(lines.texts[0])
    written = _written(lines.between(1, len(lines.texts)))
    return Scenario(
        scenario_id=f"{requirement_id}/{slug(name)}",
        name=name,
        header=lines.texts[0],
        line=lines.first,
        steps=tuple(_step(text, line) for text, line in written),
    )


def _step(text: str, line: int) -> Step:
    form = _STEP.fullmatch(text)
    return Step(word=form.group(1) if form else "", text=form.group(2) if form else text, line=line)


def _written(lines: Lines) -> Iterator[tuple[str, int]]:
    """Lines that are not blank, fenced ones included, with their numbers."""
    for index, text in enumerate(lines.texts):
        if strip(text):
            yield text.rstrip(), lines.first + index
