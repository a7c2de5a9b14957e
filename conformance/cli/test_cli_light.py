import errno
import importlib.util
import json
import os
import re
import shutil
import subprocess
import sys
import types
from pathlib import Path

import pytest
import yaml
from PIL import Image

from rollmatch import __version__
from rollmatch.cli.main import format_error, main
from rollmatch.cli.server_checks import WaitPolicy
from rollmatch.config import json_schema, load_config
from rollmatch.config.yaml_dialect import parse_mapping
from rollmatch.errors import ErrorList, LaunchError

ROOT = Path(__file__).parents[2]
RECORD = {"images": ["a.png"], "objects": [{"desc": "a", "bbox_2d": [0, 0, 9, 9]}], "width": 8, "height": 6}
SAFETENSORS = RuntimeError("Error while serializing: I/O error: No space left on device (os error 28)")
HEAVY = ("torch", "transformers", "vllm", "peft", "accelerate")


@pytest.fixture
def place(tmp_path, monkeypatch):
    """A directory in which ``rollmatch check run.yaml`` finds nothing wrong."""
    monkeypatch.chdir(tmp_path)
    monkeypatch.delenv("ROLLMATCH_TRACEBACK", raising=False)
    Image.new("L", (8, 6)).save("a.png")
    no_weights = shutil.ignore_patterns("*.safetensors")
    shutil.copytree(ROOT / "fixtures/models/digits", tmp_path / "tiny", ignore=no_weights)
    (tmp_path / "train.jsonl").write_text(f"{json.dumps(RECORD)}\n" * 3)
    (tmp_path / "val.jsonl").write_text(f"{json.dumps({**RECORD, 'objects': []})}\n")
    tree = {
        "model": {"model": "tiny"},
        "custom": {"trainer_variant": "rollout_matching_sft", "train_jsonl": "train.jsonl", "val_jsonl": "val.jsonl"},
        "global_max_length": 1024,
        "training": {"output_dir": "out"},
    }
    (tmp_path / "run.yaml").write_text(yaml.safe_dump(tree))
    return tmp_path


def test_check_prints_the_resolved_tree_and_what_the_data_holds(place, capsys):
    assert main(["check", "run.yaml", "--set", "training.seed=7", "--set=training.bf16=true"]) == 0
    told = capsys.readouterr()
    assert told.err == ""
    tree, _, summary = told.out.partition("\n\n")
    (place / "resolved.yaml").write_text(tree)
    assert load_config(place / "resolved.yaml") == load_config("run.yaml", ["training.seed=7", "training.bf16=true"])
    assert parse_mapping(tree, origin="out")["training"]["seed"] == 7
    *lines, prompts, parallel = summary.splitlines()
    assert re.fullmatch(r"prompts: at most \d+ tokens \(train.jsonl:1\)", prompts)
    assert [*lines, parallel] == [
        "train: 3 samples, 3 objects  (train.jsonl)",
        "val: 1 samples, 0 objects  (val.jsonl)",
        "longest segment: 1024 tokens, prompt and response: 1024 tokens",
        "tensor_parallel_size: 4 with 4 learner ranks, else 1",
    ]
    assert not (place / "out").exists()


def test_check_numbers_all_problems_of_the_configuration_on_stderr(place, capsys):
    assert main(["check", "run.yaml", "--set", "training.sead=7", "--set", "global_max_length=0"]) == 1
    told = capsys.readouterr()
    assert told.out == ""
    first, *problems = told.err.splitlines()
    assert first == "rollmatch: 2 problems"
    assert problems[0].startswith("  1. [out-of-range] global_max_length: ")
    assert problems[2:] == [
        "  2. [unknown-key] training.sead: there is no such key",
        "     Did you mean training.seed?",
    ]
    assert "Traceback" not in told.err


def test_check_tells_problems_of_all_files_together(place, capsys):
    (place / "tiny/config.json").unlink()
    (place / "train.jsonl").write_text(f"{json.dumps({**RECORD, 'width': 9})}\n" * 30)
    (place / "val.jsonl").write_text("{}\n")
    assert main(["check", "run.yaml"]) == 1
    lines = capsys.readouterr().err.splitlines()
    assert lines[0] == "rollmatch: 35 problems"
    assert "[model-file-missing] model.model: " in lines[1]
    assert "[image-size-mismatch] train.jsonl:1: " in lines[3]
    assert "[field-missing] val.jsonl:1: " in lines[-3]
    assert lines[-1] == "     ... and 10 more"


