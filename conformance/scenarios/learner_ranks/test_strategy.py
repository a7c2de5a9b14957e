"""``training.strategy``: names, files, and what does not go with it."""

import json

import pytest
import torch

from conformance.doubles.configs import config_with
from conformance.doubles.digits import load_digits
from conformance.doubles.refusals import refused
from rollmatch.config.strategy import read_strategy
from rollmatch.run import strategy_check

ROLLOUT = "custom.extra.rollout_matching"


@pytest.fixture
def file(tmp_path):
    def write(settings):
        path = tmp_path / "strategy.json"
        path.write_text(json.dumps(settings))
        return str(path)

    return write


def test_names_stand_for_settings():
    assert read_strategy("ddp").settings == {}
    assert read_strategy("fsdp2").settings == {"version": 2, "state_dict_type": "SHARDED_STATE_DICT"}
    assert [read_strategy(f"deepspeed_zero{stage}").stage for stage in (2, 3)] == [2, 3]
    assert [read_strategy(f"deepspeed_zero{stage}").splits_weights for stage in (2, 3)] == [False, True]
    ours = {name: on for name, on in read_strategy("deepspeed_zero2").settings.items() if isinstance(on, bool)}
    assert ours == {"zero_allow_untested_optimizer": True, "zero_force_ds_cpu_optimizer": False}
    whole = {"stage": 3, "stage3_gather_16bit_weights_on_model_save": True}
    assert read_strategy("deepspeed_zero3").settings["zero_optimization"] == whole


def test_a_file_is_deepspeeds_or_that_of_fsdp2(file):
    deepspeed = read_strategy(file({"zero_optimization": {"stage": 3, "offload_param": {"device": "cpu"}}}))
    assert (deepspeed.engine, deepspeed.stage) == ("deepspeed", 3)
    assert deepspeed.settings == {"zero_optimization": {"stage": 3, "offload_param": {"device": "cpu"}}}
    fsdp = read_strategy(file({"fsdp_version": 2, "fsdp_reshard_after_forward": False, "cpu_offload": True}))
    assert fsdp.engine == "fsdp2"
    assert fsdp.settings["reshard_after_forward"] is False
    assert fsdp.settings["cpu_offload"] is True


@pytest.mark.scenario(clauses=["learner-ranks/the-policy-is-shared-as-configured-or-not-at-all#1"])
@pytest.mark.parametrize(
    ("settings", "problem"),
    [
        ({"fsdp_sync_module_states": True}, "sync_module_states is not used"),
        ({"version": 1}, "version must be 2"),
        ({"zero_optimization": {"stage": 3}, "sequence_parallel_size": 2}, "sequence_parallel_size is not used"),
        ({"distributed_type": "FSDP", "fsdp_config": {"fsdp_version": 2}}, "configures accelerate launch"),
    ],
)
def test_settings_that_have_no_effect_are_refused(settings, problem, file):
    with refused("strategy-key-unused", key="training.strategy", problem=problem):
        config_with(f"training.strategy={file(settings)}")


def test_a_name_that_is_neither_a_strategy_nor_a_file_is_refused(tmp_path):
    with refused("strategy-unknown", key="training.strategy", remedy="fsdp2"):
        config_with("training.strategy=fsdp")
    with refused("strategy-unknown", key="training.strategy"):
        config_with(f"training.strategy={tmp_path}")
    (tmp_path / "bad.json").write_text("{a: 1, a: 2}")
    with refused("strategy-unknown", key="training.strategy", problem="bad.json holds this key in line 1"):
        config_with(f"training.strategy={tmp_path}/bad.json")


@pytest.mark.scenario(
    "learner-ranks/a-strategy-in-the-arguments-of-transformers-is-refused",
    clauses=["learner-ranks/the-policy-is-shared-as-configured-or-not-at-all#2"],
)
@pytest.mark.parametrize("name", ["fsdp", "fsdp_config", "deepspeed", "parallelism_config"])
def test_the_fields_of_transformers_are_refused(name):
    with refused("argument-has-own-key", key=f"training.extra_arguments.{name}", remedy="training.strategy"):
        config_with(f"training.extra_arguments={{{name}: full_shard}}")


