"""Adapters that a server loads beside its model, by a name each."""

import json
import shutil
import tempfile
from pathlib import Path
from typing import TYPE_CHECKING

from conformance.judge.servers.check import check
from conformance.judge.servers.checks.generation import QUESTIONS, ids_of
from conformance.judge.servers.checks.weights import NEEDS, expect, was, write
from conformance.judge.servers.exchange import Exchange
from conformance.judge.servers.talk import Talk

if TYPE_CHECKING:
    from torch import Tensor

LOAD, UNLOAD = "/v1/load_lora_adapter", "/v1/unload_lora_adapter"
ONE, OTHER, NEXT = 21, 22, 23
"""Policies: the model with an adapter merged into it."""
RANK, SCALE, TOO_HIGH = 8, 2.0, 2048
SIZE = 0.5
"""Of what an adapter adds, by the size of the weight."""
TODAY = "2026-11-27"
NOT_OFFERED = (404, 405, 501)


def adapted(talk: Talk, number: int, *, rank: int = RANK) -> "dict[str, Tensor]":
    """A random adapter of the projections of the attention, as peft names its tensors; policy ``number`` is it, merged.

    Each pair is [rank, in] and [out, rank].
    """
    import torch

    policies, generator = talk.subject.policies, torch.Generator().manual_seed(number)
    weights = dict(policies.weights(0))
    pairs: dict[str, Tensor] = {}
    for name in [
        name for name in weights if name.endswith(("q_proj.weight", "o_proj.weight")) and "visual" not in name
    ]:
        rows, columns = weights[name].shape
        down, up = (torch.randn(shape, generator=generator) for shape in ((rank, columns), (rows, rank)))
        up *= SIZE * weights[name].norm() / (SCALE * (up @ down).norm())
        weights[name] = weights[name] + SCALE * (up @ down)
        stem = f"base_model.model.{name.removesuffix('.weight')}"
        pairs |= {f"{stem}.lora_A.weight": down, f"{stem}.lora_B.weight": up.contiguous()}
    if rank == RANK:
        policies.set_weights(number, weights)
    return pairs


def folder_of(talk: Talk, number: int, *, rank: int = RANK) -> str:
    """Where the server finds this adapter until the check ends; on the judge's machine."""
    from safetensors.torch import save_file

    folder = Path(tempfile.mkdtemp(prefix="rollmatch-adapter-"))
    talk.leaving.append(lambda: shutil.rmtree(folder, ignore_errors=True))
    save_file(adapted(talk, number, rank=rank), folder / "adapter_model.safetensors")
    config = {"peft_type": "LORA", "task_type": "CAUSAL_LM", "r": rank, "lora_alpha": int(SCALE * rank)}
    config |= {"target_modules": ["q_proj", "o_proj"], "bias": "none", "lora_dropout": 0.0}
    (folder / "adapter_config.json").write_text(json.dumps(config))
    return str(folder)


def load(talk: Talk, label: str, name: str, folder: str, *, is_new: bool = True) -> bool:
    """Whether the server offers adapters."""
    body = {"lora_name": name, "lora_path": folder} | ({} if is_new else {"load_inplace": True})
    call = talk.post(label, LOAD, body, timeout_s=60)
    talk.leaving.append(lambda: talk.post("unload", UNLOAD, {"lora_name": name}, note=False))
    if call.status in NOT_OFFERED:
        talk.exchange.inapplicable = f"the server loads no adapters: {call.summary()}"
    return call.status not in NOT_OFFERED


def ask(talk: Talk, label: str, name: str = "", number: int = 0) -> None:
    """Greedily, of an adapter, or of the model; ``number`` is the policy that must answer."""
    if name:
        talk.generate(label, QUESTIONS, max_tokens=16, model=name)
    else:
        write(talk, label)
    expect(talk, label, number)


def ask_two(talk: Talk) -> None:
    if load(talk, "load-one", "one", folder_of(talk, ONE)):
        load(talk, "load-other", "other", folder_of(talk, OTHER))
        ask(talk, "one", "one", ONE)
        ask(talk, "other", "other", OTHER)
        ask(talk, "model")


