"""Markdown as OpenSpec 1.13.2 reads it: line by line, which is not how CommonMark does.

Fences count at any indent, HTML comments and setext headings do not exist, a header starts in the first column. White
space is JavaScript's: ``str.strip`` and ``\\s`` of Python differ from it at the edges, so both are spelled out here.
"""

import re
from collections.abc import Sequence

SPACES = "\t\n\v\f\r \u00a0\u1680\u2028\u2029\u202f\u205f\u3000\ufeff" + "".join(map(chr, range(0x2000, 0x200B)))
"""What JavaScript trims."""
SPACE = f"[{SPACES}]"
CHARACTER = "[^\n\r\u2028\u2029]"
"""Any character but a line terminator, JavaScript's dot."""

_FENCE_OPEN = re.compile(f"{SPACE}*(`{{3,}}|~{{3,}})")
_FENCE_CLOSE = re.compile(f"{SPACE}*(`{{3,}}|~{{3,}}){SPACE}*")


def pattern(text: str, *, any_case: bool = False) -> re.Pattern[str]:
    """A pattern in which ``<s>`` is white space and ``<c>`` any character; letters fold in ASCII only."""
    flags = re.ASCII | (re.IGNORECASE if any_case else 0)
    return re.compile(text.replace("<s>", SPACE).replace("<c>", CHARACTER), flags)


def strip(text: str) -> str:
    return text.strip(SPACES)


def rstrip(text: str) -> str:
    return text.rstrip(SPACES)


def with_line_feeds(text: str) -> str:
    """CRLF and lone CR as LF."""
    return text.replace("\r\n", "\n").replace("\r", "\n")


def split_lines(text: str) -> list[str]:
    """Lines without a byte order mark and whatever their endings were.

    >>> split_lines("\\ufeffa\\r\\nb\\rc")
    ['a', 'b', 'c']
    """
    return with_line_feeds(text.removeprefix("\ufeff")).split("\n")


def fence_mask(lines: Sequence[str]) -> list[bool]:
    """[len(lines)] whether a line belongs to a fenced block, its fences included; an open fence hides all that follows.

    >>> fence_mask(["a", "  ~~~", "b", "```", "~~~~ ", "c"])
    [False, True, True, True, True, False]
    """
    mask, fence = [], ""
    for line in lines:
        opened, closed = _FENCE_OPEN.match(line), _FENCE_CLOSE.fullmatch(line)
        mask.append(bool(fence or opened))
        if not fence:
            fence = opened.group(1) if opened else ""
        elif closed and closed.group(1).startswith(fence):
            fence = ""
    return mask
