"""``rollmatch train`` on two ranks that share the policy by the installed DeepSpeed, on CPUs: it learns as DDP does.

The loss is scored inside the head, as on GPUs. Each DeepSpeed run is continued from its checkpoint for the last step.
"""

from types import SimpleNamespace

import pytest
from safetensors.torch import load_file

from conformance.cli.division import BESIDE_DOUBLES, VLLM
from conformance.cli.started import cli_command, finish_ranks, journal_of
from conformance.doubles.answering_server import AnsweringServer
from conformance.outside_tools import deepspeed_python
from conformance.rollout.digits import CONFIG, ROOT, cut, load_model, template_of, write_cut
from conformance.server.instance import free_port
from conformance.weights.native_double import serving
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
STEPS = 3
TOLERANCE = 1e-4
"""Relative: float32, and sums over ranks in another order."""


def learned(folder, model, strategy, *overrides, until=(STEPS,)):
    """Losses, and weights at the end, of a run that stops and is continued after each of the steps ``until``."""
    (out := folder / "run").parent.mkdir()
    python_path = {"PYTHONPATH": f"{ROOT / 'impl'}:{ROOT}"}
    for number, num_steps in enumerate(until):
        with serving(AnsweringServer(cut(load_model()), template_of())) as (url,):
            server = (f"{VLLM}.server.base_url={url}", f"{VLLM}.server.group_port={free_port()}")
            names = (f"training.output_dir={out}", f"model.model={model}", f"training.strategy={strategy}")
            words = cli_command("train", CONFIG, *BESIDE_DOUBLES, *STEADY, *server, *names, *overrides)[3:]
            more = ("--set", f"training.max_steps={num_steps}", *(["--resume"] if number else []))
            (logs := folder / str(number)).mkdir()
            finish_ranks(logs, 2, deepspeed_python(), "-c", IN_HEAD, *words, *more, **python_path)
    file = "adapter_model" if "tuner.train_type=lora" in overrides else "model"
    return SimpleNamespace(
        losses=[event["loss"] for event in journal_of(out, "step")],
        weights=load_file(out / f"checkpoint-{STEPS}" / f"{file}.safetensors"),
    )


@pytest.mark.scenario(clauses=["learner-ranks/the-policy-is-shared-as-configured-or-not-at-all#4"])
@pytest.mark.parametrize(
    ("strategies", "overrides"),
    [(("deepspeed_zero2", "deepspeed_zero3"), ()), (("deepspeed_zero3",), ADAPTERS)],
    ids=["full", "adapters"],
)
def test_deepspeed_learns_what_ddp_learns_and_is_continued(strategies, overrides, tmp_path):
    runs, model = {}, write_cut(tmp_path / "model")
    if overrides:  # random adapters are others where the model is read in parts
        load_policy(ModelConfig(model=str(model)), LORA).save_pretrained(tmp_path / "adapter")
        overrides = (*overrides, f"model.adapter={tmp_path / 'adapter'}", "model.adapter_start=continue")
    for strategy in ("ddp", *strategies):
        until = (STEPS,) if strategy == "ddp" else (STEPS - 1, STEPS)
        runs[strategy] = learned(tmp_path / strategy, model, strategy, *overrides, until=until)
    whole = runs.pop("ddp")
    assert len(whole.losses) == STEPS
    for split in runs.values():
        assert split.losses == pytest.approx(whole.losses, rel=TOLERANCE)
        assert whole.weights.keys() <= split.weights.keys()  # a tied head is written, too
        for name, weight in whole.weights.items():
            assert (split.weights[name] - weight).norm() <= TOLERANCE * weight.norm(), name
