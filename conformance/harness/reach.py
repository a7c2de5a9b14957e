"""Which tests can judge a changed line of ``impl/``, by the map of coverage that ``make map`` writes."""

import ast
import builtins
import re
import sqlite3
from collections import Counter
from functools import cache
from itertools import chain
from pathlib import Path

from coverage import CoverageData

from conformance.harness.trial import IMPL, ROOT

MAP = ROOT / "build/coverage"
SERVER = "conformance/server/test_engine"
SLOW_TESTS = {
    "weights/worker/stock_engine.py": (f"{SERVER}_stock.py",),
    "weights/worker/": (f"{SERVER}_direct.py", f"{SERVER}_sync.py"),
    "weights/nccl.py": (f"{SERVER}_direct.py",),
    "server/replica.py": (f"{SERVER}_generation.py",),
    "cli/serving.py": (f"{SERVER}_generation.py",),
    "cli/server_process.py": (f"{SERVER}_generation.py",),
    "dialects/native/routes.py": (f"{SERVER}_generation.py",),
    "dialects/openai/": (f"{SERVER}_openai.py",),
    "dialects/trl/vllm_client.py": ("conformance/server/test_vllm_client.py",),
    "server/chunked_update.py": (f"{SERVER}_swift_adapter.py",),
    "cli/ray_": tuple(
        f"conformance/cli/test_up{name}"
        for name in (
            "_on_cluster.py::test_a_cluster_that_is_too_small_is_refused_with_its_numbers",
            "_on_cluster.py::test_a_server_that_is_lost_too_often_ends_the_run",
            "_on_cluster.py::test_a_server_that_comes_back_at_another_address_ends_the_run",
            ".py::test_an_interrupt_ends_the_run_on_this_machine_with_a_checkpoint_and_leaves_nothing",
        )
    ),
    "cli/torchvision_hook.py": ("conformance/cli/test_doctor.py",),
    "cli/vectors.py": ("conformance/vectors/test_vectors.py",),
    "cli/assemble.py": ("conformance/cli/test_callbacks.py",),
    "cli/processes.py": ("conformance/cli/test_learner_launcher.py",),
    "cli/learner.py": ("conformance/cli/test_learner_launcher.py",),
    "cli/shutdown.py": ("conformance/server/test_shutdown.py",),
    "cli/watch.py": ("conformance/cli/test_callbacks.py", "conformance/cli/test_train_resume.py"),
    "cli/run.py": ("conformance/cli/test_train_resume.py",),
    "startup.py": ("conformance/test_startup.py",),
    "ranks.py": ("conformance/test_ranks.py",),
    "rollout/vllm_colocate.py": ("conformance/rollout/test_vllm_colocate.py", "conformance/cli/test_colocate_run.py"),
    "_kernel.py": ("conformance/test_kernels.py",),
    "model/sharding.py": (
        "conformance/weights/test_ranks_of_learner.py",
        "conformance/trainer/test_ddp.py",
        "conformance/trainer/test_strategies.py",
    ),
    "segment_trainer.py": ("conformance/trainer/test_ddp.py",),
    "learn/score.py": ("conformance/trainer/test_ddp.py",),
    "dialects/vllm/": (f"{SERVER}_stock.py",),
    "model/merge.py": ("conformance/test_kernels.py", f"{SERVER}_sync.py"),
}
"""Part of a module's path -> tests in which it runs in a process of its own, which the map does not see."""
MOST_TESTS = 300
"""Of the map, for one line."""
START_PROCESSES = ("cli", "dialects", "servers", "trainer")
"""Folders whose tests take long: they judge last."""
REFERENCE = "conformance/docs/test_reference.py::test_the_generated_blocks_are_fresh"
"""The reference pages show defaults and bounds of keys, options and payloads, and the HTTP status of errors."""
LIMITS = ROOT / "docs/reference/limits.md"
"""Constants as ``file:NAME``, which the same test compares."""
OF_DEFAULTS = "conformance/objectives/test_defaults.py"
OF_CONFIG = ("conformance/config", REFERENCE)
TABLES = {
    "dialects/": (REFERENCE,),
    "objectives/": (OF_DEFAULTS,),
    "rollout/backend.py": (OF_DEFAULTS,),
    "server/failures.py": (REFERENCE,),
    "server/payloads.py": (REFERENCE,),
    "server/settings.py": (OF_DEFAULTS,),
}
"""Part of a module's path -> tests that list what it defines outside of function bodies."""
OF_ROUTES = "conformance/server/test_openapi.py::test_every_route_that_reads_a_body_describes_it"
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
    """Line -> tests that reached it and can judge it."""
    contexts = read_map()[0].contexts_by_lineno(path.relative_to(ROOT).as_posix())
    return {line: {test for each in reached if can_judge(test := test_of(each))} for line, reached in contexts.items()}


