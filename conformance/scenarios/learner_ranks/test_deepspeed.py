"""``rollmatch train`` on two ranks that share the policy by the installed DeepSpeed, on CPUs: it learns as DDP does.

The loss is scored inside the head, as on GPUs. Each DeepSpeed run is continued from its checkpoint for the last step.
"""

import json
from types import SimpleNamespace

import pytest
import torch
from safetensors.torch import load_file, save_file

from conformance.doubles.answering_server import AnsweringServer
from conformance.doubles.digits import CONFIG, ROOT, cut, load_model, perturb, template_of, write_cut
from conformance.doubles.division import BESIDE_DOUBLES, VLLM
from conformance.doubles.instance import free_port
from conformance.doubles.native_double import serving
from conformance.doubles.started import cli_command, finish_ranks, journal_of, started_ranks
from conformance.tools.outside_tools import python_of
from rollmatch.config.training import ModelConfig, TunerConfig
from rollmatch.model.policy import load_policy

pytestmark = pytest.mark.deepspeed
IN_HEAD = (
    "import sys; from rollmatch.model import policy; policy.LARGE_VOCABULARY = 0; "
    "from rollmatch.cli.main import main; sys.exit(main(sys.argv[1:]))"
)
STEADY = ("training.learning_rate=0.1", "training.lr_scheduler_type=constant", "training.warmup_steps=0")
ADAPTERS = ("tuner.train_type=lora", "tuner.lora_rank=2", "training.gradient_checkpointing=true")
LORA = TunerConfig(train_type="lora", lora_rank=2)
REWARDED = (
    "custom.extra.rollout_matching.decoding.temperature=1.0",
    "custom.extra.grpo.num_generations=2",
    *("custom.extra.grpo.old_logprobs=recomputed", "custom.extra.grpo.correction_cap=null"),
    'custom.extra.grpo.rewards=[{"function": "conformance.scenarios.learner_ranks.test_deepspeed:scattered"}]',
)
OBJECTIVES = {
    "matching": (),
    "grpo": (
        *(*REWARDED, "custom.trainer_variant=grpo"),
        *("custom.extra.grpo.beta=0.1", "custom.extra.grpo.num_iterations=2"),
    ),
    "vineppo": (
        *(*REWARDED, "custom.trainer_variant=vineppo", "custom.extra.vineppo.num_continuations=2"),
        *("custom.extra.vineppo.steps=tokens", "custom.extra.vineppo.step_tokens=1"),
    ),
}
STEPS = 3
TOLERANCE, STEP_TOLERANCE = 1e-4, 1e-3
"""Relative, of losses and weights, and of what the weights have moved by: float32, sums over ranks in another order."""


PATHS = {"PYTHONPATH": f"{ROOT / 'impl'}:{ROOT}"}


def scattered(answer, sample):
    """A reward by which the answers of a group differ."""
    return sum(map(ord, answer)) % 7 / 7


def write_brief(folder):
    """The cut model, which ends most answers within four tokens: one that was cut off earns nothing in VinePPO."""
    file, vocabulary = write_cut(folder) / "model.safetensors", template_of().vocabulary
    weights = load_file(file)
    embedding = weights["model.language_model.embed_tokens.weight"]  # the head, too
    embedding[vocabulary.stop_id] = 2.3 * embedding[list(vocabulary.coord_ids)].mean(0)  # it writes coordinates
    save_file(weights, file, metadata={"format": "pt"})
    return folder


def command(url, out, model, strategy, *overrides):
    """A rank of ``rollmatch train``."""
    server = (f"{VLLM}.server.base_url={url}", f"{VLLM}.server.group_port={free_port()}")
    names = (f"training.output_dir={out}", f"model.model={model}", f"training.strategy={strategy}")
    words = cli_command("train", CONFIG, *BESIDE_DOUBLES, *STEADY, *server, *names, *overrides)[3:]
    return (python_of("deepspeed"), "-c", IN_HEAD, *words)


def learned(folder, model, strategy, *overrides, until=(STEPS,)):
    """Losses, and weights at the end, of a run that stops and is continued after each of the steps ``until``."""
    (out := folder / "run").parent.mkdir()
    for number, num_steps in enumerate(until):
        with serving(AnsweringServer(cut(load_model()), template_of())) as (url,):
            more = ("--set", f"training.max_steps={num_steps}", *(["--resume"] if number else []))
            (logs := folder / str(number)).mkdir()
            finish_ranks(logs, 2, *command(url, out, model, strategy, *overrides), *more, **PATHS)
    file = "adapter_model" if "tuner.train_type=lora" in overrides else "model"
    return SimpleNamespace(
        losses=[event["loss"] for event in journal_of(out, "step")],
        weights=load_file(out / f"checkpoint-{STEPS}" / f"{file}.safetensors"),
    )


