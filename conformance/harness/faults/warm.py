"""Trials in a process that has imported everything and collected the tests: a fork, a function changed, a test run."""

import gc
import os
from collections.abc import Callable, Collection

import pytest

from conformance.harness.faults.fault import IMPLEMENTATION
from conformance.harness.faults.in_place import Loaded
from conformance.harness.faults.trial import OPTIONS, Enough, Listener, Run, Trial, test_of

THREADS = "/proc/self/task"


def collect_and(serve: Callable[[Run], None], files: Collection[str]) -> None:
    """Collect the tests of these files; ``serve`` gets what runs a trial in a fork of this process."""
    loaded = Loaded()
    gc.disable()  # nothing of what is imported now is garbage
    loaded.watch()
    warm = Warm(loaded, serve)
    pytest.main([*OPTIONS, "--capture=no", *sorted(files)], plugins=[warm, Enough(warm)])


class Warm(Listener):
    """A pytest plugin that serves where pytest would run all tests."""

    def __init__(self, loaded: Loaded, serve: Callable[[Run], None]) -> None:
        super().__init__()
        self.loaded, self.serve = loaded, serve
        self.items: dict[str, list[pytest.Item]] = {}

    @pytest.hookimpl(tryfirst=True)
    def pytest_runtestloop(self, session: pytest.Session) -> bool:
        self.loaded.look(f"{IMPLEMENTATION}/")
        for item in session.items:
            self.items.setdefault(test_of(item), []).append(item)
        assert len(os.listdir(THREADS)) == 1, "only a process of one thread may fork"
        gc.collect()
        gc.freeze()
        gc.enable()
        self.serve(self.run)
        return True

    def run(self, trial: Trial) -> Listener | None:
        """In a fork."""
        if trial.fault is None or not self.items.keys() >= set(trial.tests) or not self.loaded.put(trial.fault):
            return None
        items = [item for test in trial.tests for item in self.items[test]]
        try:
            for item, following in zip(items, [*items[1:], None], strict=True):
                item.config.hook.pytest_runtest_protocol(item=item, nextitem=following)
        finally:
            items[0].session._setupstate.teardown_exact(None)
        return self
