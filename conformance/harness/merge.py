"""A delta applied to a capability, to the same bytes as OpenSpec's archive would write.

Order: renamed, removed, modified, added. Requirements keep their places, new ones come last in the order of the delta.
What is already as the delta wants it is left alone, so a delta can be applied to its own result.
"""

from collections.abc import Iterable, Mapping

from conformance.harness.delta import Delta, read_delta
from conformance.harness.main_spec import MainSpec, split_main_spec, structure_flaws
from conformance.harness.markdown_lines import fence_mask, rstrip, strip
from conformance.harness.purpose import first_text
from conformance.harness.requirement_block import RequirementBlock, fold_name
from conformance.harness.slots import Slots, refuse
from conformance.harness.spec_error import (
    CapabilityBroken,
    CapabilityMissing,
    DeltaEmpty,
    NameRepeated,
    RenameUnpaired,
    SectionsContradict,
)


def merge(base: str | None, delta_text: str, *, capability: str, change: str) -> str:
    """The capability's file after a change; ``base`` is None where there was none.

    Errors: the refusals of ``spec_error``.
    """
    delta = read_delta(delta_text)
    _check_delta(delta, capability)
    if base is None:
        if delta.modified or delta.renamed:
            raise CapabilityMissing("there is no such capability to modify", key=capability, remedy="Use ADDED.")
        base = first_text(delta_text, capability=capability, change=change)
    if flaws := structure_flaws(base):
        raise CapabilityBroken("; ".join(flaws), key=capability, remedy="Mend the file first.")
    parts = split_main_spec(base)
    slots = Slots.of(parts.blocks)
    slots.rename(delta)
    slots.remove(delta)
    slots.modify(delta.modified)
    slots.add(delta.added)
    return _join(parts, slots.in_order())


def _check_delta(delta: Delta, capability: str) -> None:
    if delta.unpaired:
        raise refuse(RenameUnpaired, delta.unpaired[0], "has only one side")
    sections: Mapping[str, list[str]] = {
        "ADDED": [block.name for block in delta.added],
        "MODIFIED": [block.name for block in delta.modified],
        "REMOVED": list(delta.removed),
        "RENAMED FROM": [each.old for each in delta.renamed],
        "RENAMED TO": [each.new for each in delta.renamed],
    }
    for title, names in sections.items():
        for name in names:
            if names.count(name) > 1:
                raise refuse(NameRepeated, name, f"stands twice in {title}")
    _check_contradictions(sections)
    if delta.is_empty:
        raise DeltaEmpty("the delta changes nothing", key=capability, remedy="Write ADDED, MODIFIED, ... sections.")


def _check_contradictions(sections: Mapping[str, list[str]]) -> None:
    removed_folded = [fold_name(name) for name in sections["REMOVED"]]
    for name in sections["RENAMED FROM"]:
        if fold_name(name) in removed_folded:
            raise refuse(SectionsContradict, name, "is renamed and removed")
    pairs = (("RENAMED FROM", "MODIFIED"), ("RENAMED TO", "ADDED"))
    for one, other in (*pairs, ("MODIFIED", "REMOVED"), ("MODIFIED", "ADDED"), ("ADDED", "REMOVED")):
        for name in sections[one]:
            if name in sections[other]:
                raise refuse(SectionsContradict, name, f"stands in {one} and {other}")


def _join(parts: MainSpec, blocks: Iterable[RequirementBlock]) -> str:
    """Parts with one blank line between them, runs of blank lines as one, one line feed at the end."""
    preamble = [parts.preamble] if strip(parts.preamble) else []
    body = rstrip("\n\n".join([*preamble, *(block.text for block in blocks)]))
    lines = "\n\n".join(part for part in (parts.before, parts.header, body, parts.after) if part).split("\n")
    mask = fence_mask(lines)
    kept = [
        line
        for index, line in enumerate(lines)
        if line or mask[index] or index == 0 or lines[index - 1] or mask[index - 1]
    ]
    return rstrip("\n".join(kept)) + "\n"
