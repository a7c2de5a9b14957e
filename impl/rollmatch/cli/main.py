"""``rollmatch``: check, plan, train, serve, up, schema, doctor. Heavy packages are imported only by what needs them."""

import argparse
import importlib.util
import os
import sys
from collections.abc import Sequence
from functools import cache
from pathlib import Path
from typing import NoReturn

from rollmatch import __version__
from rollmatch.cli import add_coords as adding_coords
from rollmatch.cli import convert as converting
from rollmatch.cli import evaluate as evaluating
from rollmatch.cli import export as exporting
from rollmatch.cli import import_config as importing
from rollmatch.cli import judging, nodes, planning, server_arguments, up, vectors
from rollmatch.cli import schema as schemas
from rollmatch.cli import vllm_serve as vllm_serving
from rollmatch.cli.numbers import positive, seconds
from rollmatch.cli.processes import parse_gpus, visible
from rollmatch.cli.storage import storage_error
from rollmatch.config import RunConfig, load_config, resolved_yaml
from rollmatch.config.effective import max_model_len, tensor_parallel_rule
from rollmatch.data import BadSamples, LazySamples
from rollmatch.data.splits import origin_of
from rollmatch.errors import ErrorList, RollmatchError
from rollmatch.records import Sample
from rollmatch.startup import loading, run_process

TRACEBACK_VARIABLE = "ROLLMATCH_TRACEBACK"
"""Set to 1, it shows where in the code an error was raised."""
PACKAGED = {"judge": judging.judge, "judge-trainer": judging.judge_trainer, "vectors": vectors.vectors}
"""Commands of a package of its own, with its own options."""


def main(arguments: Sequence[str] | None = None) -> int:
    """Run one command. Returns 0, or 1 after printing problems to stderr; wrong usage exits with 2."""
    try:
        words = sys.argv[1:] if arguments is None else list(arguments)
        if words and (packaged := PACKAGED.get(words[0])):
            return packaged(words[1:])
        options = make_parser().parse_args(words)
        return int(options.command(options) or 0)
    except Exception as error:
        named = error if isinstance(error, RollmatchError) else storage_error(error)
        if named is None or os.environ.get(TRACEBACK_VARIABLE) == "1":
            raise
        print(format_error(named), file=sys.stderr)
        return 1


def run() -> NoReturn:
    """``main`` as a process of its own."""
    run_process(main, with_traceback=os.environ.get(TRACEBACK_VARIABLE) == "1")


def format_error(error: RollmatchError) -> str:
    """An error as a numbered list of problems, each with its remedy."""
    shown, num_hidden = _unfold(error)
    num_problems = len(shown) + num_hidden
    lines = [f"rollmatch: {num_problems} problem{'s' * (num_problems != 1)}"]
    lines += [f"{number:3}. {_lines_of(problem)}" for number, problem in enumerate(shown, start=1)]
    if num_hidden:
        lines.append(f"     ... and {num_hidden} more")
    return "\n".join(lines)


def _lines_of(error: RollmatchError) -> str:
    where = f"{error.key}: " if error.key else ""
    return f"[{error.code}] {where}{error.problem}" + (f"\n     {error.remedy}" if error.remedy else "")


def _unfold(error: RollmatchError) -> tuple[list[RollmatchError], int]:
    """The single errors inside, and how many of a data set's are left out."""
    if isinstance(error, BadSamples):
        num_shown = len(error.errors) - error.num_hidden
        return list(error.errors[:num_shown]), error.num_hidden
    if not isinstance(error, ErrorList):
        return [error], 0
    parts = [_unfold(part) for part in error.errors]
    return [single for singles, _ in parts for single in singles], sum(num_hidden for _, num_hidden in parts)


