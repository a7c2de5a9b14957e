"""Which tests can judge a changed line of ``impl/``, by the map of coverage that ``make map`` writes."""

import ast
import builtins
import re
import sqlite3
from collections import Counter
from functools import cache
from pathlib import Path

from coverage import CoverageData

from conformance.tools.trial import IMPL, ROOT

MAP = ROOT / "build/coverage"
UP = "scenarios/launchers/test_up.py::test_"
CLUSTER = "scenarios/launchers/test_up_on_cluster.py::test_"
BESIDE = {
    "scenarios/server_dialects/test_engine_stock.py": "weights/worker/stock_engine|dialects/vllm/",
    "scenarios/weight_sync/test_engine_direct.py": "weights/(worker/(?!stock)|nccl)",
    "scenarios/weight_sync/test_engine_sync.py": "weights/worker/(?!stock)|model/merge",
    "scenarios/rollout_server/test_engine_generation.py": (
        r"server/replica|serve/(serving|process)|dialects/native/routes"
    ),
    "scenarios/server_dialects/test_engine_openai.py": "dialects/openai/",
    "scenarios/server_dialects/test_engine_swift_adapter.py": "server/chunked_update",
    "scenarios/server_dialects/test_vllm_client.py": "dialects/trl/vllm_client",
    "scenarios/rollout_server/test_shutdown.py": "serve/shutdown",
    f"{CLUSTER}a_cluster_that_is_too_small_is_refused_with_its_numbers": "launch/ray_",
    f"{CLUSTER}a_server_that_is_lost_too_often_ends_the_run": "launch/ray_",
    f"{CLUSTER}a_server_that_comes_back_at_another_address_ends_the_run": "launch/ray_",
    f"{UP}an_interrupt_ends_the_run_on_this_machine_with_a_checkpoint_and_leaves_nothing": "launch/ray",
    "unit/launch/test_doctor.py": "launch/torchvision_hook",
    "unit/run/test_callbacks.py": "run/(assemble|callbacks)",
    "scenarios/launchers/test_learner_launcher.py": "launch/(processes|learner)",
    "scenarios/data_ownership/test_train_resume.py": r"run/(callbacks|lifecycle)\.py",
    "unit/run/test_colocate_run.py": "rollout/vllm_colocate",
    "scenarios/rollout_backends/test_vllm_colocate.py": "rollout/vllm_colocate",
    "judge/vectors/test_vectors.py": "cli/vectors",
    "scenarios/learner_ranks/test_ranks_of_learner.py": "model/sharding",
    "scenarios/learner_ranks/test_ddp.py": "model/sharding|training/trainer|learn/score",
    "scenarios/learner_ranks/test_strategies.py": "model/sharding",
    "unit/learn/test_kernels.py": "_kernel|model/merge",
    "unit/test_startup.py": "rollmatch/startup",
    "unit/test_ranks.py": "rollmatch/ranks",
}
"""Tests -> modules that run in a process of their own there, which the map does not see."""
MOST_TESTS = 300
"""Of the map, for one line."""
REFERENCE = "conformance/unit/docs/test_reference.py::test_the_generated_blocks_are_fresh"
"""The reference pages show options, defaults and bounds of keys and payloads, constants, and statuses of errors."""
DEFAULTS = "conformance/unit/objectives/test_defaults.py"
ROUTES = "conformance/unit/server/test_openapi.py::test_every_route_that_reads_a_body_describes_it"
"""Routes are registered where every test of a server begins: this one lists them."""
Place = tuple[Path, int]


@cache
def read_map() -> tuple[CoverageData, Counter[str]]:
    """The map, and of each test the number of files it touches. Errors: ``SystemExit`` without a map."""
    if not MAP.exists():
        raise SystemExit(f"{MAP.relative_to(ROOT)} is missing: run make map")
    data = CoverageData(basename=str(MAP))
    data.read()
    query = (
        "SELECT context.context, count(*) FROM line_bits JOIN context ON context_id = context.id GROUP BY context_id"
    )
    breadth: Counter[str] = Counter()
    with sqlite3.connect(MAP) as connection:
        for context, number in connection.execute(query):
            breadth[test_of(context)] += number
    return data, breadth


def test_of(context: str) -> str:
    """The test of a context ``test@group|phase``; the group is there where xdist dealt tests out by groups.

    >>> test_of("conformance/a/test_b.py::test_c[1@2]@conformance/a/test_b.py|run"), test_of("a.py::test_b|setup")
    ('conformance/a/test_b.py::test_c[1@2]', 'a.py::test_b')
    """
    return re.sub(r"@[\w./-]+$", "", context.rpartition("|")[0])


@cache
def contexts_of(path: Path) -> dict[int, set[str]]:
    """Line -> tests that reached it and are still there."""
    contexts = read_map()[0].contexts_by_lineno(path.relative_to(ROOT).as_posix())
    return {line: {test for each in reached if words_of(test := test_of(each))} for line, reached in contexts.items()}


