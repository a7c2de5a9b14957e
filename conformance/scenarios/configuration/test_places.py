"""Where a key is set: what the command line prints below a problem."""

import pytest

from conformance.doubles.configs import VALID
from rollmatch.cli.main import main
from rollmatch.config.layers import find_places
from rollmatch.config.yaml_dialect import dump


def test_a_problem_of_a_key_names_the_file_and_line_that_set_it(tmp_path, capsys):
    base, path = tmp_path / "base.yaml", tmp_path / "run.yaml"
    base.write_text(dump(VALID) + "rollout:\n  max_new_tokens: many\n")
    line = len(base.read_text().splitlines())
    path.write_text("extends: base.yaml\ngrpo:\n  beta: -1\n")
    assert main(["check", str(path)]) == 1
    printed = capsys.readouterr().err
    assert f"a number or a truth value has no quotes.\n     {base}:{line}\n" in printed
    assert f"Choose a value in that range.\n     {path}:3\n" in printed
    for override in ("custom.extra.grpo.beta=-2", "grpo.beta=-2", "grpo={beta: -2}"):
        assert main(["check", str(path), "--set", override]) == 1
        printed = capsys.readouterr().err
        assert f"{path}:3" not in printed
        assert f"Choose a value in that range.\n     --set {override.partition('=')[0]}\n" in printed or "{" in override
    assert main(["check", str(path), "--set=grpo.beta=-2"]) == 1
    assert "--set grpo.beta" in capsys.readouterr().err


@pytest.mark.scenario(clauses=["configuration/sections-have-short-names#3"])
def test_problems_name_sections_as_the_configuration_writes_them(tmp_path, capsys):
    path = tmp_path / "run.yaml"
    path.write_text(dump(VALID) + "grpo: {betta: 1}\n")
    assert main(["check", str(path), "--set", "rollout.max_new_token=5"]) == 1
    printed = capsys.readouterr().err
    assert "grpo.betta: there is no such key\n     Did you mean grpo.beta?" in printed
    assert "rollout.max_new_token: there is no such key\n     Did you mean rollout.max_new_tokens?" in printed
    assert "custom.extra" not in printed
    path.write_text("grpo: {beta: 1}\ncustom: {extra: {grpo: {beta: 1}}}\n")
    assert main(["check", str(path)]) == 1
    assert "as custom.extra.grpo, which is the same one" in capsys.readouterr().err


def test_files_that_cannot_be_read_have_no_places(tmp_path):
    path = tmp_path / "a.yaml"
    path.write_text("extends: a.yaml\ntraining: {seed: 1}\n")
    assert find_places(path)["training.seed"] == f"{path}:2"
    (tmp_path / "b.yaml").write_text("model: {}\ntraining:\n  seed: 2\n  max_steps: 3\n")
    path.write_text("extends: b.yaml\ntraining: {seed: 1}\n")
    places = find_places(path)
    assert places["training.seed"] == f"{path}:2", "the file itself has the last word"
    assert places["training.max_steps"] == f"{tmp_path}/b.yaml:4"
    path.write_text("a: [\n")
    assert find_places(path) == {}
    assert find_places(tmp_path / "none.yaml") == {}
