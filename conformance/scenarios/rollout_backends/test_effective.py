"""What keys mean when they are null; the files that a configuration names."""

import json

import pytest

from conformance.doubles.configs import GRPO, config_with
from conformance.doubles.refusals import refused
from rollmatch.config import check_files, effective, servers
from rollmatch.config.dataset import ColumnsConfig
from rollmatch.config.effective import (
    enforce_eager,
    kv_cache_memory_mib,
    max_model_len,
    rollout_threads,
    tensor_parallel_rule,
    tensor_parallel_size,
)
from rollmatch.config.yaml_dialect import parse_value
from rollmatch.errors import ErrorList

TP_KEY = "custom.extra.rollout_matching.vllm.tensor_parallel_size"


@pytest.mark.scenario(
    "rollout-backends/four-ranks-share-one-engine",
    "rollout-backends/two-ranks-have-an-engine-each",
    clauses=["rollout-backends/a-colocated-engine-leaves-room-for-training#1,2"],
)
@pytest.mark.parametrize(("value", "world_size", "size"), [("null", 4, 4), ("null", 8, 1), ("null", 1, 1), ("2", 4, 2)])
def test_tensor_parallel_size_follows_the_learner(value, world_size, size):
    config = config_with(f"~.vllm.tensor_parallel_size={value}")
    assert tensor_parallel_size(config, learner_world_size=world_size) == size
    assert tensor_parallel_rule(config) == ("4 with 4 learner ranks, else 1" if value == "null" else f"{value}, as set")


@pytest.mark.scenario(
    "rollout-backends/six-ranks-cannot-form-groups-of-four",
    clauses=["rollout-backends/a-colocated-engine-leaves-room-for-training#3"],
)
@pytest.mark.parametrize(("value", "world_size"), [("3", 4), ("2", 1), ("4", 6)])
def test_ranks_that_do_not_divide_are_refused(value, world_size):
    with refused("tensor-parallel-mismatch", TP_KEY):
        tensor_parallel_size(config_with(f"~.vllm.tensor_parallel_size={value}"), learner_world_size=world_size)
    fitting = tensor_parallel_size(config_with(f"~.vllm.tensor_parallel_size={value}"), learner_world_size=12)
    assert fitting == int(value)


@pytest.mark.parametrize(
    ("value", "on_cpu", "on_gpu"), [("null", True, False), ("true", True, True), ("false", False, False)]
)
def test_eager_running(value, on_cpu, on_gpu):
    config = config_with(f"~.vllm.enforce_eager={value}")
    assert (enforce_eager(config, on_gpu=False), enforce_eager(config, on_gpu=True)) == (on_cpu, on_gpu)


SET = ("~.vllm.max_model_len=600", "~.vllm.kv_cache_memory_mib=64", "training.rollout_threads=3")


@pytest.mark.parametrize(
    ("overrides", "length", "cache", "threads"), [((), 1024, (512, None), (1, None)), (SET, 600, (64, 64), (3, 3))]
)
def test_lengths_threads_and_cache_are_the_set_ones_or_have_a_default(overrides, length, cache, threads):
    config = config_with(*overrides)
    assert max_model_len(config) == length
    assert (kv_cache_memory_mib(config, on_gpu=False), kv_cache_memory_mib(config, on_gpu=True)) == cache
    assert (rollout_threads(config, on_gpu=False), rollout_threads(config, on_gpu=True)) == threads


LORA, SERVER = "tuner.train_type=lora", ("~.vllm.mode=server", "~.vllm.server.base_url=http://a:1")
SERVER = (*SERVER, "~.vllm.server.group_port=2")
REUSED = ("custom.extra.grpo.num_iterations=2", "custom.extra.grpo.correction_cap=2")
STAGE_1 = ("custom.trainer_variant=sft", "training.packing=false")
LARGE = {"on_gpu": True, "num_parameters": 10**9}
SECTION = "custom.extra.rollout_server"


