"""A run from Python: keys, records and functions in place of files and names."""

import json
import signal
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, make_dataclass
from functools import partial
from pathlib import Path

import pytest
from datasets import Dataset
from peft import LoraConfig
from PIL import Image
from transformers import TrainerCallback

import rollmatch
from conformance.doubles.digits import ROOT
from conformance.doubles.refusals import refused
from conformance.doubles.tool_classes import Counter
from rollmatch import GRPOTrainer, VinePPOMCTSTrainer, VinePPOTrainer, train
from rollmatch.config import load_config
from rollmatch.config.layers import nested
from rollmatch.environments.tools import load_tools
from rollmatch.journal import read_journal
from rollmatch.rewards.environments import get_reward
from rollmatch.run.directory import JOURNAL

PICTURE = Image.new("RGB", (8, 8), "red")
DATA = [{"prompt": f"{one} + 5 =", "metadata": {"sum": one + 5}} for one in range(10, 14)]


def right(answer, sample):
    return float(answer == str(sample.metadata["sum"]))


def lengths(completions, sum, **columns):
    assert len(sum) == len(completions)
    return [len(text) for text in completions]


def keys(folder):
    return {
        "model": {"model": str(ROOT / "fixtures/models/arithmetic"), "torch_dtype": "float32"},
        "training.output_dir": str(folder / "run"),
        "training": {"max_steps": 1, "per_device_train_batch_size": 2, "report_to": "none"},
        "global_max_length": 64,
        "custom.extra.grpo.num_generations": 2,
        "custom.extra.rollout_matching": {
            "rollout_backend": "hf",
            "max_new_tokens": 4,
            "rollout_generate_batch_size": 4,
            "decoding.temperature": 1.0,
        },
    }


def written(folder):
    paths = sorted((folder / "run-data").iterdir())
    return [[json.loads(line) for line in path.read_text().splitlines()] for path in paths]


def test_a_refused_run_leaves_the_records_of_the_run_before(tmp_path):
    """In a thread, too, where no signal can be taken."""
    with ThreadPoolExecutor() as pool:
        out = pool.submit(train, keys(tmp_path), train_data=DATA, rewards=[right]).result()
    with refused("run-directory-taken", "training.output_dir"):
        train(keys(tmp_path), train_data=DATA[:2], rewards=[right])
    config = load_config(out / "resolved.yaml")
    assert [json.loads(line) for line in Path(config.custom.train_jsonl).read_text().splitlines()] == DATA
    assert sorted(written(tmp_path), key=len) == [DATA[:2], DATA]


def test_records_and_functions_make_a_run(tmp_path):
    before = signal.getsignal(signal.SIGINT)
    (tmp_path / "held_out.jsonl").write_text(json.dumps(DATA[0]))
    config = keys(tmp_path / "new") | {"custom.val_jsonl": tmp_path / "held_out.jsonl"}
    out = train(config, train_data=iter(DATA), rewards=[right, (lengths, 0.5)])
    assert signal.getsignal(signal.SIGINT) is before
    assert written(tmp_path / "new") == [DATA]
    [run], [step] = ([one for one in read_journal(out / JOURNAL) if one["event"] == kind] for kind in ("run", "step"))
    assert (run["num_train_samples"], run["num_val_samples"], run["num_eval_samples"]) == (4, 1, 1)
    assert step["segments"] == 4
    assert {"reward/right", "reward/lengths"} <= step.keys() | step.get("metrics", {}).keys()
    assert (out / "checkpoint-1").exists()


@pytest.mark.scenario(
    "data-ownership/a-run-of-training-samples-alone",
    clauses=["data-ownership/evaluations-are-of-held-out-samples#1"],
)
def test_what_a_run_learns_from_is_not_evaluated(tmp_path):
    out = train(keys(tmp_path), train_data=DATA, rewards=[right])
    events = list(read_journal(out / JOURNAL))
    assert {event["purpose"] for event in events if event["event"] == "generated"} == {"train"}
    assert not [event for event in events if event["event"] == "evaluated"]
    assert "there are no held-out samples to evaluate" in (out / "run.html").read_text()
    with refused("nothing-to-evaluate", "training.eval_steps"):
        train(keys(tmp_path / "other") | {"training.eval_steps": 1}, train_data=DATA, rewards=[right])


