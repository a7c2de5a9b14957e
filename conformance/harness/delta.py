"""What a change says about one capability: requirements added, modified, removed and renamed."""

from collections.abc import Iterator
from dataclasses import dataclass
from itertools import pairwise

from conformance.harness.markdown_lines import pattern, split_lines, strip
from conformance.harness.requirement_block import Lines, RequirementBlock, clean_name, requirement_name, split_blocks

_SECTION = pattern("##<s>+(<c>+)")
_REMOVED_BULLET = pattern("<s>*[-*+]<s>*`?###<s>*Requirement:<s>*(<c>+?)`?<s>*")
_RENAME_SIDE = pattern("<s>*[-*+]?<s>*(FROM|TO):<s>*`?###<s>*Requirement:<s>*(<c>+?)`?<s>*")


@dataclass(frozen=True, slots=True, kw_only=True)
class Rename:
    old: str
    new: str


@dataclass(frozen=True, slots=True, kw_only=True)
class Delta:
    """One delta file. Made by ``read_delta``, eaten by ``merge`` and the delta rules."""

    added: tuple[RequirementBlock, ...]
    modified: tuple[RequirementBlock, ...]
    removed: tuple[str, ...]
    removed_blocks: tuple[RequirementBlock, ...]
    """The removed ones that are written as headers, with the text under them."""
    renamed: tuple[Rename, ...]
    unpaired: tuple[str, ...]
    """Names in FROM or TO lines that found no partner."""
    orphans: tuple[RequirementBlock, ...]
    """Requirements outside the four sections; a merge passes over them."""

    @property
    def is_empty(self) -> bool:
        return not (self.added or self.modified or self.removed or self.renamed)


def read_delta(text: str) -> Delta:
    """Read a delta by OpenSpec's rules: sections fold case, repeated sections count together."""
    lines = Lines.of(split_lines(text))
    sections = _split_sections(lines)
    renamed, unpaired = _pair_renames([each for title, each in sections if title == "renamed requirements"])
    removed = [each for title, each in sections if title == "removed requirements"]
    return Delta(
        added=tuple(_blocks_of(sections, "added requirements")),
        modified=tuple(_blocks_of(sections, "modified requirements")),
        removed=tuple(name for each in removed for name in _removed_names(each)),
        removed_blocks=tuple(_blocks_of(sections, "removed requirements")),
        renamed=tuple(renamed),
        unpaired=tuple(unpaired),
        orphans=tuple(block for title, each in sections if title not in _TITLES for block in split_blocks(each)[1]),
    )


_TITLES = tuple(f"{word} requirements" for word in ("added", "modified", "removed", "renamed"))


def _split_sections(lines: Lines) -> list[tuple[str, Lines]]:
    """(title in lower case, lines under it); what stands above the first header has the title ''."""
    starts = [(i, strip(found.group(1)).lower()) for i, text in lines.unfenced() if (found := _SECTION.fullmatch(text))]
    bounds = pairwise([*starts, (len(lines.texts), "")])
    sections = [(title, lines.between(start + 1, end)) for (start, title), (end, _) in bounds]
    return [("", lines.between(0, starts[0][0] if starts else len(lines.texts))), *sections]


def _blocks_of(sections: list[tuple[str, Lines]], wanted: str) -> Iterator[RequirementBlock]:
    for title, lines in sections:
        if title == wanted:
            yield from split_blocks(lines)[1]


def _removed_names(lines: Lines) -> Iterator[str]:
    for _, text in lines.unfenced():
        name, bullet = requirement_name(text), _REMOVED_BULLET.fullmatch(text)
        if name is not None:
            yield name
        elif bullet is not None:
            yield clean_name(bullet.group(1))


def _pair_renames(sections: list[Lines]) -> tuple[list[Rename], list[str]]:
    """A FROM line and the TO line that follows it make a pair, within one section."""
    pairs, unpaired = [], []
    for lines in sections:
        pending: str | None = None
        for _, text in lines.unfenced():
            side = _RENAME_SIDE.fullmatch(text)
            if side is None:
                continue
            name = clean_name(side.group(2))
            if side.group(1) == "TO" and pending is not None:
                pairs.append(Rename(old=pending, new=name))
                pending = None
            else:
                unpaired += [name] if side.group(1) == "TO" else [pending] if pending is not None else []
                pending = pending if side.group(1) == "TO" else name
        unpaired += [pending] if pending is not None else []
    return pairs, unpaired