@check(
    "an-adapter-is-served-by-its-name",
    "Of two adapters that are loaded, each MUST answer as the model with it merged, and the model as before.",
    clause="servers/an-adapter-is-one-of-several#1",
    dialects=("vllm",),
    ask=ask_two,
    since=TODAY,
    needs=NEEDS,
    requires=("greedy-equals-transformers",),
    deadline_s=120,
)
def judge_two(exchange: Exchange) -> str:
    if failed := exchange.unmet(ok=("load-one", "load-other", "one", "other", "model")):
        return failed
    return _others(exchange, "one", "other", "model")


def _others(exchange: Exchange, *labels: str) -> str:
    """Which of these answers are not what their policy writes."""
    wrong = [label for label in labels if not was(exchange, label)]
    return f"{' and '.join(wrong)}: the answers are of other weights" if wrong else ""


def ask_replaced(talk: Talk) -> None:
    if load(talk, "load", "one", folder_of(talk, ONE)):
        ask(talk, "first", "one", ONE)
        load(talk, "replace", "one", folder_of(talk, NEXT), is_new=False)
        ask(talk, "second", "one", NEXT)


@check(
    "a-replaced-adapter-is-served",
    "An adapter that is loaded in place of another of its name MUST answer, also prompts that were seen before.",
    clause="servers/an-adapter-is-one-of-several#2",
    dialects=("vllm",),
    ask=ask_replaced,
    since=TODAY,
    needs=NEEDS,
    requires=("an-adapter-is-served-by-its-name",),
    deadline_s=120,
)
def judge_replaced(exchange: Exchange) -> str:
    if failed := exchange.unmet(ok=("load", "first", "replace", "second")):
        return failed
    if ids_of(exchange, "first") == ids_of(exchange, "second"):
        return "the replaced adapter answers as the first one"
    return "" if was(exchange, "second") else "the answers are of other weights than those of the second adapter"


def ask_unloaded(talk: Talk) -> None:
    if load(talk, "load", "one", folder_of(talk, ONE)):
        load(talk, "load-other", "other", folder_of(talk, OTHER))
        talk.post("unload", UNLOAD, {"lora_name": "one"})
        talk.generate("gone", QUESTIONS[:1], model="one")
        ask(talk, "other", "other", OTHER)
        ask(talk, "model")


@check(
    "an-unloaded-adapter-is-gone",
    "After an adapter was unloaded, prompts to it MUST return 4xx, and another one and the model answer as before.",
    clause="servers/an-adapter-is-one-of-several#3",
    dialects=("vllm",),
    ask=ask_unloaded,
    since=TODAY,
    needs=NEEDS,
    requires=("an-adapter-is-served-by-its-name", "a-bad-prompt-is-reported"),
    is_dangerous=True,
    deadline_s=120,
)
def judge_unloaded(exchange: Exchange) -> str:
    if failed := exchange.unmet(refused=("gone",), ok=("load", "load-other", "unload", "other", "model")):
        return failed
    return _others(exchange, "other", "model")


def ask_rank(talk: Talk) -> None:
    if load(talk, "bad", "high", folder_of(talk, OTHER, rank=TOO_HIGH)):
        load(talk, "load", "one", folder_of(talk, ONE))
        ask(talk, "one", "one", ONE)
        ask(talk, "model")


@check(
    "an-adapter-of-too-high-a-rank-is-refused",
    "An adapter of rank 2048 MUST return an error, and another one and the model answer as before.",
    clause="servers/an-adapter-is-one-of-several#4",
    dialects=("vllm",),
    ask=ask_rank,
    since=TODAY,
    needs=NEEDS,
    requires=("an-adapter-is-served-by-its-name",),
    is_dangerous=True,
    deadline_s=120,
)
def judge_rank(exchange: Exchange) -> str:
    bad = exchange.one("bad")
    if bad.status is None or bad.status < 400:
        return f"it is not refused: {bad.summary()}"
    if failed := exchange.unmet(ok=("load", "one", "model")):
        return failed
    return _others(exchange, "one", "model")