@pytest.mark.scenario(clauses=["data-ownership/evaluations-are-of-held-out-samples#2"])
def test_the_evaluation_before_the_first_step_can_be_left_out(tmp_path):
    out = train(
        keys(tmp_path) | {"training.eval_on_start": False}, train_data=DATA[1:], val_data=DATA[:1], rewards=[right]
    )
    assert [event["step"] for event in read_journal(out / JOURNAL) if event["event"] == "evaluated"] == [1]


def breaks_later(answer, sample):
    breaks_later.calls = getattr(breaks_later, "calls", 0) + 1
    if breaks_later.calls > 12:
        raise RuntimeError("the judge is gone")
    return float(len(answer))


def test_an_error_that_ends_a_run_leaves_a_checkpoint(tmp_path):
    """Four completions a step, and two calls before the run: the third step loses two, the fourth fails."""
    config = keys(tmp_path) | {"training.max_steps": 5}
    with refused("rewards-all-failed"):
        train(config, train_data=DATA, rewards=[breaks_later])
    assert (tmp_path / "run/checkpoint-3/manifest.json").is_file()


def nothing(answer, sample):
    return 0.0


@pytest.mark.scenario(
    "observability/all-rewards-are-equal", clauses=["observability/a-run-that-does-not-learn-says-so#1,2"]
)
@pytest.mark.parametrize(
    ("max_new_tokens", "cause"),
    [(1, "100% of the completions are cut off: raise max_new_tokens"), (12, "they are about 0: read completions")],
)
def test_three_steps_without_differing_rewards_are_said_with_the_cause(tmp_path, capsys, max_new_tokens, cause):
    config = keys(tmp_path) | {"training.max_steps": 4, "training.eval_on_start": False}
    config["custom.extra.rollout_matching"] = config["custom.extra.rollout_matching"] | {
        "max_new_tokens": max_new_tokens
    }
    train(config, train_data=DATA, rewards=[nothing])
    printed = capsys.readouterr().out
    warnings = [line for line in printed.splitlines() if line.startswith("warning: no group has taught anything")]
    assert len(warnings) == 1
    assert cause in warnings[0]
    steps = [line for line in printed.splitlines() if line.startswith("step ")]
    assert all("flat 100.0%" in line and "cut " in line for line in steps)
    assert ["left" in line for line in steps] == [True, True, True, False]


def scored_by(unit):
    def scored(completions, **columns):
        return [len(text) / unit for text in completions]

    return scored


def counted(prompts, completions, completion_ids, trainer_state, log_extra, log_metric, **columns):
    """Needs all that TRL passes."""
    assert len(prompts) == len(completions)
    numbers = [float(len(ids)) for ids in completion_ids]
    log_extra("len", numbers)
    log_metric("mean_len", sum(numbers) / len(numbers))
    log_metric("step", trainer_state.global_step / trainer_state.max_steps)
    return numbers


@pytest.mark.scenario(
    "grpo-server-mode/a-reward-function-of-trl-sees-tokens-and-writes-figures-down",
    clauses=["grpo-server-mode/rewards-may-be-functions-of-other-libraries#4,5,6"],
)
def test_a_reward_function_of_trl_sees_tokens_and_writes_figures_down(tmp_path):
    more = {"training.max_steps": 2, "training.logged_completions": 4}
    out = train(keys(tmp_path) | more, train_data=DATA[1:], val_data=DATA[:1], rewards=[counted])
    found = {kind: [] for kind in ("step", "completions", "evaluated")}
    for event in read_journal(out / JOURNAL):
        found.get(event["event"], []).append(event)
    for step, shown, share in zip(found["step"], found["completions"], (0.0, 0.5), strict=True):
        rewards = [one["worth"]["reward"] for one in shown["completions"]]
        assert rewards == [one["num_tokens"] + (one["finish_reason"] == "stop") for one in shown["completions"]]
        assert [float(one["columns"]["len"]) for one in shown["completions"]] == rewards
        assert step["metric/mean_len"] == step["reward"] == pytest.approx(sum(rewards) / len(rewards))
        assert step["metric/step"] == share
    assert [event["metrics"]["metric/step"] for event in found["evaluated"]] == [0.0, 1.0]
    assert "len: " in (out / "run.html").read_text()


