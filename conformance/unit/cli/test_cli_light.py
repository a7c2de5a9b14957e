import errno
import gzip
import importlib.util
import json
import os
import re
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

from conformance.doubles.run_fixtures import RECORD
from rollmatch import __version__
from rollmatch.cli.main import format_error, main
from rollmatch.config import json_schema, load_config
from rollmatch.config.yaml_dialect import parse_mapping
from rollmatch.errors import ErrorList, LaunchError
from rollmatch.run.storage import storage_error

ROOT = Path(__file__).parents[3]
SAFETENSORS = RuntimeError("Error while serializing: I/O error: No space left on device (os error 28)")
HEAVY = ("torch", "transformers", "vllm", "peft", "accelerate")


def test_check_prints_the_resolved_tree_and_what_the_data_holds(place, capsys):
    assert main(["check", "run.yaml", "--set", "training.seed=7", "--set=training.bf16=true"]) == 0
    printed = capsys.readouterr()
    assert printed.err == ""
    tree, _, summary = printed.out.partition("\n\n")
    (place / "resolved.yaml").write_text(tree)
    assert load_config(place / "resolved.yaml") == load_config("run.yaml", ["training.seed=7", "training.bf16=true"])
    assert parse_mapping(tree, origin="out")["training"] == {"output_dir": "out", "seed": 7, "bf16": True}
    *lines, prompts, _, parallel, verdict = summary.splitlines()
    assert verdict == "ok: nothing is wrong"
    fit = r"train prompts: at most \d+ tokens \(train.jsonl:1\), 512 fit; 0 skipped, 0 truncated"
    assert re.fullmatch(fit, prompts)
    assert [*lines, parallel] == [
        "train: 3 samples, 3 objects  (train.jsonl)",
        "val: 1 samples, 0 objects  (val.jsonl)",
        "longest segment: 1024 tokens, prompt and response: 1024 tokens",
        "tensor_parallel_size: 4 with 4 learner ranks, else 1",
    ]
    assert not (place / "out").exists()


@pytest.mark.parametrize(("backend", "is_named"), [("vllm", True), ("hf", False)])
def test_check_speaks_of_engines_where_the_learner_holds_some(place, capsys, backend, is_named):
    rollouts = f"custom.extra.rollout_matching.rollout_backend={backend}"
    assert main(["check", "run.yaml", "--set", rollouts]) == 0
    assert ("\ntensor_parallel_size: " in capsys.readouterr().out) == is_named


def test_check_prints_every_key_on_request(place, capsys):
    assert main(["check", "run.yaml", "--all"]) == 0
    tree = parse_mapping(capsys.readouterr().out.partition("\n\n")[0], origin="out")
    assert tree["training"]["seed"] == load_config("run.yaml").training.seed
    assert tree["tuner"]["lora_rank"] == 8


def test_check_numbers_all_problems_of_the_configuration_on_stderr(place, capsys):
    assert main(["check", "run.yaml", "--set", "training.sead=7", "--set", "global_max_length=0"]) == 1
    printed = capsys.readouterr()
    assert printed.out == ""
    first, *problems = printed.err.splitlines()
    assert first == "rollmatch: 2 problems"
    assert problems[0].startswith("  1. [out-of-range] global_max_length: ")
    assert problems[2:] == [
        "     --set global_max_length",
        "  2. [unknown-key] training.sead: there is no such key",
        "     Did you mean training.seed?",
        "     --set training.sead",
    ]
    assert "Traceback" not in printed.err


def test_check_reports_problems_of_all_files_together(place, capsys):
    (place / "tiny/config.json").unlink()
    (place / "train.jsonl").write_text("".join(f"{json.dumps({**RECORD, 'width': 99 + row})}\n" for row in range(30)))
    (place / "val.jsonl").write_text("{}\n")
    assert main(["check", "run.yaml"]) == 1
    lines = capsys.readouterr().err.splitlines()
    assert lines[0] == "rollmatch: 32 problems"
    assert "[model-file-missing] model.model: " in lines[1]
    assert lines[3] == "     run.yaml:7"
    assert "[image-size-mismatch] train.jsonl:1: " in lines[4]
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


REWARDS, OUT = "custom.extra.grpo.rewards", "training.output_dir"
NAMES = ("optim=adamw_torchh", "lr_scheduler_type=cosin", "extra_arguments={max_step: 5}")
UNKNOWN = [
    ("argument-unknown", "training.extra_arguments.max_step"),
    ("not-a-choice", "training.optim"),
    ("not-a-choice", "training.lr_scheduler_type"),
]


