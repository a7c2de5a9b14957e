"""Figures of the tree, each beside its bar: ``python -m conformance.tools.measure [--quick]``.

``--quick`` runs nothing.

The last two count files of ``impl/`` that one optimizer step (hf backend) and one weight sync (native dialect, gloo, a
real vLLM engine) run through, in all processes. Below the table, each file is listed with the functions that ran and
the number of those that it has. What a server that nobody calls runs through (a poll for its end, a look at its
engines) is no part of a sync.
"""

import argparse
import ast
import json
import os
import re
import sys
import tempfile
import threading
import time
from collections import Counter
from collections.abc import Iterator
from pathlib import Path
from types import FrameType
from typing import Any

ROOT = Path(__file__).parents[2]
IMPL = ROOT / "impl" / "rollmatch"
COMMANDS = ("servers", "trainers", "vectors", "campaign")
"""Folders of what people run: ``rollmatch judge``, ``judge-trainer``, ``vectors``, and the campaign of faults."""
HOOK = "from conformance.tools.measure import Watch; Watch().start({folder!r})"
"""``sitecustomize.py`` of processes that are watched."""


def python_files(folder: Path) -> list[Path]:
    return sorted(folder.rglob("*.py"))


def num_lines(paths: list[Path]) -> int:
    return sum(len(path.read_bytes().splitlines()) for path in paths)


def files_without_tests(*folders: str) -> list[Path]:
    """Python of ``conformance/`` that is no test: below these folders, or outside of all commands."""
    known = set(folders or COMMANDS)
    files = [path for path in python_files(ROOT / "conformance") if known.isdisjoint(path.parts) != bool(folders)]
    return [path for path in files if not re.match(r"test_|conftest\.py", path.name)]


def repeated_classes() -> list[str]:
    """Class names that the tree defines more than once."""
    names = Counter(
        node.name
        for folder in ("impl", "conformance", "fixtures", "benchmarks")
        for path in python_files(ROOT / folder)
        for node in ast.walk(ast.parse(path.read_bytes()))
        if isinstance(node, ast.ClassDef)
    )
    return sorted(name for name, count in names.items() if count > 1)


def long_functions() -> list[str]:
    """Functions of the implementation with more than 40 lines."""
    return [
        f"{path.relative_to(IMPL)}:{node.lineno}"
        for path in python_files(IMPL)
        for node in ast.walk(ast.parse(path.read_bytes()))
        if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef) and (node.end_lineno or 0) - node.lineno >= 40
    ]


class Watch:
    """Which functions of ours (``file:name``) the process runs through, and when it last did."""

    def __init__(self) -> None:
        self.last: dict[str, float] = {}

    def start(self, folder: str | None = None) -> None:
        """Watch all threads; with a folder, write what was seen there every 100 ms."""
        threading.setprofile(self._called)
        sys.setprofile(self._called)
        if folder:
            self._write_beside(Path(folder))
            os.register_at_fork(after_in_child=lambda: self._write_beside(Path(folder)))

    def stop(self) -> set[str]:
        sys.setprofile(None)
        threading.setprofile(None)
        return set(self.last)

    def _called(self, frame: FrameType, event: str, _: Any) -> None:
        name = frame.f_code.co_filename
        if event == "call" and "/impl/rollmatch/" in name and frame.f_code.co_name != "<module>":
            self.last[f"{name.rpartition('/impl/rollmatch/')[2]}:{frame.f_code.co_qualname}"] = time.time()

    def _write_beside(self, folder: Path) -> None:
        threading.Thread(target=self._write, args=(folder,), daemon=True).start()

    def _write(self, folder: Path) -> None:
        path = folder / f"{os.getpid()}.json"
        while True:
            path.with_suffix(".tmp").write_text(json.dumps(self.last.copy()))
            path.with_suffix(".tmp").rename(path)
            time.sleep(0.1)