@pytest.mark.scenario(clauses=["grpo-server-mode/rewards-may-be-functions-of-other-libraries#7"])
@pytest.mark.parametrize(
    ("key", "value", "named"),
    [
        ("custom.trainer_variant", "vineppo", "log_extra, log_metric, trainer_state"),
        ("custom.extra.grpo.rewards", [{"function": f"{__name__}:counted", "processes": 1}], "log_extra, log_metric"),
    ],
)
def test_what_is_not_known_to_a_reward_function_of_trl_is_named(tmp_path, key, value, named):
    config = keys(tmp_path) | {"custom.trainer_variant": "grpo"}
    config |= {"custom.extra.grpo.rewards": [{"function": f"{__name__}:counted"}]} | {key: value}
    with refused("reward-signature", "custom.extra.grpo.rewards.0.function", problem=f"needs {named}, and "):
        train(config, train_data=DATA)


@dataclass
class GRPOConfig:
    """As TRL's, as far as it matters here: batches count completions, and an unset learning rate is 1e-6."""

    output_dir: str
    num_generations: int = 8
    per_device_train_batch_size: int = 8
    max_completion_length: int = 256
    max_steps: int = -1
    learning_rate: float = 1e-6
    report_to: object = "none"
    bf16: bool | None = None
    temperature: float = 1.0
    cache_implementation: str | None = None


class Counts(TrainerCallback):
    def __init__(self):
        self.steps = 0

    def on_step_end(self, args, state, control, **_):
        self.steps += 1


@pytest.mark.scenario(
    "grpo-server-mode/a-script-of-trl", clauses=["grpo-server-mode/grpo-trainer-takes-the-arguments-of-trl#1,2,3"]
)
def test_a_trainer_runs_by_args_peft_config_callbacks_and_functions_without_a_name(tmp_path, capsys):
    args = GRPOConfig(
        str(tmp_path / "run"),
        num_generations=2,
        per_device_train_batch_size=4,
        max_completion_length=4,
        max_steps=1,
        bf16=False,
        cache_implementation="static",
    )
    config = {
        "custom.extra.rollout_matching": {"rollout_backend": "hf", "rollout_generate_batch_size": 4},
        "global_max_length": 64,
        "model.torch_dtype": "float32",
    }
    counts = Counts()
    trainer = GRPOTrainer(
        keys(tmp_path)["model"]["model"],
        [lambda completions, **columns: [1.0] * len(completions), scored_by(10), partial(right)],
        args,
        DATA[1:],
        DATA[:1],
        callbacks=[counts],
        peft_config=LoraConfig(r=3, target_modules=["q_proj"]),
        config=config,
    )
    trainer.train()
    read = load_config(tmp_path / "run/resolved.yaml")
    assert (read.training.per_device_train_batch_size, read.custom.extra.grpo.num_generations) == (2, 2)
    assert (read.tuner.lora_rank, read.tuner.train_type) == (3, "lora")
    assert read.custom.extra.rollout_matching.max_new_tokens == 4
    assert read.training.learning_rate == 1e-6
    assert (counts.steps, trainer.state.global_step) == (1, 1)
    assert any("lora" in name for name, _ in trainer.model.named_parameters())
    assert trainer.evaluate()["eval_num_scenes"] == 1.0
    trainer.save_model(tmp_path / "saved")
    assert (tmp_path / "saved/model.safetensors").is_file()
    trainer.save_model(tmp_path / "whole", dtype="float32")
    half, whole = ((tmp_path / name / "model.safetensors").stat().st_size for name in ("saved", "whole"))
    assert whole > 1.9 * half
    trainer.save_model(tmp_path / "alone", adapter=True)
    assert (tmp_path / "alone/adapter_model.safetensors").is_file()
    for place in (tmp_path / "run", None):  # as scripts of TRL end, and again
        trainer.save_model(place)
        assert (tmp_path / "run/model.safetensors").read_bytes() == (tmp_path / "saved/model.safetensors").read_bytes()
    printed = capsys.readouterr().out
    assert "args.cache_implementation is left out: no counterpart" in printed


