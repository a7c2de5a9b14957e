"""The mutants of a file: which places they change, and what has no behavior to change."""

import ast
from itertools import chain

import pytest

from conformance.tools.mutants import mutated, places_of
from conformance.tools.reach import places_that_show
from conformance.tools.trial import IMPL

NO_BEHAVIOR = {
    "annotations": "def f(x: tuple[1, 2] | None) -> tuple[3, 4] | None: ...\ny: list[5 | 6]\n",
    "an overload": "@overload\ndef f(x: int, most=3) -> int: ...\n@typing.overload\nasync def f(x: str, most=3): ...\n",
    "what overrides": "class Low:\n    @override\n    def f(self): ...\n    @typing.override\n    def g(self): ...\n",
    "a protocol": "class Shown(Protocol):\n    most: int = 3\n    @property\n    def text(self) -> str: ...\n",
    "imports for types": "if TYPE_CHECKING:\n    import this\n",
    "flags of a class": "@dataclass(frozen=True, slots=True, kw_only=True)\nclass Low: ...\n",
    "texts of errors": "def f(x):\n    problem = f'{x + 1} is odd'\n    raise ValueError(f'{x[0]}: {problem}')\n",
    "the star of a signature": "def f(x, *, y):\n    return x\n",
}


def operators_in(path, text):
    """Line -> names of the operators that change what it does."""
    path.write_text(text)
    found = {}
    for mutation in chain.from_iterable(places_of(path)):
        if mutated(mutation):
            found.setdefault(mutation.line, set()).add(mutation.operator.partition("/")[2])
    return found


@pytest.mark.parametrize("name", NO_BEHAVIOR)
def test_what_has_no_behavior_is_left_out(tmp_path, name):
    left = operators_in(tmp_path / "small.py", NO_BEHAVIOR[name])
    assert set().union(*left.values()) <= {"RemoveDecorator"}, left
    assert list(left) == ([1] if name == "flags of a class" else []), left


def test_what_stands_beside_it_is_changed(tmp_path):
    texts = "@override\n@cache\ndef f(x: int = 1) -> list[2]:\n    return 3 if x else 4\n"
    replaced = {"NumberReplacer", "AddNot"}
    assert operators_in(tmp_path / "small.py", texts) == {2: {"RemoveDecorator"}, 3: {"NumberReplacer"}, 4: replaced}


def test_a_sign_is_one_place_with_many_replacements(tmp_path):
    path = tmp_path / "small.py"
    path.write_text("total = first + second\n")
    (place,) = places_of(path)
    assert len(place) > 9
    assert {(each.line, each.operator.rpartition("_")[0]) for each in place} == {(1, "core/ReplaceBinaryOperator_Add")}
    assert {each.operator.rpartition("_")[2] for each in place} >= {"Sub", "Mul", "BitXor"}


def test_every_mutant_is_python_and_differs(tmp_path):
    path = tmp_path / "small.py"
    text = (
        "@cache\ndef f(x, /, y=1, *, z=True):\n    while x and not y:\n        x = x - 1 if z is True else -y ** 2\n"
        "    try:\n        return [x % one for one in y if one == 2]\n    except (KeyError, OSError):\n        raise\n"
    )
    path.write_text(text)
    changed = [mutated(each) for each in chain.from_iterable(places_of(path))]
    sources = [source for source in changed if source]
    assert len(sources) > 50
    assert all(ast.dump(ast.parse(source)) != ast.dump(ast.parse(text)) for source in sources)


def test_what_pydantic_reads_is_shown_by_what_uses_its_class():
    path = IMPL / "rollmatch/config/section.py"
    texts = path.read_text().splitlines()
    line = next(number for number, text in enumerate(texts, 1) if "allow_inf_nan" in text)
    shown = {place.name for place, _ in places_that_show(path, line)}
    assert shown == {"schema.py"}, "the functions that read sections"