def test_deepspeed_with_the_policys_own_generate_is_refused():
    with refused("strategy-needs-vllm", key=f"{ROLLOUT}.rollout_backend"):
        config_with(f"{ROLLOUT}.rollout_backend=hf", "training.strategy=deepspeed_zero3")


def test_a_checkpoint_of_parts_holds_the_optimizers_state():
    only = "training.extra_arguments={save_only_model: true}"
    with refused("strategy-saves-all", key="training.extra_arguments.save_only_model", remedy="training.strategy"):
        config_with("training.strategy=fsdp2", only)
    config_with("training.strategy=fsdp2", "training.extra_arguments={save_only_model: false}")
    config_with("training.strategy=deepspeed_zero2", only)
    config_with(only)


@pytest.mark.scenario(
    "learner-ranks/one-rank-cannot-share", clauses=["learner-ranks/the-policy-is-shared-as-configured-or-not-at-all#3"]
)
def test_one_rank_cannot_share():
    config = config_with("training.strategy=fsdp2")
    with refused("strategy-needs-ranks", key="training.strategy", remedy="--gpus"):
        strategy_check.check_strategy(config, learner_world_size=1)
    strategy_check.check_strategy(config, learner_world_size=2)
    strategy_check.check_strategy(config)


def test_deepspeed_needs_a_launcher_and_its_package(monkeypatch):
    config = config_with("training.strategy=deepspeed_zero2")
    monkeypatch.delenv("LOCAL_RANK", raising=False)
    monkeypatch.setattr(strategy_check.importlib.util, "find_spec", lambda name: name)
    with refused("strategy-needs-ranks", key="training.strategy", remedy="torchrun --nproc-per-node 1"):
        strategy_check.check_strategy(config, learner_world_size=1)
    strategy_check.check_strategy(config, learner_world_size=2)
    monkeypatch.setenv("LOCAL_RANK", "0")
    strategy_check.check_strategy(config, learner_world_size=1)
    monkeypatch.setattr(strategy_check.importlib.util, "find_spec", lambda name: None)
    with refused("deepspeed-missing", key="training.strategy", remedy="pip install deepspeed"):
        strategy_check.check_strategy(config, learner_world_size=2)


def test_a_launcher_that_sets_another_strategy_is_refused(monkeypatch):
    monkeypatch.setenv("ACCELERATE_USE_FSDP", "true")
    with refused("strategy-contradicted", key="training.strategy", remedy="fsdp2"):
        strategy_check.check_strategy(config_with("training.strategy=ddp"), learner_world_size=2)
    strategy_check.check_strategy(config_with("training.strategy=fsdp2"), learner_world_size=2)


@pytest.fixture
def launched(monkeypatch):
    """As by ``accelerate launch`` with this ``deepspeed_config``; names as accelerate 1.15 makes them of its fields."""

    def set_variables(**fields):
        monkeypatch.setenv("ACCELERATE_USE_DEEPSPEED", "true")
        monkeypatch.setenv("ACCELERATE_CONFIG_DS_FIELDS", ",".join(fields))
        for name, value in fields.items():
            prefix = "" if name.startswith("gradient") else "DEEPSPEED_"
            monkeypatch.setenv(f"ACCELERATE_{prefix}{name.upper()}", value)

    monkeypatch.setattr(strategy_check.importlib.util, "find_spec", lambda name: name)
    return set_variables


def test_a_launcher_s_file_may_say_what_the_strategy_says(launched):
    launched(zero_stage="3", offload_optimizer_device="none", gradient_clipping="1.0", gradient_accumulation_steps="4")
    alike = config_with("training.strategy=deepspeed_zero3", "training.gradient_accumulation_steps=4")
    strategy_check.check_strategy(alike, learner_world_size=2)
    with refused("strategy-contradicted", key="training.strategy", remedy="deepspeed_zero3"):
        strategy_check.check_strategy(config_with("training.strategy=ddp"), learner_world_size=2)


