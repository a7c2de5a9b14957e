"""Which test shows which scenario and which clause: claims and catalogue, brought together."""

from collections.abc import Iterator, Mapping
from dataclasses import dataclass

from conformance.harness.binding.claim import Claims
from conformance.harness.binding.naming import clauses_named, nearest, scenarios_named
from conformance.harness.binding.register import Register
from conformance.harness.catalogue import Catalogue, Entry
from conformance.harness.spec_error import Finding


@dataclass(frozen=True, slots=True, kw_only=True)
class Binding:
    """Made by ``bind``."""

    tests: Mapping[str, tuple[str, ...]]
    """Scenario or clause -> its tests; only known ids."""
    unknown: tuple[Finding, ...]
    """Claims that name nothing."""


def bind(claims: Claims, catalogue: Catalogue) -> Binding:
    tests: dict[str, list[str]] = {}
    unknown: list[Finding] = list(claims.findings)
    for claim in claims.of("scenario"):
        named = scenarios_named(claim.text, catalogue)
        if len(named) == 1:
            tests.setdefault(named[0], []).append(claim.test)
        else:
            remedy = nearest(claim.text, catalogue.scenarios)
            problem = f"{claim.text!r} is {'ambiguous' if named else 'no scenario'}."
            unknown.append(Finding(code="scenario-unknown", key=claim.key, problem=problem, remedy=remedy))
    for claim in claims.of("clause"):
        for clause_id in clauses_named(claim.text):
            tests.setdefault(clause_id, []).append(claim.test)
            if clause_id not in catalogue.clauses:
                remedy = nearest(clause_id, catalogue.clauses)
                problem = f"{clause_id!r} is no clause."
                unknown.append(Finding(code="clause-unknown", key=claim.key, problem=problem, remedy=remedy))
    known = {**catalogue.scenarios, **catalogue.clauses}
    kept = {each: tuple(dict.fromkeys(names)) for each, names in tests.items() if each in known}
    return Binding(tests=kept, unknown=tuple(unknown))


def check_binding(binding: Binding, catalogue: Catalogue, register: Register) -> list[Finding]:
    """Every broken rule of the binding as a whole, unknown claims included."""
    return [
        *binding.unknown,
        *_check_bound(binding, catalogue, register),
        *_check_register(binding, catalogue, register),
        *_check_fresh(binding, catalogue, register),
    ]


def _check_bound(binding: Binding, catalogue: Catalogue, register: Register) -> Iterator[Finding]:
    for kind, entries in (("scenario", catalogue.scenarios), ("clause", catalogue.clauses)):
        for each, entry in entries.items():
            if each not in {*binding.tests, *register.pending, *register.excluded}:
                remedy = f'Bind a test by @pytest.mark.{kind}("{each}").'
                yield _finding(f"{kind}-unbound", entry, f"no test shows {each}.", remedy)


def _check_register(binding: Binding, catalogue: Catalogue, register: Register) -> Iterator[Finding]:
    known = {**catalogue.scenarios, **catalogue.clauses}
    for name, listed in (("pending", register.pending), ("excluded", register.excluded)):
        for each, why in listed.items():
            if each not in known:
                yield _listed(f"{name}-unknown", each, "there is no such id.", nearest(each, known))
            if each in binding.tests:
                yield _listed(f"{name}-bound", each, f"{binding.tests[each][0]} shows it.", "Take it off the list.")
            if len(why) < 5:
                yield _listed(f"{name}-without-reason", each, "nothing says why.", "Write a reason.")
    for each in register.excluded:
        if each in catalogue.scenarios:
            yield _listed("excluded-scenario", each, "a scenario cannot be excluded.", "Bind it, or remove it.")
        if each in register.pending:
            yield _listed("excluded-and-pending", each, "it stands on both lists.", "Take it off one of them.")


def _check_fresh(binding: Binding, catalogue: Catalogue, register: Register) -> Iterator[Finding]:
    """What a test shows is what it was written for."""
    known = {**catalogue.scenarios, **catalogue.clauses}
    wanted = [each for each in (*binding.tests, *register.excluded) if each in known]
    for each in wanted:
        if register.acknowledged.get(each) != known[each].digest:
            tests = ", ".join(binding.tests.get(each, ["spec/exclusions.yaml"]))
            what = "has changed" if each in register.acknowledged else "is new"
            remedy = f"Read {tests} against it, then run python -m conformance.harness.binding acknowledge {each}"
            yield _finding("text-not-acknowledged", known[each], f"the text of {each} {what}.", remedy)
    for each in sorted(register.acknowledged.keys() - set(wanted)):
        remedy = "Run python -m conformance.harness.binding acknowledge."
        yield _listed("acknowledged-unbound", each, "nothing bound has this id.", remedy)


def _finding(code: str, entry: Entry, problem: str, remedy: str) -> Finding:
    return Finding(code=code, key=f"{place_of(entry)}", problem=problem, remedy=remedy)


def _listed(code: str, each: str, problem: str, remedy: str) -> Finding:
    return Finding(code=code, key=each, problem=problem, remedy=remedy)


def place_of(entry: Entry) -> str:
    """``file:line`` from the repository's root."""
    return f"spec/openspec/{entry.path}:{entry.line}"
