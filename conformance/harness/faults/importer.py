"""Imports modules of the implementation from changed source; only where these are not imported yet."""

import sys
from collections.abc import Callable, Sequence
from importlib.abc import MetaPathFinder
from importlib.machinery import ModuleSpec, PathFinder, SourceFileLoader
from types import CodeType, ModuleType

Change = Callable[[str], str]
"""Source -> source."""


class ChangedLoader(SourceFileLoader):
    """Compiles changed source, and neither reads nor writes caches."""

    change: Change

    def get_code(self, fullname: str) -> CodeType | None:
        path = self.get_filename(fullname)
        source = self.get_data(path).decode("utf-8")
        return self.source_to_code(self.change(source).encode("utf-8"), path)


class ChangedFinder(MetaPathFinder):
    """Finds modules as Python does, and hands some of them to ``ChangedLoader``."""

    def __init__(self, change_of: Callable[[str], Change | None]) -> None:
        self.change_of = change_of

    def find_spec(
        self, fullname: str, path: Sequence[str] | None, target: ModuleType | None = None
    ) -> ModuleSpec | None:
        change = self.change_of(fullname) if fullname.partition(".")[0] == "rollmatch" else None
        if change is None or (spec := PathFinder.find_spec(fullname, path, target)) is None or spec.origin is None:
            return None
        loader = ChangedLoader(fullname, spec.origin)
        loader.change = change
        spec.loader = loader
        return spec


def install(change_of: Callable[[str], Change | None]) -> None:
    """From now on, in this process."""
    ours = [name for name in sys.modules if name.partition(".")[0] == "rollmatch"]
    loaded = [name for name in ours if change_of(name) is not None]
    assert not loaded, f"already imported, so that no change would be seen: {loaded[:3]}"
    sys.meta_path.insert(0, ChangedFinder(change_of))