def without_coordinates(place):
    shutil.copy(ROOT / "fixtures/models/arithmetic/tokenizer.json", place / "tiny/tokenizer.json")


ADAPTED, AS_MODEL = ["--set", "model.adapter=adapter"], ["--set", "model.model=adapter"]
ADAPTER = json.dumps({"peft_type": "LORA", "base_model_name_or_path": "tiny"})


def with_an_adapter(described=ADAPTER, weights=None):
    def write(place):
        (place / "adapter").mkdir()
        (place / "adapter/adapter_config.json").write_text(described)
        if weights is not None:
            (place / "adapter/adapter_model.safetensors").write_bytes(weights)

    return write


def with_a_pipe(place):
    os.mkfifo(place / "b.png")
    (place / "val.jsonl").write_text(f"{json.dumps({**RECORD, 'images': ['b.png']})}\n")


@pytest.mark.parametrize(
    ("spoil", "arguments", "problems"),
    [
        (lambda place: (place / "tiny/tokenizer.json").write_text("{}"), [], [("tokenizer-unreadable", "model.model")]),
        (lambda place: (place / "tiny/config.json").write_text("[]"), [], [("model-file-missing", "model.model")]),
        (lambda place: None, ADAPTED, [("model-directory-missing", "model.adapter")]),
        (lambda place: (place / "adapter").mkdir(), ADAPTED, [("model-file-missing", "model.adapter")]),
        (with_an_adapter(described="[]"), AS_MODEL, [("model-file-missing", "model.model")]),
        (with_an_adapter(described='{"peft_type": "LORA"}'), AS_MODEL, [("model-file-missing", "model.model")]),
        (with_an_adapter(), ADAPTED, [("weights-missing", "model.adapter")]),
        (with_an_adapter(weights=b"cut off"), ADAPTED, [("weights-damaged", "model.adapter")]),
        (with_an_adapter(weights=b"cut off"), AS_MODEL, [("weights-damaged", "model.adapter")]),
        (without_coordinates, [], [("coord-tokens-missing", "model.model")]),
        (with_a_pipe, [], [("image-unreadable", "val.jsonl:1")]),
        (lambda place: (place / "val.jsonl").unlink(), [], [("data-file-missing", "custom.val_jsonl")]),
        (None, [f"--set=training.{name}" for name in NAMES], UNKNOWN),
        (
            lambda place: shutil.copytree(place / "tiny", place / "out/checkpoint-5"),
            ["--set", "model.model=out/checkpoint-5"],
            [("model-in-output-dir", OUT)],
        ),
        (None, ["--set", "training.report_to=wandb"], [("reporter-missing", "training.report_to")]),
        (None, ["--set", f"{OUT}=train.jsonl/below"], [("output-dir-not-writable", OUT)]),
        *(
            (None, [*GRPO_WITH, f"{REWARDS}=[{{function: '{reward}'}}]"], [(code, f"{REWARDS}.0.function")])
            for reward, code in (
                ("nobody:x", "reward-unknown"),
                ("mine:three", "reward-signature"),
                ("leaves:x", "reward-unknown"),
            )
        ),
    ],
)
def test_check_finds_what_is_wrong(place, capsys, monkeypatch, spoil, arguments, problems):
    monkeypatch.delitem(sys.modules, "mine", raising=False)
    (place / "mine.py").write_text("def three(answer, sample, other): ...\n")
    (place / "leaves.py").write_text("raise SystemExit(0)")
    find = importlib.util.find_spec
    monkeypatch.setattr("importlib.util.find_spec", lambda name: name != "wandb" and find(name))
    if spoil:
        spoil(place)
    assert problems_of(["check", "run.yaml", *arguments], capsys) == problems


@pytest.mark.parametrize(
    ("words", "key"),
    [
        (["run.yaml", "--resume", "out/checkpoint-5"], "--resume"),
        (["run.yaml", "--resume=out"], "--resume"),
        (["--resume_from_checkpoint", "out/checkpoint-5", "run.yaml"], "--resume_from_checkpoint"),
    ],
)
def test_a_path_to_resume_from_is_answered(place, capsys, words, key):
    assert main(["train", *words]) == 1
    error = capsys.readouterr().err
    assert f"[resume-of-path] {key}: is given out" in error
    assert "the newest whole checkpoint in training.output_dir is taken" in error