@pytest.mark.parametrize(
    ("arguments", "problem"),
    [
        ({"optimizers": (None, object())}, ("argument-unknown", "optimizers")),
        ({"model": object()}, ("argument-unknown", "model")),
        ({"args": object()}, ("argument-unknown", "args")),
        ({"train_dataset": None}, ("missing-key", "train_dataset")),
        ({"peft_config": object()}, ("argument-unknown", "peft_config")),
        ({"reward_funcs": "org/reward-model"}, ("reward-not-importable", "reward_funcs")),
        ({"reward_funcs": 3}, ("argument-unknown", "reward_funcs")),
        ({"reward_funcs": [3]}, ("argument-unknown", "reward_funcs")),
        ({"reward_funcs": [(right,)]}, ("argument-unknown", "reward_funcs")),
        ({"callbacks": 3}, ("argument-unknown", "callbacks")),
        ({"train_dataset": 3}, ("argument-unknown", "train_dataset")),
        ({"eval_dataset": {"train": DATA}}, ("argument-unknown", "eval_dataset")),
        ({"config": ["training.seed=1"]}, ("argument-unknown", "config")),
        ({"processing_class": 3}, ("argument-unknown", "processing_class")),
    ],
)
def test_arguments_without_a_counterpart_are_named(tmp_path, arguments, problem):
    whole = {"model": "m", "reward_funcs": right, "train_dataset": DATA, "config": keys(tmp_path) | {"model": {}}}
    with refused(*problem):
        GRPOTrainer(**(whole | arguments)).train()


@pytest.mark.parametrize(
    ("name", "meant"),
    [
        *(("reward_func", "Did you mean reward_funcs?"), ("tokenizer", "Did you mean processing_class?")),
        *(("dataset", "Did you mean train_dataset?"), ("rollout_func", "reset, step, clone")),
        *(
            (name, f"GRPOConfig({name}=...)")
            for name in ("loss_type", "reward_weights", "vllm_mode", "num_generations")
        ),
        *(("ref_model", "before training"), ("compute_metrics", "weight 0"), ("reward_processing_classes", "function")),
        ("optimizers", "GRPOConfig(optim=...)"),
    ],
)
def test_an_argument_by_another_name_is_answered_by_its_own(name, meant):
    with refused("argument-unknown", name, remedy=meant):
        GRPOTrainer("m", **{name: object()})


def args_of(name, **given):
    """Arguments as TRL makes them: a dataclass with this name, whose fields have other defaults."""
    made = make_dataclass(name, [("output_dir", str, "o"), *((key, object, None) for key in given)])
    return made(**given)


@pytest.mark.scenario(clauses=["grpo-server-mode/grpo-trainer-takes-the-arguments-of-trl#8"])
@pytest.mark.parametrize(
    ("field", "value", "problem"),
    [
        *(("loss_type", name, f"{name} has no counterpart") for name in ("sapo", "bnpo", "luspo", "vespo", "other")),
        *(("sync_ref_model", True, ""), ("use_adaptive_entropy", True, ""), ("off_policy_mask_threshold", 0.5, "")),
        *(("min_p", 0.1, ""), ("generation_kwargs", {"min_p": 0.1}, ""), ("importance_sampling_level", "turn", "turn")),
        ("multi_objective_aggregation", "normalize_then_sum", "summed by weight"),
    ],
)
def test_a_field_that_changes_what_is_learnt_is_not_left_out(field, value, problem):
    with refused("argument-unknown", f"args.{field}", problem=problem, remedy="Leave it out"):
        GRPOTrainer("m", right, args_of("GRPOConfig", **{field: value}), DATA)


