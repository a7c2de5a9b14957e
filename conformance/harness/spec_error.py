"""What is wrong with a specification: findings of a lint, and refusals of a merge."""

from dataclasses import dataclass

from rollmatch.errors import RollmatchError


@dataclass(frozen=True, slots=True, kw_only=True)
class Finding:
    """One broken rule of a text."""

    code: str
    key: str
    """``file:line``, or the id of a clause."""
    problem: str
    remedy: str

    def __str__(self) -> str:
        return f"[{self.code}] {self.key}: {self.problem} {self.remedy}"


class MergeRefused(RollmatchError, ValueError):
    """A delta cannot be applied; ``key`` is the requirement's name, or the capability."""

    code = "merge-refused"


class DeltaEmpty(MergeRefused):
    """A delta adds, modifies, removes or renames something."""

    code = "delta-empty"


class RenameUnpaired(MergeRefused):
    """Every FROM line is followed by its TO line."""

    code = "rename-unpaired"


class NameRepeated(MergeRefused):
    """A section names a requirement once."""

    code = "name-repeated"


class SectionsContradict(MergeRefused):
    """A requirement stands in one section, or in RENAMED and, by its new name, in MODIFIED."""

    code = "sections-contradict"


class CapabilityMissing(MergeRefused):
    """Only ADDED can begin a capability."""

    code = "capability-missing"


class CapabilityBroken(MergeRefused):
    """The file to be changed is sound."""

    code = "capability-broken"


class NameUnknown(MergeRefused):
    """What is modified or renamed exists, spelled exactly so."""

    code = "name-unknown"


class NameTaken(MergeRefused):
    """A new name differs from all others by more than case and spacing."""

    code = "name-taken"


class ScenarioDropped(MergeRefused):
    """A modified requirement keeps every scenario by its name."""

    code = "scenario-dropped"


class PurposeUnclear(MergeRefused):
    """The purpose of a new capability is plain paragraphs: no comments, fences or headers."""

    code = "purpose-unclear"
