"""Rules of a specification's requirements and their sentences."""

import re
from collections.abc import Iterator

from conformance.harness.spec_error import Finding
from conformance.harness.spec_reader import Requirement, Sentence, Spec, without_code

SHORTEST_PURPOSE = 50
"""Characters; OpenSpec warns below that."""

_SEVERAL = re.compile(r"[.!?]\s+\S")
_LOWER_CASE_VERB = re.compile(r"\b(must|shall|should|may)\b")


def check_spec(spec: Spec) -> Iterator[Finding]:
    """Broken rules of a whole file."""
    if len(spec.purpose) < SHORTEST_PURPOSE or spec.purpose.startswith(("TBD", "TODO")):
        problem = f"the purpose has {len(spec.purpose)} characters, or is a placeholder."
        yield _finding(spec, 1, "purpose-thin", problem, "Say in one or two sentences what the capability is for.")
    seen: set[str] = set()
    for requirement in spec.requirements:
        if requirement.requirement_id in seen:
            problem = f"the id {requirement.requirement_id} occurs twice."
            yield _finding(spec, requirement.line, "id-repeated", problem, "Name the requirement otherwise.")
        seen.add(requirement.requirement_id)
        yield from check_requirement(spec, requirement)


def check_requirement(spec: Spec, requirement: Requirement) -> Iterator[Finding]:
    """Broken rules of one requirement, its scenarios apart."""
    line = requirement.line
    if spec.text.split("\n")[line - 1] != f"### Requirement: {requirement.name}":
        yield _finding(spec, line, "requirement-header", "the header has another form.", "Write ### Requirement: NAME.")
    if not requirement.scenarios:
        problem = f"{requirement.name!r} has no scenario."
        yield _finding(spec, line, "scenario-missing", problem, "Add #### Scenario: NAME with WHEN and THEN.")
    if not requirement.clauses:
        problem = f"{requirement.name!r} demands nothing."
        yield _finding(spec, line, "clause-missing", problem, "Write a sentence with MUST, SHOULD or MAY.")
    texts = [sentence.text for sentence in requirement.sentences]
    for sentence in requirement.sentences:
        if texts.count(sentence.text) > 1:
            yield _finding(spec, sentence.line, "sentence-repeated", "the sentence occurs twice.", "Keep one.")
        yield from _check_sentence(spec, sentence)


def _check_sentence(spec: Spec, sentence: Sentence) -> Iterator[Finding]:
    prose, line = without_code(sentence.text), sentence.line
    if len(sentence.verbs) != 1:
        problem = f"the line has {len(sentence.verbs)} normative verbs."
        yield _finding(spec, line, "verb-count", problem, "Write one sentence with one verb a line.")
    if _SEVERAL.search(prose) or not prose.endswith("."):
        problem = "the line is not exactly one whole sentence."
        yield _finding(spec, line, "sentence-form", problem, "Write one sentence a line, with a full stop.")
    if (verb := _LOWER_CASE_VERB.search(prose)) is not None:
        problem = f"{verb.group()!r} in lower case leaves open whether it binds."
        yield _finding(spec, line, "verb-in-lower-case", problem, "Use another word, or upper case.")


def _finding(spec: Spec, line: int, code: str, problem: str, remedy: str) -> Finding:
    return Finding(code=code, key=f"{spec.path}:{line}", problem=problem, remedy=remedy)