def test_a_command_line_of_others_may_name_what_to_resume(place, capsys):
    words = "import-config -- trl grpo --model_name_or_path m --resume_from_checkpoint out/checkpoint-5"
    main(words.split())
    assert "resume-of-path" not in capsys.readouterr().err


def test_the_configuration_may_follow_resume(place, capsys):
    assert problems_of(["train", "--resume", "none.yaml"], capsys) == [("config-file-missing", "none.yaml")]


CONVERTS = "rollmatch import-config converts a file of TRL or ms-swift."
OTHER_FILES = "custom.dataset reads parquet, arrow and csv"


def write_gzip(place):
    (place / "val.jsonl").write_bytes(gzip.compress(b"{}"))


def write_latin(place):
    (place / "run.yaml").write_bytes(b"a: caf\xe9")


@pytest.mark.parametrize(
    ("spoil", "override", "remedy"),
    [
        (
            write_gzip,
            "training.seed=1",
            f"Save the file unpacked, as UTF-8; {OTHER_FILES}.",
        ),
        (write_latin, "training.seed=1", "Save it as UTF-8."),
        (None, "training.optim=adam", "Did you mean adamw_torch?"),
        (None, "grpo.rewards=typed:right", "Write [{function: typed:right}]."),
        (
            None,
            "max_steps=3",
            f"Did you mean training.max_steps? {CONVERTS}",
        ),
        (None, "trainign={}", "Did you mean training?"),
        (
            None,
            "custom.extra.rollout_matching.vllm.server={base_url: 'http://a:8000/v1', group_port: 5}",
            "Name the server; routes are added to its address.",
        ),
        *(
            (None, f"grpo.rewards=[{{function: '{name}'}}]", remedy)
            for name, remedy in (
                ("typed:rihgt", "Did you mean typed:right?"),
                ("typed.py:right", "Write typed:right."),
                ("raises:right", "Correct it; python -c 'import raises' shows where."),
                ("nobody:right", "The module is looked for among installed packages and in the working directory."),
            )
        ),
    ],
)
def test_a_remedy_says_what_to_type(place, capsys, spoil, override, remedy):
    (place / "typed.py").write_text("def right(answer, sample): return 1.0\n")
    (place / "raises.py").write_text("import os\nos.environ['A_KEY_THAT_NOBODY_HAS']\n")
    if spoil:
        spoil(place)
    of_grpo = override.startswith("grpo")
    assert main(["check", "run.yaml", *(GRPO_WITH if of_grpo else ["--set"]), override]) == 1
    printed = capsys.readouterr().err.splitlines()
    assert f"     {remedy}" in printed
    if of_grpo:
        assert printed[-1] == "     --set grpo.rewards"


@pytest.mark.parametrize("backend", ["hf", "vllm"])
@pytest.mark.scenario(clauses=["packing/one-key-decides-about-what-is-too-long#1,2,4,5,7"])
def test_check_counts_the_tokens_of_prompts(place, capsys, backend):
    image = {**RECORD, "prompt": "Which colour has the picture?"}
    del image["objects"]
    records = [{"prompt": "How many?"}, {"prompt": "How many? " * 40}, image]
    (place / "train.jsonl").write_text("".join(f"{json.dumps(record)}\n" for record in records))
    (place / "val.jsonl").write_text(json.dumps(records[0]) + "\n")
    key = "custom.extra.rollout_matching"
    settings = (f"{key}.rollout_backend={backend}", f"{key}.max_new_tokens=400", "global_max_length=500")
    reward = "custom.extra.grpo.rewards=[{function: 'conformance.doubles.rewards:digit_sum'}]"
    arguments = ["check", "run.yaml", *GRPO_WITH, reward, *(f"--set={each}" for each in settings)]
    assert problems_of(arguments, capsys) == [("prompt-too-long", "global_max_length")]
    for overlong, counts in (("skip", "1 skipped, 0 truncated"), ("truncate_left", "0 skipped, 1 truncated")):
        assert main([*arguments, "--set", f"overlong={overlong}"]) == 0
        train, val = re.findall("prompts: .*", capsys.readouterr().out)
        assert f"(train.jsonl:2), 100 fit; {counts}" in train
        assert "0 skipped, 0 truncated" in val
    assert problems_of([*arguments, "--set", "global_max_length=410", "--set", "overlong=skip"], capsys) == [
        ("prompt-too-long", "global_max_length")
    ]
    assert main([*arguments, "--set", "truncation_strategy=left"]) == 1
    assert "Did you mean overlong?" in capsys.readouterr().err


