"""One deliberate mistake: a few characters of one module of the implementation, replaced."""

import hashlib
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from conformance.harness.faults.importer import Change

IMPLEMENTATION = Path(__file__).parents[3] / "impl"


class SeamGone(ValueError):
    """The text to be replaced stands in the module exactly once."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Fault:
    """A mistake that somebody could make, and that some test has to notice."""

    fault_id: str
    what: str
    """The mistake, as a reviewer would tell it."""
    seam: str
    """The module, as ``learn.pack``."""
    old: str
    new: str

    @property
    def module(self) -> str:
        return f"rollmatch.{self.seam}"

    @property
    def path(self) -> Path:
        return IMPLEMENTATION / Path(*self.module.split(".")).with_suffix(".py")

    @property
    def digest(self) -> str:
        """Changes with seam and replacement; 12 hexadecimal digits."""
        return hashlib.sha256("\0".join((self.seam, self.old, self.new)).encode()).hexdigest()[:12]

    def change_of(self, module: str) -> Change | None:
        """How a module differs; None where it does not."""
        return self.apply if module == self.module else None

    def apply(self, source: str) -> str:
        """The module's source with the mistake in it. Errors: ``SeamGone``."""
        if source.count(self.old) != 1:
            raise SeamGone(f"{self.fault_id}: {self.old!r} stands {source.count(self.old)} times in {self.module}")
        return source.replace(self.old, self.new)


def collect(*parts: Sequence[Fault]) -> dict[str, Fault]:
    """Faults by id; an id given twice is a mistake of ours."""
    faults = [fault for part in parts for fault in part]
    bank = {fault.fault_id: fault for fault in faults}
    assert len(bank) == len(faults), "a fault's id is given twice"
    return bank