@pytest.mark.parametrize(
    ("name", "remedy"),
    [("RLOOConfig", "leave_one_out"), ("OnlineDPOConfig", "same rewards"), ("TrainingArguments", "Pass a GRPOConfig")],
)
def test_the_configuration_of_another_trainer_is_refused(name, remedy):
    with refused("argument-unknown", "args", problem=f"is {name}", remedy=remedy):
        GRPOTrainer("m", right, args_of(name), DATA)


@pytest.mark.parametrize("name", ["GRPOConfig", "AsyncGRPOTrainer", "RLOOTrainer", "OnlineDPOTrainer"])
def test_a_name_of_trl_that_is_not_here_says_what_to_write(name):
    with pytest.raises(ImportError, match=f"rollmatch has no {name}: .*GRPOTrainer"):
        getattr(rollmatch, name)


@pytest.mark.scenario(clauses=["grpo-server-mode/grpo-trainer-takes-the-arguments-of-trl#9"])
def test_weights_of_the_arguments_are_those_of_the_functions():
    trainer = GRPOTrainer("m", [right, print], args_of("GRPOConfig", reward_weights=[0.3, 2]), DATA)
    assert trainer.rewards == [(right, 0.3), (print, 2.0)]
    with refused("import-uneven", "args.reward_weights", problem="has 2 values for 1 functions"):
        GRPOTrainer("m", right, args_of("GRPOConfig", reward_weights=[0.3, 2]), DATA)


@pytest.mark.parametrize(
    "settings", [{"init_lora_weights": "gaussian"}, {"layers_to_transform": [0]}, {"exclude_modules": ["lm_head"]}]
)
def test_settings_of_an_adapter_that_nothing_uses_are_refused(tmp_path, settings):
    with refused("argument-unknown", f"peft_config.{next(iter(settings))}"):
        GRPOTrainer("m", right, train_dataset=DATA, peft_config=LoraConfig(task_type="CAUSAL_LM", **settings))


def test_settings_of_an_adapter_are_keys_of_the_tuner_and_keys_of_config_win():
    settings = {"lora_alpha": 7, "lora_dropout": 0.25, "use_dora": True, "use_rslora": True}
    settings |= {"rank_pattern": {"q_proj": 2}, "alpha_pattern": {"q_proj": 3}}
    settings |= {"trainable_token_indices": [5], "modules_to_save": ["lm_head"]}
    adapter = LoraConfig(r=5, target_modules=["q_proj"], **settings)
    args = args_of("GRPOConfig", learning_rate=0.5, max_steps=3)
    config = {"tuner.lora_rank": 9, "tuner.modules_to_save": ["norm"], "training.max_steps": 4}
    for given in ({}, config):
        made = GRPOTrainer("m", right, args, DATA, peft_config=adapter, config=given).config
        keys = {"tuner.lora_rank": 5, "tuner.target_regex": r".*\.(q_proj)", "tuner.train_type": "lora"}
        keys |= {f"tuner.{name}": value for name, value in settings.items()}
        assert made["tuner"] == nested(keys | given)["tuner"]
        assert (made["training"]["learning_rate"], made["training"]["max_steps"]) == (0.5, 4 if given else 3)


def test_what_trl_s_trainer_has_beside_is_named(tmp_path, capsys):
    trainer = GRPOTrainer("m", right, train_dataset=DATA, config=keys(tmp_path) | {"model": {}})
    assert not hasattr(trainer, "tokenizer")
    trainer.accelerator.print("trained")  # as TRL's scripts do between train and save_model
    assert capsys.readouterr().out == "trained\n"
    trainer.end()
    with refused("attribute-unknown", "GRPOTrainer.push_to_hub", remedy="rollmatch export RUN OUT --push"):
        trainer.push_to_hub()


