"""``rollmatch model add-coords``: the directory it writes loads everywhere, and its new rows are in order."""

import io
import json
import sys
import time
from contextlib import redirect_stdout
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file
from transformers import AutoModelForImageTextToText

from conformance.doubles.checkpoints import check_vllm_writes_as_transformers_does
from conformance.doubles.refusals import refused
from conformance.doubles.started import finish, train_command
from conformance.tools.real_models import make_real_model
from rollmatch.cli.main import main, make_parser
from rollmatch.model.coordinates import mean_cosine, ordered_rows
from rollmatch.model.vocabulary import Vocabulary

FIXTURES = Path(__file__).parents[3] / "fixtures"
MAKE, DIGITS = FIXTURES / "detector/make_model.py", FIXTURES / "models/digits"
EMBEDDING = "model.language_model.embed_tokens.weight"


def make_model(out, *options):
    code, output = finish([sys.executable, str(MAKE), str(out), *options], out.with_suffix(".txt"))
    assert code == 0, output


@pytest.fixture(scope="module")
def made(tmp_path_factory):
    """The stock model, and the one with coordinates."""
    folder = tmp_path_factory.mktemp("models")
    make_model(folder / "stock")
    with redirect_stdout(io.StringIO()) as printed:
        assert main(["model", "add-coords", str(folder / "stock"), str(folder / "coords")]) == 0
    (folder / "printed.txt").write_text(printed.getvalue())
    return folder


def test_the_output_says_what_was_added(made):
    ids = Vocabulary.load(made / "coords").coord_ids
    before, after = (load_file(made / name / "model.safetensors")[EMBEDDING] for name in ("stock", "coords"))
    first, tokens, rows, values, following = (made / "printed.txt").read_text().splitlines()
    assert first == f"{made / 'coords'}:"
    assert tokens == f"  1000 tokens <|coord_0|> .. <|coord_999|>, ids {ids[0]} .. {ids[999]}"
    assert rows.startswith(
        f"  {len(before)} -> {len(after)} rows (a multiple of 64), one matrix for embedding and head"
    )
    new = after[list(ids)].float()
    near, far = (mean_cosine(new, apart=apart) for apart in (1, 500))
    assert values == f"  initial values from the digits: cosine {near:.3f} of bins 1 apart, {far:.3f} of bins 500 apart"
    assert "stage 1" in following


def test_the_model_keeps_its_rows_and_gets_a_thousand_ordered_ones(made):
    before = AutoModelForImageTextToText.from_pretrained(made / "stock", dtype="auto")
    after = AutoModelForImageTextToText.from_pretrained(made / "coords", dtype="auto")
    old, new = (model.get_input_embeddings().weight.detach() for model in (before, after))
    vocabulary = Vocabulary.load(made / "coords")
    num_known = min(vocabulary.coord_ids)
    assert torch.equal(new[:num_known], old[:num_known])
    assert len(new) % 64 == 0
    assert len(new) > max(vocabulary.coord_ids)
    assert json.loads((made / "coords/config.json").read_text())["text_config"]["vocab_size"] == len(new)
    assert after.get_output_embeddings().weight is after.get_input_embeddings().weight
    digits = [vocabulary.encode(str(digit))[0] for digit in range(10)]
    assert torch.allclose(new[list(vocabulary.coord_ids)], ordered_rows(old[digits]), atol=1e-6)
    padding = new[max(vocabulary.coord_ids) + 1 :]
    assert len(padding)
    assert torch.allclose(padding, old.mean(0).expand_as(padding), atol=1e-6)
    assert vocabulary.encode("<|coord_7|>") == (vocabulary.coord_ids[7],)


def test_bins_between_the_pixels_of_the_digits_model_lie_between_their_embeddings(tmp_path):
    make_model(tmp_path / "seeing", "--seeing")
    before, after = (
        load_file(folder / "model.safetensors")[EMBEDDING].float() for folder in (DIGITS, tmp_path / "seeing")
    )
    ids = Vocabulary.load(tmp_path / "seeing").coord_ids
    changed = [place for place, row in enumerate(ids) if not torch.equal(before[row], after[row])]
    assert set(range(1000)) - set(changed) == {round(pixel * 999 / 127) for pixel in range(128)}
    assert torch.allclose(after[ids[4]], (before[ids[0]] * 4 + before[ids[8]] * 4) / 8, atol=1e-2)


@pytest.mark.parametrize("name", ["qwen3", pytest.param("gpt_oss", marks=pytest.mark.wide)])
def test_real_vocabularies_get_coordinates_in_seconds(name, tmp_path):
    """gpt-oss has no other attention than eager."""
    stock = make_real_model(name, tmp_path / "stock")
    begin = time.process_time()
    assert main(["model", "add-coords", str(stock), str(tmp_path / "coords")]) == 0
    assert time.process_time() - begin < 20
    vocabulary = Vocabulary.load(tmp_path / "coords")
    assert vocabulary.encode("<|coord_0|> <|coord_999|>")[::2] == (vocabulary.coord_ids[0], vocabulary.coord_ids[999])


def test_neighbours_are_near():
    rows = ordered_rows(torch.randn(10, 64, generator=torch.Generator().manual_seed(0)))
    similar = [mean_cosine(rows, apart=apart) for apart in (1, 5, 10, 50, 100)]
    assert similar == sorted(similar, reverse=True)
    assert similar[0] > 0.99
    assert similar[-1] < 0.6


def test_what_has_coordinates_or_is_no_model_is_refused(made, tmp_path):
    def run(*arguments):
        options = make_parser().parse_args(["model", "add-coords", *map(str, arguments)])
        options.command(options)

    with refused("coord-tokens-present", "MODEL"):
        run(made / "coords", tmp_path / "out")
    with refused("output-exists", "OUT"):
        run(made / "stock", made / "coords")
    with refused("model-directory-missing", "MODEL"):
        run(tmp_path, tmp_path / "out")
    assert not (tmp_path / "out").exists()


def test_check_accepts_it_and_not_the_stock_model(made, capsys):
    command = train_command(f"model.model={made / 'coords'}", "custom.extra.rollout_matching.vllm.max_model_len=null")
    arguments = [part for part in command[command.index("train") + 1 :] if part not in ("--overwrite", "--resume")]
    assert main(["check", *arguments]) == 0
    stock = [part.replace(str(made / "coords"), str(made / "stock")) for part in arguments]
    assert main(["check", *stock]) == 1
    assert "coord-tokens-missing" in capsys.readouterr().err


@pytest.mark.wide
@pytest.mark.engine
def test_vllm_writes_coordinates_as_transformers_does(made):
    ids = Vocabulary.load(made / "coords").coord_ids
    check_vllm_writes_as_transformers_does(made / "coords", [1, ids[3], ids[999], 4])
