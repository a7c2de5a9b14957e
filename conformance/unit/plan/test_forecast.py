"""Memory and seconds of a split: by hand on round numbers, and in the right direction."""

import json
import shutil
from dataclasses import astuple, replace

import pytest

from benchmarks.gpu.six_and_two import BIG
from conformance.doubles.digits import MODEL, ROOT, absolute
from conformance.doubles.division import GRPO
from conformance.doubles.forecasts import ROUND, RULES, split
from conformance.doubles.refusals import refused
from conformance.gpu.big_model import config_of
from rollmatch.config import load_config
from rollmatch.config.effective import learner_dtype
from rollmatch.plan.forecast import Forecaster, Site
from rollmatch.plan.memory import ENGINE_BYTES, server_memory
from rollmatch.plan.proposal import propose
from rollmatch.plan.rates import Rates, load_rates
from rollmatch.plan.shape import read_shape
from rollmatch.plan.workload import make_workload, splits_of


def test_seconds_by_hand(forecaster):
    """64 rollouts of 1500 + 1000 tokens; one engine decodes 100 tokens a second whatever it is asked."""
    one = forecaster(rates=Rates.model_validate(ROUND), gpu="G")
    forecast = one.forecast(split(1, 1))
    weights = 6.946e9
    attention = 2 * 2500 * 36 * 32 * 128
    learn = 64 * (2500 * 3 * (2 * weights + attention) + 3 * 2 * 1000 * 151_936 * 4096) / 5e14
    assert forecast.learn_s == pytest.approx(learn, rel=1e-3)
    merge, carry = 2 * 2 * 8.19e9 / 1e12, 2 * 8.19e9 / 1e11
    assert forecast.sync_s == pytest.approx(0.05 + merge + carry, rel=1e-3)
    at_once = min(64, forecast.server.num_requests)
    context_ours = (weights + 151_936 * 4096) * 2 + at_once * 2000 * 147_456
    theirs = 16.38e9 + at_once * 2000 * 147_456
    rollout = 64 * 1000 / (100 * theirs / context_ours) + 64 * 1500 * 2 * weights / 5e14
    assert forecast.rollout_s == pytest.approx(rollout, rel=1e-3)
    assert forecast.step_s == pytest.approx(forecast.rollout_s + forecast.learn_s + forecast.sync_s)
    assert forecast.rollouts_per_s == pytest.approx(64 / forecast.step_s)


def test_memory_by_hand(forecaster):
    forecast = forecaster().forecast(split(3, 1))
    assert forecast.learner.weights == pytest.approx(2 * 8.19e9, rel=1e-3)
    per_layer = 8 * ((4096 + 4096) * 2 + 2 * (4096 + 1024) + 3 * (4096 + 12_288))
    assert forecast.learner.learning == 36 * per_layer * (4 + 4 + 8)
    layer = 2 * 12_000 * (8 * 4096 + 4 * 12_288 + (3 * 32 + 4 * 8) * 128)
    assert forecast.learner.activations == pytest.approx(2 * 12_000 * 4096 * 36 + 2 * layer)
    beside = 0.5e9 + 2.5e9
    assert forecast.learner.total == sum(astuple(forecast.learner)[:6]) + beside
    assert forecast.server.cache == 0.9 * 150.1e9 - forecast.learner.weights - 4e9
    assert forecast.server.num_requests == 256


def test_an_engine_of_8_bits_by_hand(forecaster):
    """Embedding and head of Qwen3-8B stay in 16; what its matrices give back is cache."""
    plain, quantized = forecaster(), forecaster("custom.extra.rollout_matching.vllm.quantization=fp8")
    memory, before = (one.forecast(split(3, 1)).server for one in (quantized, plain))
    embedding = 2 * 151_936 * 4096
    assert memory.weights == pytest.approx(2 * embedding + (8.19e9 - embedding), rel=1e-3)
    assert memory.cache - before.cache == before.weights - memory.weights