def test_what_a_run_has_made_is_asked_for_after_it(tmp_path):
    trainer = GRPOTrainer("m", right, train_dataset=DATA, config=keys(tmp_path) | {"model": {}})
    for ask in (lambda: trainer.state, lambda: trainer.model, trainer.evaluate):
        with refused("checkpoint-missing", "training.output_dir"):
            ask()


def test_a_run_without_a_directory_is_refused(tmp_path):
    values = {name: value for name, value in keys(tmp_path).items() if name != "training.output_dir"}
    with refused("missing-key", "training.output_dir"):
        train(values, train_data=DATA, rewards=[right])


@pytest.mark.parametrize("trainer", [GRPOTrainer, VinePPOTrainer, VinePPOMCTSTrainer])
def test_a_trainer_takes_the_arguments_of_trl(tmp_path, trainer):
    """Chats below ``prompt`` and columns beside it, as in data sets for TRL."""
    rows = [{"prompt": [{"role": "user", "content": row["prompt"]}], **row["metadata"]} for row in DATA]
    model = keys(tmp_path)["model"]["model"]
    config = keys(tmp_path) | {"custom.extra.vineppo.num_continuations": 2, "model": {"torch_dtype": "float32"}}
    out = trainer(model, [lengths, (right, 0.5)], train_dataset=rows, config=config).train()
    [step] = [event for event in read_journal(out / "journal.jsonl") if event["event"] == "step"]
    assert step["segments"] == 4
    assert any("continuation" in name for name in step) == (trainer is not GRPOTrainer)


def test_a_model_is_named_once(tmp_path):
    with refused("given-twice", "model.model"):
        GRPOTrainer("other", right, train_dataset=DATA, config=keys(tmp_path))
    GRPOTrainer(keys(tmp_path)["model"]["model"], right, train_dataset=DATA, config=keys(tmp_path))


@pytest.mark.scenario(clauses=["grpo-server-mode/grpo-trainer-takes-the-arguments-of-trl#5"])
def test_pictures_of_a_data_set_become_files(tmp_path, monkeypatch):
    """As TRL's examples for models that see pass them; several are listed."""
    monkeypatch.setenv("ROLLMATCH_CACHE", str(tmp_path / "cache"))
    chat = [{"role": "user", "content": "Is it red?"}]
    config = keys(tmp_path) | {"global_max_length": 256}
    config["model"] = config["model"] | {"model": str(ROOT / "fixtures/models/digits")}
    one, two = (
        Dataset.from_list([{"prompt": chat, "image": PICTURE}]),
        [{"prompt": chat, "images": [PICTURE, PICTURE.convert("CMYK")]}],
    )
    train(config, train_data=one, val_data=two, rewards=[nothing])
    listed = [record["images"] for [record] in written(tmp_path)]
    assert sorted(map(len, listed)) == [1, 2]
    assert {Image.open(path).getpixel((0, 0)) for paths in listed for path in paths} == {(255, 0, 0)}


@pytest.mark.scenario(clauses=["grpo-server-mode/grpo-trainer-takes-the-arguments-of-trl#6"])
def test_tools_are_functions(tmp_path):
    def multiply(left: int, right: int) -> int:
        """
        Multiply.

        Args:
            left: One number.
            right: The other one.
        """
        return left * right

    args = GRPOConfig(str(tmp_path), max_completion_length=300)
    made = GRPOTrainer("m", right, args, DATA, tools=[multiply]).config["custom"]["extra"]["environment"]
    assert list(load_tools(tuple(made["tools"]))) == ["multiply"]
    assert made["max_response_tokens"] == 300, "of all turns, as in TRL"
    config = keys(tmp_path) | {"model": {}, "environment.tools": ["my:other"]}
    with refused("given-twice", "custom.extra.environment.tools"):
        GRPOTrainer("m", right, None, DATA, tools=[multiply], config=config)


