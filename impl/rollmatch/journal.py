"""One JSON line per event: what was requested, generated, synced, packed, learnt, evaluated and saved.

The journal is the run's memory for people and for checkers; it is appended to, never rewritten. A resumed run
goes on in the same file, so a step that was run twice stands there twice and the later line counts.
"""

import json
import os
import threading
import time
from pathlib import Path
from typing import Any, TextIO


class Journal:
    """Appends events to ``journal.jsonl``; every line is flushed, so that a killed run keeps what it wrote."""

    def __init__(self, path: Path, *, rank: int = 0) -> None:
        self.path = path
        self.rank = rank
        path.parent.mkdir(parents=True, exist_ok=True)
        _end_last_line(path)
        self._lock = threading.Lock()
        self._file: TextIO = path.open("a", encoding="utf-8")

    def write(self, event: str, **fields: Any) -> dict[str, Any]:
        """Append one event and return it. ``time`` is in unix seconds."""
        line = {"event": event, "time": round(time.time(), 3), "rank": self.rank, **fields}
        with self._lock:  # calls beside learning write from their own threads
            self._file.write(json.dumps(line, ensure_ascii=False) + "\n")
            self._file.flush()
        return line

    def close(self) -> None:
        """Close the file."""
        self._file.close()


def read_journal(path: Path) -> list[dict[str, Any]]:
    """All whole events of a journal; a line cut by a kill is left out."""
    events = []
    for line in path.read_bytes().split(b"\n"):  # lines end there only; a text may hold other line separators
        try:
            events.append(json.loads(line.decode("utf-8")))
        except ValueError:  # no JSON, or cut in mid-character
            continue
    return events


def _end_last_line(path: Path) -> None:
    """After a kill the last line may lack its end; close it, so that the next event starts a line of its own."""
    if path.exists() and path.stat().st_size:
        with path.open("rb+") as file:
            file.seek(-1, os.SEEK_END)
            if file.read(1) != b"\n":
                file.write(b"\n")
