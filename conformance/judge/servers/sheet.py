"""One HTML page of a run: no scripts, nothing to load; light and dark, and readable on a phone."""

import json
from collections.abc import Iterator, Mapping
from html import escape
from pathlib import Path
from typing import Any

from conformance.judge.servers.reports import Judged, report_of

STYLE = """
:root { --paper: #f6f6f3; --card: #fff; --ink: #1c1e21; --muted: #5d636b; --edge: #e1e1dc; --good: #00664a;
  --bad: #a63f00; --open: #6b5a00; color-scheme: light dark; }
@media (prefers-color-scheme: dark) { :root { --paper: #14161a; --card: #1d2025; --ink: #e9eaec; --muted: #a0a6ae;
  --edge: #31353c; --good: #4fd1a5; --bad: #ff9a5c; --open: #e6c65c; } }
* { box-sizing: border-box; }
body { margin: 0; background: var(--paper); color: var(--ink); font: 15px/1.5 system-ui, "DejaVu Sans", sans-serif; }
main { max-width: 960px; margin: 0 auto; padding: 20px 16px 60px; }
h1 { font-size: clamp(20px, 3.4vw, 30px); line-height: 1.25; margin: 16px 0 6px; overflow-wrap: anywhere; }
h2 { font-size: 18px; margin: 32px 0 10px; } p { margin: 0 0 8px; } .muted { color: var(--muted); }
.pass { color: var(--good); } .must, .stale-gap, .harness-error { color: var(--bad); }
.should, .known-gap, .not-testable, .not-applicable, .blocked-by { color: var(--open); }
details { background: var(--card); border: 1px solid var(--edge); border-radius: 8px; margin: 0 0 6px; }
details > :not(summary) { margin: 0 14px 10px; }
summary { cursor: pointer; padding: 8px 14px; display: flex; flex-wrap: wrap; gap: 2px 12px; }
summary::before { content: "+"; color: var(--muted); width: .7em; } details[open] > summary::before { content: "-"; }
summary b { min-width: 7.5em; font-weight: 650; } summary span:last-child { margin-left: auto; color: var(--muted); }
pre { overflow-x: auto; background: var(--paper); border-radius: 6px; padding: 8px 10px; font-size: 12.5px;
  max-height: 22em; white-space: pre-wrap; overflow-wrap: anywhere; }
dl { display: grid; grid-template-columns: max-content 1fr; gap: 2px 16px; margin: 0; } dt { color: var(--muted); }
dd { margin: 0; overflow-wrap: anywhere; }
"""
LONGEST = 4000
"""Characters of one call that are shown; the JSON file has all."""
ORDER = (
    "must",
    "stale-gap",
    "harness-error",
    "should",
    "not-testable",
    "blocked-by",
    "known-gap",
    "not-applicable",
    "pass",
)


def write_sheet(judgement: Judged, path: Path) -> None:
    """What is missed comes first, opened."""
    path.write_text("\n".join(_lines(report_of(judgement))) + "\n", encoding="utf-8")


def _lines(report: Mapping[str, Any]) -> Iterator[str]:
    url = escape(report["url"])
    yield '<!doctype html>\n<html lang="en"><head><meta charset="utf-8">'
    yield '<meta name="viewport" content="width=device-width, initial-scale=1">'
    yield f"<title>Judged: {url}</title><style>{STYLE}</style></head><body><main>"
    yield f"<h1>{url}: {escape(report['meaning'])}</h1>"
    yield f'<p class="muted">{report["date"]}, {report["seconds"]:g} s, exit code {report["exit_code"]}</p>'
    yield f"<p>{', '.join(_counts(report))}</p>"
    problems = {"problem": report["preflight"]["problem"], "first weights": report["not_restored"]}
    for name, text in [*problems.items(), *(("warning", text) for text in report["preflight"]["warnings"])]:
        if text:
            yield f'<p class="must">{name}: {escape(text)}</p>'
    if facts := report["preflight"]["facts"]:
        yield "<h2>Facts</h2><dl>"
        yield "".join(f"<dt>{escape(str(name))}</dt><dd>{escape(str(value))}</dd>" for name, value in facts.items())
        yield "</dl>"
    yield "<h2>Checks</h2>"
    for entry in sorted(report["checks"], key=lambda entry: ORDER.index(entry["verdict"])):
        yield from _check(entry)
    if report["not_asked"]:
        yield "<h2>Not asked</h2><dl>"
        for name, needs in sorted(report["not_asked"].items()):
            yield f"<dt>{escape(name)}</dt><dd>needs {escape(', '.join(needs))}</dd>"
        yield "</dl>"
    yield "</main></body></html>"


def _counts(report: Mapping[str, Any]) -> Iterator[str]:
    verdicts = [entry["verdict"] for entry in report["checks"]]
    for verdict in ORDER:
        if verdict in verdicts:
            yield f'<b class="{verdict}">{verdicts.count(verdict)} {verdict}</b>'


def _check(entry: Mapping[str, Any]) -> Iterator[str]:
    is_open = " open" if entry["verdict"] in ("must", "stale-gap", "harness-error") else ""
    yield f'<details{is_open}><summary><b class="{entry["verdict"]}">{entry["verdict"]}</b>'
    yield f"<span>{escape(entry['id'])}</span><span>{entry['seconds']:g} s</span></summary>"
    yield f"<p>{escape(entry['clause'] or entry['level'])}: {escape(entry['sentence'])}</p>"
    if entry["reason"]:
        yield f"<p><b>{escape(entry['reason'][:LONGEST])}</b></p>"
    if entry["verdict"] != "pass":
        again = "\n".join(filter(None, [entry["again"], entry["curl"][:LONGEST]]))
        yield f"<p class='muted'>See it again:</p><pre>{escape(again)}</pre>"
    for call in entry["calls"]:
        yield _call(call)
    yield "</details>"


def _call(call: Mapping[str, Any]) -> str:
    came = call.get("failure") or f"{call.get('status')} {json.dumps(call.get('reply'), ensure_ascii=False)}"
    sent = "" if call.get("sent") is None else json.dumps(call["sent"], ensure_ascii=False)
    lines = [f"{call['label']}: {call['method']} {call['path']}  ({call.get('seconds', 0):g} s)"]
    lines += [f"> {sent[:LONGEST]}"] * bool(sent) + [f"< {came[:LONGEST]}"]
    return f"<pre>{escape(chr(10).join(lines))}</pre>"
