"""The file of a capability, cut into the parts that a merge puts together again."""

from dataclasses import dataclass

from conformance.harness.markdown_lines import pattern, rstrip, split_lines, strip, with_line_feeds
from conformance.harness.requirement_block import TOP_HEADER, Lines, RequirementBlock, clean_name, split_blocks

REQUIREMENTS_HEADER = pattern("##<s>+Requirements<s>*", any_case=True)
_DELTA_HEADER = pattern("##<s>+(ADDED|MODIFIED|REMOVED|RENAMED)<s>+Requirements<s>*", any_case=True)
_SPACED_HEADER = pattern("###<s>+Requirement:<s>*(<c>+)<s>*", any_case=True)


@dataclass(frozen=True, slots=True, kw_only=True)
class MainSpec:
    """Parts in the order of the file."""

    before: str
    header: str
    preamble: str
    blocks: tuple[RequirementBlock, ...]
    after: str


def split_main_spec(text: str) -> MainSpec:
    """Cut a file at its requirements; without such a section, everything stands before it."""
    lines = Lines.of(split_lines(text))
    start = next((index for index, line in lines.unfenced() if REQUIREMENTS_HEADER.fullmatch(line)), None)
    if start is None:
        return MainSpec(before=rstrip(text), header="## Requirements", preamble="", blocks=(), after="")
    tops = (index for index, line in lines.unfenced() if index > start and TOP_HEADER.match(line))
    end = next(tops, len(lines.texts))
    preamble, blocks = split_blocks(lines.between(start + 1, end))
    return MainSpec(
        before=rstrip("\n".join(lines.texts[:start])),
        header=lines.texts[start],
        preamble=rstrip("\n".join(preamble)),
        blocks=tuple(blocks),
        after=strip("\n".join(lines.texts[end:])),
    )


def structure_flaws(text: str) -> list[str]:
    """What OpenSpec calls structurally invalid, each with its line."""
    lines = Lines.of(with_line_feeds(text).split("\n"))
    start = next((index for index, line in lines.unfenced() if REQUIREMENTS_HEADER.fullmatch(line)), len(lines.texts))
    tops = (index for index, line in lines.unfenced() if index > start and TOP_HEADER.match(line))
    end = next(tops, len(lines.texts))
    flaws, seen = [], set()
    for index, line in lines.unfenced():
        header = _SPACED_HEADER.fullmatch(line)
        if _DELTA_HEADER.fullmatch(line):
            flaws.append(f"line {index + 1}: the header of a delta")
        elif header is not None and not start < index < end:
            flaws.append(f"line {index + 1}: a requirement outside ## Requirements")
        elif header is not None and clean_name(header.group(1)) in seen:
            flaws.append(f"line {index + 1}: a second requirement of the same name")
        elif header is not None:
            seen.add(clean_name(header.group(1)))
    return flaws
