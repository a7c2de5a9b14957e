"""What a marker's text stands for among the ids of the specification."""

from collections.abc import Collection

from conformance.harness.catalogue import Catalogue


def scenarios_named(text: str, catalogue: Catalogue) -> list[str]:
    """Ids that a text may mean: itself, or ``capability/scenario``, as a scenario's name is unique in its capability.

    Exactly one is right; none is unknown, several are ambiguous.
    """
    if text in catalogue.scenarios:
        return [text]
    capability, _, name = text.rpartition("/")
    return [
        scenario_id
        for scenario_id in catalogue.scenarios
        if scenario_id.rpartition("/")[2] == name and scenario_id.rpartition("/")[0].rpartition("/")[0] == capability
    ]


def clauses_named(text: str) -> list[str]:
    """Ids of clauses.

    >>> clauses_named("packing/a-segment-is-never-split#1,3")
    ['packing/a-segment-is-never-split#1', 'packing/a-segment-is-never-split#3']
    """
    requirement, _, numbers = text.partition("#")
    return [f"{requirement}#{number.strip()}" for number in numbers.split(",")]


def nearest(text: str, known: Collection[str]) -> str:
    """A remedy that names the id most alike."""
    from difflib import get_close_matches

    alike = get_close_matches(text, known, n=1, cutoff=0.5)
    return f"Did you mean {alike[0]}?" if alike else "Take an id of spec/openspec/specs."
