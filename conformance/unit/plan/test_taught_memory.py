"""What distillation and shared prompts change of a forecast, beside what runs took."""

import json
from dataclasses import replace

import pytest

from conformance.doubles.digits import ROOT
from conformance.doubles.distilled import CONFIG, DISTILL, MODEL, config_of, make_trainer
from conformance.doubles.forecasts import RULES, split
from rollmatch.cli.main import main
from rollmatch.config.effective import learner_dtype
from rollmatch.plan.memory import learner_memory
from rollmatch.plan.proposal import propose
from rollmatch.plan.shape import read_shape, read_teachers
from rollmatch.plan.workload import make_workload

WITHIN = 0.25
"""As for all forecasts that a run was measured for."""
MODELS = f"{{model: {MODEL}, when: {{kind: product}}}}"
AVERAGED = '{self: true, prompt: "{question} {sum}", average: 0.9}'
PAID = (
    *("custom.trainer_variant=grpo", "custom.extra.grpo.rewards=[{function: a:b}]"),
    f"{RULES}.decoding.temperature=1",
)
TEACHERS = f"custom.extra.distill.teachers=[{MODELS}, {AVERAGED}]"


def bytes_of(tensors):
    return sum(tensor.numel() * tensor.element_size() for tensor in tensors)


@pytest.mark.parametrize("tuner", [(), ("tuner.train_type=lora", "tuner.lora_rank=4")])
def test_teachers_and_averages_are_forecast_as_a_run_holds_them(tuner, tmp_path):
    trainer = make_trainer(tmp_path, TEACHERS, *tuner)
    trainer.train()
    model, average = (teacher.answers for teacher in trainer.learner.objective.teachers)
    config = config_of(TEACHERS, *tuner)
    shape = read_shape(config.model.model, dtype=learner_dtype(config))
    work = make_workload(config, shape, prompt_len=20, response_len=4)
    found = learner_memory(config, shape, work, num_learners=1, teachers=read_teachers(config))
    assert found.teachers == pytest.approx(bytes_of(model.model.parameters()), rel=WITHIN)
    assert found.averages == pytest.approx(bytes_of(average.average.weights.values()), rel=WITHIN)
    assert found.averages < found.teachers if tuner else found.averages > 0


def test_a_teacher_is_split_as_the_policy_is(forecaster):
    taught = ("custom.trainer_variant=distill", f"custom.extra.distill.teachers=[{{model: {MODEL}}}]")
    whole, parts = (
        forecaster(*taught, f"training.strategy={strategy}").forecast(split(2, 2)).learner
        for strategy in ("ddp", "deepspeed_zero3")
    )
    assert whole.teachers == 2 * parts.teachers > 0


def test_a_teacher_takes_a_forward_pass_of_the_samples_that_it_has(forecaster):
    """The policy of 8B itself as a teacher of all samples, or of half of them beside a server on other GPUs."""
    directory = forecaster().config.model.model
    itself = f"{{model: {directory}}}"
    server = "{base_url: 'http://127.0.0.1:1', when: {kind: sum}}"
    none, half, whole = (
        forecaster("custom.trainer_variant=distill", f"custom.extra.distill.teachers=[{', '.join(teachers)}]")
        for teachers in ((server,), (server, itself), (itself,))
    )
    assert none.forecast(split(3, 1)).score_s == 0
    assert 2 * half.forecast(split(3, 1)).score_s == pytest.approx(whole.forecast(split(3, 1)).score_s)
    learn = whole.forecast(split(3, 1)).learn_s
    assert 3 <= learn / whole.forecast(split(3, 1)).score_s <= 4
    assert any("those at a URL take no time" in line for line in propose(none).assumptions)


@pytest.mark.parametrize("group", ["text", "picture", "short"])
def test_shared_prompts_are_forecast_as_they_were_measured(forecaster, group):
    """Rows token by token; memory and seconds beside those of whole segments, on an H100."""
    results = json.loads((ROOT / "benchmarks/results/shared_prompt.json").read_text())
    sizes, measured = results["shape"], results["groups"][group]
    prompt_len, num, response_len = sizes["groups"][group]
    rows = (
        *PAID, "custom.extra.grpo.num_generations=8", "tuner.train_type=lora",
        "training.packing=false", f"training.tokens_per_micro_batch={sizes['capacity']}",
        f"training.per_device_train_batch_size={num // 8}", "training.gradient_accumulation_steps=1",
        "training.gradient_checkpointing=false", f"global_max_length={sizes['capacity']}",
    )  # fmt: skip
    keys = {"hidden_len": "hidden_len", "inner_len": "inner_len", "num_layers": "num_layers"}
    forecasts = {}
    for name, shares in (("shared", "auto"), ("whole", "false")):
        made = forecaster(*rows, f"training.share_prompts={shares}")
        shape = replace(made.shape, **{name: sizes[key] for name, key in keys.items()})
        work = make_workload(made.config, shape, prompt_len=prompt_len, response_len=response_len)
        assert work.num_tokens == sum(measured["tokens"][name])
        assert max(measured["tokens"][name]) <= work.row_len <= sizes["capacity"]
        forecasts[name] = replace(made, shape=shape, work=work).forecast(split(3, 1))
    shared, whole = forecasts["shared"], forecasts["whole"]
    peaks = {name: one["peak_bytes"] for name, one in measured["measured"].items()}
    assert shared.learner.activations / whole.learner.activations == pytest.approx(
        peaks["shared"] / peaks["whole"], rel=WITHIN
    )
    assert whole.learn_s / shared.learn_s == pytest.approx(measured["gain"], rel=WITHIN)


DROPOUT = ("tuner.lora_dropout=0.1", "tuner.train_type=lora")
SHARED = [
    (("training.padding_free=auto",), True),
    (("training.padding_free=auto", "training.bf16=false", "model.torch_dtype=float32"), False),
    (("training.padding_free=true", "training.bf16=false", "model.torch_dtype=float32"), True),
    (("training.padding_free=false",), False),
    (("training.padding_free=auto", "model.attn_impl=sdpa"), False),
    (DROPOUT, False),
    ((*DROPOUT, "training.padding_free=true", "training.share_prompts=true"), True),
    (("training.packing=true",), False),
]


@pytest.mark.parametrize(("settings", "are_shared"), SHARED)
def test_prompts_are_counted_once_where_a_run_shares_them(forecaster, settings, are_shared):
    grpo = (*PAID, "custom.extra.grpo.num_generations=4", "training.packing=false")
    small = ("training.per_device_train_batch_size=2",)
    made = forecaster(*grpo, *small, *settings)
    work = make_workload(made.config, made.shape, prompt_len=101, response_len=9)
    assert work.num_rollouts == 2 * 4 * 4
    assert (work.num_prompts, work.num_tokens) == ((8, 32 * 10 + 800) if are_shared else (32, 32 * 110))
    assert any("prompts: 8 are computed for 32" in line for line in propose(made).assumptions) == are_shared


def test_plan_and_check_print_what_teaches(capsys, tmp_path):
    sets = [part for one in (*DISTILL, TEACHERS, f"training.output_dir={tmp_path}") for part in ("--set", one)]
    assert main(["check", str(CONFIG), *sets]) == 0
    assert "teachers: models 0.0" in capsys.readouterr().out
    assert main(["plan", str(CONFIG), "--gpus", "2", *sets]) == 0
    shown = capsys.readouterr().out
    assert "teachers 0.0 GB, averages 0.0 GB" in shown