@cache
def can_judge(test: str) -> bool:
    """Whether a test of the map is still there."""
    file, _, name = test.partition("::")
    path = ROOT / file
    return path.is_file() and f"def {name.partition('[')[0]}(" in path.read_text(encoding="utf-8")


@cache
def tree_of(path: Path) -> ast.Module:
    return ast.parse(path.read_bytes())


@cache
def bodies_of(path: Path) -> frozenset[int]:
    """Lines of function bodies; the others run when the module is imported."""
    functions = [node for node in ast.walk(tree_of(path)) if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef)]
    return frozenset(line for node in functions for line in range(node.body[0].lineno, (node.end_lineno or 0) + 1))


@cache
def lines_of_words() -> dict[str, list[Place]]:
    """Word -> lines with it."""
    places: dict[str, list[Place]] = {}
    for path in sorted(IMPL.rglob("*.py")):
        for line, text in enumerate(path.read_text(encoding="utf-8").splitlines(), 1):
            for word in set(re.findall(r"\w+", text)):
                places.setdefault(word, []).append((path, line))
    return places


@cache
def places_that_show(path: Path, line: int, depth: int = 2) -> frozenset[Place]:
    """The line itself, if it is in a function body; otherwise lines of bodies that use what it defines.

    Of a default or a decorator these are the function's; of a type that other types name, those that use these; of
    pydantic's ``model_config`` those that use its class.
    """
    if line in bodies_of(path):
        return frozenset({(path, line)})
    around = [node for node in ast.walk(tree_of(path)) if isinstance(node, ast.stmt) and _first(node) <= line]
    node = max((each for each in around if line <= (each.end_lineno or 0)), key=_first, default=None)
    if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef):
        return frozenset((path, each) for each in range(node.body[0].lineno, (node.end_lineno or 0) + 1))
    targets = node.targets if isinstance(node, ast.Assign) else [getattr(node, "target", node)]
    names = {each.id for target in targets for each in ast.walk(target or ast.Pass()) if isinstance(each, ast.Name)}
    classes = [each for each in around if isinstance(each, ast.ClassDef) and line <= (each.end_lineno or 0)]
    if isinstance(node, ast.ClassDef) or names == {"model_config"}:
        names = {max(classes, key=_first).name}
    uses = {use for name in names for use in lines_of_words()[name] if use != (path, line)}
    shown = {use for use in uses if use[1] in bodies_of(use[0])}
    if shown or not depth:
        return frozenset(shown)
    return frozenset(place for use in uses for place in places_that_show(*use, depth - 1))


def _first(node: ast.stmt) -> int:
    """First line, decorators included."""
    return min([node.lineno, *(each.lineno for each in getattr(node, "decorator_list", ()))])


