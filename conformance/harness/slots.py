"""The requirements of a capability in their places, and what a delta may do to them."""

from collections.abc import Iterable
from dataclasses import dataclass, replace

from conformance.harness.delta import Delta
from conformance.harness.markdown_lines import strip
from conformance.harness.requirement_block import RequirementBlock, fold_name, scenario_names
from conformance.harness.spec_error import MergeRefused, NameTaken, NameUnknown, ScenarioDropped


@dataclass(slots=True)
class Slots:
    """Requirements by name, and the names in the order of the file."""

    blocks: dict[str, RequirementBlock]
    names: list[str]

    @classmethod
    def of(cls, blocks: Iterable[RequirementBlock]) -> "Slots":
        kept = list(blocks)
        return cls(blocks={block.name: block for block in kept}, names=[block.name for block in kept])

    def in_order(self) -> list[RequirementBlock]:
        places = [name for name in self.names if name in self.blocks]
        return [self.blocks[name] for name in (*places, *(name for name in self.blocks if name not in set(places)))]

    def like(self, name: str, *, but: str = "") -> str | None:
        """A name that differs in case or spacing only."""
        return next((other for other in self.blocks if other != but and fold_name(other) == fold_name(name)), None)

    def rename(self, delta: Delta) -> None:
        for each in delta.renamed:
            if each.old not in self.blocks:
                if each.new not in self.blocks or self.like(each.old, but=each.new) is not None:
                    raise refuse(NameUnknown, each.old, "is not there to be renamed")
                continue
            if each.new in self.blocks or self.like(each.new, but=each.old) is not None:
                raise refuse(NameTaken, each.new, "is taken, or differs in case or spacing only")
            block = self.blocks.pop(each.old)
            header = f"### Requirement: {each.new}"
            text = "\n".join([header, *block.text.split("\n")[1:]])
            self.blocks[each.new] = replace(block, name=each.new, text=text)
            self.names[self.names.index(each.old)] = each.new

    def remove(self, delta: Delta) -> None:
        for name in delta.removed:
            if name not in self.blocks and self.like(name) is not None:
                raise refuse(NameUnknown, name, "is spelled otherwise")
            self.blocks.pop(name, None)

    def modify(self, blocks: Iterable[RequirementBlock]) -> None:
        for block in blocks:
            if block.name not in self.blocks:
                raise refuse(NameUnknown, block.name, "is not there to be modified")
            kept = scenario_names(block.text)
            for name in scenario_names(self.blocks[block.name].text):
                if name not in kept:
                    raise refuse(ScenarioDropped, block.name, f"would lose the scenario {name!r}")
                kept.remove(name)
            self.blocks[block.name] = block

    def add(self, blocks: Iterable[RequirementBlock]) -> None:
        for block in blocks:
            there = self.blocks.get(block.name)
            if there is not None and strip(there.text) == strip(block.text):
                continue
            if there is not None or self.like(block.name) is not None:
                raise refuse(NameTaken, block.name, "is there already, in this or another spelling")
            self.blocks[block.name] = block


def refuse(kind: type[MergeRefused], name: str, problem: str) -> MergeRefused:
    return kind(f"{name!r} {problem}", key=name, remedy="Correct the delta.")
