"""An SVG that says by which rules a server or trainer was judged, and what came of it."""

from html import escape
from pathlib import Path

import msgspec

from conformance.judge.servers.reports import Judged, Report, report_of
from conformance.judge.servers.verdicts import CONFORMS, MISSES

FAILING = ("must", "stale-gap")
GREEN, RED, GREY = "#00664a", "#a63f00", "#5d636b"
COLORS = {CONFORMS: GREEN, MISSES: RED}
HIGH, LETTER, MARGIN = 20, 6.6, 6
"""Unit: px."""


def write_badge(judgement: Judged, path: Path) -> None:
    """Of a run that has just ended."""
    path.write_text(badge_text(msgspec.convert(report_of(judgement), Report)), encoding="utf-8")


def badge_words(report: Report) -> tuple[str, str]:
    """Left and right half."""
    verdicts = [entry.verdict for entry in report.checks]
    num_failing = sum(verdict in FAILING for verdict in verdicts)
    gaps = f", {verdicts.count('known-gap')} known gaps" * ("known-gap" in verdicts)
    is_open = report.exit_code not in (CONFORMS, MISSES)
    state = "not judged" if is_open else f"{verdicts.count('pass')} pass, {num_failing} fail{gaps}"
    return f"rollout rules {report.rules}", state


def badge_text(report: Report) -> str:
    """An SVG of two halves."""
    words = badge_words(report)
    left, right = (round(len(text) * LETTER) + 2 * MARGIN for text in words)
    texts = [
        f'<text x="{start + MARGIN}" y="14" textLength="{width - 2 * MARGIN}">{escape(text)}</text>'
        for text, start, width in zip(words, (0, left), (left, right), strict=True)
    ]
    return (
        f'<svg xmlns="http://www.w3.org/2000/svg" width="{left + right}" height="{HIGH}" role="img">'
        f"<title>{escape(': '.join(words))}</title>"
        f'<rect width="{left}" height="{HIGH}" fill="#31353c"/>'
        f'<rect x="{left}" width="{right}" height="{HIGH}" fill="{COLORS.get(report.exit_code, GREY)}"/>'
        f'<g fill="#fff" font-family="Verdana,DejaVu Sans,sans-serif" font-size="11">{"".join(texts)}</g></svg>\n'
    )