def distance(some, others):
    """Of all weights together that both have."""
    return torch.cat([(some[name] - others[name]).flatten() for name in sorted(some.keys() & others.keys())]).norm()


@pytest.mark.scenario(clauses=["learner-ranks/the-policy-is-shared-as-configured-or-not-at-all#4"])
@pytest.mark.parametrize("objective", OBJECTIVES)
@pytest.mark.parametrize(
    ("strategies", "overrides"),
    [(("deepspeed_zero2", "deepspeed_zero3"), ()), (("deepspeed_zero2", "deepspeed_zero3"), ADAPTERS)],
    ids=["full", "adapters"],
)
def test_deepspeed_learns_what_ddp_learns_and_is_continued(strategies, overrides, objective, tmp_path):
    runs, model = {}, write_brief(tmp_path / "model")
    start = load_file(model / "model.safetensors")
    if overrides:  # random adapters are others where the model is read in parts
        load_policy(ModelConfig(model=str(model)), LORA).save_pretrained(tmp_path / "adapter")
        start = load_file(tmp_path / "adapter/adapter_model.safetensors")
        overrides = (*overrides, f"model.adapter={tmp_path / 'adapter'}", "model.adapter_start=continue")
    overrides = (*overrides, *OBJECTIVES[objective])
    for strategy in ("ddp", *strategies):
        until = (STEPS,) if strategy == "ddp" else (STEPS - 1, STEPS)
        runs[strategy] = learned(tmp_path / strategy, model, strategy, *overrides, until=until)
    whole = runs.pop("ddp")
    assert len(whole.losses) == STEPS
    for split in runs.values():
        check_alike(split, whole)
        assert distance(split.weights, whole.weights) <= STEP_TOLERANCE * distance(whole.weights, start)
        assert distance(whole.weights, start) > 0


def check_alike(split, whole):
    assert split.losses == pytest.approx(whole.losses, rel=TOLERANCE, abs=1e-6)
    assert whole.weights.keys() <= split.weights.keys()  # a tied head is written, too
    for name, weight in whole.weights.items():
        assert (split.weights[name] - weight).norm() <= TOLERANCE * weight.norm(), name


@pytest.mark.scenario(clauses=["learner-ranks/the-policy-is-shared-as-configured-or-not-at-all#4"])
@pytest.mark.parametrize("overrides", [(), ("tuner.train_type=lora", "tuner.lora_rank=2")], ids=["full", "adapters"])
def test_an_adapter_is_merged_at_the_start_into_weights_that_ranks_hold_in_parts(overrides, tmp_path):
    model = write_cut(tmp_path / "model")
    adapted = load_policy(ModelConfig(model=str(model)), LORA)
    perturb(adapted, seed=1, scale=0.5)  # a fresh adapter changes nothing
    adapted.save_pretrained(tmp_path / "adapter")
    merged = f"model.adapter={tmp_path / 'adapter'}"
    whole, split = (
        learned(tmp_path / strategy, model, strategy, merged, *overrides) for strategy in ("ddp", "deepspeed_zero3")
    )
    without = learned(tmp_path / "without", model, "ddp", *overrides)
    assert split.losses[0] == pytest.approx(whole.losses[0], rel=TOLERANCE)
    assert whole.losses[0] != pytest.approx(without.losses[0], rel=TOLERANCE)
    if not overrides:  # random adapters are others where the model is read in parts
        check_alike(split, whole)


@pytest.mark.scenario(clauses=["learner-ranks/the-policy-is-shared-as-configured-or-not-at-all#9"])
@pytest.mark.parametrize("name", ["old", "reference"])
def test_scoring_is_refused_where_only_some_ranks_have_images(name, tmp_path):
    model, record = write_cut(tmp_path / "model"), json.loads((CONFIG.parent / "train.jsonl").open().readline())
    image = {**record, "images": [str(CONFIG.parent / record["images"][0])]}
    text = {"messages": [{"role": "user", "content": "What is it?"}]}
    (tmp_path / "train.jsonl").write_text(f"{json.dumps(image)}\n{json.dumps(text)}\n")
    more = [*OBJECTIVES["grpo"], f"custom.train_jsonl={tmp_path / 'train.jsonl'}"]
    more += ["training.per_device_train_batch_size=1"]
    more += ["custom.extra.grpo.beta=0"] if name == "old" else ["custom.extra.grpo.num_iterations=1"]
    with (
        serving(AnsweringServer(cut(load_model()), template_of())) as (url,),
        started_ranks(tmp_path, 2, *command(url, tmp_path / "run", model, "deepspeed_zero3", *more), **PATHS) as ranks,
    ):
        assert [rank.wait() for rank in ranks] == [1, 1]
        assert "[images-on-some-ranks] training.strategy: step 0: rank" in ranks[0].output()
    assert not journal_of(tmp_path / "run", "packed"), "before the micro-batches that would be refused, too"