@cache
def make_parser() -> argparse.ArgumentParser:
    """Every command with its options, made once in a process: it takes 10 ms, and tests call thousands of commands."""
    parser = argparse.ArgumentParser(prog="rollmatch", description="Train a model on its own rollouts.")
    parser.add_argument("--version", action="version", version=f"rollmatch {__version__}")
    commands = parser.add_subparsers(required=True, metavar="COMMAND")
    _add_check(commands)
    plan = commands.add_parser("plan", help="find the best split of GPUs between servers and learners; starts nothing")
    planning.add_arguments(_add_config(plan, planning.plan))
    _add_train(commands)
    _add_serve(commands)
    up.add_arguments(_add_config(commands.add_parser("up", help="run servers and learner on a Ray cluster"), up.up))
    vllm_serve = commands.add_parser("vllm-serve", help="start a rollout server by TRL's arguments, without a YAML")
    vllm_serving.add_arguments(vllm_serve)
    vllm_serve.set_defaults(command=vllm_serving.vllm_serve)
    _add_pages(commands)
    evaluated = commands.add_parser("eval", help="judge a run's policy, or a model, on one split: COCO AP and F1")
    evaluating.add_arguments(evaluated)
    evaluated.set_defaults(command=evaluating.evaluate)
    exported = commands.add_parser("export", help="write a run's policy as a model directory")
    exporting.add_arguments(exported)
    exported.set_defaults(command=exporting.export)
    adding_coords.add_command(commands.add_parser("model", help="prepare a model for training"))
    _add_data(commands.add_parser("data", help="convert detection data sets"))
    imported = commands.add_parser("import-config", help="turn a GRPO configuration of TRL or ms-swift into ours")
    importing.add_arguments(imported)
    imported.set_defaults(command=importing.import_config)
    _add_judges(commands)
    proved = commands.add_parser("vectors", help="prove another implementation by portable vectors (same package)")
    proved.add_argument("words", nargs="...", metavar="run COMMAND ...", help="options: see rollmatch vectors --help")
    schemas.add_command(commands.add_parser("schema", help="print the JSON Schema of the YAML, for editors"))
    doctor = commands.add_parser("doctor", help="check this machine and its packages")
    doctor.add_argument("--fix", action="store_true", help="repair problems that can be repaired")
    doctor.set_defaults(command=_doctor)
    return parser


def _add_check(commands: "argparse._SubParsersAction[argparse.ArgumentParser]") -> None:
    text = "check configuration, files, samples and rewards; starts nothing"
    check = _add_config(commands.add_parser("check", help=text), _check)
    check.add_argument("--gpus", type=parse_gpus, metavar="LIST", help="GPUs of the learner, to check its ranks, too")
    check.add_argument("--nnodes", type=positive, metavar="N", help="machines of the learner, each with --gpus")


def _add_judges(commands: "argparse._SubParsersAction[argparse.ArgumentParser]") -> None:
    judged = commands.add_parser("judge", help="judge a running rollout server (package rollmatch-conformance)")
    judged.add_argument("words", nargs="...", metavar="URL ...", help="options: see rollmatch judge --help")
    judged = commands.add_parser("judge-trainer", help="judge a trainer by what it does to a server (same package)")
    judged.add_argument("words", nargs="...", metavar="... -- COMMAND", help="see rollmatch judge-trainer --help")


def _add_train(commands: "argparse._SubParsersAction[argparse.ArgumentParser]") -> None:
    train = commands.add_parser("train", help="train the policy")
    _add_config(train, _train)
    train.add_argument(
        "--resume", action="store_true", help="continue from the newest whole checkpoint in training.output_dir"
    )
    train.add_argument("--overwrite", action="store_true", help="delete the run in training.output_dir and start over")
    train.add_argument("--gpus", type=parse_gpus, metavar="LIST", help="GPUs such as 6,7; one learner process per GPU")
    nodes.add_arguments(train)
    train.add_argument(
        "--wait-timeout", type=seconds, metavar="SECONDS", help="limit of the wait for healthy rollout servers"
    )
    train.add_argument("--server-pid", type=positive, metavar="PID", help="stop the wait when this process ends")
    engines = ("rollmatch", "swift")
    train.add_argument(
        "--engine", choices=engines, default=engines[0], help="learner; swift is ms-swift's own, for GRPO"
    )
    train.add_argument("--dry-run", action="store_true", help="print the command and its environment; start nothing")
    server_arguments.add_arguments(train)


def _add_serve(commands: "argparse._SubParsersAction[argparse.ArgumentParser]") -> None:
    serve = commands.add_parser("serve", help="start a rollout server")
    _add_config(serve, _serve)
    serve.add_argument(
        "--gpus", type=parse_gpus, metavar="LIST", help="GPUs such as 0,1,2; on CPU, one replica per entry"
    )
    serve.add_argument(
        "--server", type=int, metavar="INDEX", help="index of the server to start, if the YAML names several"
    )
    serve.add_argument("--dry-run", action="store_true", help="print the command and its environment; start nothing")


def _add_pages(commands: "argparse._SubParsersAction[argparse.ArgumentParser]") -> None:
    page = commands.add_parser("page", help="write the page of a run that is under way, or was cut off")
    page.add_argument("run", type=Path, metavar="RUN", help="run directory")
    page.set_defaults(command=_page)
    compare = commands.add_parser("compare", help="write one page about several runs")
    compare.add_argument("runs", type=Path, nargs="+", metavar="RUN", help="run directories, two to six")
    compare.add_argument("--out", type=Path, default=Path("compare.html"), metavar="FILE", help="default: compare.html")
    compare.set_defaults(command=_compare)


def _page(options: argparse.Namespace) -> None:
    from rollmatch.report.page import write_page

    print(write_page(options.run))


def _compare(options: argparse.Namespace) -> None:
    from rollmatch.report.compare import write_comparison

    print(write_comparison(options.runs, options.out))


