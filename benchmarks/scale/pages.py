"""Size of the page of a long run: the journal of a recorded one, repeated, with calls to as many servers as wanted."""

import json
import tempfile
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from benchmarks.scale.records import TRACE
from rollmatch.report.page import write_page

STEP_S = 0.6
KINDS = ("synced", "requested", "generated", "packed", "timeline", "step")
Event = dict[str, Any]


def page_bytes(num_steps: int, num_servers: int) -> int:
    """Write the page of such a run."""
    with tempfile.TemporaryDirectory() as folder:
        run = Path(folder) / "run"
        run.mkdir()
        lines = (json.dumps(event) + "\n" for event in _events(num_steps, num_servers))
        (run / "journal.jsonl").write_text("".join(lines))
        return write_page(run).stat().st_size


def _events(num_steps: int, num_servers: int) -> Iterator[Event]:
    recorded = [event for line in TRACE.read_text().splitlines() if (event := json.loads(line))["rank"] == 0]
    (run,) = [event for event in recorded if event["event"] == "run"]
    yield run | {"servers": [f"http://server{index}:8000" for index in range(num_servers)]}
    last = max(event["step"] for event in recorded if event["event"] == "packed")
    by_kind = {
        kind: {event["step"]: event for event in recorded if event["event"] == kind and event.get("purpose") != "eval"}
        for kind in KINDS
    }
    for step in range(num_steps):
        for kind in KINDS:
            event = by_kind[kind][1 + step % (last - 1)]
            yield _moved(event, step + (kind == "step"), (step - event["step"]) * STEP_S, num_servers)
    yield {"event": "finished", "time": run["time"], "rank": 0, "step": num_steps, "seconds": num_steps * STEP_S}


def _moved(event: Event, step: int, by_s: float, num_servers: int) -> Event:
    moved = event | {"step": step, "time": event["time"] + by_s}
    if event["event"] == "timeline":
        _, begin, end, _ = event["calls"][0]
        moved |= {name: event[name] + by_s for name in ("began", "ended")}
        moved["learner"] = [[phase, start + by_s, stop + by_s] for phase, start, stop in event["learner"]]
        moved["calls"] = [[index, begin + by_s, end + by_s, step] for index in range(num_servers)]
    return moved
