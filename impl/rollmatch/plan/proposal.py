"""All splits of a site with the one to take, and what they rest on."""

from collections.abc import Sequence
from dataclasses import dataclass

from rollmatch.config.servers import uses_servers
from rollmatch.config.strategy import read_strategy
from rollmatch.errors import LaunchError
from rollmatch.plan.forecast import SHORTEST_STEP_S, SYNC_LATENCY_S, Forecast, Forecaster
from rollmatch.plan.memory import ENGINE_BYTES, HEAD_BYTES, OVERHEAD_BYTES
from rollmatch.plan.rates import decode_source
from rollmatch.plan.workload import splits_of


class NothingFits(LaunchError):
    """No split of the GPUs fits engine and learner."""

    code = "nothing-fits"


@dataclass(frozen=True, slots=True, kw_only=True)
class Proposal:
    """What to print."""

    forecasts: Sequence[Forecast]
    best: Forecast
    assumptions: Sequence[str]


def propose(forecaster: Forecaster, *, key: str = "--gpus") -> Proposal:
    """The split with most rollouts a second among those that fit; ``key`` is what named the GPUs.

    Errors: ``too-few-gpus``, ``NothingFits``.
    """
    config, site = forecaster.config, forecaster.site
    colocated = not uses_servers(config)
    size = config.custom.extra.rollout_matching.vllm.tensor_parallel_size
    tp = (size or 1) if colocated else config.custom.extra.rollout_server.vllm_tensor_parallel_size
    num_gpus = site.num_gpus
    fewest = 2 if read_strategy(config.training.strategy).engine == "fsdp2" else 1
    splits = [one for one in splits_of(num_gpus, tp=tp, colocated=colocated) if one.num_learning >= fewest]
    forecasts = [forecaster.forecast(split) for split in splits]
    if not forecasts:
        remedy = "Give more GPUs, or set vllm.mode to colocate." if not colocated else "Choose a divisor for tp."
        problem = f"{num_gpus} GPUs cannot be split into engines of {tp} and learners"
        raise LaunchError(problem, code="too-few-gpus", key=key, remedy=remedy)
    fitting = [forecast for forecast in forecasts if not forecast.problem]
    if not fitting:
        raise _nothing_fits(forecasts, key)
    best = max(fitting, key=lambda forecast: forecast.rollouts_per_s)
    return Proposal(forecasts=forecasts, best=best, assumptions=list(_assumptions(forecaster)))


def _nothing_fits(forecasts: Sequence[Forecast], key: str) -> NothingFits:
    shown = [one for one in forecasts if one.layout is not None] or forecasts
    remedy = "Give other GPUs, or leave vllm_data_parallel_size out."
    if shown[-1].layout is not None:
        remedy = (
            "Train adapters, split the policy (training.strategy: fsdp2), compute activations again "
            "(training.gradient_checkpointing), or shorten rows."
        )
    return NothingFits(f"{shown[-1].split}: {shown[-1].problem}", key=key, remedy=remedy)


def _assumptions(forecaster: Forecaster) -> list[str]:
    work = forecaster.work
    rates = forecaster.rates
    site = forecaster.site
    shape = forecaster.shape
    gpu, source = forecaster.gpu, decode_source(forecaster.rates, site.gpu)
    overlap = forecaster.config.custom.extra.rollout_matching.overlap
    learnt = "measured" if gpu.learn_flops_s else f"{rates.learn_share:g} of its matrix products, not measured"
    size, cache = shape.num_weights / 1e9, shape.kv_bytes_per_token
    lines = [
        f"model: {size:.2f} B weights in {shape.dtype}, in engines {forecaster.served.dtype}; {cache} bytes of cache a "
        "token",
        f"a rollout: {work.prompt_len} tokens of prompt, {work.response_len} of response; no continuations (VinePPO)",
        f"a forward pass: {work.row_len} places, {work.fill:.0%} of them tokens; images count as their tokens",
        f"learning: {forecaster.flops_s / 1e12:.0f} TFLOP/s of a {site.gpu} ({learnt}); prompts are read as fast",
        f"decoding: as measured on {source}" + ("" if source == site.gpu else f", by memory speed for {site.gpu}"),
        "decoding of another model or context: by the bytes that a step reads, a step taking "
        f"{SHORTEST_STEP_S * 1000:g} ms at least; tensor parallel engines are as much faster as they have GPUs",
        f"sync: {forecaster.link_bytes_s / 1e9:.0f} GB/s over one communicator, plus {SYNC_LATENCY_S:g} s; adapters "
        f"are merged at {rates.merge_share:.0%} of memory speed",
        f"step: overlap {overlap}; adapters on every matrix that is not frozen, the head left out",
        f"per GPU: {OVERHEAD_BYTES / 1e9:g} GB beside the learner, {HEAD_BYTES / 1e9:g} GB of logits, "
        f"{ENGINE_BYTES / 1e9:g} GB beside an engine's weights and cache",
        "gradients are exchanged after the last backward, not beside it",
        "parsing, matching, rewards and packing take no time",
    ]
    if forecaster.served.is_quantized:
        lines.append(
            "8 bits: an engine's matrices take a byte for each weight, decoding takes as long as without, memory in "
            "which a sync's weights arrive is not counted"
        )
    if work.num_prompts < work.num_rollouts:
        lines.append(
            f"prompts: {work.num_prompts} are computed for {work.num_rollouts} rollouts; completions of one prompt are "
            "neighbours in a pass, and no attention of the model has a window"
        )
    if forecaster.config.custom.extra.distill.teachers:
        lines.append(
            "teachers: as many samples each, with prompts as long as the policy's; those at a URL take no time"
        )
    if forecaster.config.tuner.use_dora:
        lines.append(f"DoRA: learning at {rates.dora_share:.0%} of that speed, as measured once, on every matrix of 8B")
    strategy = forecaster.config.training.strategy
    if strategy != "ddp":
        lines.append(f"{strategy}: by arithmetic, not measured; a reference of full fine-tuning is not counted")
    if len(site.nodes) > 1:
        between = rates.links.between_nodes_bytes_s / 1e9
        lines.append(
            f"nodes of {', '.join(map(str, site.nodes))} GPUs: every sync and exchange crosses {between:.0f} GB/s; "
            "nothing of this was measured on more than one node"
        )
    return lines
