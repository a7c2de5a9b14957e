"""A drawn run by rollmatch's public doors, beside the oracle's; the first disagreement is an error."""

import contextlib
import io
import json
import math
import re
import shutil
import sys
import tempfile
from pathlib import Path

import numpy as np
import torch
import yaml
from PIL import Image
from safetensors.torch import load_file
from torch.nn import functional

import rollmatch
from conformance.doubles.started import started_ranks
from conformance.draws.models import model_directory
from conformance.draws.servers import scripted, teaching
from conformance.draws.strategy import PLAIN, WRONG
from conformance.oracle.defaults import tree_of
from conformance.oracle.plan import chunks
from conformance.oracle.policy import saved, words_of
from conformance.oracle.runs import Oracle, Refused
from conformance.oracle.sampling import TooClose
from rollmatch.errors import RollmatchError

TOLERANCE = 1e-4
STEEP = {"sgd": 1e4, "adamw_torch": 1e3}
"""A gradient's norm above which float32 says nothing of its small elements, which Adam moves like large ones."""
OVERFLOWN = ("loss-not-finite", "policy-not-finite")
"""Codes that end a run in float32 where float64 has numbers still."""
FIGURES = ("loss", "grad_norm", "kl", "clip_share", "ratio_mean", "drift", "correction_mean", "entropy")
FIGURES += ("loss_ce", "loss_coord", "teacher_kl", "divergence", "teacher_logprob", "policy_logprob")
REFUSED = re.compile(r"^  1\. \[([a-z-]+)\]", re.MULTILINE)
"""The code of the first problem that ``rollmatch train`` prints."""
DROPOUT = functional.dropout


class Disagreement(AssertionError):
    """Product and oracle differ."""


def judge(draw: dict, folder: Path, models: Path) -> None:
    """Run both. Errors: ``Disagreement``, ``TooClose`` (of steep gradients after all that came before was compared)."""
    if draw.get("wrong"):
        check_refused(draw, folder, model_directory(draw["family"], models))
        return
    directory = model_directory(draw["family"], models, dropout=draw.get("dropout", 0.0), rows=draw.get("rows", 0))
    code, problem = "", ""
    try:
        with (
            scripted(draw, directory, words_of(directory, draw["keys"])) as (servers, named),
            teaching(draw, directory) as url,
        ):
            write(draw, folder, directory, named, teacher=url)
            try:
                run(draw, folder)
                if draw.get("resume"):
                    resume(draw, folder)
            except RollmatchError as error:
                code, problem = error.code, str(error)
        compare(draw, folder, directory, servers, code=code)
    except Refused as refused:
        same("what the run is refused with", code, refused.code)
    except (Disagreement, FileNotFoundError) as disagreement:
        raise Disagreement(f"{disagreement}; the run ended with {problem}" if code else str(disagreement)) from None
    finally:
        functional.dropout = DROPOUT


def check_refused(draw: dict, folder: Path, directory: Path) -> None:
    """Every wrong key is named, and nothing else, before anything has begun."""
    wrong = [WRONG[place] for place in draw["wrong"]]
    keys = PLAIN | {key: value for own, _, _ in wrong for key, value in own.items()}
    write({"samples": [{"prompt": "a"}], "keys": keys}, folder, directory, {})
    found = {("", "nothing")}
    try:
        rollmatch.train(folder / "run.yaml")
    except RollmatchError as error:
        found = {(each.code, each.key) for each in getattr(error, "errors", (error,))}
    same("refusals", found, {(code, key) for _, code, key in wrong})


def run(draw: dict, folder: Path, existing: str = "refuse") -> None:
    """``rollmatch.train`` here, or ``rollmatch train`` on several ranks."""
    if (ranks := draw.get("ranks", 1)) > 1:
        further = ("--resume",) if existing == "resume" else ()
        command = (sys.executable, "-m", "rollmatch", "train", str(folder / "run.yaml"), *further)
        with started_ranks(folder, ranks, *command) as started:
            codes = [rank.wait(120) for rank in started]
            output = "".join(rank.output()[-1500:] for rank in started)
        if any(codes):
            refused = REFUSED.search(output)
            raise RollmatchError(output, code=refused[1]) if refused else Disagreement(f"exit codes {codes}: {output}")
        return
    output = io.StringIO()
    with contextlib.redirect_stdout(output), contextlib.redirect_stderr(output):
        rollmatch.train(folder / "run.yaml", existing=existing)