@pytest.mark.parametrize(
    ("module", "name", "cases"),
    [
        (
            effective,
            "learner_dtype",
            [
                *((["model.torch_dtype=auto"], "float32"), (["model.torch_dtype=float16", LORA], "float16")),
                *((["model.torch_dtype=auto", LORA], "auto"), (["training.bf16=true"], "float32")),
                (["model.torch_dtype=bfloat16", "training.allow_half_weights=true", "training.bf16=false"], "bfloat16"),
                (["model.torch_dtype=bfloat16", "training.bf16=true"], "float32"),
            ],
        ),
        (
            effective,
            "engine_dtype",
            [
                *((["~.vllm.dtype=float16", "training.bf16=true"], "float16"), (["training.bf16=true"], "bfloat16")),
                (["training.bf16=false", "model.torch_dtype=float32"], "float32"),
            ],
        ),
        (
            effective,
            "rollout_backend",
            [
                *(([*SERVER, *STAGE_1], "hf"), (SERVER, "vllm"), (STAGE_1, "vllm")),
                ([*SERVER, *STAGE_1, "~.rollout_backend=hf"], "hf"),
            ],
        ),
        (effective, "max_prompt_len", [(["~.max_new_tokens=24"], 1000), (["~.vllm.max_model_len=600"], 600 - 512)]),
        (
            effective,
            "reference_in_batch",
            [
                *(([*GRPO, LORA, "custom.extra.grpo.beta=0.1"], True), ([*GRPO, "custom.extra.grpo.beta=0.1"], False)),
                *(([*GRPO, LORA, "custom.extra.grpo.beta=0"], False), ([LORA, "custom.extra.grpo.beta=0.1"], False)),
                ([*GRPO, LORA, "custom.extra.grpo.beta=0.1", *REUSED], False),
            ],
        ),
        (
            effective,
            "old_logprobs",
            [
                *(([*GRPO], "current"), ([*GRPO, *REUSED], "recomputed")),
                ([*GRPO, "custom.extra.grpo.steps_per_generation=2"], "recomputed"),
                ([*GRPO, "custom.extra.grpo.old_logprobs=server"], "server"),
            ],
        ),
        (
            effective,
            "steps_per_window",
            [
                *(([*GRPO, *REUSED], 2), ([*GRPO, *REUSED, "custom.extra.grpo.steps_per_generation=3"], 6)),
                (["custom.extra.grpo.steps_per_generation=3"], 1),
            ],
        ),
        (
            effective,
            "staleness_when_learning_begins",
            [([*GRPO, *REUSED, "~.max_staleness=5"], 4), (["~.max_staleness=5"], 5)],
        ),
        (servers, "uses_servers", [(SERVER, True), ((), False), ([*SERVER, *STAGE_1], False)]),
        (
            servers,
            "max_model_len",
            [
                *((["~.vllm.max_model_len=600"], 600), ([*GRPO, "~.vllm.max_model_len=600"], 1024)),
                *(
                    ([f"{SECTION}.vllm_max_model_len=1100"], 1100),
                    ([*GRPO, f"{SECTION}.vllm_max_model_len=2000"], 2000),
                ),
            ],
        ),
        (
            servers,
            "prefix_caching",
            [
                ([f"{SECTION}.vllm_enable_prefix_caching={one}", f"~.vllm.enable_prefix_caching={other}"], found)
                for one, other, found in (("false", "true", False), ("true", "false", True), ("null", "false", False))
            ],
        ),
        (
            servers,
            "memory_share",
            [((), 0.9), (GRPO, 0.6), ([*GRPO, f"{SECTION}.vllm_gpu_memory_utilization=0.3"], 0.3)],
        ),
    ],
)
def test_what_follows_from_several_keys(module, name, cases):
    assert [(overrides, getattr(module, name)(config_with(*overrides))) for overrides, _ in cases] == cases


