"""The file that a capability begins with: a title and the purpose that its first delta states."""

from conformance.harness.markdown_lines import pattern, strip, with_line_feeds
from conformance.harness.requirement_block import TOP_HEADER, Lines
from conformance.harness.spec_error import PurposeUnclear

PURPOSE_HEADER = pattern("##<s>+Purpose<s>*", any_case=True)
_PLACEHOLDER = "TBD - created by archiving change {change}. Update Purpose after archive."


def first_text(delta_text: str, *, capability: str, change: str) -> str:
    """A file without requirements. Errors: ``PurposeUnclear``."""
    purpose = read_purpose(delta_text) or _PLACEHOLDER.format(change=change)
    return f"# {capability} Specification\n\n## Purpose\n{purpose}\n\n## Requirements\n"


def read_purpose(text: str) -> str:
    """What stands under ``## Purpose``; empty without such a section, as behind a byte order mark.

    Errors: ``PurposeUnclear``.
    """
    lines = Lines.of(with_line_feeds(text).split("\n"))
    start = next((index for index, line in lines.unfenced() if PURPOSE_HEADER.fullmatch(line)), None)
    if start is None:
        return ""
    end = next((i for i, line in lines.unfenced() if i > start and TOP_HEADER.match(line)), len(lines.texts))
    body = lines.between(start + 1, end)
    if "<!--" in text or any(body.mask) or any(line.startswith("#") for line in body.texts):
        problem = "the purpose holds a comment, a fence or a header"
        raise PurposeUnclear(problem, key=f"line {start + 1}", remedy="Write plain paragraphs.")
    return strip("\n".join(body.texts))
