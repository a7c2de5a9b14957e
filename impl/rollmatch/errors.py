"""Errors that this package raises on purpose.

Every error carries four fields, so that a test (and a user) need not read prose:

``code``     stable, kebab-case: that of the class, or the one given to the error
``key``      where: a dotted config key, ``file:line`` of a record, or a request index
``problem``  what was found
``remedy``   what to change

A class of its own is for an error that somebody catches; every other error is one of these classes with a ``code``.
"""

import os
import re
from collections.abc import Iterable
from functools import cache
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from pydantic import ValidationError
    from pydantic_core import ErrorDetails


HIDDEN = "***"
_CREDENTIALS = re.compile(
    r"""(?<=:/)(/?)[^/?#\s'"]+@"""  # of a URL, also of one that was read as a path
    r"""|()(?<![\w.+/:@-])[\w.+-]{1,200}:[^/?#\s'"@]{1,200}@(?=[\w\[])"""  # without a scheme
    r"""|((?<=[?&])\w*(?:key|token|secret|password)=|(?-i:Bearer|Basic)\s)[^&#\s'"]+"""  # or of a header
    r"""|((?<![\w-])hf_)[A-Za-z0-9]{30,}""",  # the hub's
    re.IGNORECASE,
)
_SECRET_VARIABLE = re.compile(r"(?:(?:API|ACCESS|PRIVATE|SECRET|ENCRYPTION)_?KEY|TOKEN|PASSWORD|PASSWD|SECRET)$")
_SHORTEST_SECRET = 8


@cache
def _secrets_of_environment() -> tuple[str, ...]:
    """Values of the variables that are secrets by their names, as they are with the first text; long ones first."""
    values = {value for name, value in os.environ.items() if _SECRET_VARIABLE.search(name.upper())}
    return tuple(sorted((value for value in values if len(value) >= _SHORTEST_SECRET), key=len, reverse=True))


def without_credentials(text: str) -> str:
    """A text with users, passwords and keys of URLs and headers hidden, and secrets of this process' environment.

    >>> without_credentials("'http://me:word@h:80' or me:word@h:80, https:/me:word@h/m, http://h/?api_key=word&n=1")
    "'http://***@h:80' or ***@h:80, https:/***@h/m, http://h/?api_key=***&n=1"
    """

    def hidden(found: re.Match[str]) -> str:
        before = found[3] or found[4]
        return f"{before}{HIDDEN}" if before else f"{found[1] or ''}{HIDDEN}@"

    for secret in _secrets_of_environment():
        text = text.replace(secret, HIDDEN)
    return _CREDENTIALS.sub(hidden, text)


_CONTROLS = re.compile(r"[\x00-\x08\x0b-\x1f\x7f-\x9f]")


def shown(text: str) -> str:
    """A text for people: without credentials, and with control characters, which move cursors and set titles, spelled.

    >>> shown("\x1b[2J of http://me:word@h")
    '\\\\x1b[2J of http://***@h'
    """
    return _CONTROLS.sub(lambda found: f"\\x{ord(found[0]):02x}", without_credentials(text))


class RollmatchError(Exception):
    """Root of everything this package raises on purpose; its texts are ``shown``."""

    code = "rollmatch-error"
    is_shared = False
    """Whether every learner rank raises an error for the same cause, at the same place."""

    def __init__(self, problem: str, *, key: str = "", remedy: str = "", code: str = "") -> None:
        self.code = code or type(self).code
        self.key, self.problem, self.remedy = map(shown, (key, problem, remedy))
        super().__init__(self.problem)

    def __str__(self) -> str:
        """The whole message.

        >>> str(RollmatchError("is missing", key="model.model", remedy="Name a directory."))
        '[rollmatch-error] model.model: is missing. Name a directory.'
        """
        where = f"{self.key}: " if self.key else ""
        then = f". {self.remedy}" if self.remedy else ""
        return f"[{self.code}] {where}{self.problem}{then}"


FAILURES = (RollmatchError, RuntimeError, ValueError, TypeError, LookupError, AttributeError, OSError, AssertionError)
"""What work with engines and connections is known to fail with, bugs among it; to be handed on, never swallowed."""


class ConfigError(RollmatchError, ValueError):
    """The configuration cannot be used; ``key`` is the dotted path inside the YAML."""

    code = "config-error"


class DataError(RollmatchError, ValueError):
    """A record of the user's data set cannot be used; ``key`` is ``file:line``."""

    code = "data-error"


class RolloutError(RollmatchError, RuntimeError):
    """The rollout side failed or answered what it must not."""

    code = "rollout-error"


class TargetError(RollmatchError, ValueError):
    """A rollout cannot be turned into a training target."""

    code = "target-error"


class LearnError(RollmatchError, ValueError):
    """Segments cannot be packed, masked or scored."""

    code = "learn-error"


class SyncError(RollmatchError, RuntimeError):
    """Weights could not be brought to the rollout side."""

    code = "sync-error"


class LaunchError(RollmatchError, RuntimeError):
    """A run cannot start or continue in this directory or on this machine."""

    code = "launch-error"


class ErrorList(RollmatchError, ValueError):
    """Several independent errors, reported together."""

    code = "several-errors"

    def __init__(self, errors: Iterable[RollmatchError]) -> None:
        self.errors = tuple(errors)
        super().__init__(f"{len(self.errors)} problems")

    def __str__(self) -> str:
        return "\n".join(str(error) for error in self.errors)


def kind_and_text(error: BaseException) -> str:
    """Class and text of an exception that other code has raised.

    >>> kind_and_text(ValueError("no such file"))
    'ValueError: no such file'
    """
    return f"{type(error).__name__}: {error}"


def first_line(error: object) -> str:
    """What another library found, without its stack or advice.

    >>> first_line(ValueError("no such file\\nTry another one."))
    'no such file'
    """
    return str(error).strip().partition("\n")[0]


def first_fault(error: "ValidationError") -> "ErrorDetails":
    """Place and message of the first thing that pydantic found.

    >>> from pydantic import TypeAdapter, ValidationError
    >>> try:
    ...     TypeAdapter(dict[str, int]).validate_python({"a": "x", "b": "y"})
    ... except ValidationError as error:
    ...     first_fault(error)["loc"]
    ('a',)
    """
    return error.errors()[0]