def _add_data(parser: argparse.ArgumentParser) -> None:
    convert = parser.add_subparsers(required=True, metavar="COMMAND").add_parser(
        "convert", help="COCO, LVIS, YOLO and ms-swift data sets to ours, and back"
    )
    converting.add_arguments(convert)
    convert.set_defaults(command=converting.convert)


def _add_config(parser: argparse.ArgumentParser, command: object) -> argparse.ArgumentParser:
    parser.add_argument("config", metavar="CONFIG", help="YAML file")
    text = "override one key of the YAML; can be repeated"
    parser.add_argument("--set", action="append", default=[], dest="overrides", metavar="a.b=VALUE", help=text)
    parser.set_defaults(command=command)
    return parser


def _check(options: argparse.Namespace) -> None:
    from rollmatch.cli.preflight import load_checked
    from rollmatch.cli.strategy_check import check_strategy
    from rollmatch.model.source import with_local_model

    num_ranks = nodes.num_ranks(options)
    config = with_local_model(load_config(options.config, options.overrides))
    train, val = load_checked(config)
    check_strategy(config, learner_world_size=num_ranks)
    nodes.check_servers_reachable(config, num_nodes=options.nnodes)
    prompts = _prompts(config, train, val)
    print(resolved_yaml(config))
    print(f"train: {_count(train)}  ({origin_of(config.custom, 'train')})")
    print(f"val: {_count(val)}  ({origin_of(config.custom, 'val')})")
    print(f"longest segment: {config.global_max_length} tokens, prompt and response: {max_model_len(config)} tokens")
    for line in prompts:
        print(line)
    print(f"tensor_parallel_size: {tensor_parallel_rule(config)}")
    if num_ranks is not None:
        print(f"learner ranks: {num_ranks} on {options.nnodes or 1} nodes")


def _prompts(config: RunConfig, train: Sequence[Sample], val: Sequence[Sample]) -> list[str]:
    """Lengths of prompts, where the packages that render them are installed."""
    if importlib.util.find_spec("torch") is None or importlib.util.find_spec("transformers") is None:
        return ["prompts: not counted, because torch or transformers is not installed"]
    from rollmatch.cli.preflight import check_training_arguments

    check_training_arguments(config.training)
    with loading():
        from rollmatch.cli.prompts import read_prompts
    _, *found = read_prompts(config, train, val)
    return [
        f"{name} prompts: at most {fit.longest} tokens ({fit.origin}), {fit.limit} fit; "
        f"{fit.num_skipped} skipped, {fit.num_cut} truncated"
        for name, fit in zip(("train", "val"), found)
    ]


def _count(samples: Sequence[Sample]) -> str:
    if isinstance(samples, LazySamples):
        objects = "" if samples.num_objects is None else f", {samples.num_objects} objects"
        return f"{len(samples)} samples{objects}, read when they are used"
    return f"{len(samples)} samples, {sum(len(sample.objects) for sample in samples)} objects"


def _train(options: argparse.Namespace) -> int:
    from rollmatch.cli.learner import launch, shown_command, train
    from rollmatch.cli.server_checks import WaitPolicy

    placement = nodes.Placement(gpus=options.gpus or (), nodes=nodes.nodes_of(options))
    options.overrides = [*options.overrides, *server_arguments.overrides_of(options)]  # the parser keeps its default
    if options.use_vllm_server:
        server_arguments.check_used(load_config(options.config, options.overrides))
    arguments = [part for override in options.overrides for part in ("--set", override)]
    arguments += [f"--{name}" for name in ("resume", "overwrite") if getattr(options, name)]
    wait = WaitPolicy(timeout_s=options.wait_timeout, server_pid=options.server_pid)
    if options.engine == "swift":
        from rollmatch.cli.swift_cli import train_by_swift

        nodes.check_swift(placement.nodes)
        return train_by_swift(
            options.config, overrides=options.overrides, gpus=placement.gpus, wait=wait, dry_run=options.dry_run
        )
    if options.dry_run:
        load_config(options.config, options.overrides)
        print(shown_command(options.config, arguments, placement))
        return 0
    if placement.is_launched:
        return launch(options.config, arguments, placement, overrides=options.overrides, wait=wait)
    os.environ.update(visible(placement.gpus) if placement.gpus else {})
    return train(
        options.config, overrides=options.overrides, resume=options.resume, overwrite=options.overwrite, wait=wait
    )


def _serve(options: argparse.Namespace) -> int:
    from rollmatch.cli.rollout_server import serve

    return serve(
        options.config,
        overrides=options.overrides,
        gpus=options.gpus,
        server_index=options.server,
        dry_run=options.dry_run,
    )


def _doctor(options: argparse.Namespace) -> int:
    from rollmatch.cli.doctor import doctor

    return doctor(fix=options.fix)
