"""The shape of the house: import order, doors of heavy packages, budgets, names, ASCII."""

import ast
import functools
import re
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[1]
PACKAGE = ROOT / "impl" / "rollmatch"
ROOMS = (
    *(
        "errors",
        "startup",
        "records",
        "journal",
        "checkpoint",
        "ranks",
        "config",
        "data",
        "model",
        "weights",
        "server",
        "dialects",
    ),
    *(
        "rollout",
        "learn",
        "objectives",
        "step_report",
        "evaluation",
        "packer_state",
        "streaming",
        "trainer",
        "report",
        "plan",
        "cli",
        "__main__",
    ),
)
VLLM = ("rollout.vllm_colocate", "server", "weights.nccl", "weights.stateless", "weights.worker")
DOORS = {"vllm": VLLM, "peft": ("model",)}
"""Heavy package -> the only modules that may import it."""
TORCHLESS = (
    *("errors", "config", "records", "model.vocabulary", "data", "objectives.environment"),
    *(
        "objectives.episode",
        "objectives.named",
        "objectives.rollout_matching.parse",
        "objectives.rollout_matching.match",
    ),
    *("objectives.rollout_matching.elements", "objectives.rollout_matching.supervision", "objectives.grpo.segments"),
    *("objectives.grpo.advantage", "objectives.grpo.reward", "objectives.vineppo.advantage", "objectives.vineppo.tree"),
    *("learn.pack", "report", "plan"),
)
LIGHT = (*TORCHLESS, "cli.main")
"""Loading these loads none of HEAVY."""
HEAVY = ("torch", "transformers", "vllm", "peft")
FORBIDDEN = {
    *("utils", "util", "helpers", "helper", "common", "manager", "handler", "processor", "service"),
    *("base", "core", "misc"),
}
FILE_BUDGET, FUNCTION_BUDGET, PARAMETER_BUDGET = 300, 40, 5
IMPORT_CALLS = ("import_module", "__import__")

MODULES = sorted(PACKAGE.rglob("*.py"))
OURS = sorted(
    path for name in ("impl", "conformance", "fixtures", "benchmarks") for path in (ROOT / name).rglob("*.py")
)


def module_of(path):
    """``impl/rollmatch/learn/pack.py`` -> ``learn.pack``; a room's ``__init__`` is the room; the root's is ''."""
    parts = path.relative_to(PACKAGE).with_suffix("").parts
    return ".".join(parts[:-1] if parts[-1] == "__init__" else parts)


@functools.cache
def nodes_in(source):
    """Those that checks look at, all at the same files; without bodies, which the collector would walk ever again."""
    kinds = (ast.Import, ast.ImportFrom, ast.Call, ast.FunctionDef, ast.AsyncFunctionDef, ast.ClassDef)
    tree = ast.parse(source)
    may_import = any(name in source for name in IMPORT_CALLS)  # else what is in expressions need not be looked through
    found = [node for node in (ast.walk(tree) if may_import else statements_in(tree.body)) if isinstance(node, kinds)]
    for node in found:
        if hasattr(node, "body"):
            node.body = []
    return found


def statements_in(block):
    """Of a block and of all blocks in it."""
    for each in block:
        yield each
        for field in ("body", "orelse", "finalbody", "handlers", "cases"):
            yield from statements_in(getattr(each, field, ()))


def imports_of(source, module, *, is_package=False):
    """Absolute dotted names of all a module imports, wherever in it: inside functions, by relative and dynamic import.

    >>> sorted(imports_of("from . import mask\\ndef f():\\n    import torch.nn", "learn.pack"))
    ['rollmatch.learn', 'rollmatch.objectives.rollout_matching.supervision', 'torch.nn']
    """
    own = ["rollmatch", *filter(None, module.split("."))] + (["__init__"] if is_package else [])
    found = set()
    for node in nodes_in(source):
        if isinstance(node, ast.Import):
            found |= {alias.name for alias in node.names}
        elif isinstance(node, ast.ImportFrom):
            above = own[: -node.level] if node.level else []
            origin = ".".join([*above, *([node.module] if node.module else [])])
            found |= {origin} | {f"{origin}.{alias.name}" for alias in node.names}
        elif isinstance(node, ast.Call) and node.args and isinstance(node.args[0], ast.Constant):
            called = node.func.attr if isinstance(node.func, ast.Attribute) else getattr(node.func, "id", "")
            found |= {str(node.args[0].value)} if called in IMPORT_CALLS else set()
    return found


def room_of(dotted):
    """``rollmatch.learn.pack`` -> ``learn``; None for what is no room of ours."""
    package, _, rest = dotted.partition(".")
    room = rest.partition(".")[0]
    return room if package == "rollmatch" and room in ROOMS else None


def backward_imports(module, imported):
    """Imports of a room that comes later."""
    own = module.partition(".")[0]
    if own not in ROOMS:
        return sorted(name for name in imported if room_of(name))
    return sorted(name for name in imported if (room := room_of(name)) and ROOMS.index(room) > ROOMS.index(own))


def is_within(module, places):
    return any(module == place or module.startswith(f"{place}.") for place in places)


def closed_doors(module, imported):
    """Heavy packages a module imports although it may not."""
    packages = {name.partition(".")[0] for name in imported}
    closed = {package for package, doors in DOORS.items() if not is_within(module, doors)}
    closed |= {"torch"} if is_within(module, TORCHLESS) else set()
    return sorted(packages & closed)


def functions_in(source):
    return [node for node in nodes_in(source) if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef)]


def long_functions(source):
    """Names and lengths of functions over the budget, signature and docstring counted, decorators not."""
    sized = ((node.name, node.end_lineno - node.lineno + 1) for node in functions_in(source))
    return [(name, length) for name, length in sized if length >= FUNCTION_BUDGET]


