"""What a configuration becomes: arguments of transformers and of the engine, bounds of prefetch, threads."""

import json

import pytest
import torch
from transformers import AutoModelForCausalLM, MistralConfig, Qwen3Config

from conformance.doubles.configs import config_with
from conformance.doubles.digits import load_digits, template_of
from conformance.doubles.started import HF
from rollmatch.config.training import TRAINER_KEYS
from rollmatch.ranks import Ranks
from rollmatch.run import assemble, computing


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


OF_TRANSFORMERS = {"seed": 7, "max_steps": 9, "num_train_epochs": 2.5, "gradient_accumulation_steps": 3}
OF_TRANSFORMERS |= {"learning_rate": 3e-4, "lr_scheduler_type": "cosine", "warmup_steps": 4.0, "weight_decay": 0.2}
OF_TRANSFORMERS |= {"max_grad_norm": 0.7, "optim": "sgd", "adam_beta1": 0.6, "adam_beta2": 0.7, "adam_epsilon": 1e-3}
OF_TRANSFORMERS |= {"bf16": True, "logging_steps": 5, "save_steps": 6, "save_total_limit": 3, "eval_steps": 6}
OF_TRANSFORMERS |= {"per_device_train_batch_size": 2, "report_to": ["tensorboard", "wandb"], "output_dir": "/tmp/x"}
"""Keys of ``training`` that transformers has by the same name, and values that are no defaults."""


def test_keys_of_transformers_reach_its_trainer():
    keys = [f"training.{name}={json.dumps(value)}" for name, value in OF_TRANSFORMERS.items()]
    arguments = assemble.make_arguments(load_digits(*keys))
    assert {name: getattr(arguments, name) for name in OF_TRANSFORMERS} == OF_TRANSFORMERS
    assert {*TRAINER_KEYS} <= OF_TRANSFORMERS.keys()


@pytest.mark.parametrize(
    ("threads", "num_cpus", "num_ranks", "used"),
    [("null", 9, "2", 4), ("null", 1, "2", 1), ("null", None, "1", 1), ("3", 9, "2", 3)],
)
def test_ranks_share_the_processor_unless_threads_are_set(monkeypatch, on_gpu, threads, num_cpus, num_ranks, used):
    counts = []
    monkeypatch.setenv("LOCAL_WORLD_SIZE", num_ranks)
    monkeypatch.setattr(assemble.os, "cpu_count", lambda: num_cpus)
    monkeypatch.setattr(torch, "set_num_threads", counts.append)
    config = load_digits(*HF, f"training.learner_threads={threads}", "training.rollout_threads=null")
    source = assemble.make_source(config, torch.nn.Linear(1, 1), template_of(), journal=None, ranks=Ranks())
    assert counts == ([] if on_gpu and threads == "null" else [used])
    assert source.num_threads == (None if on_gpu else 1)
    assert source.run_seed == 42


def small(kind):
    """A model of one layer; Mistral's attention slides over a window."""
    sizes = {"vocab_size": 8, "hidden_size": 8, "intermediate_size": 8, "num_hidden_layers": 1}
    heads = {"num_attention_heads": 2, "num_key_value_heads": 1, "head_dim": 4}
    return AutoModelForCausalLM.from_config(kind(**sizes, **heads))


@pytest.mark.parametrize(
    ("overrides", "dtype", "kind", "found"),
    [
        ((), torch.bfloat16, Qwen3Config, True),
        ((), torch.float32, Qwen3Config, False),
        (("training.bf16=true",), torch.float32, Qwen3Config, True),
        ((), torch.bfloat16, MistralConfig, False),
        (("model.attn_impl=sdpa",), torch.bfloat16, Qwen3Config, False),
        (("training.padding_free=true",), torch.float32, Qwen3Config, True),
        (("training.padding_free=false",), torch.bfloat16, Qwen3Config, False),
    ],
)
def test_rows_have_no_padding_where_a_flash_kernel_takes_them(on_gpu, overrides, dtype, kind, found):
    model = small(kind).to(dtype)
    is_free = computing.is_padding_free(config_with("training.packing=false", *overrides), model)
    is_chosen = overrides == ("training.padding_free=true",)
    assert is_free is (found and (on_gpu or is_chosen))


@pytest.mark.parametrize(("wanted", "found"), [("auto", True), ("true", True), ("false", False)])
def test_activations_are_recomputed_unless_that_is_switched_off(wanted, found):
    assert computing.recomputes(config_with(f"training.gradient_checkpointing={wanted}")) is found


@pytest.mark.scenario(clauses=["determinism/the-same-seed-gives-the-same-order-and-the-same-requests#4"])
def test_new_adapters_follow_the_seed_whatever_was_drawn_before():
    def drawn(seed):
        torch.rand(3)
        policy = assemble.read_policy(load_digits(f"training.seed={seed}", "tuner.train_type=lora"))
        return torch.cat([weight.detach().flatten() for name, weight in policy.named_parameters() if "lora_A" in name])

    first, again, other = drawn(7), drawn(7), drawn(8)
    assert torch.equal(first, again)
    assert (first == other).float().mean() < 0.01