def functions_of_a_step() -> set[str]:
    """``file:name`` of those of the second optimizer step; the first one imports and compiles."""
    from transformers import TrainerCallback

    from conformance.doubles.small_run import make_trainer

    watch = Watch()

    class Second(TrainerCallback):  # type: ignore[misc]
        def on_step_end(self, args: Any, state: Any, control: Any, **_: Any) -> None:
            watch.start() if state.global_step == 1 else watch.stop()

    with tempfile.TemporaryDirectory() as folder:
        make_trainer(Path(folder), "training.max_steps=2", callbacks=[Second()]).train()
    return set(watch.last)


def functions_of_a_sync() -> set[str]:
    """Those of the second sync to a server of one replica: learner, server and worker together."""
    from conformance.doubles.digits import load_model
    from conformance.doubles.instance import running
    from conformance.doubles.learner_side import native_backend
    from rollmatch.model.checkpoint import merged_weights

    with tempfile.TemporaryDirectory() as scratch:
        Path(scratch, "sitecustomize.py").write_text(HOOK.format(folder=scratch))
        os.environ["PYTHONPATH"] = os.pathsep.join((scratch, str(ROOT / "impl"), str(ROOT)))
        with running(Path(scratch, "log"), fork=False) as instance:
            backend, weights = native_backend(instance.url), dict(merged_weights(load_model()))
            backend.push(weights.items(), version=1)
            time.sleep(3)
            idle = seen_since(time.time() - 2, scratch)
            watch, began = Watch(), time.time()
            watch.start()
            backend.push(weights.items(), version=2)
            functions = watch.stop()
            time.sleep(1)
            backend.close()
            return functions | seen_since(began, scratch) - idle


def seen_since(began: float, folder: str) -> set[str]:
    """Functions that watched processes have run through since then."""
    seen = [json.loads(path.read_text()) for path in Path(folder).glob("*.json")]
    return {name for functions in seen for name, last in functions.items() if last > began}


def listed(functions: set[str]) -> Iterator[str]:
    """A line for each file: which of its functions ran, and how many it has."""
    for file in sorted({name.partition(":")[0] for name in functions}):
        ran = sorted(name.partition(":")[2] for name in functions if name.startswith(f"{file}:") and ".<" not in name)
        nodes = ast.walk(ast.parse((IMPL / file).read_bytes()))
        total = sum(isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef) for node in nodes)
        yield f"{file}: {len(ran)} of {total}: {', '.join(ran)}"


def rows() -> Iterator[tuple[str, object, str]]:
    """(name, figure, bar) of what is counted without running anything."""
    commands, machinery = (num_lines(files_without_tests(*folders)) for folders in (COMMANDS[1:], ()))
    yield "Python in conformance/ that is no test (without servers/)", commands + machinery, "6000"
    yield "    of these, folders of commands (trainers/, vectors/, campaign/)", commands, ""
    yield "    of these, machinery of the tests", machinery, ""
    yield "    beside these, the folder of a command (servers/)", num_lines(files_without_tests("servers")), ""
    yield "Python in conformance/", num_lines(python_files(ROOT / "conformance")), "32000"
    yield "class names used twice", len(repeated_classes()), "0"
    texts = [path.read_text(encoding="utf-8") for path in python_files(IMPL)]
    yield "Any in impl/", sum(len(re.findall(r"\bAny\b", text)) for text in texts), "350"
    yield "functions over 40 lines in impl/", len(long_functions()), "0"
    yield "files over 300 lines in impl/", sum(len(text.split("\n")) > 301 for text in texts), "0"


def main() -> None:
    """Print one line a figure, and what is over its bar."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--quick", action="store_true")
    is_quick = parser.parse_args().quick
    for row in rows():
        print_row(*row)
    for name in repeated_classes():
        sys.stdout.write(f"twice: {name}\n")
    if is_quick:
        return
    for name, bar, watched in (("hf step", "22", functions_of_a_step), ("native gloo sync", "12", functions_of_a_sync)):
        lines = list(listed(watched()))
        print_row(f"files of impl/ in one {name}", len(lines), bar)
        sys.stdout.writelines(f"{'':>9}{line}\n" for line in lines)


def print_row(name: str, figure: object, bar: str) -> None:
    """A line of the table."""
    sys.stdout.write(f"{figure!s:>7}  {f'at most {bar:>5}' if bar else '':13}  {name}\n")


if __name__ == "__main__":
    main()
