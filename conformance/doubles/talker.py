"""A model that says what a test has chosen: behind each token of a chain comes the next one, with certainty.

Its chat ends with the user's last word, so that the word chooses the chain. Its tokens are those of a family whose
end of turn is not the tokenizer's ``eos_token`` (base layout of Llama 3). Behind the end of a chain it continues with a
filler: an engine that does not stop there shows it.
"""

import json
import shutil
from collections.abc import Sequence
from pathlib import Path

import torch
from transformers import Qwen3Config, Qwen3ForCausalLM

from rollmatch.model.template import Template
from rollmatch.records import Sample

ROOT = Path(__file__).parents[2]
TEXT = ROOT / "fixtures/models/arithmetic"
EOS, END_OF_TURN, CALL = "<|endoftext|>", "<|eot_id|>", "<|im_start|>"
"""The tokenizer's end, the chat's, and one more, as that of a call of a tool."""
FILLER = "9"
CHAT = (
    "{% for m in messages %}{{ '[' + m.role + ']' + m.content }}"
    "{% if m.role == 'assistant' %}{{ '" + END_OF_TURN + "' }}{% endif %}{% endfor %}"
)


def make_talker(folder: Path, *, chains: Sequence[str | Sequence[str]], generated: Sequence[str]) -> Path:
    """A model's directory. ``generated``: the tokens of ``generation_config.eos_token_id``."""
    shutil.copytree(TEXT, folder, ignore=shutil.ignore_patterns("*.safetensors"))
    path = folder / "tokenizer.json"
    path.write_text(path.read_text().replace("<|im_end|>", END_OF_TURN))
    (folder / "chat_template.jinja").write_text(CHAT)
    named = {"tokenizer_class": "PreTrainedTokenizerFast", "eos_token": EOS, "pad_token": EOS}
    (folder / "tokenizer_config.json").write_text(json.dumps(named))
    vocab = {token: token_id for token_id, token in _tokens_of(path)}
    config = Qwen3Config.from_pretrained(
        TEXT, num_hidden_layers=1, layer_types=["full_attention"], tie_word_embeddings=False
    )
    model = Qwen3ForCausalLM(config)
    with torch.no_grad():
        for name, weight in model.named_parameters():
            weight.fill_(1.0 if "norm" in name else 0.0)
        pairs = [pair for chain in chains for pair in zip(chain, [*chain[1:], FILLER], strict=True)]
        following = dict(pairs) | {FILLER: FILLER}
        for place, (token, after) in enumerate(following.items()):
            model.get_input_embeddings().weight[vocab[token], place] = 1.0
            model.get_output_embeddings().weight[vocab[after], place] = 2.0
    model.generation_config.eos_token_id = [vocab[token] for token in generated]
    model.generation_config.pad_token_id = vocab[EOS]
    model.config.eos_token_id = vocab[EOS]
    model.save_pretrained(folder)
    return folder


def _tokens_of(path: Path) -> list[tuple[int, str]]:
    described = json.loads(path.read_text())
    added = [(token["id"], token["content"]) for token in described["added_tokens"]]
    return [(token_id, token) for token, token_id in described["model"]["vocab"].items()] + added


def talker_template(folder: Path) -> Template:
    return Template(folder, system="", user="", any_chat=True)


def asked(word: str, number: int) -> Sample:
    """What begins a chain."""
    return Sample(sample_id=number, origin=f"x.jsonl:{number + 1}", images=(), messages=(("user", word),))