def problems_of(arguments, capsys):
    """(code, key) of each problem that a command prints."""
    assert main(arguments) == 1
    lines = [line for line in capsys.readouterr().err.splitlines()[1:] if line.lstrip()[:1].isdigit()]
    return [(line.partition("[")[2].partition("]")[0], line.partition("] ")[2].partition(": ")[0]) for line in lines]


GRPO_WITH = (
    *("--set", "custom.trainer_variant=grpo", "--set", "custom.extra.rollout_matching.decoding.temperature=1"),
    *("--set", "custom.extra.rollout_matching.max_new_tokens=64", "--set"),
)


def test_check_reads_the_tokenizer(place, capsys):
    (place / "tiny/tokenizer.json").write_text("{}")
    assert problems_of(["check", "run.yaml"], capsys) == [("tokenizer-unreadable", "model.model")]


def test_check_finds_coordinate_tokens_that_are_missing(place, capsys):
    shutil.copy(ROOT / "fixtures/models/arithmetic/tokenizer.json", place / "tiny/tokenizer.json")
    assert problems_of(["check", "run.yaml"], capsys) == [("coord-tokens-missing", "model.model")]


@pytest.mark.parametrize(
    ("reward", "code"),
    [("nobody:x", "reward-unknown"), ("mine:trl_style", "reward-signature"), ("mine:rubric", "reward-signature")],
)
def test_check_imports_rewards_and_looks_at_their_arguments(place, capsys, monkeypatch, reward, code):
    monkeypatch.delitem(sys.modules, "mine", raising=False)
    (place / "mine.py").write_text(
        "def trl_style(completions, **columns): ...\ndef rubric(prompt, completion, answer, state): ...\n"
    )
    key = "custom.extra.grpo.rewards"
    arguments = ["check", "run.yaml", *GRPO_WITH, f"{key}=[{{function: '{reward}'}}]"]
    assert problems_of(arguments, capsys) == [(code, f"{key}.0.function")]


def test_check_knows_reporters_that_are_not_installed(place, capsys, monkeypatch):
    monkeypatch.setattr(
        "importlib.util.find_spec", lambda name, find=importlib.util.find_spec: name != "wandb" and find(name)
    )
    arguments = ["check", "run.yaml", "--set", "training.report_to=wandb"]
    assert problems_of(arguments, capsys) == [("reporter-missing", "training.report_to")]


def test_check_counts_the_tokens_of_prompts(place, capsys):
    arguments = ["check", "run.yaml", "--set", "global_max_length=520"]
    assert problems_of(arguments, capsys) == [("prompt-too-long", "global_max_length")]
    assert main([*arguments, "--set", "custom.extra.rollout_matching.rollout_backend=hf"]) == 0
    assert "4 leave less than max_new_tokens" in capsys.readouterr().out


def test_check_compares_names_with_transformers(place, capsys):
    names = ("optim=adamw_torchh", "lr_scheduler_type=cosin", "extra_arguments={max_step: 5}")
    arguments = ["check", "run.yaml", *(f"--set=training.{name}" for name in names)]
    expected = [
        ("argument-unknown", "training.extra_arguments.max_step"),
        ("not-a-choice", "training.optim"),
        ("not-a-choice", "training.lr_scheduler_type"),
    ]
    assert problems_of(arguments, capsys) == expected


def test_check_tries_the_output_directory(place, capsys):
    arguments = ["check", "run.yaml", "--set", "training.output_dir=train.jsonl/below"]
    assert problems_of(arguments, capsys) == [("output-dir-not-writable", "training.output_dir")]


def test_a_pipe_in_place_of_an_image_is_a_problem_of_its_sample(place, capsys):
    os.mkfifo(place / "b.png")
    (place / "val.jsonl").write_text(f"{json.dumps({**RECORD, 'images': ['b.png']})}\n")
    assert problems_of(["check", "run.yaml"], capsys) == [("image-unreadable", "val.jsonl:1")]


@pytest.mark.parametrize("error", [OSError(errno.ENOSPC, os.strerror(errno.ENOSPC), "out/journal.jsonl"), SAFETENSORS])
def test_a_full_disk_is_a_named_error(heavy_command, capsys, error):
    heavy_command("learner", error)
    assert main(["train", "run.yaml"]) == 1
    told = capsys.readouterr().err
    assert "[storage-failed]" in told
    assert "No space left on device" in told


def test_other_failures_keep_their_traceback(heavy_command):
    heavy_command("learner", ZeroDivisionError())
    with pytest.raises(ZeroDivisionError):
        main(["train", "run.yaml"])


