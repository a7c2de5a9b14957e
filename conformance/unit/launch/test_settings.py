"""What is set for servers and engines, by YAML or by arguments, reaches the server's process and vLLM, each by name.

Values are no defaults; vLLM's names are those of its ``EngineArgs``.
"""

import json
import shlex

import pytest

from conformance.doubles.digits import MODEL, load_digits
from rollmatch.cli import main
from rollmatch.config.limits import LimitsConfig
from rollmatch.config.schema import fields
from rollmatch.run.assemble import _engine_arguments

CONFIG = "fixtures/digits/digits.yaml"
VLLM, SERVER = "custom.extra.rollout_matching.vllm", "custom.extra.rollout_server"
OF_ENGINES = {
    f"{VLLM}.enable_prefix_caching": (False, "enable_prefix_caching", False),
    f"{VLLM}.enforce_eager": (False, "enforce_eager", False),
    f"{VLLM}.max_num_seqs": (7, "max_num_seqs", 7),
    f"{VLLM}.max_num_batched_tokens": (4096, "max_num_batched_tokens", 4096),
    f"{VLLM}.enable_chunked_prefill": (False, "enable_chunked_prefill", False),
    f"{VLLM}.kv_cache_memory_mib": (96, "kv_cache_memory_bytes", 96 * 2**20),
    f"{VLLM}.limit_mm_per_prompt": ({"image": 3}, "limit_mm_per_prompt", {"image": 3, "video": 0}),
    f"{VLLM}.disable_custom_all_reduce": (False, "disable_custom_all_reduce", False),
    f"{VLLM}.quantization": ("fp8", "quantization", "fp8_per_channel"),
    "model.processor_kwargs": ({"max_pixels": 784}, "mm_processor_kwargs", {"max_pixels": 784}),
    "training.seed": (5, "seed", 5),
}
"""Key -> its value, vLLM's name and value."""
OF_COLOCATE = {
    f"{VLLM}.load_format": ("dummy", "load_format", "dummy"),
    f"{VLLM}.enable_lora": (True, "enable_lora", True),
    f"{VLLM}.gpu_memory_utilization": (0.3, "gpu_memory_utilization", 0.3),
}
OF_SERVERS = {
    "model.stop_token": ("<|endoftext|>", "stop_token", "<|endoftext|>"),
    f"{VLLM}.dtype": ("float16", "dtype", "float16"),
    f"{VLLM}.max_model_len": (900, "max_model_len", 900),
    f"{VLLM}.load_format": ("dummy", "load_format", "dummy"),
    f"{VLLM}.enable_lora": (True, "enable_lora", True),
    f"{SERVER}.host": ("10.0.0.7", "host", "10.0.0.7"),
    f"{SERVER}.allow_no_key": (True, "allow_no_key", True),
    f"{SERVER}.allowed_hosts": (["a", "b"], "allowed_hosts", ["a", "b"]),
    f"{SERVER}.image_roots": (["/a", "/b"], "image_roots", ["/a", "/b"]),
    f"{SERVER}.allowed_media_domains": (["a.b"], "allowed_media_domains", ["a.b"]),
    f"{SERVER}.drain_s": (7.5, "drain_s", 7.5),
    f"{SERVER}.served_model_names": (["a"], "served_model_names", ["a", "fixtures/models/digits"]),
    f"{SERVER}.tool_call_parser": ("hermes", "tool_call_parser", "hermes"),
    f"{SERVER}.reasoning_parser": ("qwen3", "reasoning_parser", "qwen3"),
    f"{SERVER}.vllm_max_model_len": (800, "max_model_len", 800),
    f"{SERVER}.vllm_gpu_memory_utilization": (0.55, "engine_arguments.gpu_memory_utilization", 0.55),
    f"{SERVER}.vllm_enable_prefix_caching": (False, "engine_arguments.enable_prefix_caching", False),
    f"{SERVER}.vllm_disable_custom_all_reduce": (False, "engine_arguments.disable_custom_all_reduce", False),
    f"{SERVER}.vllm_engine_kwargs": ({"block_size": 32}, "engine_arguments.block_size", 32),
    f"{SERVER}.vllm_tensor_parallel_size": (2, "tensor_parallel_size", 2),
    f"{SERVER}.vllm_data_parallel_size": (4, "data_parallel_size", 4),
}
"""Key -> its value; place and value in what the server's process gets."""
ELSEWHERE = {f"{SERVER}.engine", f"{SERVER}.vllm_enable_lora", f"{SERVER}.limits"}
NEEDED = {
    f"{VLLM}.quantization": {f"{VLLM}.dtype": "bfloat16"},
    f"{VLLM}.enable_lora": {"tuner.train_type": "lora"},
    f"{SERVER}.host": {f"{SERVER}.allow_no_key": True},
    f"{SERVER}.vllm_tensor_parallel_size": {"gpus": "0,1"},
    f"{SERVER}.vllm_data_parallel_size": {"gpus": "0,1,2,3"},
}
"""Key -> what has to be beside it."""
OF_ARGUMENTS = {
    "--host": ("127.0.0.2", "host", "127.0.0.2"),
    "--port": ("8123", "port", 8123),
    "--tensor-parallel-size": ("2", "tensor_parallel_size", 2),
    "--data-parallel-size": ("3", "data_parallel_size", 3),
    "--max-model-len": ("900", "max_model_len", 900),
    "--gpu-memory-utilization": ("0.3", "engine_arguments.gpu_memory_utilization", 0.3),
    "--enable-prefix-caching": ("false", "engine_arguments.enable_prefix_caching", False),
    "--served-model-name": ("a b", "served_model_names", ["a", "b"]),
    "--tool-call-parser": ("hermes", "tool_call_parser", "hermes"),
    "--reasoning-parser": ("qwen3", "reasoning_parser", "qwen3"),
    "--allowed-media-domains": ("a.b c.d", "allowed_media_domains", ["a.b", "c.d"]),
    "--enable-lora": ("", "enable_lora", True),
    "--dtype": ("half", "dtype", "half"),
    "--allow-no-key": ("", "allow_no_key", True),
    "--allowed-hosts": ("a b", "allowed_hosts", ["a", "b"]),
}
"""Of ``vllm-serve``, in TRL's and vLLM's words."""


