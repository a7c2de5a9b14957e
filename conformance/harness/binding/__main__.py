"""``python -m conformance.harness.binding [acknowledge [ID ...]]``: what is bound and what is wrong with it.

``acknowledge`` notes that tests were read against the present text, of the given ids or of all that are bound.
"""

import sys

from conformance.harness.binding.binding import bind, check_binding
from conformance.harness.binding.claim import read_claims
from conformance.harness.binding.register import load_register, write_acknowledged
from conformance.harness.catalogue import load_catalogue


def main(arguments: list[str]) -> int:
    """Exit status: 0 when nothing is wrong."""
    catalogue = load_catalogue()
    binding = bind(read_claims(), catalogue)
    known = {**catalogue.scenarios, **catalogue.clauses}
    if arguments[:1] == ["acknowledge"]:
        register = load_register()
        bound = {each: known[each].digest for each in (*binding.tests, *register.excluded) if each in known}
        named = arguments[1:] or list(bound)
        kept = {each: digest for each, digest in register.acknowledged.items() if each in bound}
        write_acknowledged(kept | {each: bound[each] for each in named})
    register = load_register()
    found = check_binding(binding, catalogue, register)
    sys.stdout.write("".join(f"{finding}\n" for finding in found))
    for kind, entries in (("scenarios", catalogue.scenarios), ("clauses", catalogue.clauses)):
        counts = [
            len(entries.keys() & listed.keys()) for listed in (binding.tests, register.pending, register.excluded)
        ]
        told = f"{len(entries)} {kind}: {counts[0]} bound, {counts[1]} pending, {counts[2]} excluded\n"
        sys.stdout.write(told)
    return 1 if found else 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
