"""``engine: swift``: command lines that ms-swift's own parsers take, and mean what our YAML says."""

import json
import os
import re
import shlex
import subprocess
import tomllib

import pytest

from conformance.doubles.digits import CONFIG, MODEL, ROOT, absolute, load_digits
from conformance.doubles.refusals import refused
from conformance.doubles.swift_parser import FOLDER, parse, recorded
from conformance.tools.outside_tools import python_of
from rollmatch.cli.main import main
from rollmatch.interop.swift_cli import rollout_command

VLLM, SERVER, SWIFT = (f"custom.extra.{name}" for name in ("rollout_matching.vllm", "rollout_server", "swift"))
ENGINE = f"{SERVER}.engine=swift"
NAMED = (f"{VLLM}.mode=server", f"{VLLM}.server.base_url=http://127.0.0.1:8123", f"{VLLM}.server.group_port=51216")
SIX = (
    f"{SERVER}.vllm_tensor_parallel_size=1",
    f"{SERVER}.vllm_data_parallel_size=6",
    f"{SERVER}.vllm_gpu_memory_utilization=0.6",
    f"{SERVER}.vllm_max_model_len=12000",
    f"{SERVER}.vllm_enable_lora=false",
)


def words(*overrides, on_gpu=True):
    config = load_digits(*NAMED, ENGINE, *overrides)
    return rollout_command(config, port=8123, replicas=6, on_gpu=on_gpu)[2:]


def printed(capsys, command, *flags, overrides=()):
    """What a dry run prints: (environment, words)."""
    sets = [part for override in absolute(*NAMED, ENGINE, *overrides) for part in ("--set", override)]
    assert main([command, str(CONFIG), *flags, "--dry-run", *sets]) == 0
    command = shlex.split(capsys.readouterr().out)
    start = next(place for place, word in enumerate(command) if "=" not in word)
    return dict(word.split("=", 1) for word in command[:start]), command[start:]


@pytest.mark.scenario("launchers/a-swift-command-line", clauses=["launchers/ms-swift-can-be-the-server#1,2"])
def test_a_swift_command_line(capsys):
    environment, command = printed(capsys, "serve", "--gpus", "0,1,2,3,4,5", overrides=SIX)
    assert "VLLM_ENABLE_V1_MULTIPROCESSING" not in environment, "ms-swift's workers are its own business"
    assert command[:2] == ["swift", "rollout"]
    expected = (
        "--vllm_tensor_parallel_size 1 --vllm_data_parallel_size 6 --vllm_gpu_memory_utilization 0.6 "
        "--vllm_max_model_len 12000 --vllm_enable_lora false"
    )
    assert expected in " ".join(command)
    understood = parse("rollout", command[2:])
    assert (understood["model"], understood["host"], understood["port"]) == (str(MODEL), "127.0.0.1", 8123)
    assert (understood["vllm_data_parallel_size"], understood["vllm_enable_lora"]) == (6, False)
    assert (understood["vllm_max_model_len"], understood["vllm_gpu_memory_utilization"]) == (12000, 0.6)


@pytest.mark.scenario(clauses=["launchers/ms-swift-can-be-the-server#2"])
@pytest.mark.parametrize("dtype", ["auto", "float32", "bfloat16", "float16"])
def test_every_precision_is_one_that_swift_knows(dtype):
    understood = parse("rollout", words("model.torch_dtype=auto", f"{VLLM}.dtype={dtype}"))
    assert understood.get("torch_dtype", "auto") == dtype


def test_swift_s_engine_gets_what_ours_would(capsys):
    understood = parse(
        "rollout",
        words(
            f"{VLLM}.max_num_batched_tokens=4096",
            f"{VLLM}.kv_cache_memory_mib=128",
            f"{SERVER}.vllm_engine_kwargs={json.dumps({'block_size': 32})}",
            f"{SERVER}.vllm_enable_prefix_caching=false",
        ),
    )
    assert json.loads(understood["vllm_engine_kwargs"]) == {
        "kv_cache_memory_bytes": 128 * 2**20,
        "max_num_batched_tokens": 4096,
        "block_size": 32,
    }
    assert json.loads(understood["vllm_limit_mm_per_prompt"]) == {"image": 1, "video": 0}
    assert (understood["vllm_enable_prefix_caching"], understood["vllm_max_num_seqs"]) == (False, 64)
    assert (understood["vllm_enforce_eager"], understood["vllm_disable_custom_all_reduce"]) == (False, True)
    assert parse("rollout", words(on_gpu=False))["vllm_enforce_eager"] is True


