"""Requests to a server and its replies, as they are recorded and judged: plain values that survive JSON."""

import re
from collections.abc import Mapping, Sequence
from typing import Any

import msgspec

LONGEST, FEWEST = 24, 3
"""Entries of a list, and of a list of objects, that are kept of what was sent; replies are kept whole."""
CUT = re.compile(r"\.\.\. \d+ (in all|characters)$")


class RecordedCall(msgspec.Struct, kw_only=True, omit_defaults=True):
    """One thing that was done to a server, in the order in which it ended."""

    label: str
    """What it is in its check; may be given several times."""
    method: str
    """GET, POST; JOIN and SEND for what passes a communicator's group; SIGNAL for what the process was sent."""
    path: str
    sent: Any = None
    status: int | None = None
    """None: no answer."""
    reply: Any = None
    """Decoded JSON, or text."""
    seconds: float = 0.0
    failure: str = ""
    """Why there is no answer."""
    key: str | None = None
    """Sent in place of the server's; empty: none was sent."""

    @property
    def is_ok(self) -> bool:
        """Answered with 2xx, or gone through."""
        return self.status is not None and 200 <= self.status < 300 and not self.failure

    @property
    def is_refusal(self) -> bool:
        """Answered with 4xx."""
        return self.status is not None and 400 <= self.status < 500

    def summary(self) -> str:
        """In a few words."""
        came = self.failure or f"{self.status} {shown(self.reply)}"
        return f"{self.label}: {self.method} {self.path} -> {came}"


class Exchange(msgspec.Struct, kw_only=True, omit_defaults=True):
    """All calls of one check, and what the judge must know besides."""

    calls: list[RecordedCall] = []
    notes: dict[str, Any] = {}
    stopped: str = ""
    """Why the check could not be carried through: that is the server's failure, or the deadline's."""
    untestable: str = ""
    """What the judge lacked: no failure, and no evidence either."""
    inapplicable: str = ""
    """Why the server has nothing that could be judged: it offers no such thing."""
    fault: str = ""
    """What went wrong in the judge itself."""

    def one(self, label: str) -> RecordedCall:
        """The last call of this label; one that never answered where there is none."""
        found = self.all(label)
        return found[-1] if found else RecordedCall(label=label, method="-", path="-", failure="was never sent")

    def unmet(self, *, refused: Sequence[str] = (), ok: Sequence[str] = ()) -> str:
        """The calls of these labels that were not refused, or not answered with 2xx; empty where there are none."""
        wrong = [call for label in refused if not (call := self.one(label)).is_refusal]
        wrong += [call for label in ok if not (call := self.one(label)).is_ok]
        return "; ".join(call.summary() for call in wrong)

    def all(self, label: str) -> list[RecordedCall]:
        """In the order in which they ended."""
        return [call for call in self.calls if call.label == label]


def shortened(value: Any) -> Any:
    """Long lists and texts cut, saying how long they were; what is cut already stays.

    >>> shortened(shortened({"ids": list(range(30))}))["ids"][-2:]
    [23, '... 30 in all']
    """
    if isinstance(value, Mapping):
        return {name: shortened(inner) for name, inner in value.items()}
    if isinstance(value, list | tuple):
        limit = FEWEST if len(value) > LONGEST and isinstance(value[0], Mapping) else LONGEST
        is_cut = len(value) == limit + 1 and CUT.search(str(value[-1]))
        kept = [shortened(inner) for inner in value[: limit + bool(is_cut)]]
        return kept if is_cut or len(value) <= limit else [*kept, f"... {len(value)} in all"]
    if isinstance(value, str) and len(value) > 400 and not CUT.search(value):
        return f"{value[:400]}... {len(value)} characters"
    return value


def shown(value: Any) -> str:
    """On one line of moderate length."""
    text = " ".join(str(value).split())
    return text if len(text) <= 200 else text[:200] + "..."
