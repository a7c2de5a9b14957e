"""Rows for ``spec/sources.yaml``: ``python -m conformance.harness.trace`` prints one for each untraced clause."""

import json
import sys
from collections.abc import Iterator, Sequence

from conformance.harness.catalogue import load_specs
from conformance.harness.sources import Sources, load_sources
from conformance.harness.spec_reader import Spec


def missing_rows(specs: Sequence[Spec], sources: Sources) -> Iterator[str]:
    """YAML rows to be filled in; numbers go on after the highest that the requirement ever had."""
    rows = {(row.requirement_id, row.says) for row in sources.rows}
    for requirement in (each for spec in specs for each in spec.requirements):
        ids = (*(row.clause_id for row in sources.rows), *sources.retired)
        numbers = [int(each.partition("#")[2]) for each in ids if each.startswith(f"{requirement.requirement_id}#")]
        last = max(numbers, default=0)
        untraced = [each.text for each in requirement.clauses if (requirement.requirement_id, each.text) not in rows]
        for number, text in enumerate(untraced, last + 1):
            yield f"  {requirement.requirement_id}#{number}:\n    says: {json.dumps(text)}\n    from: []\n"


if __name__ == "__main__":
    sys.stdout.write("".join(missing_rows(load_specs(), load_sources())))