def started(capsys, *words):
    """What the server's process would get."""
    assert main.main([*words, "--dry-run"]) == 0, capsys.readouterr().err
    return json.loads(shlex.split(capsys.readouterr().out)[-1])


def by_yaml(capsys, **keys):
    given = ("--gpus", keys.pop("gpus")) if "gpus" in keys else ()
    keys |= {
        f"{VLLM}.mode": "server",
        f"{VLLM}.server.base_url": "http://127.0.0.1:8000",
        f"{VLLM}.server.group_port": 7,
    }
    return started(
        capsys, "serve", CONFIG, *given, *(f"--set={key}={json.dumps(value)}" for key, value in keys.items())
    )


def at(tree, place):
    for name in place.split("."):
        tree = tree[name]
    return tree


@pytest.mark.parametrize("key", [*OF_SERVERS, *OF_ENGINES])
def test_a_key_reaches_the_server(key, capsys):
    value, place, expected = OF_SERVERS.get(key) or OF_ENGINES[key]
    place = place if key in OF_SERVERS else f"engine_arguments.{place}"
    assert at(by_yaml(capsys, **NEEDED.get(key, {}), **{key: value}), place) == expected


def test_every_limit_reaches_the_server(capsys):
    limits = {name: 1001 + place for place, name in enumerate(LimitsConfig.model_fields)}
    keys = {f"{SERVER}.limits.{name}": value for name, value in limits.items()}
    assert by_yaml(capsys, **keys)["limits"] == limits


def test_no_key_of_servers_is_forgotten_here():
    named = {key for key in fields() if key.startswith(f"{SERVER}.") and not key.startswith(f"{SERVER}.limits.")}
    assert named == ELSEWHERE | {key for key in OF_SERVERS if key.startswith(SERVER)}


@pytest.mark.parametrize("key", [*OF_COLOCATE, *OF_ENGINES])
def test_a_key_reaches_an_engine_in_the_process(key):
    value, name, expected = OF_COLOCATE.get(key) or OF_ENGINES[key]
    keys = {f"{VLLM}.mode": "colocate"} | NEEDED.get(key, {}) | {key: value}
    assert (
        _engine_arguments(load_digits(*(f"{key}={json.dumps(value)}" for key, value in keys.items())))[name] == expected
    )


@pytest.mark.parametrize("option", OF_ARGUMENTS)
def test_an_argument_of_vllm_serve_reaches_the_server(option, capsys):
    value, place, expected = OF_ARGUMENTS[option]
    for written in {option, f"--{option[2:].replace('-', '_')}"}:
        beside = ("--allow-no-key",) if option == "--host" else ()
        assert (
            at(started(capsys, "vllm-serve", "--model", str(MODEL), written, *value.split(), *beside), place)
            == expected
        )
