"""A small specification tree that breaks no rule, for tests that break one rule at a time."""

from pathlib import Path

import pytest

DELTA = """\
## Purpose
What a lamp promises to whoever switches it on, told in as few words as possible.

## ADDED Requirements

### Requirement: A lamp gives light
A lamp MUST give light while it is switched on.
A lamp SHOULD NOT hum.

#### Scenario: Switched on
- **GIVEN** a lamp that is off
- **WHEN** the switch is pressed
- **THEN** there is light
- **AND** nothing hums

### Requirement: A lamp burns oil
A lamp MUST burn oil.

#### Scenario: Oil
- **WHEN** the lamp is lit
- **THEN** it burns oil
"""

SECOND_DELTA = """\
## REMOVED Requirements

### Requirement: A lamp burns oil
**Reason**: Lamps are electric.
**Migration**: Use a socket.
"""

SOURCES = """\
seeds: {"000": lamps.md}
contradictions:
  humming:
    question: May a lamp hum?
    said: [{lines: ["000:2"], says: "never"}, {lines: ["000:7-9"], says: "a little"}]
    ruling: It had better not.
decisions: {light: A lamp is for light.}
removed:
  lamp/a-lamp-burns-oil: {added: ["000:1"], removed: ["000:3"]}
retired: []
excluded:
  - {lines: ["000:4-6"], reason: Headings.}
clauses:
  lamp/a-lamp-gives-light#1: {says: A lamp MUST give light while it is switched on., from: ["000:1", "ruling:light"]}
  lamp/a-lamp-gives-light#2: {says: A lamp SHOULD NOT hum., from: ["ruling:humming"]}
"""


class Tree:
    """A specification folder on disk whose parts can be replaced before it is linted."""

    def __init__(self, root: Path) -> None:
        self.root = root / "openspec"
        self.sources = root / "sources.yaml"
        self.deltas = {"2020-01-01-begin": DELTA, "2020-01-02-electric": SECOND_DELTA}
        self.sources_text = SOURCES

    def replace(self, old: str, new: str) -> None:
        """Replace a text that stands exactly once in deltas and sources."""
        texts = [*self.deltas.values(), self.sources_text]
        assert sum(text.count(old) for text in texts) == 1, f"{old!r} stands {sum(t.count(old) for t in texts)} times"
        self.deltas = {name: text.replace(old, new) for name, text in self.deltas.items()}
        self.sources_text = self.sources_text.replace(old, new)

    def write(self) -> None:
        for name, text in self.deltas.items():
            path = self.root / "changes" / "archive" / name / "specs" / "lamp" / "spec.md"
            path.parent.mkdir(parents=True, exist_ok=True)
            path.write_bytes(text.encode())
        self.sources.write_text(self.sources_text, encoding="utf-8")


@pytest.fixture
def tree(tmp_path):
    return Tree(tmp_path)
