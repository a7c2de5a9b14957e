"""Calls to a server under judgement: every call is recorded, none raises because of what the server does."""

import errno
import time
from collections.abc import Callable, Sequence
from concurrent.futures import Future
from typing import Any

import requests

from conformance.judge.servers.bounded import Unbounded, fetch, in_thread
from conformance.judge.servers.exchange import Exchange, RecordedCall
from conformance.judge.servers.question import Question
from conformance.judge.servers.subject import Subject, bearer

CALL_TIMEOUT_S = 30.0
NOT_HERE = (errno.EADDRINUSE, errno.EADDRNOTAVAIL)
"""An address of a group that this machine cannot listen at: nothing that the server did."""


class Stopped(Exception):  # an end, not an error of ours
    """The check cannot continue, because of what the server did."""


class Talk:
    """One check's conversation."""

    def __init__(self, subject: Subject) -> None:
        self.subject = subject
        self.exchange = Exchange(notes={"dialect": subject.dialect.name, "tolerance": subject.tolerance})
        self.leaving: list[Callable[[], None]] = []
        """What is to be done at the end, however it came."""

    def get(self, label: str, path: str, **keywords: Any) -> RecordedCall:
        return self.call(label, "GET", path, **keywords)

    def post(self, label: str, path: str, body: Any = None, **keywords: Any) -> RecordedCall:
        return self.call(label, "POST", path, json={} if body is None else body, **keywords)

    def call(self, label: str, method: str, path: str, **keywords: Any) -> RecordedCall:
        """``keep`` False leaves the reply out of the record, ``note`` False the whole call unless it failed.

        ``key`` is sent in place of the server's, none where it is empty.
        """
        keep, note, timeout = (keywords.pop(*pair) for pair in (("keep", True), ("note", True), ("timeout_s", None)))
        key = keywords.pop("key", None)
        sent, headers = keywords.get("json", keywords.get("data")), self.subject.headers if key is None else bearer(key)
        call = RecordedCall(label=label, method=method, path=path, sent=sent, key=key)
        began = time.monotonic()
        try:
            answer = fetch(
                method,
                self.subject.url + path,
                headers=headers,
                timeout_s=timeout or CALL_TIMEOUT_S,
                allowance=self.subject.allowance,
                **keywords,
            )
            call.status, call.reply = answer.status, answer.value if keep else None
        except Unbounded as error:
            call.failure = str(error)
        except requests.RequestException as error:
            call.failure = type(error).__name__
        call.seconds = round(time.monotonic() - began, 3)
        if note or not call.is_ok:
            self.exchange.calls.append(call)
        return call

    def generate(self, label: str, prompts: Sequence[str | Question], **options: Any) -> RecordedCall:
        """``options`` as in ``ServerDialect``; also ``call``'s keywords."""
        keywords = {name: options.pop(name) for name in ("keep", "timeout_s", "session") if name in options}
        dialect = self.subject.dialect
        questions = [self.subject.prompt(one) if isinstance(one, str) else one for one in prompts]
        is_seen = any(question.picture for question in questions)
        path = dialect.picture_path if is_seen else dialect.generate_path
        return self.post(label, path, dialect.body(questions, **options), **keywords)

    def collective(self, label: str, method: str, work: Callable[[], Any], *, note: bool = True) -> RecordedCall:
        """What passes the group; ``Stopped`` where it fails."""
        call = RecordedCall(label=label, method=method, path="group", status=200)
        began = time.monotonic()
        try:
            work()
        except (RuntimeError, OSError, ValueError) as error:
            if getattr(error, "errno", None) in NOT_HERE or getattr(error, "code", "") == "group-port-in-use":
                raise
            call.status, call.failure = None, f"{type(error).__name__}: {str(error).splitlines()[0]}"
        call.seconds = round(time.monotonic() - began, 3)
        if note or call.failure:
            self.exchange.calls.append(call)
        if call.failure:
            raise Stopped(call.summary())
        return call

    def beside(self, work: Callable[..., Any], *arguments: Any, **keywords: Any) -> "Future[Any]":
        """Started; ``result()`` waits for it."""
        return in_thread(work, *arguments, **keywords)

    def note(self, name: str, value: Any) -> None:
        """What the judge must know and no reply says."""
        self.exchange.notes[name] = value

    def leave(self) -> None:
        """Do what is to be done at the end."""
        while self.leaving:
            self.leaving.pop()()