def tests_of(path: Path, line: int) -> tuple[str, ...]:
    """Tests that reach a line: by turns the one that reaches a line near it that fewest tests reach, and the narrowest.

    Those in a file that names the module come first, then those with most of the line's names, those in the folder of
    the package, and those that also reach a method of the class around the line; tests that start processes last.
    """
    breadth, rarity = read_map()[1], dict[str, int]()
    for file, place in places_that_show(path, line):
        contexts = contexts_of(file)
        near = [contexts.get(place + by, set()) for by in range(-10, 11)]
        for test in near[10]:
            number = min(len(tests) for tests in near if test in tests)
            rarity[test] = min(number, rarity.get(test, number))
    own = _tests_of_class(path, line) or set(rarity)
    names = names_in(path, line)
    folder, order = f"/{path.relative_to(IMPL).parts[1]}/", dict[str, tuple[int, ...]]()
    for test in rarity:
        file, num_named = test.partition("::")[0], len(names & words_of(test))
        order[test] = (path.stem not in file, -num_named, folder not in file, test not in own, _starts_processes(test))
    narrow = sorted(rarity, key=lambda test: (*order[test], breadth[test], test))
    rare = sorted(narrow, key=lambda test: (*order[test], rarity[test]))
    tests = tuple(dict.fromkeys(chain.from_iterable(zip(rare, narrow, strict=True))))
    return (*tests_of_tables(path, line), *tests[:MOST_TESTS], *slow_tests_of(path))


def tests_of_tables(path: Path, line: int) -> tuple[str, ...]:
    """Tests of pages that list what a line defines; they judge first."""
    name = path.relative_to(IMPL / "rollmatch").as_posix()
    functions = [node for node in ast.walk(tree_of(path)) if isinstance(node, ast.FunctionDef)]
    around = [node for node in functions if _first(node) <= line <= (node.end_lineno or 0)]
    if name.startswith("cli/") and any("add_argument(" in ast.unparse(node) for node in around):
        return (REFERENCE,)
    if name.startswith("config/"):
        return OF_CONFIG
    if line in bodies_of(path):
        return (OF_ROUTES,) if name.endswith(("routes.py", "server_app.py")) else ()
    if f"{name}:" in LIMITS.read_text(encoding="utf-8"):
        return (REFERENCE, OF_DEFAULTS)
    return next((tests for part, tests in TABLES.items() if name.startswith(part)), ())


def names_in(path: Path, line: int) -> set[str]:
    """Names and attributes that a line reads, sets or defines; of a decorator, the function's name."""
    nodes = [node for node in ast.walk(tree_of(path)) if getattr(node, "lineno", 0) == line]
    named = [node for node in ast.walk(tree_of(path)) if isinstance(node, ast.FunctionDef | ast.ClassDef)]
    nodes += [node for node in named if _first(node) <= line < node.body[0].lineno]
    names = {str(getattr(node, field, "")) for node in nodes for field in ("id", "attr", "arg", "name")}
    return names.difference(dir(builtins), {""})


@cache
def words_of(test: str) -> frozenset[str]:
    """Words in the function of a test, also in its texts."""
    file, _, name = test.partition("::")
    lines = (ROOT / file).read_text(encoding="utf-8").splitlines()
    functions = [node for node in ast.walk(tree_of(ROOT / file)) if isinstance(node, ast.FunctionDef)]
    texts = [lines[_first(each) - 1 : each.end_lineno] for each in functions if each.name == name.partition("[")[0]]
    return frozenset(re.findall(r"\w+", "\n".join(chain.from_iterable(texts))))


def _tests_of_class(path: Path, line: int) -> set[str]:
    """Tests that reach a method of the class around a line; any body of the module, if the class has no methods."""
    classes = [node for node in ast.walk(tree_of(path)) if isinstance(node, ast.ClassDef)]
    around = [range(node.lineno, (node.end_lineno or 0) + 1) for node in classes]
    lines = {each for span in around if line in span for each in bodies_of(path).intersection(span)}
    if line not in bodies_of(path):
        lines = lines or bodies_of(path)
    return set().union(*(contexts_of(path).get(each, set()) for each in lines))


def _starts_processes(test: str) -> bool:
    return test.split("/")[1] in START_PROCESSES


def slow_tests_of(path: Path) -> tuple[str, ...]:
    """Test files that judge after the tests of the map."""
    return next((tests for part, tests in SLOW_TESTS.items() if part in path.as_posix()), ())
