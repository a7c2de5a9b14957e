"""All archived changes applied from nothing, in the order of their dates: what ``specs/`` has to hold.

``python -m conformance.harness.replay`` compares; with ``--write`` it writes the specifications anew.
"""

import sys
from pathlib import Path

from conformance.harness.merge import merge
from conformance.harness.spec_error import Finding

OPENSPEC = Path(__file__).parents[2] / "spec" / "openspec"


def archived_changes(root: Path = OPENSPEC) -> list[Path]:
    """Folders of archived changes, oldest first."""
    return sorted(path for path in (root / "changes" / "archive").iterdir() if path.is_dir())


def spec_files(folder: Path) -> dict[str, Path]:
    """Capability -> its file below ``folder/specs``, in the order of names."""
    files = sorted((folder / "specs").rglob("spec.md"))
    return {path.parent.relative_to(folder / "specs").as_posix(): path for path in files}


def replay(root: Path = OPENSPEC) -> dict[str, str]:
    """Capability -> text after all changes. Errors: ``MergeRefused``."""
    texts: dict[str, str] = {}
    for change in archived_changes(root):
        for capability, path in spec_files(change).items():
            delta = path.read_text(encoding="utf-8")
            texts[capability] = merge(texts.get(capability), delta, capability=capability, change=change.name)
    return texts


def replay_findings(root: Path = OPENSPEC) -> list[Finding]:
    """Where the committed specifications differ from the replayed ones."""
    texts, files = replay(root), spec_files(root)
    remedy = "Write a change, then run python -m conformance.harness.replay --write."
    found = []
    for capability in sorted({*texts, *files}):
        committed = files[capability].read_bytes() if capability in files else b""
        if committed != texts.get(capability, "").encode():
            problem = "the file is not what the archived changes make of it."
            key = f"specs/{capability}/spec.md"
            found.append(Finding(code="specs-not-replayed", key=key, problem=problem, remedy=remedy))
    return found


def write_specs(root: Path = OPENSPEC) -> None:
    """Write every capability's file anew; files of capabilities that no change makes are left to the comparison."""
    for capability, text in replay(root).items():
        path = root / "specs" / capability / "spec.md"
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_bytes(text.encode())


def main(arguments: list[str]) -> int:
    """Exit status: 0 when committed and replayed specifications are equal."""
    if arguments == ["--write"]:
        write_specs()
    found = replay_findings()
    sys.stdout.write("".join(f"{finding}\n" for finding in found))
    return 1 if found else 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
