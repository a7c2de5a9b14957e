"""What a configuration becomes: arguments of transformers and of the engine, bounds of prefetch, threads."""

from types import SimpleNamespace

import pytest
import torch

from conformance.doubles.configs import GRPO, config_with
from conformance.doubles.digits import load_digits
from rollmatch.ranks import Ranks
from rollmatch.run import assemble, computing

VLLM = "custom.extra.rollout_matching.vllm"


@pytest.fixture(params=[False, True], ids=["cpu", "gpu"])
def on_gpu(request, monkeypatch):
    monkeypatch.setattr(torch.cuda, "is_available", lambda: request.param)
    return request.param


def test_early_stopping_is_what_transformers_calls_it_and_is_resumed(tmp_path):
    stopping = "training.early_stopping={metric: f1, greater_is_better: false}"
    where = (f"training.output_dir={tmp_path}", "training.eval_steps=2")
    arguments = assemble.make_arguments(load_digits(*where, stopping))
    assert (arguments.metric_for_best_model, arguments.greater_is_better) == ("f1", False)
    assert arguments.restore_callback_states_from_checkpoint is True
    assert (arguments.save_strategy, arguments.disable_tqdm, arguments.remove_unused_columns) == ("steps", True, False)
    plain = assemble.make_arguments(load_digits(*where, "training.eval_steps=0"))
    assert (plain.restore_callback_states_from_checkpoint, plain.eval_strategy) == (False, "no")


def test_the_engine_gets_what_is_set_and_what_the_machine_needs(on_gpu):
    arguments = assemble._engine_arguments(load_digits(f"{VLLM}.kv_cache_memory_mib=3"))
    machine = {"enforce_eager": not on_gpu} | ({} if on_gpu else {"enable_chunked_prefill": False})
    assert arguments == machine | {
        "seed": 42,
        "gpu_memory_utilization": 0.45,
        "kv_cache_memory_bytes": 3 * 2**20,
        "load_format": arguments["load_format"],
        "enable_lora": False,
        "enable_prefix_caching": arguments["enable_prefix_caching"],
        "max_num_seqs": 64,
        "limit_mm_per_prompt": {"image": 1, "video": 0},
        "disable_custom_all_reduce": arguments["disable_custom_all_reduce"],
    }
    without = assemble._engine_arguments(load_digits(f"{VLLM}.kv_cache_memory_mib=null"))
    assert without.get("kv_cache_memory_bytes") == (None if on_gpu else 512 * 2**20)


@pytest.mark.parametrize(
    ("threads", "num_cpus", "num_ranks", "used"),
    [("null", 9, "2", 4), ("null", 1, "2", 1), ("null", None, "1", 1), ("3", 9, "2", 3)],
)
def test_ranks_share_the_processor_unless_threads_are_set(monkeypatch, on_gpu, threads, num_cpus, num_ranks, used):
    counts = []
    monkeypatch.setenv("LOCAL_WORLD_SIZE", num_ranks)
    monkeypatch.setattr(assemble.os, "cpu_count", lambda: num_cpus)
    monkeypatch.setattr(torch, "set_num_threads", counts.append)
    monkeypatch.setattr(assemble, "make_backend", lambda *_, **__: None)
    config = load_digits(f"training.learner_threads={threads}", "training.rollout_threads=null")
    source = assemble.make_source(config, None, None, journal=None, ranks=Ranks())
    assert counts == ([] if on_gpu and threads == "null" else [used])
    assert source.num_threads == (None if on_gpu else 1)
    assert source.run_seed == 42


