"""A second opinion: a header counts only if OpenSpec's line rules and CommonMark both see it."""

import re
from collections.abc import Iterator

from markdown_it import MarkdownIt

from conformance.harness.markdown_lines import split_lines
from conformance.harness.requirement_block import Lines
from conformance.harness.spec_error import Finding

_HEADER = re.compile(r"#{1,6}\s+\S")


def check_markdown(text: str, *, path: str) -> Iterator[Finding]:
    """Headers that only one of the two readers sees: fenced oddly, indented, commented out, underlined."""
    by_lines = {index + 1 for index, line in Lines.of(split_lines(text)).unfenced() if _HEADER.match(line)}
    tokens = MarkdownIt("commonmark").parse(text)
    by_commonmark = {token.map[0] + 1 for token in tokens if token.type == "heading_open" and token.map}
    for line in sorted(by_lines ^ by_commonmark):
        reader = "OpenSpec" if line in by_lines else "CommonMark"
        problem = f"only {reader} sees a header here."
        remedy = "Close fences, begin headers in the first column, use no HTML comments and no underlined headers."
        yield Finding(code="markdown-ambiguous", key=f"{path}:{line}", problem=problem, remedy=remedy)
