"""Rules of deltas beyond what a merge refuses: nothing is passed over, and a removal says why and what now."""

from collections.abc import Iterator

from conformance.harness.delta import read_delta
from conformance.harness.spec_error import Finding

_REMOVAL_LINES = (("**Reason**: ", "removal-without-reason"), ("**Migration**: ", "removal-without-migration"))


def check_delta(text: str, *, path: str) -> Iterator[Finding]:
    """Broken rules of one delta file."""
    delta = read_delta(text)
    for orphan in delta.orphans:
        problem = f"{orphan.name!r} stands outside the sections ADDED, MODIFIED, REMOVED, RENAMED."
        remedy = "Move it into one of them."
        yield Finding(code="requirement-orphaned", key=f"{path}:{orphan.line}", problem=problem, remedy=remedy)
    with_text = {block.name for block in delta.removed_blocks}
    for name in delta.removed:
        if name not in with_text:
            problem = f"the removal of {name!r} is a bullet, which has no room for a reason."
            yield Finding(code="removal-as-bullet", key=path, problem=problem, remedy="Write it as a header.")
    for block in delta.removed_blocks:
        for beginning, code in _REMOVAL_LINES:
            if not any(line.startswith(beginning) for line in block.text.split("\n")):
                problem = f"the removal of {block.name!r} has no line that begins with {beginning.strip()}."
                yield Finding(code=code, key=f"{path}:{block.line}", problem=problem, remedy="Add it.")
