"""Public names: what ``rollmatch.__all__`` names is there, typed, and loaded only when used."""

import ast
import subprocess
import sys
from pathlib import Path

import pytest

import rollmatch

FOLDER = Path(rollmatch.__file__).parent
API_PAGE = FOLDER.parents[1] / "docs" / "reference" / "python.md"


@pytest.mark.parametrize("name", rollmatch.__all__)
def test_a_public_name_is_there_and_documented(name):
    assert getattr(rollmatch, name) is not None
    assert f".{name}\n" in API_PAGE.read_text()


def test_type_checkers_see_the_same_names():
    stub = ast.parse((FOLDER / "__init__.pyi").read_text())
    homes = {alias.name: node.module for node in stub.body if isinstance(node, ast.ImportFrom) for alias in node.names}
    assert sorted(homes) == rollmatch.__all__
    assert all(homes[name].endswith(module) for module, names in rollmatch._MODULES.items() for name in names)
    assert (FOLDER / "py.typed").exists()


def test_another_name_is_an_attribute_error():
    with pytest.raises(AttributeError, match="no attribute 'Rollmatch'"):
        _ = rollmatch.Rollmatch


def test_importing_the_package_loads_nothing_heavy():
    code = (
        "import rollmatch, sys; print([name for name in ('torch', 'vllm', 'pydantic', 'numpy') if name in sys.modules])"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert done.stdout == "[]\n"
