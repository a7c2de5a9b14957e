"""Which mistake is on."""

import threading
from collections.abc import Iterator
from contextlib import contextmanager


class Switches:
    """At most one mistake; ``asked`` are those that mattered since ``turn``."""

    def __init__(self, on: str = "") -> None:
        self._thread = threading.local()
        self.turn(on)

    def turn(self, on: str) -> None:
        """From now on this one, or none."""
        self.on, self.asked = on, set[str]()

    def __call__(self, name: str) -> bool:
        self.asked.add(name)
        getattr(self._thread, "asked", set()).add(name)
        return self.on == name

    @contextmanager
    def noted(self) -> Iterator[set[str]]:
        """Those that this thread asks meanwhile."""
        self._thread.asked = asked = set[str]()
        try:
            yield asked
        finally:
            self._thread.asked = set()