def test_key_value_heads_are_divided_among_no_more_gpus_than_there_are_of_them(forecaster):
    """8 heads of Qwen3-8B: a GPU of 16 holds one of them, as a GPU of 8 does."""
    planned = forecaster()
    shape, work = planned.served, planned.work
    requests = {}
    for tp in (4, 8, 16):
        budget = shape.num_weights * shape.weight_bytes / tp + ENGINE_BYTES + 10e9
        requests[tp] = server_memory(shape, work, budget=budget, tp=tp, max_num_seqs=10**6).num_requests
    one = work.segment_len * shape.kv_bytes_per_token
    assert requests == {4: int(10e9 // (one / 4)), 8: int(10e9 // (one / 8)), 16: int(10e9 // (one / 8))}


def test_engines_hold_and_are_sent_their_own_precision(forecaster):
    """Full fine-tuning keeps float32 weights; engines, and weights on their way there, are in bfloat16."""
    lora, full = (
        replace(one, shape=replace(one.shape, dtype=learner_dtype(one.config))).forecast(split(3, 1))
        for one in (forecaster(), forecaster("tuner.train_type=full"))
    )
    assert full.learner.weights == 2 * lora.learner.weights
    assert full.learner.learning == pytest.approx(3 * full.learner.weights, rel=1e-3), "gradients and two moments"
    assert (full.server, full.rollout_s) == (lora.server, lora.rollout_s)
    assert full.sync_s < lora.sync_s, "the same bytes, and no merge"
    served = forecaster("tuner.train_type=full", f"{RULES}.vllm.dtype=float32").forecast(split(3, 1)).server
    assert served.weights == 2 * lora.server.weights


HEAVIER = ("tuner.train_type=full", "tuner.lora_rank=64", "model.torch_dtype=float32", "global_max_length=24000")


def test_what_takes_more_memory_is_forecast_to(forecaster):
    plain = forecaster().forecast(split(3, 1)).learner.total
    for heavier in (*HEAVIER, "training.gradient_checkpointing=false"):
        assert forecaster(heavier).forecast(split(3, 1)).learner.total > plain, heavier


@pytest.mark.parametrize(("strategy", "shares"), [("ddp", 1), ("fsdp2", 1), ("deepspeed_zero3", 2)])
def test_a_reference_that_is_kept_takes_memory(forecaster, strategy, shares):
    """With adapters there is none: they are left out for its passes. FSDP2 splits the policy alone."""
    rewards = (
        "custom.trainer_variant=grpo",
        "custom.extra.grpo.rewards=[{function: a:b}]",
        f"{RULES}.decoding.temperature=1",
        "custom.extra.grpo.beta=0.1",
    )
    split_over = f"training.strategy={strategy}"
    adapters, full, free = (
        forecaster(*rewards, split_over, *more).forecast(split(2, 2)).learner
        for more in ((), ("tuner.train_type=full",), ("tuner.train_type=full", "custom.extra.grpo.beta=0"))
    )
    assert adapters.reference == free.reference == 0
    assert full.total - free.total == full.reference == pytest.approx(2 * 8.19e9 / shares, rel=1e-3)


def test_learners_engines_and_nodes_change_what_they_should(forecaster):
    alone, two = (forecaster("tuner.train_type=full").forecast(split(2, number)) for number in (1, 2))
    assert two.learner.learning == pytest.approx(alone.learner.learning * 4 / 3, rel=1e-3), "a copy of the gradients"
    assert two.learn_s > alone.learn_s
    assert two.num_rollouts == 2 * alone.num_rollouts
    whole, half = (forecaster().forecast(split(2, 2, tp=tp)) for tp in (1, 2))
    assert half.server.weights == pytest.approx(whole.server.weights / 2)
    assert half.split.num_engines == 1
    one, three = (forecaster().forecast(split(number, 1)) for number in (1, 3))
    assert three.rollout_s < one.rollout_s
    assert forecaster(num_nodes=2).forecast(split(3, 1)).sync_s > three.sync_s
    adapter = forecaster(f"{RULES}.vllm.sync.mode=auto", f"{RULES}.vllm.enable_lora=true").forecast(split(3, 1))
    assert adapter.sync_s < three.sync_s


def test_overlap_hides_the_shorter_of_both(forecaster):
    off = forecaster().forecast(split(3, 1))
    ahead = forecaster(f"{RULES}.overlap=ahead", f"{RULES}.max_staleness=2").forecast(split(3, 1))
    assert ahead.step_s == pytest.approx(max(off.rollout_s, off.learn_s) + off.sync_s)


def test_the_split_with_most_rollouts_a_second_is_proposed(forecaster):
    proposal = propose(forecaster(num_gpus=8))
    assert [str(one.split) for one in proposal.forecasts] == [f"{n}v{8 - n}" for n in range(1, 8)]
    assert proposal.best.rollouts_per_s == max(one.rollouts_per_s for one in proposal.forecasts)
    fast = Rates.model_validate(load_rates().model_dump() | {"learn_share": 1.0})
    slow = Rates.model_validate(load_rates().model_dump() | {"learn_share": 0.02})
    learners = [
        propose(forecaster(num_gpus=8, rates=rates)).best.split.num_learning
        for rates in (fast, slow)
        if all(gpu.learn_flops_s is None for gpu in rates.gpus.values())
    ]
    assert learners == sorted(learners)


def test_a_split_that_does_not_fit_is_never_proposed(forecaster):
    full = ("tuner.train_type=full", "model.torch_dtype=float32", "training.gradient_checkpointing=false")
    with refused("nothing-fits", "--gpus", problem="the learner lacks"):
        propose(forecaster(*full, num_gpus=2))
    assert propose(forecaster(num_gpus=2)).best.problem == ""
    crowded = forecaster("custom.extra.rollout_server.vllm_gpu_memory_utilization=0.12")
    assert "no memory for one request" in crowded.forecast(split(1, 1)).problem


def test_gpus_that_cannot_be_split_are_refused(forecaster):
    with refused("too-few-gpus", "--gpus"):
        propose(forecaster(num_gpus=1))
    propose(forecaster(num_gpus=2))
    with refused("too-few-gpus"):
        propose(forecaster("custom.extra.rollout_server.vllm_tensor_parallel_size=2", num_gpus=2))


def test_an_engine_in_the_learners_process_leaves_it_what_it_does_not_take(forecaster):
    colocated = (f"{RULES}.vllm.mode=colocate", f"{RULES}.vllm.gpu_memory_utilization=0.4")
    kept = propose(forecaster(*colocated)).best
    assert str(kept.split) == "4 colocated"
    assert kept.learner_bytes == pytest.approx(0.6 * kept.gpu_bytes)
    slept = propose(forecaster(*colocated, f"{RULES}.vllm.sleep_level=1")).best
    assert slept.learner_bytes == slept.gpu_bytes


def test_splits_use_every_gpu_once():
    for num_gpus in range(2, 17):
        for tp in (1, 2, 4):
            for one in splits_of(num_gpus, tp=tp, colocated=False):
                assert one.num_serving + one.num_learning == num_gpus
                assert one.num_serving % tp == 0
                assert one.num_learning >= 1 <= one.num_engines


def test_a_measured_pass_is_forecast_within_a_quarter(forecaster):
    """Seconds (from which the rate was taken) and, by formulas alone, the memory beside the weights."""
    results = json.loads((ROOT / "benchmarks/results/packed_pass.json").read_text())
    assert "H200" in results["on"]["gpu"]["name"]
    overrides = (f"global_max_length={results['num_tokens']}", "training.gradient_accumulation_steps=1")
    one = forecaster(*overrides, "training.per_device_train_batch_size=5")
    work = replace(one.work, prompt_len=1862, response_len=466)  # five segments of 2,328 tokens on average
    forecast = replace(one, work=work).forecast(split(3, 1))
    measured = results["measured"]["packed"]
    assert work.num_tokens == results["num_tokens"]
    assert forecast.learn_s == pytest.approx(measured["median_s"], rel=0.25)
    gradients = 4 * results["num_weights"] - 4 * 8.19e9
    beside = forecast.learner.activations + forecast.learner.head + gradients
    assert beside == pytest.approx(measured["peak_bytes"], rel=0.25)


def test_a_number_of_tokens_bounds_a_pass_whatever_the_samples(forecaster):
    """400 segments of 3,000 tokens: four fit a row of 12,500, so 100 passes of that many; or two segments, and one."""
    samples = ("training.gradient_accumulation_steps=1", "training.per_device_train_batch_size=400")
    rows = ("training.packing=false", "training.tokens_per_micro_batch=12500")
    two = (samples[0], "training.per_device_train_batch_size=2")

    def work_of(*settings):
        made = forecaster(*settings)
        return make_workload(made.config, made.shape, prompt_len=2500, response_len=500)

    many, few, padded = work_of(*samples, *rows), work_of(*two, *rows), work_of(*samples, rows[0])
    assert (many.row_len, many.num_passes, many.fill) == (12500, 100, 1.0)
    assert (few.row_len, few.num_passes) == (6000, 1)
    assert (padded.row_len, padded.num_passes) == (400 * 3000, 1)
    by_tokens, by_samples = (
        replace(forecaster(*samples, *more), work=work).forecast(split(3, 1)).learner.activations
        for more, work in ((rows, many), (rows[:1], padded))
    )
    assert by_tokens / by_samples == pytest.approx(12500 / (400 * 3000))


SCORING = [
    ((), 0),
    (("grpo.beta=0.02",), 1),
    (("grpo.old_logprobs=recomputed",), 0),
    (("grpo.old_logprobs=recomputed", "grpo.num_iterations=2"), 1),
    (("grpo.old_logprobs=recomputed", "grpo.num_iterations=2", "grpo.beta=0.02"), 2),
]


@pytest.mark.parametrize(("settings", "passes"), SCORING)
def test_log_probabilities_are_scored_by_the_passes_that_a_run_makes(settings, passes):
    """Old ones by the learner cost a pass only where it learns from rollouts more than once."""
    config = load_config(str(GRPO), absolute("custom.extra.grpo.beta=0", *(f"custom.extra.{one}" for one in settings)))
    shape = read_shape(MODEL, dtype="float32")
    work = make_workload(config, shape, prompt_len=100, response_len=50)
    site, rates = Site(gpu="H200", nodes=(4,)), load_rates().model_copy(update={"dora_share": 1.0})
    one = Forecaster(config=config, shape=shape, work=work, rates=rates, site=site).forecast(split(3, 1))
    body = 150 * (2 * shape.active_weights + 2 * 150 * shape.num_layers * shape.num_heads * shape.head_len)
    head = 2 * 50 * shape.num_ids * shape.hidden_len
    assert one.score_s == pytest.approx(passes * work.num_rollouts * (body + head) / 316e12)
    assert one.step_s == pytest.approx(one.rollout_s + one.score_s + one.learn_s + one.sync_s)


def test_dora_takes_its_measured_share_of_the_speed(forecaster):
    plain, dora = (forecaster("tuner.train_type=lora", f"tuner.use_dora={used}") for used in ("false", "true"))
    ratio = dora.forecast(split(3, 1)).learn_s / plain.forecast(split(3, 1)).learn_s
    assert ratio == pytest.approx(1 / plain.rates.dora_share)
    assert any("DoRA" in line for line in propose(dora).assumptions)
    assert not any("DoRA" in line for line in propose(plain).assumptions)


@pytest.mark.parametrize("sizes", [(1, 1), (3, 1)])
def test_a_measured_step_of_servers_and_a_learner_is_forecast_within_a_quarter(sizes, tmp_path):
    """GRPO with DoRA; only the speed of learning was taken from the run on two GPUs."""
    num_gpus = sum(sizes)
    run = json.loads((ROOT / f"benchmarks/results/six_and_two-{num_gpus}.json").read_text())
    big = run["big"]
    assert run["machine"]["gpus"] == ["NVIDIA H200"] * num_gpus
    shutil.copytree(MODEL, tmp_path / "model", ignore=shutil.ignore_patterns("*.safetensors", "config.json"))
    (tmp_path / "model/config.json").write_text(json.dumps(config_of() | {"dtype": "bfloat16"}))
    config = load_config(str(GRPO), absolute(*BIG, f"model.model={tmp_path / 'model'}", "training.share_prompts=false"))
    shape, lengths = read_shape(tmp_path / "model", dtype="bfloat16"), (big["prompt_len"], big["response_len"])
    prompt_len, response_len = map(round, lengths)
    one = Forecaster(
        config=config,
        shape=shape,
        work=make_workload(config, shape, prompt_len=prompt_len, response_len=response_len),
        rates=load_rates(),
        site=Site(gpu="H200", nodes=(num_gpus,)),
    ).forecast(split(*sizes))
    measured = big["phase_s"]
    assert one.rollout_s == pytest.approx(measured["rollout"], rel=0.25)
    assert one.score_s == pytest.approx(measured["target"], rel=0.25), "rewards take next to nothing"
    assert one.learn_s == pytest.approx(measured["learn"], rel=0.25)
    assert one.sync_s == pytest.approx(measured["sync"], rel=0.25)
    assert one.step_s == pytest.approx(big["step_s"], rel=0.25)