@pytest.mark.parametrize(
    ("overrides", "dtype", "flash", "unpackable", "found"),
    [
        *(((), torch.bfloat16, True, "", True), ((), torch.float32, True, "", False)),
        *((("training.bf16=true",), torch.float32, True, "", True), ((), torch.bfloat16, False, "", False)),
        *(((), torch.bfloat16, True, "it slides", False), (("model.attn_impl=sdpa",), torch.bfloat16, True, "", False)),
        *((("training.padding_free=true",), torch.float32, False, "", True),),
        *((("training.padding_free=false",), torch.bfloat16, True, "", False),),
    ],
)
def test_rows_have_no_padding_where_a_flash_kernel_takes_them(
    monkeypatch, on_gpu, overrides, dtype, flash, unpackable, found
):
    monkeypatch.setattr(computing, "installed", lambda: "flash" if flash else None)
    monkeypatch.setattr(computing, "why_unpackable", lambda _: unpackable)
    monkeypatch.setattr(computing, "check_packable", lambda *_, **__: None)
    model = SimpleNamespace(parameters=lambda: iter([torch.zeros(1, dtype=dtype)]))
    is_free = computing.is_padding_free(config_with("training.packing=false", *overrides), model)
    is_chosen = overrides == ("training.padding_free=true",)
    assert is_free is (found and (on_gpu or is_chosen))


@pytest.mark.parametrize("beta", [0.0, 0.1])
def test_a_reference_is_kept_where_one_is_needed_and_does_not_learn(monkeypatch, beta):
    monkeypatch.setattr(assemble, "read_policy", lambda _: torch.nn.Linear(2, 2))
    kept = assemble._load_reference(config_with(*GRPO, f"custom.extra.grpo.beta={beta}"), None)
    assert (kept is None) == (beta == 0)
    assert kept is None or not (kept.training or any(weight.requires_grad for weight in kept.parameters()))


@pytest.mark.parametrize(("wanted", "found"), [("auto", True), ("true", True), ("false", False)])
def test_checkpointing_is_on_where_memory_is_short_unless_it_is_set(monkeypatch, on_gpu, wanted, found):
    config, made = config_with(f"training.gradient_checkpointing={wanted}", "training.compile_layers=auto"), []
    assert computing.recomputes(config) is found
    monkeypatch.setattr(computing, "unwrap", lambda model: model)
    monkeypatch.setattr(computing, "count_weights", lambda _: (10**9, 0))
    monkeypatch.setattr(computing, "compile_layers", lambda _: made.append("compiled"))
    monkeypatch.setattr(computing, "decoder_layers", lambda _: ())
    monkeypatch.setattr(computing, "AdaptiveCheckpointing", lambda *_, share: made.append("adaptive"))
    computing.prepare_layers(config, object())
    assert made == ["compiled"] * on_gpu + ["adaptive"] * (wanted == "auto")


@pytest.mark.parametrize("wanted", ["auto", "true"])
def test_memory_is_that_of_the_gpu_and_of_the_layers_that_kept_what_they_computed(monkeypatch, on_gpu, wanted):
    layers = [SimpleNamespace(gradient_checkpointing=each) for each in (True, False, False)]
    monkeypatch.setattr(computing, "unwrap", lambda model: model)
    monkeypatch.setattr(computing, "decoder_layers", lambda _: layers)
    monkeypatch.setattr(torch.cuda, "max_memory_allocated", lambda: 2_500_000_000)
    figures = computing.memory_figures(config_with(f"training.gradient_checkpointing={wanted}"), None)
    counted = {"layers": 3, "kept_layers": 2} if wanted == "auto" else {}
    assert figures == ({"gpu_memory": {"peak_gb": 2.5} | counted} if on_gpu else {})


@pytest.mark.scenario(clauses=["determinism/the-same-seed-gives-the-same-order-and-the-same-requests#4"])
def test_new_adapters_follow_the_seed_whatever_was_drawn_before():
    def drawn(seed):
        torch.rand(3)
        policy = assemble.read_policy(load_digits(f"training.seed={seed}", "tuner.train_type=lora"))
        return torch.cat([weight.detach().flatten() for name, weight in policy.named_parameters() if "lora_A" in name])

    first, again, other = drawn(7), drawn(7), drawn(8)
    assert torch.equal(first, again)
    assert (first == other).float().mean() < 0.01