def test_further_options_are_passed_on_and_none_is_said_twice():
    options = f"{SWIFT}.rollout_options={json.dumps({'use_hf': True, 'max_turns': 2})}"
    understood = parse("rollout", words(options, f"{SWIFT}.model_type=qwen3_vl", f"{SWIFT}.template=qwen3_vl"))
    assert (understood["use_hf"], understood["max_turns"]) == (True, 2)
    assert (understood["model_type"], understood["template"]) == ("qwen3_vl", "qwen3_vl")
    with refused("argument-has-own-key", f"{SWIFT}.rollout_options.port"):
        words(f"{SWIFT}.rollout_options={json.dumps({'port': 1})}")


@pytest.mark.parametrize(
    "wrong", [["--vllm_max_model_le", "1"], ["--vllm_max_model_len", "x"], ["--torch_dtype", "auto"], ["--nobody", "1"]]
)
def test_the_recorded_parser_refuses_what_swift_refuses(wrong):
    with pytest.raises(AssertionError, match="swift rollout"):
        parse("rollout", wrong)


def test_what_is_recorded_is_of_the_version_that_is_named():
    extras = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]["optional-dependencies"]
    (pinned,) = (re.fullmatch(r"ms-swift==(.*)", need)[1] for need in extras["swift"] if need.startswith("ms-swift"))
    assert recorded()["version"] == pinned


READ_BACK = """
import json, sys
import swift.arguments.deploy_args as deploy
from swift.arguments import RolloutArguments
from swift.utils import parse_args
deploy.get_device_count = lambda: 6
arguments, rest = parse_args(RolloutArguments, json.loads(sys.argv[1]))
names = ["model", "host", "port", "model_type", "template", "torch_dtype"]
names += ["vllm_data_parallel_size", "vllm_max_model_len", "vllm_enable_lora", "vllm_engine_kwargs"]
parsed = {name: getattr(arguments, name) for name in names}
print("\\n" + json.dumps(parsed | {"rest": rest, "torch_dtype": str(parsed["torch_dtype"])}))
"""


def run_by_swift(*arguments):
    environment = os.environ | {"OMP_NUM_THREADS": "1", "CUDA_VISIBLE_DEVICES": ""}
    done = subprocess.run(
        [python_of("swift"), *arguments], env=environment, capture_output=True, text=True, timeout=240
    )
    assert done.returncode == 0, done.stderr[-2000:]
    return done.stdout


@pytest.mark.swift
def test_the_installed_swift_knows_what_is_recorded(tmp_path):
    run_by_swift(str(FOLDER / "record.py"), "--out", str(tmp_path / "options.json"))
    assert json.loads((tmp_path / "options.json").read_text()) == recorded()


@pytest.mark.swift
def test_the_installed_swift_takes_the_command_line():
    """Its own classes, with everything they check when they are made, on a machine with six devices."""
    arguments = words(*SIX, f"{SWIFT}.model_type=qwen3_vl", f"{SWIFT}.template=qwen3_vl")
    understood = json.loads(run_by_swift("-c", READ_BACK, json.dumps(arguments)).splitlines()[-1])
    assert understood["rest"] == []
    assert (understood["model"], understood["port"], understood["host"]) == (str(MODEL), 8123, "127.0.0.1")
    assert (understood["vllm_data_parallel_size"], understood["vllm_max_model_len"]) == (6, 12000)
    assert (understood["model_type"], understood["torch_dtype"]) == ("qwen3_vl", "torch.float32")
    assert (understood["vllm_enable_lora"], understood["vllm_engine_kwargs"]["kv_cache_memory_bytes"]) == (False, 2**27)