def resume(draw: dict, folder: Path) -> None:
    """The run once more from an earlier checkpoint: it ends with the same weights, bit for bit."""
    whole, last = Path(tempfile.mkdtemp(dir=folder)) / "whole", draw["keys"]["training.max_steps"]
    shutil.copytree(folder / "run", whole)
    for step in range(draw["resume"] + 1, last + 1):
        shutil.rmtree(folder / "run" / f"checkpoint-{step}")
    run(draw, folder, existing="resume")
    adapts = draw["keys"].get("tuner.train_type") == "lora"
    pairs = [saved(base / f"checkpoint-{last}", adapts=adapts) for base in (whole, folder / "run")]
    wrong = [name for name, tensor in pairs[0].items() if not torch.equal(tensor, pairs[1][name])]
    same(f"weights that differ after a resume from step {draw['resume']}", wrong, [])
    shutil.rmtree(folder / "run")
    shutil.move(whole, folder / "run")


def write(draw: dict, folder: Path, directory: Path, named: dict, *, teacher: str = "") -> None:
    """The files of a run: data, ``run.yaml`` for ``rollmatch train``, ``draw.json`` for this package's command.

    ``teacher``: URL of the entry whose ``base_url`` is true.
    """
    folder.mkdir(parents=True, exist_ok=True)
    for name in {name for one in draw["samples"] for name in one.get("images", [])}:
        width, height, number = map(int, name.removesuffix(".png").split("-"))
        pixels = np.random.default_rng(number).integers(0, 256, (height, width, 3), dtype=np.uint8)
        Image.fromarray(pixels).save(folder / name)
    (folder / "data.jsonl").write_text("".join(json.dumps(sample) + "\n" for sample in draw["samples"]))
    own = {"model.model": str(directory), "model.torch_dtype": "float32"}
    own |= {f"custom.{split}_jsonl": str(folder / "data.jsonl") for split in ("train", "val")}
    own |= {"training.output_dir": str(folder / "run"), "training.report_to": "none", "training.learner_threads": 1}
    own |= {"training.save_steps": 1, "training.save_total_limit": None}
    if entries := draw["keys"].get("custom.extra.distill.teachers"):
        where = {"self": True, "base_url": teacher, "model": str(directory)}
        kinds = [next((kind for kind in ("self", "base_url") if kind in one), "model") for one in entries]
        made = [one | {kind: where[kind]} for one, kind in zip(entries, kinds, strict=True)]
        named = named | {"custom.extra.distill.teachers": made}
    (folder / "run.yaml").write_text(yaml.safe_dump(tree_of(own | draw["keys"] | named), sort_keys=False))
    (folder / "draw.json").write_text(json.dumps(draw, indent=1))


def compare(draw: dict, folder: Path, directory: Path, servers: list, *, code: str) -> None:
    """Everything that the run has written down; ``code``: that of the error that has ended it."""
    names = ["journal.jsonl", *(f"journal-rank{rank}.jsonl" for rank in range(1, draw.get("ranks", 1)))]
    journals = [read(folder / "run" / name) for name in names]
    oracle = Oracle(draw, directory, folder, servers)
    before = evaluated(journals[0], 0, oracle)
    for step, expected in oracle.steps():
        if code in OVERFLOWN and is_steep(expected, oracle):
            raise TooClose
        compare_step(journals, oracle, step, expected)
    oracle.take(oracle.run / f"checkpoint-{oracle.num_steps}")
    after = evaluated(journals[0], oracle.num_steps, oracle)
    if "resume" not in draw:
        same("the headline", headline(before, after, oracle) in (oracle.run / "run.html").read_text(), True)
    compare_servers(draw, oracle, directory)