@pytest.mark.parametrize(
    "fields",
    [
        {"zero_stage": "2"},
        {"offload_param_device": "cpu"},
        {"offload_optimizer_device": "nvme"},
        {"gradient_clipping": "0.5"},
        {"gradient_accumulation_steps": "2"},
        {"config_file": "zero3.json"},
    ],
)
def test_a_launcher_s_file_that_says_something_else_is_refused(launched, fields):
    launched(**({"zero_stage": "3"} | fields))
    with refused("strategy-contradicted", key="training.strategy", remedy="Set both alike"):
        strategy_check.check_strategy(config_with("training.strategy=deepspeed_zero3"), learner_world_size=2)


def test_a_launcher_s_file_offloads_what_the_strategy_s_file_does(launched, file):
    zero = {"stage": 3, "offload_optimizer": {"device": "cpu"}}
    config = config_with(f"training.strategy={file({'zero_optimization': zero})}")
    launched(zero_stage="3", offload_optimizer_device="cpu", offload_param_device="none")
    strategy_check.check_strategy(config, learner_world_size=2)
    launched(zero_stage="3", offload_optimizer_device="none")
    with refused("strategy-contradicted", key="training.strategy", problem="means cpu"):
        strategy_check.check_strategy(config, learner_world_size=2)


@pytest.mark.scenario(clauses=["learner-ranks/the-policy-is-shared-as-configured-or-not-at-all#8"])
def test_ranks_that_would_share_rows_are_refused(monkeypatch):
    monkeypatch.setenv("ACCELERATE_USE_PARALLELISM_CONFIG", "true")
    with refused("parallelism-unsupported", key="ACCELERATE_USE_PARALLELISM_CONFIG", remedy="fsdp2"):
        strategy_check.check_strategy(config_with("training.strategy=fsdp2"), learner_world_size=2)


@pytest.mark.parametrize(("strategy", "is_shared"), [("ddp", False), ("fsdp2", True)])
def test_transformers_knows_how_weights_are_shared(monkeypatch, tmp_path, strategy, is_shared):
    from rollmatch.run import assemble  # seconds to load
    from rollmatch.run import strategy as distribution

    monkeypatch.setattr(distribution, "_split_on_cpus", (split := []).append)
    config = load_digits(f"training.output_dir={tmp_path}", f"training.strategy={strategy}", "training.bf16=true")
    arguments = assemble.make_arguments(config)
    given = arguments.fsdp_plugin_args or {}
    precision = given.get("mixed_precision_policy")
    assert (bool(arguments.fsdp), given.get("fsdp_version"), len(split)) == (
        (True, 2, 1) if is_shared else (False, None, 0)
    )
    assert (precision is not None and precision.reduce_dtype) == (is_shared and torch.float32)
    each = {"sync_each_batch": True} if is_shared else None
    assert arguments.accelerator_config.gradient_accumulation_kwargs == each


@pytest.mark.parametrize(("is_frozen", "finds"), [("true", None), ("false", True)])
def test_ranks_wait_for_no_gradient_of_a_tower_that_a_batch_does_not_use(tmp_path, is_frozen, finds):
    from rollmatch.run.assemble import make_arguments  # seconds to load

    tower = (f"tuner.freeze_vit={is_frozen}", f"tuner.freeze_aligner={is_frozen}")
    arguments = make_arguments(load_digits(f"training.output_dir={tmp_path}", *tower))
    assert arguments.ddp_find_unused_parameters == finds


def test_evaluations_follow_their_own_number_of_steps(tmp_path):
    from rollmatch.run.assemble import make_arguments  # seconds to load

    config = load_digits(f"training.output_dir={tmp_path}", "training.eval_steps=3", "training.logging_steps=2")
    arguments = make_arguments(config)
    assert (arguments.eval_strategy, arguments.eval_steps, arguments.logging_steps) == ("steps", 3, 2)
