"""``rollmatch check``: configuration, files, samples and rewards; starts nothing."""

import argparse
import importlib.util
from collections.abc import Sequence

from rollmatch.cli.configured import add_config
from rollmatch.cli.numbers import positive
from rollmatch.config import RunConfig, load_config, resolved_yaml
from rollmatch.config.custom import CustomConfig
from rollmatch.config.effective import learner_dtype, max_model_len, tensor_parallel_rule
from rollmatch.config.schema import set_yaml
from rollmatch.config.servers import is_colocated
from rollmatch.data import LazySamples
from rollmatch.data.splits import origin_of
from rollmatch.errors import ConfigError
from rollmatch.launch.processes import parse_gpus
from rollmatch.plan.memory import average_bytes, teacher_bytes
from rollmatch.plan.shape import read_shape, read_teachers
from rollmatch.records import Sample
from rollmatch.run.server_checks import check_servers_reachable
from rollmatch.startup import loading


def add_command(commands: "argparse._SubParsersAction[argparse.ArgumentParser]") -> None:
    """Add the command with its options."""
    text = "check configuration, files, samples and rewards; starts nothing"
    check = add_config(commands.add_parser("check", help=text), _check)
    check.add_argument("--gpus", type=parse_gpus, metavar="LIST", help="GPUs of the learner, to check its ranks, too")
    check.add_argument("--all", action="store_true", help="print every key, not only what differs from its default")
    check.add_argument("--nnodes", type=positive, metavar="N", help="machines of the learner, each with --gpus")


def _check(options: argparse.Namespace) -> None:
    from rollmatch.model.source import with_local_model
    from rollmatch.run.preflight import load_checked
    from rollmatch.run.strategy_check import check_strategy

    num_ranks = _num_ranks(options)
    config = with_local_model(load_config(options.config, options.overrides))
    warnings: list[str] = []
    train, val = load_checked(config, warnings.append)
    check_strategy(config, learner_world_size=num_ranks)
    check_servers_reachable(config, num_nodes=options.nnodes)
    prompts = _prompts(config, train, val)
    print(resolved_yaml(config) if options.all else set_yaml(config))
    print(f"train: {_count(train, config.custom)}  ({origin_of(config.custom, 'train')})")
    counted = f"{_count(val, config.custom)}  ({origin_of(config.custom, 'val')})"
    print(f"val: {counted if config.custom.is_evaluated else 'none; not evaluated'}")
    print(f"longest segment: {config.global_max_length} tokens, prompt and response: {max_model_len(config)} tokens")
    for line in prompts:
        print(line)
    for line in _teachers(config):
        print(line)
    if is_colocated(config):
        print(f"tensor_parallel_size: {tensor_parallel_rule(config)}")
    if num_ranks is not None:
        print(f"learner ranks: {num_ranks} on {options.nnodes or 1} nodes")
    for warning in warnings:
        print(f"warning: {warning}")
    print(f"ok; warnings: {len(warnings)}" if warnings else "ok: nothing is wrong")


def _prompts(config: RunConfig, train: Sequence[Sample], val: Sequence[Sample]) -> list[str]:
    """Lengths of prompts, where the packages that render them are installed."""
    if importlib.util.find_spec("torch") is None or importlib.util.find_spec("transformers") is None:
        return ["prompts: not counted, because torch or transformers is not installed"]
    from rollmatch.run.preflight import check_training_arguments

    check_training_arguments(config.training)
    with loading():
        from rollmatch.run.policy_check import check_policy
        from rollmatch.run.prompts import find_long_answers, read_prompts
    check_policy(config)
    template, *found = read_prompts(config, train, val)
    if (problem := find_long_answers(config, template, found[0].samples)) is not None:
        raise problem
    return [
        f"{name} prompts: at most {fit.longest} tokens ({fit.origin}), {fit.limit} fit; "
        f"{fit.num_skipped} skipped, {fit.num_cut} truncated"
        for name, fit in zip(("train", "val"), found)
        if fit.samples
    ]


def _teachers(config: RunConfig) -> list[str]:
    """Memory of what teaches in the learner's process; models and averages that are not there are left out."""
    entries = config.custom.extra.distill.teachers
    if not any(one.model or one.average is not None for one in entries):
        return []
    try:
        shape, models = read_shape(config.model.model, dtype=learner_dtype(config)), read_teachers(config)
    except ConfigError as error:
        return [f"teachers: memory is not counted: {error.problem}"]
    sizes = {"models": teacher_bytes(models), "averages": average_bytes(config, shape)}
    parts = [f"{name} {size / 1e9:.2g} GB" for name, size in sizes.items() if size]
    return [f"teachers: {', '.join(parts)} beside the policy"]


def _count(samples: Sequence[Sample], custom: CustomConfig) -> str:
    num = samples.num_objects if isinstance(samples, LazySamples) else sum(len(sample.objects) for sample in samples)
    objects = f", {num} objects" if num or custom.detects else ""
    kept = f", read when they are used{samples.shown_dropped}" if isinstance(samples, LazySamples) else ""
    return f"{len(samples)} samples{objects}{kept}"


def _num_ranks(options: argparse.Namespace) -> int | None:
    """Learner ranks; None where neither GPUs nor machines are named."""
    if options.gpus is None and options.nnodes is None:
        return None
    return (options.nnodes or 1) * max(1, len(options.gpus or ()))
