"""Groups of the windows under way that no step has learnt from, and which of them a step takes. Needs no torch.

A group is all rollouts of one sample. A step takes as many groups as its own window has: of the complete ones those
that come first in the plan. So a step whose groups are all complete takes exactly these, and a slow group is learnt
from later, up to its *last step*. A step waits for a group where the steps that are left have no room for it.
"""

import json
from collections.abc import Collection, Iterable, Mapping, Sequence
from pathlib import Path
from typing import NamedTuple

from rollmatch.errors import LaunchError
from rollmatch.journal import Event, read_journal

GROUPS_FILE = "groups-rank{rank}.json"


class Group(NamedTuple):
    """The rollouts of one sample."""

    window: int
    """First optimizer step of the window that it was requested for."""
    place: int
    """Of its sample in that window."""


class OpenGroups:
    """Which groups are left, and until which step each may wait."""

    def __init__(self, *, lead: int, max_staleness: int) -> None:
        """``max_staleness``: in optimizer steps when a window's first step begins."""
        self.lead, self.max_staleness = lead, max_staleness
        self.left: dict[int, list[int]] = {}
        """First step of each window -> places of the groups that no step has taken, ascending. A window stays until its
        own step is over, also where none is left."""
        self.last_step: dict[int, int] = {}
        """First step of each window -> the last step that may learn from it; by ``request``."""
        self.replayed: dict[int, list[Group]] = {}
        """What steps took before the run was resumed."""
        self._taken: tuple[int, list[Group]] = (-1, [])

    def open(self, window: int, num_groups: int) -> None:
        """Note a window none of whose groups was taken."""
        self.left[window] = list(range(num_groups))

    def request(self, window: int, *, step: int) -> list[int]:
        """The groups of an open window that are to be requested at ``step``."""
        self.last_step[window] = step + self.max_staleness
        return self.left[window]

    def choose(self, complete: Mapping[int, Collection[int]], coming: Sequence[tuple[int, int]]) -> list[Group] | None:
        """The groups that a step takes; None: more of them have to be complete.

        ``complete``: complete groups of each window. ``coming``: (first step, number of groups) of the step's own
        window and of those requested behind it.

        Two groups per step, and group 0 of window 0 is slow. Step 0 takes one of window 1 in its place. Step 1 may
        leave it again, step 2 is its last one:

        >>> groups = OpenGroups(lead=1, max_staleness=2)
        >>> for window in (0, 1):
        ...     groups.open(window, 2)
        ...     _ = groups.request(window, step=0)
        >>> chosen = groups.choose({0: [1], 1: [0, 1]}, [(0, 2), (1, 2)])
        >>> [tuple(group) for group in chosen]
        [(0, 1), (1, 0)]
        >>> groups.take(0, chosen)
        >>> groups.open(2, 2)
        >>> groups.request(2, step=1)
        [0, 1]
        >>> chosen = groups.choose({0: [], 1: [1], 2: [0]}, [(1, 2), (2, 2)])
        >>> [tuple(group) for group in chosen]
        [(1, 1), (2, 0)]
        >>> groups.take(1, chosen)
        >>> groups.open(3, 2)
        >>> groups.request(3, step=2)
        [0, 1]
        >>> groups.choose({0: [], 2: [1], 3: [0, 1]}, [(2, 2), (3, 2)]) is None
        True
        """
        step, num_taken = coming[0]
        wanted = self.replayed.get(step, [])
        if wanted and all(place in self.left.get(window, ()) for window, place in wanted):
            return wanted if all(place in complete[window] for window, place in wanted) else None
        ready = [Group(w, place) for w in sorted(self.left) for place in self.left[w] if place in complete[w]]
        if len(ready) < num_taken:
            return None
        for last in sorted(set(self.last_step.values())):
            urgent = [window for window in self.left if self.last_step[window] <= last]
            room = sum(num_groups for later, num_groups in coming[1:] if later <= last)
            num_due = sum(len(self.left[window]) for window in urgent) - room
            if sum(group.window in urgent for group in ready) < min(num_due, num_taken):
                return None
        return ready[:num_taken]

    def take(self, step: int, groups: Sequence[Group]) -> None:
        """Note what a step learns from."""
        self._taken = step, list(groups)
        for window, place in groups:
            self.left[window].remove(place)
        for window in [window for window, places in self.left.items() if window < step and not places]:
            del self.left[window], self.last_step[window]

    def save(self, folder: Path, *, step: int, rank: int) -> None:
        """Write what is left after ``step`` optimizer steps into a checkpoint's folder; a later step's groups are."""
        left = {window: set(places) for window, places in self.left.items()}
        if self._taken[0] >= step:
            for window, place in self._taken[1]:
                left.setdefault(window, set()).add(place)
        stored = {"lead": self.lead, "left": [[window, sorted(left[window])] for window in sorted(left)]}
        (folder / GROUPS_FILE.format(rank=rank)).write_text(json.dumps(stored))


def restore_groups(groups: OpenGroups | None, folder: Path, journal: Path, *, step: int, rank: int) -> None:
    """Read back what a checkpoint has left; steps that the run did afterwards will take the groups that they took.

    Errors: ``groups-unfit``.
    """
    file = folder / GROUPS_FILE.format(rank=rank)
    stored = json.loads(file.read_text()) if file.exists() else None
    if stored is not None and (groups is None or groups.lead != stored["lead"]):
        now = "groups are learnt from in their order" if groups is None else f"{groups.lead} are now"
        problem = f"{stored['lead']} windows were requested in advance for steps that take first complete groups, {now}"
        remedy = "Resume with max_staleness and late_windows of the run that wrote it, or start a new run."
        raise LaunchError(problem, code="groups-unfit", key=str(file), remedy=remedy)
    if groups is not None:
        groups.left = dict(stored["left"]) if stored is not None else {}
        groups.replayed = taken_since(read_journal(journal), step=step)


def taken_since(events: Iterable[Event], *, step: int) -> dict[int, list[Group]]:
    """What steps from ``step`` on took in a run, by its journal; of a step that was run twice, the later line.

    >>> old = {"event": "run", "resumed_from": None}, {"event": "taken", "step": 1, "groups": [[1, 0]]}
    >>> new = old[0], {"event": "taken", "step": 1, "groups": [[2, 0]]}, {"event": "taken", "step": 0, "groups": []}
    >>> taken_since([*old, *new], step=1)
    {1: [Group(window=2, place=0)]}
    """
    taken: dict[int, list[Group]] = {}
    for event in events:
        if event["event"] == "run" and event["resumed_from"] is None:
            taken = {}  # another run had written to the same place
        elif event["event"] == "taken" and event["step"] >= step:
            taken[event["step"]] = [Group(*group) for group in event["groups"]]
    return taken