@pytest.mark.parametrize(
    ("overrides", "changed", "compiled"),
    [
        *(((), {}, True), ((), {"on_gpu": False}, False), ((), {"num_parameters": 10**9 - 1}, False)),
        *((("training.strategy=fsdp2",), {}, True), (("training.strategy=deepspeed_zero2",), {}, False)),
        *(((LORA, "tuner.lora_dropout=0.1"), {}, False), ((LORA, "tuner.lora_dropout=0"), {}, True)),
        ((LORA, "tuner.lora_dropout=0", "tuner.use_dora=true"), {}, True),
        ((LORA, "tuner.lora_dropout=0", "tuner.use_dora=true", "training.strategy=fsdp2"), {}, False),
        (("training.compile_layers=true",), {"on_gpu": False}, True),
        (("training.compile_layers=false",), {}, False),
    ],
)
def test_layers_of_large_models_are_compiled_where_that_works(overrides, changed, compiled):
    assert effective.compiles_layers(config_with(*overrides), **LARGE | changed) is compiled


BROKEN = [("config.json", "{"), ("config.json", "")]


@pytest.fixture
def place(tmp_path, monkeypatch):
    """A directory with all that the required keys name."""
    monkeypatch.chdir(tmp_path)
    (tmp_path / "models" / "tiny").mkdir(parents=True)
    (tmp_path / "models/tiny/config.json").write_text(json.dumps({"text_config": {"max_position_embeddings": 1024}}))
    (tmp_path / "models/tiny/tokenizer.json").write_text("{}")
    for name in ("train.jsonl", "val.jsonl"):
        (tmp_path / name).write_text("{}\n")
    return tmp_path


def test_what_is_there_is_accepted(place):
    check_files(config_with())
    (place / "images").mkdir()
    check_files(config_with("custom.image_root=images"))


def test_a_model_that_is_no_directory_is_refused(place):
    with refused("model-directory-missing", "model.model", remedy="organization/name"):
        check_files(config_with("model.model=Qwen3-VL-2B-Instruct"))


@pytest.mark.parametrize(("name", "text"), [("config.json", None), ("tokenizer.json", None), *BROKEN])
def test_a_model_needs_its_files(place, name, text):
    path = place / "models/tiny" / name
    path.unlink() if text is None else path.write_text(text)
    with refused("model-file-missing", "model.model"):
        check_files(config_with())


@pytest.mark.parametrize("nested", [True, False])
def test_segments_fit_the_models_positions(place, nested):
    limits = {"max_position_embeddings": 1023}
    (place / "models/tiny/config.json").write_text(json.dumps({"text_config": limits} if nested else limits))
    with refused("model-too-short", "global_max_length"):
        check_files(config_with())
    check_files(config_with("global_max_length=1023"))


def test_quantized_weights_are_refused(place):
    (place / "models/tiny/config.json").write_text(json.dumps({"quantization_config": {"quant_method": "gptq"}}))
    with refused("base-quantized", "model.model", remedy="QLoRA"):
        check_files(config_with())


def test_a_list_of_servers_is_read_where_servers_are_used(place):
    section = "custom.extra.rollout_matching.vllm.server.servers_file"
    listed = "~.vllm.server.servers_file=servers.yaml"
    with refused("servers-file-invalid", section, problem="servers.yaml cannot be read"):
        check_files(config_with("~.vllm.mode=server", listed))
    check_files(config_with("~.vllm.mode=colocate", listed))
    (place / "servers.yaml").write_text("[{base_url: http://a:1, group_port: 2}]")
    check_files(config_with("~.vllm.mode=server", listed))


@pytest.mark.parametrize(
    ("columns", "has"),
    [("{}", False), ("{prompt: q}", True), ("{messages: m}", True), ("{prompt: q, messages: m}", True)],
)
def test_samples_have_questions_where_a_column_holds_them(columns, has):
    assert ColumnsConfig.model_validate(parse_value(columns)).has_questions is has


def test_everything_missing_is_reported_at_once(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    with pytest.raises(ErrorList) as caught:
        check_files(config_with("custom.image_root=gone"))
    assert [(error.code, error.key) for error in caught.value.errors] == [
        ("model-directory-missing", "model.model"),
        ("data-file-missing", "custom.train_jsonl"),
        ("data-file-missing", "custom.val_jsonl"),
        ("image-root-missing", "custom.image_root"),
    ]
