"""Modules of the ``rollmatch-judge`` wheel: ``servers/`` and ``trainers/`` without tests and known ones,
and ``vectors/`` without what makes them.
"""

from pathlib import Path

from setuptools import setup

LEFT_OUT = {
    *(f"servers.{name}" for name in ("declared", "install", "judge", "known", "page", "trl_client_tests")),
    *(f"trainers.{name}" for name in ("known", "page", "recording", "small_trainer")),
}
JUDGES = {f"{folder}.{path.stem}" for folder in ("servers", "trainers") for path in Path(folder).glob("*.py")}
TESTS = {name for name in JUDGES if ".test_" in name}

VECTORS = ("asking", "command", "compare", "stored")

setup(
    py_modules=[
        *(f"conformance.judge.{name}" for name in sorted(JUDGES - LEFT_OUT - TESTS)),
        *(f"conformance.judge.vectors.{name}" for name in VECTORS),
        *(f"conformance.judge.{name}" for name in ("calls", "ports", "rule_sets")),
    ]
)
