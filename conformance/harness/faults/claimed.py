"""Which tests claim to notice which fault."""

from collections.abc import Mapping

from conformance.harness.binding.claim import Claims
from conformance.harness.binding.naming import nearest
from conformance.harness.faults.fault import Fault
from conformance.harness.spec_error import Finding


def tests_by_fault(claims: Claims) -> dict[str, list[str]]:
    """Fault -> its tests, in the order of files."""
    found: dict[str, list[str]] = {}
    for claim in claims.of("kills"):
        found.setdefault(claim.text, []).append(claim.test)
    return found


def unknown_faults(claims: Claims, bank: Mapping[str, Fault]) -> list[Finding]:
    """Claims that name no fault of the bank."""
    return [
        Finding(
            code="fault-unknown",
            key=claim.key,
            problem=f"{claim.text!r} is no fault.",
            remedy=nearest(claim.text, bank),
        )
        for claim in claims.of("kills")
        if claim.text not in bank
    ]
