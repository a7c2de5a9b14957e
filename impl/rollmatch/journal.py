"""One JSON line per event: what was requested, generated, synced, packed, learned, evaluated and saved.

``Journal`` appends to it; only a last line that a kill cut off is removed. A resumed run continues in the same
file: a step that was run twice has two lines, and the later one counts.
"""

import json
import os
import threading
import time
from pathlib import Path
from typing import Any, TextIO

Event = dict[str, Any]
"""A line of the journal: ``event``, ``time``, ``rank`` and what each kind of event has besides."""
BLOCK_BYTES = 65536
"""How much of a journal's end is read at first in search of its last line."""


class Journal:
    """Appends events to ``journal.jsonl``; every line is flushed, so that a killed run keeps what it wrote."""

    def __init__(self, path: Path, *, rank: int = 0) -> None:
        self.path = path
        self.rank = rank
        path.parent.mkdir(parents=True, exist_ok=True)
        end_last_line(path)
        self._lock = threading.Lock()
        path.touch(mode=0o600)  # problems of servers are quoted, and may hold what nobody else should read
        self._file: TextIO = path.open("a", encoding="utf-8")

    def write(self, event: str, **fields: object) -> Event:
        """Append one event and return it. ``time`` is in unix seconds."""
        line = {"event": event, "time": round(time.time(), 3), "rank": self.rank, **fields}
        with self._lock:  # calls beside learning write from their own threads
            self._file.write(json.dumps(line, ensure_ascii=False) + "\n")
            self._file.flush()
        return line

    def close(self) -> None:
        """Close the file."""
        self._file.close()


def read_journal(path: Path) -> list[Event]:
    """All whole events of a journal; a line cut by a kill is left out."""
    events = []
    for line in path.read_bytes().split(b"\n"):  # lines end there only; a text may hold other line separators
        try:
            events.append(json.loads(line.decode("utf-8")))
        except ValueError:  # no JSON, or cut in mid-character
            continue
    return events


def end_last_line(path: Path) -> None:
    """Remove a last line that a kill cut off, so that the next event starts a line of its own; end a whole one."""
    if not path.exists():
        return
    with path.open("rb+") as file:
        size, line = file.seek(0, os.SEEK_END), b""
        while b"\n" not in line and len(line) < size:
            start = max(0, size - 2 * len(line) - BLOCK_BYTES)
            file.seek(start)
            line = file.read()
        line = line.rpartition(b"\n")[2]
        if _is_json(line):
            file.write(b"\n")
        else:
            file.truncate(size - len(line))


def _is_json(line: bytes) -> bool:
    try:
        json.loads(line.decode("utf-8"))
    except ValueError:
        return False
    return True