def words_of(test: str) -> frozenset[str]:
    """Words in the function of a test, also in its texts; none where the test is gone."""
    file, _, name = test.partition("::")
    path = ROOT / file
    return _words_by_function(path).get(name.partition("[")[0], frozenset()) if path.is_file() else frozenset()


@cache
def _words_by_function(path: Path) -> dict[str, frozenset[str]]:
    lines = path.read_text(encoding="utf-8").splitlines()
    functions = [node for node in ast.walk(tree_of(path)) if isinstance(node, ast.FunctionDef)]
    texts = {node.name: "\n".join(lines[_first(node) - 1 : node.end_lineno]) for node in functions}
    return {name: frozenset(re.findall(r"\w+", text)) for name, text in texts.items()}


@cache
def tree_of(path: Path) -> ast.Module:
    return ast.parse(path.read_bytes())


@cache
def bodies_of(path: Path) -> frozenset[int]:
    """Lines of function bodies; the others run when the module is imported."""
    functions = [node for node in ast.walk(tree_of(path)) if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef)]
    return frozenset(line for node in functions for line in range(node.body[0].lineno, (node.end_lineno or 0) + 1))


@cache
def lines_of_words() -> dict[str, set[Place]]:
    """Word -> lines with it."""
    places: dict[str, set[Place]] = {}
    for path in sorted(IMPL.rglob("*.py")):
        for line, text in enumerate(path.read_text(encoding="utf-8").splitlines(), 1):
            for word in re.findall(r"\w+", text):
                places.setdefault(word, set()).add((path, line))
    return places


@cache
def places_that_show(path: Path, line: int, depth: int = 2) -> set[Place]:
    """The line itself, if it is in a function body; otherwise lines of bodies that use what it defines.

    Of a default or a decorator these are the function's. Where no body uses a name, those that use its class or
    what names either; pydantic's ``model_config`` has no other use.
    """
    if line in bodies_of(path):
        return {(path, line)}
    statements = [node for node in ast.walk(tree_of(path)) if isinstance(node, ast.stmt)]
    around = [node for node in statements if _first(node) <= line <= (node.end_lineno or 0)]
    uses = set[Place]()
    for node in sorted(around, key=_first, reverse=True):
        if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef):
            return {(path, each) for each in range(node.body[0].lineno, (node.end_lineno or 0) + 1)}
        names = [each for each in ast.walk(node) if isinstance(each, ast.Name) and isinstance(each.ctx, ast.Store)]
        words = {node.name} if isinstance(node, ast.ClassDef) else {each.id for each in names} - {"model_config"}
        uses |= set[Place]().union(*(lines_of_words()[word] for word in words)) - {(path, line)}
        if shown := {use for use in uses if use[1] in bodies_of(use[0])}:
            return shown
    return set[Place]().union(*(places_that_show(*use, depth - 1) for use in uses if depth))


def _first(node: ast.stmt) -> int:
    """First line, decorators included."""
    return min([node.lineno, *(each.lineno for each in getattr(node, "decorator_list", ()))])


def tests_of(path: Path, line: int) -> tuple[str, ...]:
    """Tests that judge a line, in their order: those of pages that list it, those that reach it, those beside the map.

    Of those that reach it, first those in a file that names the module, then those with most of the line's words,
    those in the folder of the package, and the narrowest.
    """
    reached = {test for file, place in places_that_show(path, line) for test in contexts_of(file).get(place, ())}
    text = path.read_text(encoding="utf-8").splitlines()[line - 1]
    words, folder = set(re.findall(r"[^\W\d]\w+", text)).difference(dir(builtins)), path.relative_to(IMPL).parts[1]

    def order(test: str) -> tuple[bool, int, bool, int, str]:
        file = test.partition("::")[0]
        return path.stem not in file, -len(words & words_of(test)), f"/{folder}/" not in file, read_map()[1][test], test

    return (*tests_of_lists(path, line), *sorted(reached, key=order)[:MOST_TESTS], *tests_beside(path))


def tests_of_lists(path: Path, line: int) -> tuple[str, ...]:
    """Tests that list what a line defines."""
    if line not in bodies_of(path):
        of_config = ("conformance/unit/config",) if path.parent.name == "config" else ()
        return (*of_config, REFERENCE, DEFAULTS)
    if path.name in ("routes.py", "server_app.py"):
        return (ROUTES,)
    return (REFERENCE,) if "add_argument(" in path.read_text(encoding="utf-8") else ()


def tests_beside(path: Path) -> tuple[str, ...]:
    """Tests of processes that the module runs in; they take long."""
    return tuple(f"conformance/{test}" for test, modules in BESIDE.items() if re.search(modules, path.as_posix()))