def wide_functions(source):
    """Names of functions with too many parameters, ``self`` not counted; GPU kernels take only numbers, one by one."""
    wide = (node for node in functions_in(source) if _num_parameters(node.args) > PARAMETER_BUDGET)
    return [node.name for node in wide if "triton.jit" not in map(ast.unparse, node.decorator_list)]


def _num_parameters(arguments):
    named = [argument.arg for argument in (*arguments.posonlyargs, *arguments.args, *arguments.kwonlyargs)]
    return len([name for name in named if name not in ("self", "cls")])


def forbidden_names(source, path):
    """Words that say nothing, in the path of a file and in the names of its classes."""
    classes = [node.name for node in nodes_in(source) if isinstance(node, ast.ClassDef)]
    words = [word for name in classes for word in re.findall(r"[A-Z]+(?![a-z])|[A-Z]?[a-z]+", name)]
    words += [word for part in path.with_suffix("").parts for word in part.split("_")]
    return sorted({word.lower() for word in words} & FORBIDDEN)


def id_of(path):
    return str(path.relative_to(ROOT))


def culprits(check, paths):
    """Files that a check finds something in, and what."""
    return {id_of(path): found for path in paths if (found := check(path))}


def imported_by(path):
    return imports_of(path.read_text(), module_of(path), is_package=path.name == "__init__.py")


def test_a_room_imports_itself_and_rooms_before_it():
    assert culprits(lambda path: backward_imports(module_of(path), imported_by(path)), MODULES) == {}


def test_heavy_packages_come_in_by_their_doors():
    assert culprits(lambda path: closed_doors(module_of(path), imported_by(path)), MODULES) == {}


def test_files_stay_small():
    assert culprits(lambda path: len(path.read_text().splitlines()) // FILE_BUDGET, OURS) == {}


def test_functions_stay_small():
    assert culprits(lambda path: long_functions(path.read_text()), OURS) == {}


def test_functions_take_few_parameters():
    assert culprits(lambda path: wide_functions(path.read_text()), MODULES) == {}


def test_names_say_something():
    assert culprits(lambda path: forbidden_names(path.read_text(), path.relative_to(ROOT)), OURS) == {}


def test_code_is_plain_ascii():
    assert culprits(lambda path: not path.read_bytes().isascii(), MODULES) == {}


def test_every_module_lives_in_a_room():
    assert {module_of(path).partition(".")[0] for path in MODULES} - {"", "__main__"} <= set(ROOMS)


def test_light_modules_load_nothing_heavy():
    light = [f"rollmatch.{name}" for path in MODULES if is_within(name := module_of(path), LIGHT)]
    code = f"import sys, importlib\nfor name in {light!r}: importlib.import_module(name)\n"
    code += f"print([name for name in {HEAVY!r} if name in sys.modules])"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert done.stdout == "[]\n"
    assert {"rollmatch.config.load", "rollmatch.data.jsonl", "rollmatch.cli.main"} <= set(light)


@pytest.mark.parametrize(
    ("source", "module", "culprits"),
    [
        ("import rollmatch.learn.pack", "data.jsonl", ["rollmatch.learn.pack"]),
        ("from rollmatch import trainer", "weights", ["rollmatch.trainer"]),
        ("def f():\n    from rollmatch.cli.main import main", "config.load", 2),
        ("from ..learn import pack", "data.jsonl", 2),
        ("import importlib\nimportlib.import_module('rollmatch.cli')", "report.page", ["rollmatch.cli"]),
        ("from rollmatch.records import Sample", "", 2),
        (
            "from rollmatch.data.jsonl import load_samples\nfrom . import mask\nimport torch",
            "learn.pack",
            [],
        ),
        ("from rollmatch import __version__", "cli.main", []),
    ],
)
def test_the_order_check_sees_every_kind_of_import(source, module, culprits):
    found = backward_imports(module, imports_of(source, module))
    assert found == culprits if isinstance(culprits, list) else len(found) == culprits


@pytest.mark.parametrize(
    ("source", "module", "closed"),
    [
        ("import vllm", "rollout.hf", ["vllm"]),
        ("def f():\n    from vllm.outputs import X", "dialects.http", ["vllm"]),
        ("import vllm", "server", []),
        ("__import__('peft')", "trainer", ["peft"]),
        ("from peft import LoraConfig", "model", []),
        ("from peft import LoraConfig", "model.adapter", []),
        ("if TYPE_CHECKING:\n    import torch", "learn.pack", ["torch"]),
        ("import torch.nn as nn", "objectives.rollout_matching.match", ["torch"]),
        ("import torch", "learn.head", []),
        ("from rollmatch import model", "objectives.rollout_matching.match", []),
    ],
)
def test_the_door_check_sees_every_kind_of_import(source, module, closed):
    assert closed_doors(module, imports_of(source, module)) == closed


def test_a_package_resolves_its_own_relative_imports():
    assert "rollmatch.learn.pack" in imports_of("from .pack import Packer", "learn", is_package=True)
    assert "rollmatch.data" in imports_of("from .. import data", "learn", is_package=True)


def test_the_budget_checks_count():
    body = "    x = 1\n"
    assert long_functions("def f():\n" + body * 38) == []
    assert long_functions("class A:\n def f(self):\n" + body * 39) == [("f", 40)]
    assert wide_functions("def f(self, a, b, c, *, d, e): ...") == []
    assert wide_functions("def f(a, b, c, *, d, e, g): ...") == ["f"]


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
def test_the_name_check_reads_words(source, path, words):
    assert forbidden_names(source, Path(path)) == words
