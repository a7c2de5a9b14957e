"""Allowed imports (``[tool.importlinter]`` of pyproject.toml), sizes of files and functions, names."""

import ast
import re
import subprocess
import sys
import tomllib
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
PACKAGE = ROOT / "impl" / "rollmatch"
HEAVY = ("torch", "transformers", "vllm", "peft")
FORBIDDEN = {
    *("utils", "util", "helpers", "helper", "common", "manager", "handler", "processor", "service"),
    *("base", "core", "misc"),
}
MODULES = sorted(PACKAGE.rglob("*.py"))
FILES = sorted(
    path for name in ("impl", "conformance", "fixtures", "benchmarks") for path in (ROOT / name).rglob("*.py")
)


def functions_and_classes(source, kinds):
    return [node for node in ast.walk(ast.parse(source)) if isinstance(node, kinds)]


def forbidden_names(source, path):
    """Words that say nothing, in the path of a file and in the names of its classes."""
    classes = [node.name for node in functions_and_classes(source, ast.ClassDef)]
    words = [word for name in classes for word in re.findall(r"[A-Z]+(?![a-z])|[A-Z]?[a-z]+", name)]
    words += [word for part in path.with_suffix("").parts for word in part.split("_")]
    return sorted({word.lower() for word in words} & FORBIDDEN)


def offenders(check, paths):
    """File -> what the check found in it."""
    return {str(path.relative_to(ROOT)): found for path in paths if (found := check(path))}


def test_modules_import_only_what_they_may():
    """In a process of its own: the tool switches the loggers off that exist by then."""
    command = [Path(sys.executable).with_name("lint-imports"), "--config", "pyproject.toml", "--no-cache", "--no-logo"]
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, check=False, timeout=120)
    assert done.returncode == 0, done.stdout + done.stderr


@pytest.mark.parametrize(
    ("module", "line"),
    [
        ("data/jsonl.py", "def f():\n    from ..learn import pack"),
        ("learn/pack.py", "import torch.nn as nn"),
        ("report/page.py", "import rollmatch.cli"),
        ("training/trainer.py", "import peft"),
        ("dialects/http.py", "def f():\n    from vllm.outputs import X"),
    ],
)
def test_an_import_that_is_not_allowed_is_found(tmp_path, module, line):
    """In a copy of the package, by a process of its own."""
    for path in MODULES:
        target = tmp_path / "rollmatch" / path.relative_to(PACKAGE)
        target.parent.mkdir(parents=True, exist_ok=True)
        target.symlink_to(path)
    spoiled = tmp_path / "rollmatch" / module
    source = spoiled.read_text()
    spoiled.unlink()
    spoiled.write_text(f"{source}\n{line}\n")
    command = [
        str(Path(sys.executable).with_name("lint-imports")),
        "--no-cache",
        "--config",
        str(ROOT / "pyproject.toml"),
    ]
    done = subprocess.run(command, cwd=tmp_path, env={"PYTHONPATH": str(tmp_path)}, capture_output=True, text=True)
    assert done.returncode == 1
    assert "BROKEN" in done.stdout, done.stdout + done.stderr


@pytest.mark.parametrize(
    ("source", "path", "words"),
    [
        ("class SyncManager: ...", "impl/sync.py", ["manager"]),
        ("class HTTPHandler: ...", "impl/wire.py", ["handler"]),
        ("", "impl/file_utils.py", ["utils"]),
        ("", "impl/common/box.py", ["common"]),
        ("class Database: ...\nbase = 1", "impl/baseline.py", []),
    ],
)
def test_names_say_something(source, path, words):
    assert forbidden_names(source, Path(path)) == words


def test_no_file_and_no_class_has_a_forbidden_name():
    assert offenders(lambda path: forbidden_names(path.read_text(), path.relative_to(ROOT)), FILES) == {}


def imports_of_tests(path):
    """Imports from a ``test_*.py``, in strings of code too: what is shared belongs into ``conformance/doubles``."""
    return re.findall(
        r"^ *(?:from|import) [\w.]*\btest_.*|^ *from [\w.]+ import .*\btest_.*", path.read_text(), re.MULTILINE
    )


def test_no_file_imports_from_a_test():
    paths = [path for path in FILES if "conformance" in path.parts or "benchmarks" in path.parts]
    assert offenders(imports_of_tests, paths) == {}


def test_code_is_plain_ascii():
    assert offenders(lambda path: not path.read_bytes().isascii(), MODULES) == {}


def test_modules_without_tensors_load_nothing_heavy():
    """Not even through what they import."""
    contracts = tomllib.loads((ROOT / "pyproject.toml").read_text())["tool"]["importlinter"]["contracts"]
    (light,) = [each["source_modules"] for each in contracts if each.get("forbidden_modules") == ["torch"]]
    names = [".".join(path.relative_to(ROOT / "impl").with_suffix("").parts) for path in MODULES]
    loaded = [
        name for name in names if any(f"{name}.".startswith(f"{each}.") for each in (*light, "rollmatch.cli.main"))
    ]
    code = f"import sys, importlib\nfor name in {loaded!r}: importlib.import_module(name.removesuffix('.__init__'))\n"
    code += f"print([name for name in {HEAVY!r} if name in sys.modules])"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert done.stdout == "[]\n"
    assert {"rollmatch.config.load", "rollmatch.data.jsonl", "rollmatch.cli.main"} <= set(loaded)
