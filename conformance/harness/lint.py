"""All rules of the specification tree: ``python -m conformance.harness.lint`` prints what is broken."""

import sys
from pathlib import Path

from conformance.harness.catalogue import load_specs
from conformance.harness.delta import read_delta
from conformance.harness.delta_rules import check_delta
from conformance.harness.markdown_rules import check_markdown
from conformance.harness.replay import OPENSPEC, archived_changes, replay_findings, spec_files
from conformance.harness.scenario_rules import check_scenarios
from conformance.harness.source_rules import check_sources
from conformance.harness.sources import SOURCES, load_sources
from conformance.harness.spec_error import Finding
from conformance.harness.spec_reader import read_spec, slug
from conformance.harness.spec_rules import check_requirement, check_spec


def lint(root: Path = OPENSPEC, sources: Path = SOURCES) -> list[Finding]:
    """Every broken rule of specifications, archived changes and sources."""
    specs = load_specs(root)
    found = [finding for spec in specs for finding in (*check_spec(spec), *check_scenarios(spec))]
    found += [finding for spec in specs for finding in check_markdown(spec.text, path=spec.path)]
    for change in archived_changes(root):
        found += _lint_change(change)
    found += check_sources(load_sources(sources), specs, gone=removed_ids(root))
    return found + replay_findings(root)


def removed_ids(root: Path = OPENSPEC) -> set[str]:
    """Ids of requirements that archived changes removed."""
    removed: set[str] = set()
    for change in archived_changes(root):
        for capability, path in spec_files(change).items():
            delta = read_delta(path.read_text(encoding="utf-8"))
            removed -= {f"{capability}/{slug(block.name)}" for block in delta.added}
            removed |= {f"{capability}/{slug(name)}" for name in delta.removed}
    return removed


def _lint_change(change: Path) -> list[Finding]:
    found: list[Finding] = []
    for capability, file in spec_files(change).items():
        text, path = file.read_text(encoding="utf-8"), f"{change.name}/specs/{capability}/spec.md"
        found += [*check_delta(text, path=path), *check_markdown(text, path=path)]
        spec, removed = read_spec(text, capability=capability, path=path), read_delta(text).removed
        kept = [requirement for requirement in spec.requirements if requirement.name not in removed]
        found += [finding for requirement in kept for finding in check_requirement(spec, requirement)]
    return found


def main() -> int:
    """Exit status: 0 when nothing is broken."""
    found = lint()
    sys.stdout.write("".join(f"{finding}\n" for finding in found))
    return 1 if found else 0


if __name__ == "__main__":
    sys.exit(main())