def compare_step(journals: list, oracle: Oracle, step: int, expected) -> None:
    if expected.evaluated:
        compare_evaluation(journals[0], step, expected.evaluated)
    for rank, (asked, seeds) in enumerate(expected.requested):
        found = of_step(journals[rank], "requested", step, purpose="train")
        same(f"samples of step {step}, rank {rank}", found["sample_ids"], asked)
        same(f"seeds of step {step}, rank {rank}", found["seeds"], seeds)
    for rank, rewards in enumerate(expected.rewards):
        close(f"rewards of step {step}, rank {rank}", of_step(journals[rank], "rewarded", step)["rewards"], rewards)
    for rank, found in enumerate(expected.values):
        close(f"values of step {step}, rank {rank}", of_step(journals[rank], "valued", step)["values"], found)
    for rank, learnt in enumerate(expected.learnt):
        found = sorted(i for row in of_step(journals[rank], "packed", step)["sample_ids"] for i in row)
        if "training.tokens_per_micro_batch" not in oracle.keys or oracle.ranks == 1:
            same(f"learnt at step {step}, rank {rank}", found, learnt)
    found = of_step(journals[0], "step", step + 1)
    found |= {f"drop/{reason}": number for reason, number in found["drops"].items()}
    for name, number in expected.counts.items():
        same(f"{name} of step {step}", found[name], number)
    for name, mean in expected.means.items():
        close(f"{name} of step {step}", found[name], mean)
    for name in FIGURES:
        if name in expected.figures:  # a norm adds up the rounding of all elements
            tolerance = 10 * TOLERANCE if name == "grad_norm" else TOLERANCE
            close(f"{name} of step {step}", found[name], expected.figures[name], tolerance=tolerance)
    if is_steep(expected, oracle):
        raise TooClose
    found = saved(oracle.run / f"checkpoint-{step + 1}", adapts=oracle.policy.adapts)
    for name, (weight, before) in expected.weights.items():
        if name in found:
            difference = float((found[name].double() - weight).abs().max())
            size, moved = float(weight.abs().max()), float((weight - before).abs().max())
            allowed = TOLERANCE * max(1.0, size) + 10 * TOLERANCE * moved
            if difference > allowed:
                raise Disagreement(f"weight {name} after step {step}: differs by {difference:.3g}")


def is_steep(expected, oracle: Oracle) -> bool:
    return expected.figures.get("grad_norm", 0) > STEEP[oracle.keys["training.optim"]]


def compare_servers(draw: dict, oracle: Oracle, directory: Path) -> None:
    """Weights of each version, and who was asked for what by which weights, and how."""
    servers = oracle.servers
    is_exact = not any(one.get("fails") for one in draw.get("servers", [])) and not draw.get("resume")
    again = bool(draw.get("resume"))  # a server without versions of its own counts from 1 once more
    is_mixed = again or oracle.keys["custom.extra.rollout_matching.overlap"] == "ahead"
    is_repeated = oracle.keys.get("custom.extra.rollout_matching.vllm.sync.in_flight") == "restart"
    for place, server in enumerate(servers if is_exact else []):
        found = [version for kind, version, _ in server.log if kind == "commit"]
        same(f"versions of server {place}", found, list(range(1, oracle.version + 1)))
        for version, tensors in server.kept.items():
            learnt = weights_of(oracle, directory, oracle.synced[version])
            same(f"tensors of version {version}", sorted(tensors), sorted(learnt))
            wrong = [n for n, tensor in learnt.items() if not torch.allclose(tensors[n], tensor, rtol=0, atol=1e-5)]
            same(f"tensors of version {version} on server {place} that differ", wrong, [])
    for versions in [list(oracle.synced)] if is_mixed else [[version] for version in oracle.synced]:
        wanted: dict = {place: [] for place in range(len(servers))}
        for call in (one for one in oracle.calls if one["version"] in versions):
            for start, stop, place in chunks(len(call["requests"]), len(servers), call["rank"], oracle.ranks):
                wanted[place] += call["requests"][start:stop]
        known = {seed for call in oracle.calls for _, seed, _ in call["requests"]}
        found = {p: [r for kind, v, r in s.log if kind == "infer" and (again or v in versions) and r[1] in known]
                 for p, s in enumerate(servers)}  # fmt: skip
        moves = {f"custom.extra.rollout_matching.{name}" for name in ("pieces_per_server", "late_windows")}
        if not is_exact or moves & oracle.keys.keys():
            found, wanted = ({0: [r for own in part.values() for r in own]} for part in (found, wanted))
        for place in wanted:
            both = [texts(part[place]) for part in (found, wanted)]
            what = f"requests of versions {versions} to server {place}"
            same(what, *(both if is_exact and not is_repeated else [sorted(set(part)) for part in both]))


