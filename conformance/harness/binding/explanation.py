"""What a failing test says about the specification: where the rule stands, how it reads, how to run it again."""

import shlex
from collections.abc import Sequence

from conformance.harness.binding.binding import place_of
from conformance.harness.catalogue import Catalogue


def explain(ids: Sequence[str], node_id: str, catalogue: Catalogue) -> str:
    """Each scenario with its steps, each clause with its sentence, and one command that can be copied."""
    known = {**catalogue.scenarios, **catalogue.clauses}
    parts = []
    for each in ids:
        entry = known[each]
        text = "\n".join(f"    {line}" for line in entry.text.split("\n"))
        parts.append(f"{place_of(entry)}  {each}\n{text}")
    return "\n".join([*parts, f"again:  python -m pytest {shlex.quote(node_id)}"])
