"""Names in double backquotes that look like ours exist: modules, classes and functions that docstrings speak of."""

import ast
import builtins
import re
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[3]
PACKAGE = ROOT / "impl" / "rollmatch"
THEIRS = {
    *("EngineClient", "TrainClient", "RequestConfig", "Env", "MultiTurnEnv", "ToolEnv", "Origin"),
    *("model.load_weights", "data.yaml", "extends"),
}
"""Names of vLLM, prime-rl, ms-swift, Gymnasium, verifiers, HTTP, data sets and YAML files."""
FILES = (".json", ".jsonl", ".html", ".py")


def names_in(node):
    """Every identifier below a node."""
    fields = [getattr(each, key, None) for each in ast.walk(node) for key in ("id", "attr", "name", "arg", "asname")]
    return {part for name in fields if isinstance(name, str) for part in name.split(".")}


class Names:
    """What the package defines, read by the first test that asks."""

    def __init__(self):
        self.trees = {path: ast.parse(path.read_text()) for path in sorted(PACKAGE.rglob("*.py"))}
        self.tops = {
            ".".join(path.relative_to(ROOT / "impl").with_suffix("").parts).removesuffix(".__init__"): names_in(tree)
            for path, tree in self.trees.items()
        }
        """Module -> its identifiers."""
        self.defined = set().union(dir(builtins), *self.tops.values())
        self.packages = {name.split(".")[1] for name in self.tops if "." in name}
        self.keys = {
            node.target.id
            for path, tree in self.trees.items()
            if path.parent.name == "config"
            for node in ast.walk(tree)
            if isinstance(node, ast.AnnAssign) and isinstance(node.target, ast.Name)
        }
        """Of the configuration."""


@pytest.fixture(scope="module")
def known():
    return Names()


def is_missing(name, path, known):
    """Whether a name looks like ours, in a docstring of that file, and does not exist."""
    word = re.sub(r"\(.*\)$", "", name)
    if word in THEIRS or word.endswith(FILES):
        return word.split("/")[0] in known.packages and "/" in word and not (PACKAGE / word).exists()
    if re.fullmatch(r"[a-z_]\w*(\.\w+)+", word):
        if word.split(".")[-1] in known.keys or word.split(".")[0] not in {*known.packages, "rollmatch"}:
            return False
        whole = f"rollmatch.{word.removeprefix('rollmatch.')}"
        return whole not in known.tops and whole.split(".")[-1] not in known.tops.get(whole.rpartition(".")[0], ())
    if re.fullmatch(r"_*[A-Z]\w*[a-z]\w*(\.\w+)*", word) or (name != word and word.isidentifier()):
        return not set(word.split(".")) <= known.defined
    if path.name == "__init__.py" and re.fullmatch(r"[a-z][a-z_]*", word):
        return (
            word not in known.keys and not (path.parent / word).is_dir() and not (path.parent / f"{word}.py").exists()
        )
    return False


def docstrings_of(tree, *, module_only):
    """Strings that are statements: docstrings, and what is said below an attribute."""
    nodes = tree.body[:1] if module_only else ast.walk(tree)
    for node in nodes:
        if isinstance(node, ast.Expr) and isinstance(node.value, ast.Constant) and isinstance(node.value.value, str):
            yield node.value.value


def test_names_in_docstrings_exist(known):
    missing = {
        f"{path.relative_to(ROOT)}: {name}"
        for path, tree in known.trees.items()
        for text in docstrings_of(tree, module_only=path.name == "__init__.py")
        for name in re.findall(r"``([^`\n]+)``", text)
        if is_missing(name, path, known)
    }
    assert missing == set()


@pytest.mark.parametrize(
    ("name", "file", "missing"),
    [
        ("cli.assemble", "rollout/source.py", True),
        ("run.assemble", "rollout/source.py", False),
        ("learn.varlen", "learn/attention.py", True),
        ("training.seed", "run/assemble.py", False),
        ("collate", "learn/__init__.py", True),
        ("WeightSenders", "rollout/weight_sender.py", True),
        ("make_senders()", "rollout/weight_sender.py", True),
        ("rollmatch.train", "api.py", False),
        ("cli/assemble.py", "api.py", True),
    ],
)
def test_a_name_that_does_not_exist_is_found(known, name, file, missing):
    assert is_missing(name, PACKAGE / file, known) is missing
