"""Mutation of what decides over data: parse, match, append, pack, mask, chunk, pairing. Needs mutmut 3.

    python -m conformance.harness.mutation --out FOLDER [--only rollout/chunk ...]

mutmut names modules by their path below ``src``, so it works in a copy of the tree where ``impl`` is called that, and
without what slows its thousand short runs of pytest down. ``mutmut results`` in the copy lists survivors;
``conformance/mutation.md`` says what those of the last run are.
"""

import argparse
import os
import shutil
import subprocess
import sys
from pathlib import Path

ROOT = Path(__file__).parents[2]
MUTATED = (
    *("config/pairing", "rollout/chunk", "learn/pack", "learn/mask"),
    *(f"target/{name}" for name in ("parse", "scan", "verdict", "match", "append")),
)
TESTS = (
    *("config/test_server_rules", "rollout/test_chunk", "learn/test_pack", "learn/test_mask"),
    *(f"target/test_{name}" for name in ("append", "match", "parse", "rollout_matching", "scan", "transport")),
    *(f"scenarios/test_{name}" for name in ("parsing", "matching", "target", "packing", "supervision")),
    "scenarios/test_server_connection",
)
QUIET = (
    *("-p", "no:conformance.harness.binding.plugin", "-p", "no:xdist", "-p", "no:benchmark", "-p", "no:cacheprovider"),
    *("-o", "addopts=", "--import-mode=importlib"),
)


def settings(mutated: tuple[str, ...]) -> str:
    """The section of ``pyproject.toml``."""
    fields = {
        "source_paths": ["src"],
        "only_mutate": [f"src/rollmatch/{name}.py" for name in mutated],
        "also_copy": ["conformance", "fixtures", "spec"],
        "pytest_add_cli_args_test_selection": [f"conformance/{name}.py" for name in TESTS],
        "pytest_add_cli_args": list(QUIET),
    }
    lines = [f"{key} = {value}".replace("'", '"') for key, value in fields.items()]
    return "\n".join(["", "[tool.mutmut]", *lines, ""])


def make_copy(out: Path, mutated: tuple[str, ...]) -> None:
    """The tree as mutmut needs it."""
    for name in ("conformance", "fixtures", "spec"):
        shutil.copytree(ROOT / name, out / name, ignore=shutil.ignore_patterns("__pycache__"))
    shutil.copytree(ROOT / "impl", out / "src", ignore=shutil.ignore_patterns("__pycache__"))
    told = (ROOT / "pyproject.toml").read_text(encoding="utf-8")
    (out / "pyproject.toml").write_text(told.replace('"impl"', '"src"') + settings(mutated), encoding="utf-8")


def main() -> int:
    """mutmut's exit status."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--out", type=Path, required=True, help="a folder that is not there yet")
    parser.add_argument("--only", nargs="+", choices=MUTATED, default=MUTATED)
    parser.add_argument("--workers", type=int, default=2)
    options = parser.parse_args()
    make_copy(options.out, tuple(options.only))
    mutants = options.out.absolute() / "mutants/src"
    mutants.mkdir(parents=True)  # Python forgets a path that is not there when it starts
    path = os.pathsep.join(filter(None, (str(mutants), os.environ.get("PYTHONPATH"))))
    command = [sys.executable, "-m", "mutmut", "run", "--max-children", str(options.workers)]
    environment = os.environ | {"PYTHONPATH": path, "OMP_NUM_THREADS": "1"}
    return subprocess.run(command, cwd=options.out, env=environment, check=False).returncode


if __name__ == "__main__":
    raise SystemExit(main())
