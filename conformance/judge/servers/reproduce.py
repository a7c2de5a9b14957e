"""How to see a verdict again: one command of the judge, and one ``curl`` per call."""

import json
import shlex
from collections.abc import Sequence

from conformance.judge.servers.check import Check
from conformance.judge.servers.exchange import Exchange, RecordedCall
from conformance.judge.servers.numbers import TOLERANCE
from conformance.judge.servers.subject import KEY_VARIABLE, Subject

COMMAND = "rollmatch-judge"


def command_for(check: Check, subject: Subject) -> str:
    """The judge, asked for this check alone."""
    return shlex.join([*_words(subject), "--check", check.check_id] + ["--dangerous"] * check.is_dangerous)


def run_again(subject: Subject, *, rules: str, dangerous: bool) -> str:
    """The judge, asked for all that this run asked."""
    return shlex.join([*_words(subject), "--rules", rules] + ["--dangerous"] * dangerous)


def _words(subject: Subject) -> list[str]:
    words = [COMMAND, subject.url, "--dialect", subject.dialect.file or subject.dialect.name]
    if subject.policies is not None:
        words += ["--model", subject.policies.directory]
        words += ["--tolerance", f"{subject.tolerance:g}"] * (subject.tolerance != TOLERANCE)
    if subject.transport is not None:
        words += ["--transport", subject.transport, "--group-host", subject.group_host]
    return words


def curl_for(call: RecordedCall, subject: Subject) -> str:
    """Empty for what is no call over HTTP. A key is named by its variable, never written."""
    if call.method not in ("GET", "POST"):
        return ""
    words = ["curl", "-sS", "-i", "-X", call.method, subject.url + call.path]
    if call.method == "POST":
        body = call.sent if isinstance(call.sent, str) else json.dumps(call.sent, separators=(",", ":"))
        words += ["-H", "Content-Type: application/json", "-d", body]
    key = f"${KEY_VARIABLE}" * bool(subject.headers) if call.key is None else call.key
    return shlex.join(words) + f' -H "Authorization: Bearer {key}"' * bool(key)


def decisive(calls: Sequence[RecordedCall]) -> RecordedCall | None:
    """The call that most likely shows a miss: one served without the key; the last that failed; the first of all.

    None where all went well and a group was joined: a call that opens one waits for a learner, and shows nothing alone.

    >>> opened, joined = (RecordedCall(label="open", method=each, path="/", status=200) for each in ("POST", "JOIN"))
    >>> decisive([opened]) is opened, decisive([opened, joined])
    (True, None)
    """
    sent = [call for call in calls if call.method in ("GET", "POST")]
    if served := [call for call in sent if call.key is not None and call.is_ok]:
        return served[0]
    failed = [call for call in sent if not call.is_ok]
    if failed or len(sent) < len(calls):
        return failed[-1] if failed else None
    return next(iter(sent), None)


def curl_of(exchange: Exchange | None, subject: Subject) -> str:
    """Of the decisive call; empty without one."""
    call = decisive(exchange.calls) if exchange else None
    return curl_for(call, subject) if call else ""
