"""Where a key is set: what the command line prints below a problem."""

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
    assert main(["check", str(path), "--set", "custom.extra.grpo.beta=-2"]) == 1
    assert f"{path}:3" not in capsys.readouterr().err


def test_files_that_cannot_be_read_have_no_places(tmp_path):
    path = tmp_path / "a.yaml"
    path.write_text("extends: a.yaml\ntraining: {seed: 1}\n")
    assert find_places(path)["training.seed"] == f"{path}:2"
    path.write_text("a: [\n")
    assert find_places(path) == {}
    assert find_places(tmp_path / "none.yaml") == {}
