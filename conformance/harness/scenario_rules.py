"""Rules of scenarios: they can be executed, and each says one thing."""

import re
from collections.abc import Iterator

from conformance.harness.spec_error import Finding
from conformance.harness.spec_reader import VERB, Scenario, Spec, without_code

_ORDER = re.compile(r"(GIVEN (AND )*)?WHEN (AND )*THEN (AND )*")


def check_scenarios(spec: Spec) -> Iterator[Finding]:
    """Broken rules of all scenarios of a file."""
    seen: dict[str, int] = {}
    for scenario in (each for requirement in spec.requirements for each in requirement.scenarios):
        yield from (_at(spec, line, *told) for line, *told in _flaws(scenario))
        if scenario.name in seen:
            problem = f"{scenario.name!r} is also the name of the scenario in line {seen[scenario.name]}."
            yield _at(spec, scenario.line, "scenario-repeated", problem, "Name it otherwise.")
        seen[scenario.name] = scenario.line


def _flaws(scenario: Scenario) -> Iterator[tuple[int, str, str, str]]:
    """(line, code, problem, remedy)."""
    if scenario.header != f"#### Scenario: {scenario.name}":
        yield scenario.line, "scenario-header", "the header has another form.", "Write #### Scenario: NAME."
    if not scenario.steps:
        yield scenario.line, "scenario-empty", f"{scenario.name!r} has no steps.", "Write WHEN and THEN."
        return
    for step in scenario.steps:
        if not step.word:
            yield step.line, "step-form", "the line is no step.", "Write - **WHEN** ..., one line a step."
        if VERB.search(without_code(step.text)):
            yield step.line, "step-demands", "a step demands something.", "Tell what happens; demands are clauses."
    if not _ORDER.fullmatch("".join(f"{step.word} " for step in scenario.steps)):
        problem = "the steps are not GIVEN, WHEN, THEN in this order."
        yield scenario.line, "step-order", problem, "Begin with GIVEN or WHEN, end with THEN, go on with AND."


def _at(spec: Spec, line: int, code: str, problem: str, remedy: str) -> Finding:
    return Finding(code=code, key=f"{spec.path}:{line}", problem=problem, remedy=remedy)
