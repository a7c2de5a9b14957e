"""``rollmatch plan``: splits of GPUs between generation and learning, with memory and seconds of each."""

import argparse
import json
from dataclasses import asdict
from pathlib import Path

from rich.console import Console
from rich.table import Table

from rollmatch.cli.configured import add_config
from rollmatch.cli.numbers import positive
from rollmatch.config import load_config
from rollmatch.plan.forecast import Forecast, Site, make_forecaster
from rollmatch.plan.proposal import Proposal, propose


def add_command(commands: "argparse._SubParsersAction[argparse.ArgumentParser]") -> None:
    """Add the command with its options."""
    parser = commands.add_parser(
        "plan", help="find the best split of GPUs between servers and learners; starts nothing"
    )
    add_config(parser, plan)
    parser.add_argument("--gpus", type=positive, required=True, metavar="N", help="GPUs per node")
    parser.add_argument(
        "--nodes", "--nnodes", type=positive, default=1, metavar="N", help="number of nodes (default: 1)"
    )
    add_forecast_arguments(parser, default_gpu="H200")
    parser.add_argument("--json", action="store_true", help="print JSON")


def add_forecast_arguments(parser: argparse.ArgumentParser, *, default_gpu: str | None) -> None:
    """Add what a forecast rests on beside the GPUs; without a default, the GPU model is read from the cluster."""
    text = f"GPU model, as named in the rates (default: {default_gpu or 'as the cluster says'})"
    parser.add_argument("--gpu", default=default_gpu, metavar="NAME", help=text)
    parser.add_argument("--rates", type=Path, metavar="FILE", help="YAML file with your own measured rates")
    text = "prompt length in tokens (default: the rest of global_max_length)"
    parser.add_argument("--prompt-tokens", type=positive, metavar="N", help=text)
    text = "mean response length in tokens (default: max_new_tokens)"
    parser.add_argument("--response-tokens", type=positive, metavar="N", help=text)


def plan(options: argparse.Namespace) -> int:
    """Print the plan. Errors: those of the configuration, ``shape-unknown``, ``rates-invalid``, ``NothingFits``."""
    site = Site(gpu=options.gpu, nodes=(options.gpus,) * options.nodes)
    forecaster = make_forecaster(
        load_config(options.config, options.overrides),
        site,
        rates_file=options.rates,
        prompt_tokens=options.prompt_tokens,
        response_tokens=options.response_tokens,
    )
    proposal = propose(forecaster)
    if options.json:
        print(json.dumps(_as_json(proposal), indent=2))
    else:
        print_proposal(proposal, Console(width=120, highlight=False))
    return 0


def print_proposal(proposal: Proposal, console: Console) -> None:
    """Print a table of all splits, the best one, and the assumptions."""
    seconds = ("rollout", "score", "learn", "sync", "step")
    table = Table("split", "engine", "requests", "learner", *seconds, "rollouts/s", "")
    for forecast in proposal.forecasts:
        table.add_row(*_row(forecast, is_best=forecast is proposal.best))
    console.print(table)
    learner = proposal.best.learner
    parts = [name for name, size in asdict(learner).items() if size]
    console.print(f"best: {proposal.best.split}, {proposal.best.rollouts_per_s:.2f} rollouts/s: {proposal.best.layout}")
    console.print(
        "learner: " + ", ".join(f"{name} {getattr(learner, name) / 1e9:.1f} GB" for name in parts), soft_wrap=True
    )
    console.print("assumed:")
    for line in proposal.assumptions:
        console.print(f"  - {line}")


def _row(forecast: Forecast, *, is_best: bool) -> list[str]:
    server, size = forecast.server, forecast.gpu_bytes / 1e9
    return [
        str(forecast.split),
        f"{(server.weights + max(0.0, server.cache)) / 1e9:.0f} of {size:.0f} GB",
        str(server.num_requests),
        f"{forecast.learner.total / 1e9:.0f} of {forecast.learner_bytes / 1e9:.0f} GB",
        *(f"{seconds:.1f} s" for seconds in (forecast.rollout_s, forecast.score_s, forecast.learn_s)),
        f"{forecast.sync_s:.2f} s",
        f"{forecast.step_s:.1f} s",
        f"{forecast.rollouts_per_s:.2f}",
        forecast.problem or ("best" if is_best else ""),
    ]


def _as_json(proposal: Proposal) -> dict[str, object]:
    def one(forecast: Forecast) -> dict[str, object]:
        named = {"name": str(forecast.split), "rollouts_per_s": forecast.rollouts_per_s, "problem": forecast.problem}
        return named | asdict(forecast)

    return {
        "best": str(proposal.best.split),
        "forecasts": [one(forecast) for forecast in proposal.forecasts],
        "assumptions": list(proposal.assumptions),
    }
