"""Known gaps of servers: the check that is missed, for which reason, in which versions."""

import re
from collections.abc import Collection, Mapping, Sequence
from datetime import date
from pathlib import Path

import msgspec
from packaging.requirements import InvalidRequirement, Requirement
from packaging.specifiers import InvalidSpecifier, SpecifierSet
from packaging.version import InvalidVersion

from conformance.judge.servers.check import FAULTY, INAPPLICABLE, MUST, PASSED, UNTESTABLE, Check, CheckVerdict
from conformance.judge.servers.checks import BY_ID

FOLDER = Path(__file__).parent / "gaps"
PASS, MISSES_MUST, MISSES_SHOULD, BLOCKED = "pass", "must", "should", "blocked-by"
KNOWN, STALE = "known-gap", "stale-gap"
SERVERS = {"swift": "ms-swift", "trl": "trl", "vllm": "vllm"}
"""Dialect -> the server whose gaps are known."""
"""Verdicts, beside ``not-testable`` and ``harness-error``."""


class GapMalformed(ValueError):
    """A gap does not name an existing check, a reason, what is seen of it and a link, or names no range of versions."""


class Gap(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """Why a server misses a check."""

    check: str
    reason: str
    seen: str
    """Regular expression, found in what the judge says about the miss. A miss without it is another one."""
    link: str
    """``{version}`` stands for the server's."""
    finding: str = ""
    """A page of ``docs/findings`` that shows it."""
    expires: date | None = None
    """Last day on which it excuses anything; needed where no range of versions ends it."""
    versions: str = ""
    """Of these alone, such as ``>=4.6``; default: all of the file."""
    lines: Mapping[str, int] = {}
    """Version -> line at ``link``."""

    def at(self, version: str) -> "Gap":
        """Fill in the link of this version."""
        line = f"#L{self.lines[version]}" if version in self.lines else ""
        return msgspec.structs.replace(self, link=self.link.replace("{version}", version) + line)


class VersionChange(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """A change that came with a version and that no check asks for; shown on the page."""

    version: str
    text: str


class GapFile(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """Gaps of one server."""

    server: str
    """Its name and the versions in which they were seen, such as ``ms-swift>=4.5,<4.7``. Others have no known gap."""
    gaps: list[Gap]
    changes: list[VersionChange] = []


def load_gaps(path: Path, known: Collection[str] = BY_ID, *, server: str = "") -> Mapping[str, Gap]:
    """Read gaps, by check, of the ``known`` checks; none where there is no file.

    ``server``: name and version, joined by a hyphen; needed where the file or a gap has a range of versions. Errors:
    ``GapMalformed``.
    """
    if not path.exists():
        return {}
    listed = _read(path)
    gaps = listed.gaps if isinstance(listed, GapFile) else listed
    if unknown := {gap.check for gap in gaps} - {*known}:
        raise GapMalformed(f"{path.name}: there is no check {sorted(unknown)}")
    name, _, version = server.rpartition("-")
    if isinstance(listed, GapFile) and not _counts(path, listed, name, version):
        return {}
    held = [gap.at(version) for gap in gaps if not gap.versions or _lies_in(path, gap.versions, version)]
    is_ranged = isinstance(listed, GapFile) and bool(Requirement(listed.server).specifier)
    endless = [gap.check for gap in held if not (gap.expires or gap.versions or is_ranged)]
    if endless:
        raise GapMalformed(f"{path.name}: {endless}: a gap needs a day, expires: YYYY-MM-DD, or a range of versions")
    if twice := sorted({gap.check for gap in held if [other.check for other in held].count(gap.check) > 1}):
        raise GapMalformed(f"{path.name}: several gaps {twice} hold for {server or 'every version'}")
    return {gap.check: gap for gap in held}


def gaps_of(server: str) -> Mapping[str, Gap]:
    """Known gaps of ``server``, its name and version, joined by a hyphen. Errors: ``GapMalformed``."""
    return load_gaps(FOLDER / f"{server.rpartition('-')[0]}.yaml", server=server)


def known_as(dialect: str, version: str, missed: Mapping[str, str]) -> str:
    """Name of the server whose known gaps are among what was ``missed`` (check -> reason); empty where there is none.

    ``version``: as the server says, empty where it says none; then the name ends with ``VERSION``.

    >>> known_as("vllm", "0.32.0", {"copies-of-a-prompt-differ": "all four copies of one prompt got the same response"})
    'vllm-0.32.0'
    >>> known_as("vllm", "x", {"copies-of-a-prompt-differ": "all four copies of one prompt got the same response"})
    ''
    """
    name = SERVERS.get(dialect, "")
    path = FOLDER / f"{name}.yaml"
    listed = _read(path) if path.exists() else []
    if not isinstance(listed, GapFile):
        return ""
    try:
        held = gaps_of(f"{name}-{version}").values() if version else listed.gaps
    except InvalidVersion:
        return ""
    is_same = any(gap.check in missed and re.search(gap.seen, missed[gap.check]) for gap in held)
    return f"{name}-{version or 'VERSION'}" if is_same else ""


def changes_of(server: str) -> Sequence[str]:
    """Changes that came with this version and that no check asks for. Errors: ``GapMalformed``."""
    name, _, version = server.rpartition("-")
    path = FOLDER / f"{name}.yaml"
    listed = _read(path) if path.exists() else []
    return (
        [change.text for change in listed.changes if change.version == version] if isinstance(listed, GapFile) else []
    )


def _read(path: Path) -> Sequence[Gap] | GapFile:
    try:
        listed: list[Gap] | GapFile = msgspec.yaml.decode(path.read_bytes(), type=list[Gap] | GapFile)
        for gap in listed.gaps if isinstance(listed, GapFile) else listed:
            re.compile(gap.seen)
    except (msgspec.DecodeError, re.error) as error:
        raise GapMalformed(f"{path.name}: {error}") from None
    return listed


def _counts(path: Path, listed: GapFile, name: str, version: str) -> bool:
    try:
        wanted = Requirement(listed.server)
    except InvalidRequirement as error:
        raise GapMalformed(f"{path.name}: server: {error}") from None
    if name and wanted.name != name:
        raise GapMalformed(f"{path.name} lists gaps of {wanted.name}, not of {name}")
    return _lies_in(path, str(wanted.specifier), version)


def _lies_in(path: Path, versions: str, version: str) -> bool:
    if not version:
        raise GapMalformed(
            f"{path.name}: gaps of versions {versions}, but the server's version is not known; "
            "judge it with --server-name NAME-VERSION, or leave out server and versions, and give each gap a day"
        )
    try:
        return SpecifierSet(versions).contains(version, prereleases=True)
    except InvalidSpecifier as error:
        raise GapMalformed(f"{path.name}: versions: {error}") from None


def settle(check: Check, verdict: CheckVerdict, gaps: Mapping[str, Gap]) -> tuple[str, str]:
    """Verdict and reason once the known gaps are taken into account.

    A gap that passes is stale. A missed MUST that nobody excuses is ``must``, a missed SHOULD ``should``; so is a miss
    in which nothing is seen of the known reason.
    """
    gap = gaps.get(check.check_id)
    if verdict.state in (UNTESTABLE, FAULTY, INAPPLICABLE):
        return verdict.state, verdict.reason
    if verdict.state == PASSED:
        return (STALE, f"passes, but is listed as a gap: {gap.reason}") if gap else (PASS, verdict.reason)
    missed = MISSES_MUST if check.grade == MUST else MISSES_SHOULD
    if gap is None:
        return missed, verdict.reason
    if re.search(gap.seen, verdict.reason) is None:
        return missed, f"{verdict.reason} (the known gap is another one: {gap.seen})"
    if gap.expires and date.today() > gap.expires:  # of this machine
        return missed, f"{verdict.reason} (the known gap has expired on {gap.expires})"
    return KNOWN, f"{gap.reason} ({verdict.reason})"


FAILING = (MISSES_MUST, STALE)