def test_a_data_file_that_is_missing_is_told_once(place, capsys):
    (place / "val.jsonl").unlink()
    assert main(["check", "run.yaml"]) == 1
    lines = capsys.readouterr().err.splitlines()
    assert lines[0] == "rollmatch: 1 problem"
    assert "[data-file-missing] custom.val_jsonl: " in lines[1]


def test_a_config_file_that_is_missing_is_no_traceback(place, capsys):
    assert main(["check", "gone.yaml"]) == 1
    assert "[config-file-missing] gone.yaml: " in capsys.readouterr().err


def test_the_traceback_is_shown_on_demand(place, monkeypatch):
    monkeypatch.setenv("ROLLMATCH_TRACEBACK", "1")
    with pytest.raises(ErrorList):
        main(["check", "gone.yaml"])


def test_schema_is_printed_or_written(place, capsys):
    assert main(["schema"]) == 0
    assert json.loads(capsys.readouterr().out) == json_schema()
    assert main(["schema", "--out", "schema.json"]) == 0
    assert json.loads((place / "schema.json").read_text()) == json_schema()


def test_schema_into_a_missing_directory_is_refused(place, capsys):
    assert main(["schema", "--out", "gone/schema.json"]) == 1
    assert "[output-not-writable] gone/schema.json: " in capsys.readouterr().err


def test_version(capsys):
    with pytest.raises(SystemExit) as caught:
        main(["--version"])
    assert caught.value.code == 0
    assert capsys.readouterr().out == f"rollmatch {__version__}\n"


@pytest.mark.parametrize(
    "arguments", [[], ["fly"], ["check"], ["check", "a.yaml", "--set"], ["train"], ["schema", "x"]]
)
def test_wrong_usage_exits_with_2(arguments, capsys):
    with pytest.raises(SystemExit) as caught:
        main(arguments)
    assert caught.value.code == 2
    assert "usage: rollmatch" in capsys.readouterr().err


@pytest.fixture
def heavy_command(monkeypatch):
    """Stands in for a command that would start something; remembers how it was called."""

    def stand_in(name, answer):
        calls = []

        def command(*positional, **named):
            calls.append((positional, named))
            if isinstance(answer, Exception):
                raise answer
            return answer

        module = types.ModuleType(f"rollmatch.cli.{name}")
        module.train = module.doctor = module.launch = module.shown_command = command
        monkeypatch.setitem(sys.modules, module.__name__, module)
        return calls

    return stand_in


WAITING = WaitPolicy(timeout_s=9, server_pid=7)


def test_train_hands_on_what_it_was_told(heavy_command):
    calls = heavy_command("learner", 0)
    assert main(["train", "run.yaml", "--set", "a.b=1", "--resume"]) == 0
    assert main(["train", "run.yaml", "--overwrite", "--wait-timeout", "9", "--server-pid", "7"]) == 0
    assert calls == [
        (("run.yaml",), {"overrides": ["a.b=1"], "resume": True, "overwrite": False, "wait": WaitPolicy()}),
        (("run.yaml",), {"overrides": [], "resume": False, "overwrite": True, "wait": WAITING}),
    ]


def test_doctor_hands_on_whether_to_repair_and_its_exit_code_counts(heavy_command):
    calls = heavy_command("doctor", 1)
    assert main(["doctor"]) == main(["doctor", "--fix"]) == 1
    assert calls == [((), {"fix": False}), ((), {"fix": True})]


def test_errors_of_heavy_commands_are_told_like_others(heavy_command, capsys):
    heavy_command("learner", LaunchError("holds a run", key="training.output_dir", remedy="Use --resume."))
    assert main(["train", "run.yaml"]) == 1
    expected = "rollmatch: 1 problem\n  1. [launch-error] training.output_dir: holds a run\n     Use --resume.\n"
    assert capsys.readouterr().err == expected


def test_nested_error_lists_are_told_flat():
    errors = [LaunchError(name) for name in "abc"]
    assert format_error(ErrorList([errors[0], ErrorList(errors[1:])])).splitlines() == [
        "rollmatch: 3 problems",
        "  1. [launch-error] a",
        "  2. [launch-error] b",
        "  3. [launch-error] c",
    ]


def test_check_and_schema_need_no_torch(place):
    code = (
        f"import sys; sys.modules |= dict.fromkeys({HEAVY!r})\n"
        "from rollmatch.cli.main import main\n"
        "assert main(['check', 'run.yaml']) == 0 and main(['schema', '--out', 'schema.json']) == 0\n"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=False)
    assert (done.returncode, done.stderr) == (0, "")
    assert "prompts: not counted, because torch or transformers is not installed" in done.stdout