def error_of_torch():
    """What torch raises where a disk is full."""
    torch = pytest.importorskip("torch")
    with pytest.raises(RuntimeError) as caught:
        torch.save({"a": torch.zeros(100_000)}, "/dev/full")
    return caught.value


@pytest.mark.parametrize(
    ("make", "reason"),
    [
        (lambda: OSError(errno.ENOSPC, "", "out/x"), "out/x: cannot be written: No space left on device"),
        (lambda: OSError(errno.EROFS, ""), "the output directory: cannot be written: Read-only file system"),
        (lambda: SAFETENSORS, "No space left on device"),
        (error_of_torch, "full disk"),
    ],
)
def test_a_full_disk_is_a_named_error(make, reason):
    printed = format_error(storage_error(make()))
    assert "[storage-failed]" in printed
    assert reason in printed


@pytest.mark.parametrize("outputs", [("stdout",), ("stdout", "stderr")])
@pytest.mark.parametrize("words", [["schema"], ["check", "gone.yaml"]])
def test_an_output_on_a_full_disk_ends_a_command_by_name(tmp_path, words, outputs):
    """It was a traceback and exit code 120."""
    files = {name: (tmp_path / name).open("w+") for name in ("stdout", "stderr")}
    with open("/dev/full", "w") as full:
        streams = files | dict.fromkeys(outputs, full)
        done = subprocess.run([sys.executable, "-m", "rollmatch", *words], **streams, timeout=60, check=False)
    assert done.returncode == 1
    written = (tmp_path / "stderr").read_text()
    assert "Traceback" not in written
    assert ("[storage-failed] stdout: " in written) == (words == ["schema"] and outputs == ("stdout",))


def test_errors_have_no_traceback_unless_it_is_wished(place, capsys, monkeypatch):
    assert main(["check", "gone.yaml"]) == 1
    assert "[config-file-missing] gone.yaml: " in capsys.readouterr().err
    monkeypatch.setenv("ROLLMATCH_TRACEBACK", "1")
    with pytest.raises(ErrorList):
        main(["check", "gone.yaml"])


def test_schema_is_printed_or_written(place, capsys):
    assert main(["schema"]) == 0
    assert json.loads(capsys.readouterr().out) == json_schema()
    assert main(["schema", "--out", "schema.json"]) == 0
    assert json.loads((place / "schema.json").read_text()) == json_schema()
    assert main(["schema", "--out", "gone/schema.json"]) == 1
    assert "[output-not-writable] gone/schema.json: " in capsys.readouterr().err


def test_version(capsys):
    with pytest.raises(SystemExit) as caught:
        main(["--version"])
    assert caught.value.code == 0
    assert capsys.readouterr().out == f"rollmatch {__version__}\n"


@pytest.mark.parametrize(
    "arguments",
    [
        *([], ["fly"], ["data"], ["model"], ["check"], ["check", "a.yaml", "--set"], ["train"], ["schema", "x"]),
        *(["eval", "x", "--limit", "-1"], ["train", "x", "--wait-timeout", "nan"], ["up", "x", "--max-restarts", "-1"]),
        *(["vllm-serve", "--model", "x", *words] for words in (["--port", "65536"], ["--data-parallel-size", "0"])),
        ["vllm-serve", "--model", "x", "--gpu-memory-utilization", "7"],
    ],
)
def test_wrong_usage_exits_with_2(arguments, capsys):
    with pytest.raises(SystemExit) as caught:
        main(arguments)
    assert caught.value.code == 2
    assert "usage: rollmatch" in capsys.readouterr().err


@pytest.mark.parametrize("words", [["training.max_steps=3"], ["--training.max_steps", "3"]], ids=["hydra", "argparse"])
def test_a_key_without_set_is_told_from_an_option(words, capsys):
    with pytest.raises(SystemExit):
        main(["train", "run.yaml", *words])
    assert f"unrecognized arguments: {' '.join(words)}; write a key of the YAML as --set" in capsys.readouterr().err


def test_errors_are_numbered_each_with_its_remedy():
    error = LaunchError("holds a run", key="training.output_dir", remedy="Use --resume.")
    expected = "rollmatch: 1 problem\n  1. [launch-error] training.output_dir: holds a run\n     Use --resume."
    assert format_error(error) == expected
    errors = [LaunchError(name) for name in "abc"]
    assert format_error(ErrorList([errors[0], ErrorList(errors[1:])])).splitlines() == [
        "rollmatch: 3 problems",
        *(f"  {number}. [launch-error] {name}" for number, name in enumerate("abc", start=1)),
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