def weights_of(oracle: Oracle, directory: Path, step: int) -> dict:
    """All weights before a step, adapters merged, by the names of a checkpoint."""
    base = load_file(directory / "model.safetensors")
    if step and not oracle.policy.adapts:
        whole = saved(oracle.run / f"checkpoint-{step}", adapts=False)
        return {name: whole[name] for name in base}  # FSDP2 writes tied weights twice
    if step:
        oracle.policy.take(oracle.run / f"checkpoint-{step}")
        base |= {name: weight.detach().float() for name, weight in oracle.policy.merged().items()}
    return base


def texts(requests: list) -> list[str]:
    """Sorted: those of several ranks arrive in any order."""
    return sorted(f"{list(prompt)} {seed} {sorted(sampling.items())}" for prompt, seed, sampling, *_ in requests)


def headline(before: dict, after: dict, oracle: Oracle) -> str:
    """What the run's page says first; one sample shows no change beyond noise."""
    name, subject = ("reward", "Mean reward") if oracle.is_paid else ("f1", "F1")
    if name not in before:
        name, subject = "teacher_logprob", "Log-probability by the teacher"
    old, new = before[name], after[name]
    if abs(new - old) < 5e-4:
        return f"{subject} stayed at {new:z.3f}"
    return f"{subject} went from {old:z.3f} to {new:z.3f}, which may be noise, in {oracle.num_steps} steps."


def evaluated(journal: list[dict], step: int, oracle: Oracle) -> dict:
    """The evaluation before an optimizer step. Errors: ``Refused``."""
    metrics = oracle.evaluate(step)
    compare_evaluation(journal, step, metrics)
    return metrics


def compare_evaluation(journal: list[dict], step: int, metrics: dict) -> None:
    found = of_step(journal, "evaluated", step)["metrics"]
    for name, value in metrics.items():
        close(f"{name} of the evaluation before step {step}", found.get(name), value)


def read(path: Path) -> list[dict]:
    """Events; none of a run that was refused before its first."""
    return [json.loads(line) for line in path.read_text().splitlines()] if path.exists() else []


def of_step(journal: list[dict], event: str, step: int, **fields) -> dict:
    """The last such event of a step."""
    wanted = {"event": event, "step": step} | fields
    found = [one for one in journal if all(one.get(name) == value for name, value in wanted.items())]
    if not found:
        raise Disagreement(f"no event {wanted} in the journal")
    return found[-1]


def same(what: str, found, expected) -> None:
    if found != expected:
        raise Disagreement(f"{what}: {str(found)[:600]}, the oracle says {str(expected)[:600]}")


def close(what: str, found, expected, *, tolerance: float = TOLERANCE) -> None:
    """Numbers, or lists of numbers and None."""
    if isinstance(expected, list):
        same(f"length of {what}", len(found), len(expected))
        for place, pair in enumerate(zip(found, expected, strict=True)):
            close(f"{what} [{place}]", *pair)
    elif expected is None or found is None:
        same(what, found, expected)
    elif not math.isclose(found, expected, rel_tol=tolerance, abs_tol=TOLERANCE):
        raise Disagreement(f"{what}: {found}, the oracle says {expected}")
