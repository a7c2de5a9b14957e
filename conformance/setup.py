"""Modules of the ``rollmatch-conformance`` wheel: ``servers/`` without its tests and what starts known servers, and
``vectors/`` without what makes them.
"""

from pathlib import Path

from setuptools import setup

LEFT_OUT = {"declared", "install", "judge", "known", "page"}
SERVERS = {path.stem for path in Path("servers").glob("*.py")}
TESTS = {name for name in SERVERS if name.startswith("test_")} - {"test_server"}

VECTORS = ("asking", "command", "compare", "stored")

setup(
    py_modules=[
        *(f"conformance.servers.{name}" for name in sorted(SERVERS - LEFT_OUT - TESTS)),
        *(f"conformance.vectors.{name}" for name in VECTORS),
        *("conformance.ports", "conformance.server.calls"),
    ]
)
