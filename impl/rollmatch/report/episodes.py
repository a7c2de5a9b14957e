"""Episodes of an environment: when each had its turns, the tail of their durations, tools, failures, two chats."""

from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from rollmatch.report.axes import Axis, value_axis
from rollmatch.report.gantt import LANE, LEFT, RIGHT, TOP, Bar, Lane, place_bar
from rollmatch.report.history import Event, History
from rollmatch.report.numbers import finite, percent, plain

MAX_LANES = 32
MAX_FAILURES = 8
HEIGHT_OF_AXIS = 22
TAIL = (("p50", 0.5), ("p90", 0.9), ("p99", 0.99), ("max", 1.0))


@dataclass(frozen=True, slots=True, kw_only=True)
class ToolRow:
    """A tool over the whole run."""

    name: str
    calls: str
    seconds: str
    share: float
    share_text: str


@dataclass(frozen=True, slots=True, kw_only=True)
class Chat:
    """An episode as its messages."""

    title: str
    about: str
    messages: tuple[tuple[str, str], ...]
    """(role, text); the policy's and the environment's, and what the sample began with."""


@dataclass(frozen=True, slots=True, kw_only=True)
class EpisodeSheet:
    """What the page shows of episodes."""

    step: int
    x: Axis
    lanes: tuple[Lane, ...]
    height: float
    bottom: float
    tail: tuple[tuple[str, str, str], ...]
    """Name, of all windows, of the last one."""
    figures: tuple[tuple[str, str], ...]
    tools: tuple[ToolRow, ...]
    failures: tuple[str, ...]
    chats: tuple[Chat, ...]


def make_episode_sheet(history: History) -> EpisodeSheet | None:
    """None for a run without episodes. Lanes and chats are of the last window."""
    events = [event for event in history.others.get("episodes", ()) if event.get("durations")]
    if not events:
        return None
    step = events[-1]["step"]
    last = [event for event in events if event["step"] == step]
    shown = [one for event in last for one in event.get("shown", ()) if isinstance(one, Mapping) and one.get("turns")]
    shown = shown[:MAX_LANES]
    end = max((finite(one["turns"][-1][2]) or 0.0 for one in shown), default=0.0)
    x = value_axis(0.0, max(end, 1e-3), start=LEFT, end=RIGHT)
    lanes = tuple(_lane(one, place, x) for place, one in enumerate(shown))
    bottom = TOP + LANE * len(lanes)
    return EpisodeSheet(
        step=step,
        x=x,
        lanes=lanes,
        height=bottom + HEIGHT_OF_AXIS,
        bottom=bottom,
        tail=_tail(events, last),
        figures=_figures(events),
        tools=_tools(events),
        failures=tuple(str(failure) for event in events for failure in event.get("failures", ()))[-MAX_FAILURES:],
        chats=_chats(last),
    )


def _lane(one: Mapping[str, object], place: int, x: Axis) -> Lane:
    bars, turns = list[Bar](), one["turns"]
    assert isinstance(turns, list)
    for number, (requested, written, replied, tools) in enumerate(turns, 1):
        text = f"turn {number}: engine, {plain(written - requested, digits=2)} s"
        bars.append(place_bar(x, requested, written, kind="call-0", text=text))
        what = ", ".join(f"{name} x {num}" if num > 1 else name for name, num in Counter(tools).items())
        text = f"turn {number}: {what or 'environment'}, {plain(replied - written, digits=2)} s"
        bars.append(place_bar(x, written, replied, kind="tool" if tools else "environment", text=text))
    worth = "failed" if one.get("reward") is None else f"{finite(one['reward']) or 0.0:z.3g}"
    return Lane(
        label=f"{one.get('sample_id')}: {worth}",
        y=TOP + LANE * place,
        bars=tuple(bar for bar in bars if bar.width > 0),
    )


def _tail(events: Sequence[Event], last: Sequence[Event]) -> tuple[tuple[str, str, str], ...]:
    both = [sorted(float(each) for event in part for each in event["durations"]) for part in (events, last)]
    return tuple((name, *(plain(_quantile(part, share), digits=2) for part in both)) for name, share in TAIL)  # type: ignore[misc]


def _quantile(values: Sequence[float], share: float) -> float:
    """The smallest value that so large a share does not exceed.

    >>> _quantile([1.0, 2.0, 3.0, 10.0], 0.5), _quantile([1.0, 2.0, 3.0, 10.0], 0.9)
    (2.0, 10.0)
    """
    return values[max(0, -int(-share * len(values) // 1) - 1)]


def _figures(events: Sequence[Event]) -> tuple[tuple[str, str], ...]:
    count = sum(len(event["durations"]) for event in events)
    engine, environment, failed = (
        sum(finite(event.get(name)) or 0.0 for event in events) for name in ("engine_s", "environment_s", "num_failed")
    )
    whole = sum(sum(event["durations"]) for event in events)
    return (
        ("episodes", f"{count:,}"),
        ("failed", f"{failed:,.0f} ({percent(failed / count)})"),
        ("waiting for the engine", percent(engine / whole if whole else 0.0)),
        ("environment and tools", percent(environment / whole if whole else 0.0)),
        ("waiting for other episodes", percent(max(0.0, 1 - (engine + environment) / whole) if whole else 0.0)),
    )


def _tools(events: Sequence[Event]) -> tuple[ToolRow, ...]:
    """Slowest first; the share is of the time of all tools."""
    calls, seconds = Counter[str](), Counter[str]()
    for event in events:
        for name, (num, spent) in (event.get("tools") or {}).items():
            calls[name] += num
            seconds[name] += spent
    whole = sum(seconds.values()) or 1.0
    return tuple(
        ToolRow(
            name=name or "(no tool)",
            calls=f"{calls[name]:,}",
            seconds=plain(1000 * seconds[name] / max(calls[name], 1), digits=1),
            share=seconds[name] / whole,
            share_text=percent(seconds[name] / whole),
        )
        for name in sorted(calls, key=lambda name: -seconds[name])
    )


def _chats(last: Sequence[Event]) -> tuple[Chat, ...]:
    """The best and the worst episode of all ranks; one where they are the same."""
    known = [chat for event in last for chat in event.get("chats", ())]
    if not known:
        return ()
    best, worst = (pick(known, key=lambda chat: finite(chat.get("reward")) or 0.0) for pick in (max, min))
    pairs = [("Best episode", best)] + ([("Worst episode", worst)] if worst is not best else [])
    return tuple(
        Chat(
            title=title,
            about=f"reward {finite(chat.get('reward')) or 0.0:z.3g}, {chat.get('origin')}",
            messages=tuple((str(role), str(text)) for role, text in chat.get("messages", ())),
        )
        for title, chat in pairs
    )
