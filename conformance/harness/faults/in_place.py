"""A fault put into functions that are loaded already, where that is the same as importing the changed source.

A function that has not run has left nothing behind. Where the changed source differs from what is loaded in nothing but
what such functions do, they get the changed code, wherever they are held (a registry, a decorator, a class), and nobody
can tell. Anything else (a constant, a field, a default, a decorator, a function that ran while tests were collected) is
refused: such a fault is imported, where nothing of the implementation is loaded.
"""

import cProfile
import gc
import sys
from collections.abc import Iterable, Iterator
from types import CodeType, FunctionType

from conformance.harness.faults.fault import Fault
from conformance.harness.faults.importer import install

IS_FUNCTION = 1
"""Flag of code whose names are local: not that of a module or a class."""
Pair = tuple[CodeType, CodeType]
Place = tuple[str, str, int]
"""File, name and first line."""


class Loaded:
    """The functions of this process, and which have run since ``watch``."""

    def __init__(self) -> None:
        self.profile = cProfile.Profile(subcalls=False, builtins=False)
        self.functions: dict[Place, list[FunctionType]] = {}
        self.ran: set[Place] = set()

    def watch(self) -> None:
        """From now on; before anything of the implementation is imported."""
        self.profile.enable()

    def look(self, root: str) -> None:
        """Note the functions of files below this folder, and what has run."""
        self.profile.disable()
        codes = [entry.code for entry in self.profile.getstats() if isinstance(entry.code, CodeType)]
        self.ran = {_place(code) for code in codes if code.co_flags & IS_FUNCTION}
        gc.unfreeze()  # what is frozen is not told
        for found in gc.get_objects():
            if type(found) is FunctionType and found.__code__.co_filename.startswith(root):
                self.functions.setdefault(_place(found.__code__), []).append(found)

    def put(self, fault: Fault) -> bool:
        """Whether it is in place now; else nothing has changed."""
        if fault.module not in sys.modules:
            install(fault.change_of)
            return True
        source, path = fault.path.read_text(encoding="utf-8"), str(fault.path)
        pairs = changed_functions(compile(source, path, "exec"), compile(fault.apply(source), path, "exec"))
        holders = [self._holders(old) for old, _ in pairs or ()]
        if not holders or not all(holders):
            return False
        for (_, new), functions in zip(pairs or (), holders, strict=True):
            for function in functions:
                function.__code__ = new
        return True

    def _holders(self, code: CodeType) -> list[FunctionType]:
        """Functions that would do something else; none where it cannot be told or is too late."""
        if _place(code) in self.ran:
            return []
        found = self.functions.get(_place(code), [])
        return found if all(_says(each.__code__) == _says(code) for each in found) else []


def changed_functions(old: CodeType, new: CodeType) -> list[Pair] | None:
    """Outermost functions that do something else, or None where anything but that differs.

    >>> def told(*sources):
    ...     pairs = changed_functions(*(compile(source, "x.py", "exec") for source in sources))
    ...     return pairs if pairs is None else [old.co_name for old, new in pairs]
    >>> told("x = 1\\ndef f(a):\\n    return a", "x = 1\\n\\n\\ndef f(a):\\n    return -a")
    ['f']
    >>> told("x = 1\\ndef f(a): return a", "x = 2\\ndef f(a): return a")  # a constant
    >>> told("def f(a=1): return a", "def f(a=2): return a")  # a default
    >>> told("def f(a): return a", "def f(b): return b")  # what it is called with
    >>> told("class A:\\n    def f(self): return 1", "class A:\\n    def f(self): return 2")
    ['f']
    """
    if old.co_flags & IS_FUNCTION:
        return _pair(old, new)
    if _says(old, inside=False) != _says(new, inside=False):
        return None
    pairs: list[Pair] = []
    for ours, theirs in zip(_codes(old), _codes(new), strict=True):
        if (found := changed_functions(ours, theirs)) is None:
            return None
        pairs += found
    return pairs


def _pair(old: CodeType, new: CodeType) -> list[Pair] | None:
    if _says(old) == _says(new):
        return []
    return [(old, new)] if _asks(old) == _asks(new) else None


def _asks(code: CodeType) -> tuple[object, ...]:
    """What others see of it: the kind, the arguments, and what it uses of what stands around it."""
    num = code.co_argcount + code.co_kwonlyargcount
    asked = (code.co_argcount, code.co_posonlyargcount, code.co_kwonlyargcount, code.co_flags)
    return (code.co_name, *asked, code.co_varnames[:num], code.co_freevars)


def _says(code: CodeType, *, inside: bool = True) -> tuple[object, ...]:
    """All of it but where it stands; what stands in functions and classes inside it only if asked for."""
    names = (code.co_names, code.co_varnames, code.co_freevars, code.co_cellvars, code.co_exceptiontable)
    return (_asks(code), code.co_code, names, tuple(_constants(code.co_consts, inside=inside)))


def _constants(constants: Iterable[object], *, inside: bool) -> Iterator[object]:
    for each in constants:
        if isinstance(each, CodeType):
            yield _says(each) if inside else each.co_name
        else:
            yield type(each), repr(each)


def _codes(code: CodeType) -> list[CodeType]:
    return [each for each in code.co_consts if isinstance(each, CodeType)]


def _place(code: CodeType) -> Place:
    return code.co_filename, code.co_qualname, code.co_firstlineno
