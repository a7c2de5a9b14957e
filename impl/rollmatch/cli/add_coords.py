"""``rollmatch model add-coords``: a model directory with the coordinate tokens, made from one without."""

import argparse
import json
import shutil
from pathlib import Path

from rollmatch.errors import LaunchError
from rollmatch.model.source import dtype_of
from rollmatch.run.export import copy_described, write_weights
from rollmatch.startup import loading


def add_command(commands: "argparse._SubParsersAction[argparse.ArgumentParser]") -> None:
    """Add ``model add-coords`` with its options."""
    below = commands.add_parser("model", help="prepare a model for training").add_subparsers(
        required=True, metavar="COMMAND"
    )
    added = below.add_parser("add-coords", help="give a model the 1000 coordinate tokens")
    added.add_argument("model", metavar="MODEL", help="model directory or hub id")
    added.add_argument("out", type=Path, metavar="OUT", help="directory to write the model to")
    added.set_defaults(command=add_coords)


def add_coords(options: argparse.Namespace) -> None:
    """Write the model directory. Errors: ``coord-tokens-present``, ``output-exists``, ``model-directory-missing``."""
    from rollmatch.model.source import local_directory

    out: Path = options.out
    if out.exists():
        raise LaunchError(f"{out} exists", code="output-exists", key="OUT", remedy="Remove it, or name another one.")
    base = Path(local_directory(options.model, revision=None, key="MODEL"))
    if not (base / "config.json").is_file():
        problem, remedy = f"{base} holds no config.json", "Name a model directory, or a model of the hub."
        raise LaunchError(problem, code="model-directory-missing", key="MODEL", remedy=remedy)
    partial = out.with_name(f"{out.name}.partial")
    shutil.rmtree(partial, ignore_errors=True)
    partial.mkdir(parents=True)
    lines = _write(base, partial)
    partial.rename(out)
    print("\n".join([f"{out}:", *lines]))


def _write(base: Path, out: Path) -> list[str]:
    """Fill the directory; returns what was done, in lines."""
    with loading():
        from transformers.utils.logging import disable_progress_bar

        from rollmatch.config.training import ModelConfig, TunerConfig
        from rollmatch.model.coordinates import ROWS_MULTIPLE, add_rows, add_tokens
        from rollmatch.model.policy import load_policy, unwrap
        from rollmatch.model.vocabulary import Vocabulary, load_tokenizer
    disable_progress_bar()
    tokenizer = load_tokenizer(base)
    ids = add_tokens(tokenizer)  # refuses before the weights are read
    vocabulary = Vocabulary.of(tokenizer, base, coordinates=False)
    digits = [vocabulary.encode_bytes(b"%d" % digit)[0] for digit in range(10)]
    # Nothing is computed, and eager is the attention that every architecture has.
    model = unwrap(load_policy(ModelConfig(model=str(base)), TunerConfig(), attn_implementation="eager"))
    added = add_rows(model, ids, digits)
    copy_described(base, out)
    (out / "added_tokens.json").unlink(missing_ok=True)  # tokenizer.json has them all
    tokenizer.save_pretrained(out)
    dtype = dtype_of(base)
    write_weights(model, out, dtype)
    _set_vocabulary_size(out / "config.json", added.num_rows)
    heads = "one matrix for embedding and head" if added.is_tied else "embedding and head, each with its own rows"
    return [
        f"  1000 tokens <|coord_0|> .. <|coord_999|>, ids {added.first_id} .. {added.first_id + 999}",
        f"  {added.num_rows_before} -> {added.num_rows} rows (a multiple of {ROWS_MULTIPLE}), {heads}, {dtype}",
        f"  initial values from the digits: cosine {added.cosine_of_neighbours:.3f} of bins 1 apart, "
        f"{added.cosine_of_distant:.3f} of bins 500 apart",
        "  next: stage 1 (custom.trainer_variant: sft), which teaches what they mean",
    ]


def _set_vocabulary_size(path: Path, num_rows: int) -> None:
    """In every part of config.json that says it."""
    described = json.loads(path.read_text(encoding="utf-8"))
    for part in (described, described.get("text_config", {})):
        if "vocab_size" in part:
            part["vocab_size"] = num_rows
    path.write_text(json.dumps(described, indent=2) + "\n", encoding="utf-8")