@pytest.mark.scenario(clauses=["grpo-server-mode/grpo-trainer-takes-the-arguments-of-trl#7"])
def test_an_environment_is_a_class_or_what_makes_an_instance(tmp_path):
    args = GRPOConfig(str(tmp_path), max_completion_length=300, max_steps=3)
    for factory in (Counter, lambda: Counter(), partial(Counter)):
        made = GRPOTrainer("m", right, args, DATA, environment_factory=factory)
        environment = made.config["custom"]["extra"]["environment"]
        assert list(load_tools(tuple(environment["tools"]))) == ["add", "shout"]
        assert environment["max_turns"] == environment["max_response_tokens"] == 300, "TRL limits no turns by itself"
        assert made.rewards == [(right, 1.0), (get_reward, 1.0)]
    own = GRPOTrainer("m", args=args, environment_factory=Counter)
    assert own.rewards == [(get_reward, 1.0)]
    assert len(own.train_dataset) == 3, "a prompt for each of 3 steps, which reset fills"
    with refused("missing-key", "training.max_steps", remedy="how many prompts"):
        GRPOTrainer("m", args=GRPOConfig(str(tmp_path)), environment_factory=Counter)
    with refused("argument-unknown", "environment_factory", problem="is dict", remedy="one class"):
        GRPOTrainer("m", right, None, DATA, environment_factory={"one": Counter})


def test_a_record_that_cannot_be_written_is_refused_by_row(tmp_path):
    for bad in ({"prompt": "?", "image": object()}, {"prompt": "half a character: \ud83d"}):
        with refused("record-not-json", "train_data[1]"):
            train(keys(tmp_path), train_data=[DATA[0], bad], rewards=[right])
    assert written(tmp_path) == []


@pytest.mark.parametrize(
    ("arguments", "config", "problem"),
    [
        ({"train_data": 3}, {}, ("argument-unknown", "train_data")),
        ({"rewards": 3}, {}, ("argument-unknown", "rewards")),
        ({"train_data": [None]}, {}, ("record-not-json", "train_data[0]")),
        ({"rewards": ["my:right"]}, {}, ("reward-not-importable", "rewards")),
        ({"existing": "again"}, {}, ("not-a-choice", "existing")),
        ({}, {1: 2}, ("key-not-text", "config")),
        ({}, {"custom.extra.grpo.rewards": [{"function": "m:f"}]}, ("given-twice", "custom.extra.grpo.rewards")),
    ],
)
def test_arguments_that_nothing_fits_are_named(tmp_path, arguments, config, problem):
    with refused(*problem):
        train(**{"config": keys(tmp_path) | config, "train_data": DATA, "rewards": [right]} | arguments)


def test_a_path_is_a_text_in_the_configuration(tmp_path):
    assert nested({"training.output_dir": tmp_path, "a": {"b": tmp_path}}) == {
        "training": {"output_dir": str(tmp_path)}, "a": {"b": str(tmp_path)}
    }  # fmt: skip


@pytest.mark.scenario(clauses=["vineppo/vineppo-trainers-use-a-rollout-server-by-five-arguments#1"])
@pytest.mark.parametrize("trainer", [GRPOTrainer, VinePPOTrainer, VinePPOMCTSTrainer])
def test_trainers_take_the_five_arguments_of_a_rollout_server(tmp_path, trainer):
    model = keys(tmp_path)["model"]["model"]
    five = {"vllm_host": "node7", "vllm_server_port": 9000, "vllm_group_port": 22222, "vllm_connection_timeout": 30.0}
    config = keys(tmp_path) | {"custom.extra.rollout_matching.rollout_backend": "vllm"}
    made = trainer(model, right, train_dataset=DATA, config=config, use_vllm_server=True, **five)
    vllm = made.config["custom"]["extra"]["rollout_matching"]["vllm"]
    assert vllm["mode"] == "server"
    named = {name: value for name, value in vllm["server"].items() if value is not None}
    assert named == {"base_url": "http://node7:9000", "group_port": 22222, "timeout_s": 30.0}
    with refused("server-not-used", "--vllm_host"):
        trainer(model, right, train_dataset=DATA, config=keys(tmp_path), vllm_host="node7")
    with refused("given-twice", "custom.extra.rollout_matching.rollout_backend"):
        trainer(model, right, train_dataset=DATA, config=keys(tmp_path), use_vllm_server=True)
