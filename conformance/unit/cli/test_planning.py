"""What ``rollmatch plan`` prints of a proposal, and by which options it is made."""

import io
import json
from types import SimpleNamespace

import pytest
from rich.console import Console

from conformance.doubles.digits import absolute
from conformance.doubles.division import GRPO
from conformance.doubles.refusals import refused
from rollmatch.cli import plan as planning
from rollmatch.cli.main import main
from rollmatch.config import load_config
from rollmatch.plan.forecast import Site, make_forecaster
from rollmatch.plan.memory import LearnerMemory


def forecast_of(split="3 + 1", *, cache=3e9, problem="", reference=0.0):
    parts = {"weights": 1.26e9, "learning": 2e9, "activations": 3e9, "head": 4e9, "overhead": 5e9, "teachers": 0.0}
    learner = LearnerMemory(reference=reference, averages=reference / 2, **parts)
    return SimpleNamespace(
        split=split, server=SimpleNamespace(weights=2e9, cache=cache, num_requests=7), gpu_bytes=8e9,
        learner=learner, learner_bytes=18e9,
        rollout_s=1.26, score_s=0.5, learn_s=2.0, sync_s=0.126, step_s=4.0, rollouts_per_s=1.234, problem=problem,
        layout="a layout",
    )  # fmt: skip


@pytest.mark.parametrize("reference", [0.0, 6e9])
def test_the_best_split_is_named_with_what_it_assumes(reference):
    best, text = forecast_of(reference=reference), io.StringIO()
    other = forecast_of("2 + 2", cache=-9e9, problem="too large")
    proposal = SimpleNamespace(forecasts=[other, best], best=best, assumptions=["one", "two"])
    planning.print_proposal(proposal, Console(file=text, width=120, highlight=False))
    shown = text.getvalue()
    rows = [[cell.strip() for cell in line.strip("│").split("│")] for line in shown.splitlines() if "of 18 GB" in line]
    seconds = ("1.3 s", "0.5 s", "2.0 s", "0.13 s", "4.0 s")
    assert rows == [
        ["2 + 2", "2 of 8 GB", "7", "15 of 18 GB", *seconds, "1.23", "too large"],
        ["3 + 1", "5 of 8 GB", "7", f"{24 if reference else 15} of 18 GB", *seconds, "1.23", "best"],
    ]
    held = "reference 6.0 GB, averages 3.0 GB, " if reference else ""
    assert shown.splitlines()[-5:] == [
        "best: 3 + 1, 1.23 rollouts/s: a layout",
        f"learner: weights 1.3 GB, learning 2.0 GB, activations 3.0 GB, {held}head 4.0 GB, overhead 5.0 GB",
        *("assumed:", "  - one", "  - two"),
    ]
    header = next(line for line in shown.splitlines() if "split" in line)
    assert all(
        word in header for word in ("engine", "requests", "learner", "rollout", "score", "learn", "sync", "step")
    )


def test_the_json_of_a_plan_is_written_for_people_too(capsys):
    sets = [part for override in absolute() for part in ("--set", override)]
    where = ["--gpus", "4", "--prompt-tokens", "100", "--response-tokens", "50", "--json"]
    assert main(["plan", str(GRPO), *where, *sets]) == 0
    text = capsys.readouterr().out
    read = json.loads(text)
    assert text == json.dumps(read, indent=2) + "\n"
    names = [each["name"] for each in read["forecasts"]]
    assert read["best"] in names
    assert read["assumptions"]
    assert (
        max(read["forecasts"], key=lambda each: each["rollouts_per_s"] * (not each["problem"]))["name"] == read["best"]
    )
    with refused("rates-invalid"):
        unheard = Site(gpu="unheard-of", nodes=(4,))
        make_forecaster(
            load_config(GRPO, absolute()), unheard, rates_file=None, prompt_tokens=None, response_tokens=None
        )
