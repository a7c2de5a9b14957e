"""A whole run, computed naively from its keys; the weights of each step are read from the product's checkpoints.

So each step is judged by itself: what goes in is what the product had, what comes out is compared with what it made.
"""

import json
import math
from dataclasses import dataclass, field
from itertools import chain
from pathlib import Path

import numpy as np
import torch
from PIL import Image

from conformance.oracle import echo, matching, values
from conformance.oracle.defaults import DEFAULTS, D, E, G, R, T, V, below
from conformance.oracle.gradients import Optimizer, group_advantages, policy_step
from conformance.oracle.plan import calls, rows_of, sampled_seeds, seed_of, windows
from conformance.oracle.policy import PICTURE, Policy, words_of
from conformance.oracle.rewards import pay
from conformance.oracle.sampling import sample
from conformance.oracle.script import write
from conformance.oracle.teachers import teacher_of


@dataclass
class Step:
    """What one optimizer step must have been; lists have an entry per rank."""

    figures: dict = field(default_factory=dict)
    weights: dict = field(default_factory=dict)
    """After the step and before it."""
    requested: list = field(default_factory=list)
    """(sample ids, seeds); empty where the step rolls nothing out."""
    rewards: list = field(default_factory=list)
    values: list = field(default_factory=list)
    counts: dict = field(default_factory=dict)
    """Tokens that were written for the step, segments and tokens that it learns from, and what waits, of all ranks."""
    means: dict = field(default_factory=dict)
    """Of the window's completions of all ranks."""
    learnt: list = field(default_factory=list)
    """Sample ids of the step's segments, sorted."""
    evaluated: dict = field(default_factory=dict)
    """Metrics of an evaluation before the step, but for the first."""


class Refused(Exception):
    """The product must end the run with this code."""

    def __init__(self, code: str) -> None:
        super().__init__(code)
        self.code = code


def is_flat(group: list) -> bool:
    """Whether its rewards do not differ."""
    return len({c["reward"] for c in group if c["reward"] is not None}) < 2


class Oracle:
    """One drawn run: ``draw`` has family, keys, samples, servers, ranks; ``folder`` its data, ``run`` what it wrote."""

    def __init__(self, draw: dict, directory: Path, folder: Path, servers: list) -> None:
        self.draw, self.folder, self.run, self.servers = draw, folder, folder / "run", servers
        self.keys = DEFAULTS | draw["keys"]
        self.variant = self.keys["custom.trainer_variant"]
        self.rules, tuner = below(self.keys, G), below(self.keys, "tuner")
        self.words, self.policy = words_of(directory, self.keys), Policy(directory, tuner)
        self.sampler = Policy(directory, tuner, dtype=torch.float32)
        self.reference = self.policy if self.policy.adapts else Policy(directory, tuner)
        self.num_steps, self.ranks = self.keys[f"{T}.max_steps"], draw.get("ranks", 1)
        places = [[self.folder / name for name in one.get("images", [])] for one in draw["samples"]]
        self.sizes = [[Image.open(path).size for path in own] for own in places]
        self.kept = self.fitting()
        self.optimizer = Optimizer(below(self.keys, T), self.num_steps)
        self.version, self.synced, self.calls, self.firsts = 0, {}, [], []
        self.waiting = [[] for _ in range(self.ranks)]
        self.is_paid = self.variant in ("grpo", "distill", "vineppo", "vineppo_mcts")
        self.is_grouped, self.distill = self.variant in ("grpo", "distill"), below(self.keys, D)
        has_gradient = self.variant != "distill" or self.distill["loss"] == "sampled" or bool(self.rules["rewards"])
        has_gradient = has_gradient or self.distill["environment_weight"] > 0
        is_given = any(name.startswith("correction.") for name in self.rules)
        self.corrects = has_gradient and (is_given or self.rules["correction_cap"] is not None)
        self.corrects &= self.rules["old_logprobs"] == "recomputed"
        self.scores_before = has_gradient and self.rules["old_logprobs"] == "recomputed"
        self.means = [Policy(directory, tuner) if "average" in one else None for one in self.distill["teachers"]]
        if any(self.means) and self.keys.get(f"{T}.strategy") == "fsdp2":
            raise Refused("teacher-average-in-parts")
        self.repeats = self.rules["num_generations"] if self.is_paid else 1
        if not self.is_paid:  # these keys are for rewards
            self.keys |= {f"{G}.steps_per_generation": 1, f"{G}.num_iterations": 1}
        self.decoding = {"repetition_penalty": self.keys[f"{R}.repetition_penalty"]} | below(self.keys, f"{R}.decoding")
        wanted = self.rules["old_logprobs"] == "server" or self.corrects
        wanted |= not self.is_grouped and self.keys[f"{V}.steps"] == "low_probability"
        self.decoding["logprobs"] = self.is_paid and wanted

    def steps(self):
        """Every optimizer step in turn; before each, the product's weights replace the oracle's."""
        made, means = None, {}
        self.windows, self.left = {}, {}
        plan = windows(len(self.kept), self.keys, ranks=self.ranks, num_steps=self.num_steps)
        self.plan = plan = [
            (first, [[self.kept[i] for i in own] for own in whole], *more) for first, whole, *more in plan
        ]
        self.averaged = self.num_steps  # the means begin with the weights before training
        if self.policy.adapts and (self.run / "checkpoint-1").exists():  # the first rate is 0: adapters as they began
            self.take(self.run / "checkpoint-1")
            for mean in filter(None, self.means):
                mean.take(self.run / "checkpoint-1")
            moved = [n for n, w in self.policy.weights.items() if "lora_B" in n and bool(w.any())]
            assert not moved, f"adapters that begin somewhere: {moved}"
        self.averaged = 0
        for step, (first, whole, places, num_batches) in enumerate(plan):
            result = Step()
            if step:
                self.take(self.run / f"checkpoint-{step}")
                if (every := self.keys[f"{T}.eval_steps"]) and step % every == 0:
                    result.evaluated = self.evaluate(step)
            if step == first:
                made = self.roll_out(step, whole, result)
                means = result.means
            else:
                result.means, result.counts = means, {"rollout_tokens": 0}
            both, n = zip(made, places, strict=True), self.repeats
            segments = [[own[p * n + i] for p in at for i in range(n)] for own, at in both]
            self.learn(step, segments, num_batches, result)
            yield step, result

    def take(self, checkpoint: Path) -> None:
        """The product's weights, as the next step finds them."""
        self.policy.take(checkpoint)
        self.sampler.take(checkpoint)
        if checkpoint.name == f"checkpoint-{self.averaged + 1}":
            self.averaged += 1
            for one, mean in zip(self.distill["teachers"], self.means, strict=True):
                for name, weight in self.policy.weights.items() if mean else ():
                    mean.weights[name].data.lerp_(weight.data, 1 - one["average"])

    def fitting(self) -> list[int]:
        """Samples whose prompts leave room for a response, as ``overlong`` has it. Errors: ``Refused``."""
        limit, rule = self.keys["global_max_length"] - self.keys[f"{R}.max_new_tokens"], self.keys["overlong"]
        if f"{E}.name" in self.keys:
            limit = self.keys["global_max_length"] - self.keys[f"{E}.max_response_tokens"]
        self.prompt_limit = limit if rule == "truncate_left" else math.inf
        lengths = [len(self.words.expanded(self.prompt(i), own)) for i, own in enumerate(self.sizes)]
        kept = [i for i, length in enumerate(lengths) if 0 < length <= limit]  # 0: there was too little to cut
        if not kept or (rule == "error" and len(kept) < len(lengths)):
            raise Refused("prompt-too-long")
        if rule == "truncate_left" and self.draw.get("dialect") in ("vllm", "swift"):
            raise Refused("prompt-not-truncated")
        return kept

    def sync(self, step: int) -> None:
        """Servers get the weights before the first rollout of a step."""
        if step not in self.synced.values():
            self.version += 1
            self.synced[self.version] = step

    def roll_out(self, step: int, whole: list, result: Step) -> list:
        """[rank] completions of a window, judged and compared."""
        per_rank = []
        self.firsts.append(step)
        if self.variant != "sft":
            self.sync(step)
        chance = np.random.default_rng([self.keys[f"{T}.seed"], step, 2]).random()
        is_given = self.variant == "distill" and chance >= self.distill["lmbda"]
        for rank, samples in enumerate(whole):
            asked = [index for index in samples for _ in range(self.repeats)]
            if self.variant == "sft":
                rollouts = [([], [])] * len(asked)
            elif is_given:
                answers = [self.distill["answers"].format(**self.draw["samples"][i]["metadata"]) for i in asked]
                rollouts = [([*self.words.ids(text), self.words.stop], []) for text in answers]
            else:
                seeds = [seed_of(self.keys, step=step, rank=rank, index=i) for i in range(len(asked))]
                result.requested.append((asked, seeds))
                if self.keys.get(f"{R}.late_windows"):
                    per_rank.append(self.taken(step, rank, len(samples)))
                    continue
                pieces = self.keys.get(f"{R}.pieces_per_server", 1)
                rollouts = self.generate(asked, seeds, self.decoding, rank=rank, pieces=pieces)
            per_rank.append(self.completions(asked, rollouts, name=f"{step}.{rank}"))
        written = [*chain(*per_rank)]
        if self.is_grouped:
            written += chain(*self.replace_flat(step, whole, per_rank))
        if not self.keys.get(f"{R}.late_windows"):
            tokens = 0 if is_given else sum(c.get("num_tokens", len(c["response"])) for c in written)
            result.counts = {"rollout_tokens": tokens}
        if self.is_paid:
            self.compare(per_rank, result)
        else:
            for c in written:
                c |= self.matched(c, self.keys[f"{R}.maskiou_gate"])
            counts = [c["counts"] for c in written]
            result.means = {"appended": sum(one["appended"] for one in counts)}
            result.means |= matching.quality(counts) if self.variant != "sft" else {}
        return per_rank

    def taken(self, step: int, rank: int, num: int) -> list:
        """The completions of the groups that a step says it has taken, each once, from windows that were asked for."""
        name, n = "journal.jsonl" if rank == 0 else f"journal-rank{rank}.jsonl", self.repeats
        events = [json.loads(line) for line in (self.run / name).read_text().splitlines()]
        said = [e["groups"] for e in events if e["event"] == "taken" and e["step"] == step]
        assert said.count(said[0]) == len(said), f"groups of step {step}: {said}"
        assert len(said[0]) == num, f"step {step} has {num} groups and took {said[0]}"
        latest = step + self.keys[f"{R}.max_staleness"]
        made = []
        for first, place in said[0]:
            assert first <= latest, f"step {step} took a group of window {first}"
            if (first, rank) not in self.windows:
                asked = [index for index in self.plan[first][1][rank] for _ in range(n)]
                seeds = [seed_of(self.keys, step=first, rank=rank, index=i) for i in range(len(asked))]
                rollouts = self.generate(asked, seeds, self.decoding, rank=rank)
                self.windows[first, rank] = self.completions(asked, rollouts, name=f"{first}.{rank}")
                self.left[first, rank] = list(range(len(asked) // n))
            self.left[first, rank].remove(place)
            made += self.windows[first, rank][place * n : (place + 1) * n]
        return made

    def replace_flat(self, step: int, whole: list, per_rank: list) -> list:
        """Groups of equal rewards make place for those of further samples; returns [rank] all that these wrote."""
        order = np.random.default_rng([self.keys[f"{T}.seed"], step, 1]).permutation(len(self.kept)).tolist()
        left, n, made = [self.kept[i] for i in order], self.repeats, [[] for _ in whole]
        left = [i for i in left if all(i not in own for own in whole)]
        for number in range(self.rules.get("dynamic_sampling.max_rounds", 0)):
            for own in per_rank if number == 0 else ():
                self.check_rewards(own)
            places = [[p for p in range(0, len(own), n) if is_flat(own[p : p + n])] for own in per_rank]
            for rank, (own, flat) in enumerate(zip(per_rank, places, strict=True)):
                asked = [index for index in left[: len(flat)] for _ in range(n)]
                left, behind = left[len(flat) :], (3 + number) * self.ranks
                seeds = [seed_of(self.keys, step=step, rank=rank + behind, index=i) for i in range(len(asked))]
                more = self.completions(asked, self.generate(asked, seeds, self.decoding, rank=rank), name="")
                made[rank] += more
                better = [more[i : i + n] for i in range(0, len(more), n) if not is_flat(more[i : i + n])]
                for place, group in zip(flat, better, strict=False):
                    own[place : place + n] = group
        return made

    def matched(self, completion: dict, gate: float) -> dict:
        truth, rules = self.draw["samples"][completion["index"]]["objects"], below(self.keys, R)
        if self.keys.get("custom.object_ordering") == "sorted":
            truth = sorted(truth, key=lambda one: (one["bbox_2d"][1], one["bbox_2d"][0]))
        return matching.target_of(self.words, completion["response"], truth, rules | {"maskiou_gate": gate})

    def evaluate(self, step: int) -> dict:
        """Metrics of an evaluation by the weights of now, over all ranks."""
        samples = self.kept[: self.keys[f"{T}.eval_scenes"]]
        own = {"temperature": self.rules["eval_temperature"], "logprobs": False} if self.is_paid else {}
        self.sync(step)
        made = []
        for rank in range(self.ranks):
            asked = samples[rank :: self.ranks]
            seeds = [seed_of(self.keys, step=step, rank=rank + 2 * self.ranks, index=i) for i in range(len(asked))]
            rollouts = self.generate(asked, seeds, self.decoding | own, rank=rank)
            made += self.completions(asked, rollouts, name=f"{step}.{rank + 2 * self.ranks}", is_eval=True)
        made.sort(key=lambda c: c["index"])
        found = {"num_scenes": len(samples)}
        if not self.is_paid:
            found |= {"loss": self.true_loss(samples)} if self.variant == "sft" else {}
            return found | matching.quality([self.matched(c, self.keys[f"{R}.eval_iou"])["counts"] for c in made])
        self.check_rewards(made)
        if self.variant == "distill":
            masks = [c["written"] or [True] * len(c["target"]) for c in made]
            pairs = zip(made, masks, strict=True)
            rows = [three for c, mask in pairs for three in zip(self.taught(c), c["target"], mask, strict=True)]
            rows = [(row, token) for row, token, is_mine in rows if is_mine]
            found["teacher_logprob"] = sum(float(row[token]) for row, token in rows) / max(1, len(rows))
            if not self.rules["rewards"] and not self.keys.get(f"{E}.name"):
                return found
        if not self.is_grouped:
            return {"reward": float(np.mean([self.return_of(c) for c in made]))} | found
        return {name: value for name, value in self.worth(made).items() if name != "flat_group_rate"} | found

    @torch.no_grad()
    def true_loss(self, samples: list) -> float:
        """Mean negative log-probability of the tokens of the true answers."""
        made = []
        for index in samples:
            one = self.completion(index, ([], []))
            one |= self.matched(one, self.keys[f"{R}.maskiou_gate"])
            made += self.policy.logprobs(one, temperature=1.0, banned=self.words.banned).tolist()
        return -sum(made) / len(made)

    @torch.no_grad()
    def taught(self, c: dict) -> torch.Tensor:
        """[T, V] log-probabilities at a completion's target by its sample's teacher."""
        one = self.draw["samples"][c["index"]]
        place = teacher_of(self.distill["teachers"], one["metadata"])
        entry, asked = self.distill["teachers"][place], c
        if "prompt" in entry:
            prompt = self.prompt(c["index"], entry["prompt"])
            asked = c | {"expanded": self.words.expanded(prompt, self.sizes[c["index"]])}
        policy = self.means[place] or (self.policy if entry.get("self") else self.reference)
        options = {"temperature": self.decoding["temperature"], "banned": self.words.banned}
        return policy.distribution(asked, adapted=bool(entry.get("self")), **options)

    def check_rewards(self, completions: list) -> None:
        if completions and all(c["reward"] is None for c in completions):
            raise Refused("rewards-all-failed")
        if not self.is_grouped and any(c["reward"] is None for c in completions):
            raise Refused("reward-missing")

    def return_of(self, c: dict) -> float:
        unfinished = self.keys[f"{V}.unfinished_return"] if not self.is_grouped else None
        return c["reward"] if c["ended"] or unfinished is None else unfinished

    def prompt(self, index: int, other: str | None = None) -> list[int]:
        """The ids of a sample's prompt, one placeholder per picture; ``other`` takes the place of the question."""
        one = self.draw["samples"][index]
        system = one.get("system", "" if "messages" in one else self.keys["custom.prompts.system"])
        names = one.get("images", [])
        if "messages" in one:
            chat = [(m["role"], m["content"].replace("<image>", PICTURE)) for m in one["messages"]]
        else:
            chat = [("user", PICTURE * len(names) + one.get("prompt", self.keys["custom.prompts.user"]))]
        if self.keys.get(f"{E}.name"):
            chat[-1] = (chat[-1][0], f"{chat[-1][1]}\ngo")
        if other is not None:
            fields = {"question": chat[-1][1]} | one["metadata"]
            chat[-1] = (chat[-1][0], other.format(**fields))
        ids = self.words.chat([*([("system", system)] if system else []), *chat])
        excess = len(self.words.expanded(ids, self.sizes[index])) - self.prompt_limit
        return self.words.without_first(ids, excess) if excess > 0 else ids

    def generate(self, asked: list, seeds: list, decoding: dict, *, rank: int, pieces: int = 1) -> list:
        """[(ids with the stop token, log-probabilities)]: what servers write, or the policy itself."""
        limit, prompts, made = self.keys[f"{R}.max_new_tokens"], [self.prompt(i) for i in asked], []
        if self.servers and self.variant != "sft":
            sampling = {name: decoding[name] for name in ("top_p", "top_k", "temperature", "repetition_penalty")}
            sampling |= {"stop_token_ids": sorted(self.words.stops), "max_tokens": limit}
            dialect = self.draw.get("dialect", "native")
            if dialect in ("native", "vllm"):  # the others cannot ban a token
                sampling |= {"logit_bias": dict.fromkeys(self.words.banned, -100.0)}
            sampling |= {"logprobs": True} if decoding["logprobs"] else {}
            ends = calls(len(asked), len(self.servers), rank, self.ranks, pieces=pieces)
            seeds = [s for a, b in ends for s in sampled_seeds(dialect, prompts[a:b], seeds[a:b])]
            requests = [(prompt, seed, sampling) for prompt, seed in zip(prompts, seeds, strict=True)]
            self.calls.append({"version": self.version, "rank": rank, "requests": requests})
            return [write(self.words, *pair, limit, self.variant) for pair in zip(prompts, seeds, strict=True)]
        size = self.keys[f"{R}.rollout_generate_batch_size"]
        for start in range(0, len(asked), size):
            rows = [self.completion(i, ([], [])) for i in asked[start : start + size]]
            options = {"stops": self.words.stops, "banned": self.words.banned, "limit": limit}
            made += sample(self.sampler, rows, seeds[start], decoding, **options)
        return made

    def completions(self, asked: list, rollouts: list, *, name: str, is_eval: bool = False) -> list:
        """Of each rollout; in an environment, of the whole episode that begins with it."""
        made = [self.completion(*pair) for pair in zip(asked, rollouts, strict=True)]
        if self.keys.get(f"{E}.name"):
            rules, limit = below(self.keys, E), self.keys[f"{R}.max_new_tokens"]
            known = {(seed, tuple(ids)) for call in self.calls for ids, seed, _ in call["requests"]}
            is_ahead = self.keys[f"{R}.overlap"] == "ahead"  # turns are then of any version
            infers = [(v, r) for s in self.servers for kind, v, r in s.log if kind == "infer"]
            later = [r for v, r in infers if is_ahead or v == self.version]
            later = [r for r in later if r[3].startswith(f"{name}.")]
            for place, (c, first) in enumerate(zip(made, rollouts, strict=True)):

                def next_turn(so_far: list, number: int, most: int, c: dict = c, place: int = place) -> tuple:
                    ids = (*c["prompt"], *so_far)
                    found = [r for r in later if r[3] == f"{name}.{place}.{number}" and r[0] == ids]
                    wanted = self.decoding["temperature"] if not is_eval else self.rules["eval_temperature"]
                    found = [r for r in found if r[2]["temperature"] == wanted and (r[1], r[0]) not in known]
                    assert found, f"turn {number} of {name}.{place} was never requested for its ids"
                    assert found[-1][2]["max_tokens"] == most, "a turn has another budget"
                    return write(self.words, ids, found[-1][1], most, self.variant)

                c |= echo.play(self.words, first, next_turn, rules, turn_limit=limit)
        return made

    def completion(self, index: int, rollout: tuple) -> dict:
        target, logprobs = rollout
        ended = not self.words.stops.isdisjoint(target[-1:])
        response = target[:-1] if ended else target
        paths = [str(self.folder / name) for name in self.draw["samples"][index].get("images", [])]
        prompt = self.prompt(index)
        expanded = self.words.expanded(prompt, self.sizes[index])
        made = {"index": index, "prompt": prompt, "expanded": expanded, "images": paths}
        made |= {"target": target, "response": response, "ended": ended, "engine": logprobs, "written": None}
        paid, said = pay(self.words.text(response), self.rules.get("rewards", []))
        unpaid = 0.0 if self.variant == "distill" else None
        return made | {"reward": paid if said else unpaid, "said": said}

    def compare(self, per_rank: list, result: Step) -> None:
        """Advantages, masks and recorded log-probabilities of a window's completions."""
        size, rules = self.repeats, self.rules
        weight = self.distill["environment_weight"] or 1.0
        everyone = [weight * c["reward"] for own in per_rank for c in own if c["reward"] is not None]
        reuse = rules["steps_per_generation"] * rules["num_iterations"]
        for own in per_rank:
            self.check_rewards(own)
            paid = [None if c["reward"] is None else weight * c["reward"] for c in own]
            groups = [paid[i : i + size] for i in range(0, len(own), size)]
            options = {"baseline": rules["baseline"], "scale": rules["scale_rewards"], "everyone": everyone}
            found = [a for row in group_advantages(groups, **options) for a in row]
            if self.variant == "distill" and not rules["rewards"] and not self.distill["environment_weight"]:
                found = [0.0] * len(own)
            for c, advantage in zip(own, found, strict=True):
                c["advantages"] = [advantage] * len(c["target"])
                c["masked"] = c["reward"] is None or (rules["mask_truncated_completions"] and not c["ended"])
        if not self.is_grouped:
            self.value(per_rank, result)
        elif self.rules.get("rewards") or self.variant == "grpo" or self.keys.get(f"{E}.name"):
            result.rewards = [[c["reward"] for c in own] for own in per_rank]
            result.means = self.worth([*chain(*per_rank)])
            if self.variant == "distill":
                result.means.pop("flat_group_rate")
        for c in (c for own in per_rank for c in own):
            from_server = rules["old_logprobs"] == "server"
            c["sampled"] = c["engine"] if self.corrects else None
            recomputes = reuse > 1 and self.scores_before
            c["old"] = c["engine"] if from_server else self.scored(self.policy, c) if recomputes else None
            if self.variant == "distill":
                entries = self.distill["teachers"]
                place = teacher_of(entries, self.draw["samples"][c["index"]]["metadata"])
                c |= {"teacher": self.taught(c), "weight": entries[place].get("weight", 1.0)}
            c["reference"] = self.scored(self.reference, c, adapted=False) if rules["beta"] else None

    def worth(self, everyone: list) -> dict:
        """Figures of completions."""
        size, rewards = self.repeats, [c["reward"] for c in everyone if c["reward"] is not None]
        groups = [everyone[i : i + size] for i in range(0, len(everyone), size)]
        lens = [len(c["response"]) if c["written"] is None else sum(c["written"]) for c in everyone]
        said = {
            name: [c["said"][name] for c in everyone if c["said"][name] is not None] for name in everyone[0]["said"]
        }
        return {f"reward/{name}": np.mean(values) for name, values in said.items() if values} | {
            "reward_failed_rate": np.mean([c["reward"] is None for c in everyone]),
            "reward": np.mean(rewards),
            "reward_std": np.std(rewards),
            "truncated_rate": np.mean([not c["ended"] for c in everyone]),
            "flat_group_rate": np.mean([is_flat(group) for group in groups]),
            "response_len": np.mean(lens),
        }

    def value(self, per_rank: list, result: Step) -> None:
        """VinePPO: advantages from what continuations returned, which servers were asked for."""
        everyone, rules = [c for own in per_rank for c in own], below(self.keys, V)
        for c in everyone:
            c |= {"return": self.return_of(c), "masked": False}
        bounds = [values.cuts(self.words, c, rules) for c in everyone]
        is_search = self.variant == "vineppo_mcts"
        fresh, asked, num_tokens = self.continuations(everyone, rules, is_search=is_search)
        if not is_search and rules["first_continuations"] is None:
            wanted = values.needed(everyone, bounds, rules)
            found = {state: len(fresh.get(state, [])) for state in wanted}
            assert found == wanted, f"continuations of states: {found}, the oracle says {wanted}"
            assert asked == sum(wanted.values()), f"{asked} continuations, the oracle says {sum(wanted.values())}"
        rows = values.values(everyone, bounds, fresh, rules, is_search=is_search)
        assert all(v is not None for row in rows for v in row), "a state was never continued"
        changes, found = values.advantages(everyone, bounds, rows, rules["normalization"])
        for c, row in zip(everyone, found, strict=True):
            c["advantages"] = row
        num_states = sum(map(len, rows))
        result.means = {
            "reward": np.mean([c["return"] for c in everyone]),
            "truncated_rate": np.mean([not c["ended"] for c in everyone]),
            "response_len": np.mean([len(c["response"]) for c in everyone]),
            "steps": num_states / len(rows),
            "prompt_value": np.mean([row[0] for row in rows]),
            "advantage_size": np.mean([abs(a) for row in changes for a in row]),
            "continuations": asked,
            "continuation_tokens": num_tokens,
            "states_per_continuation": num_states / asked if asked else 0.0,
        }
        left = iter(rows)
        result.values = [[next(left) for _ in own] for own in per_rank]

    def continuations(self, everyone: list, rules: dict, *, is_search: bool) -> tuple[dict, int, int]:
        """State -> returns of its continuations, from all that servers were asked for by the version that wrote the
        responses; how many, and the tokens of all."""
        limit, fresh, asked, num_tokens = self.keys[f"{R}.max_new_tokens"], {}, 0, 0
        known = {seed for call in self.calls for _, seed, _ in call["requests"]}
        prompts = {i: tuple(self.prompt(i)) for i in {c["index"] for c in everyone}}
        dialect = self.draw.get("dialect", "native")
        step, is_ahead = self.firsts[-1], self.keys[f"{R}.overlap"] == "ahead"
        sent_at = self.firsts[-2:][0] if is_ahead else step  # a window is written beside the one before it
        (version,) = [version for version, at in self.synced.items() if at == sent_at]
        records = [one for s in self.servers for kind, v, one in s.log if kind == "infer" and v == version]
        records = [one for one in records if one[3].split(".")[0] in ("", str(step))]
        for ids, seed, sampling, _ in records:
            if seed in known:
                continue
            index = max((i for i, p in prompts.items() if ids[: len(p)] == p), key=lambda i: len(prompts[i]))
            prefix, asked = ids[len(prompts[index]) :], asked + 1
            most, own = sampling["max_tokens"], limit - len(prefix)  # some dialects have one limit for a whole call
            assert most == own or (own < most <= limit and dialect != "native"), "a continuation has another budget"
            assert seed > 0, "a seed of 0"
            more, logprobs = (made[:own] for made in write(self.words, ids, seed, most, self.variant))
            num_tokens += len(more)
            c = self.completion(index, ([*prefix, *more], [0.0] * len(prefix) + logprobs))
            passed = values.cuts(self.words, c, rules)[:-1] if is_search else []
            for start in {len(prefix), *(p for p in passed if p > len(prefix))}:
                fresh.setdefault((index, tuple(c["target"][:start])), []).append(self.return_of(c))
        return fresh, asked, num_tokens

    def scored(self, policy: Policy, completion: dict, *, adapted: bool = True) -> list[float]:
        with torch.no_grad():
            return self.logprobs(policy, completion, adapted=adapted).tolist()

    def logprobs(self, policy: Policy, completion: dict, *, adapted: bool = True) -> torch.Tensor:
        temperature = self.decoding["temperature"]
        return policy.logprobs(completion, temperature=temperature, banned=self.words.banned, adapted=adapted)

    def rows(self, completion: dict) -> torch.Tensor:
        temperature = self.decoding["temperature"]
        return self.policy.distribution(completion, temperature=temperature, banned=self.words.banned)

    def learn(self, step: int, segments: list, num_batches: list, result: Step) -> None:
        """The step's loss over all ranks, and the weights it makes."""
        if self.keys[f"{T}.packing"]:
            is_last = step == self.num_steps - 1 and not self.keys.get(f"{T}.packing_drop_last", False)
            given = zip(range(self.ranks), segments, num_batches, strict=True)
            segments = [self.packed(*three, leaves_none=is_last) for three in given]
        result.learnt = [sorted(c["index"] for c in own) for own in segments]
        everyone = [c for own in segments for c in own]
        result.counts |= {"segments": len(everyone), "carried": sum(map(len, self.waiting))}
        result.counts["learn_tokens"] = sum(len(c["expanded"]) + len(c["target"]) for c in everyone)
        limit = self.keys.get(f"{E}.max_response_tokens", self.keys[f"{R}.max_new_tokens"])
        self.policy.model.train()
        if self.is_paid:
            distill = self.distill if self.variant == "distill" else None
            loss, figures = policy_step(segments, self.rows, self.rules, limit=limit, distill=distill)
            for c in (c for c in everyone if c["masked"]):  # it has a forward pass, too: Adam moves what it used
                loss = loss + 0 * self.logits(c).sum()
        else:
            coords = [self.words.added[f"<|coord_{k}|>"] for k in range(1000)]
            loss, figures = matching.matching_step(everyone, self.logits, below(self.keys, R), coords)
        result.figures = {"loss": float(loss.detach())} | figures
        names = [*self.policy.weights]
        if loss.requires_grad:  # weights that no segment has used keep still: they are not decayed either
            leaves = [self.policy.weights[name] for name in names]
            found = torch.autograd.grad(loss, leaves, allow_unused=True)
        else:
            found = [torch.zeros_like(self.policy.weights[name]) for name in names]
        gradients = {name: g for name, g in zip(names, found, strict=True) if g is not None}
        self.policy.model.eval()
        before = {name: weight.detach().clone() for name, weight in self.policy.weights.items()}
        result.figures["grad_norm"] = self.optimizer.step(self.policy.weights, gradients, step)
        result.weights = {name: (weight.detach(), before[name]) for name, weight in self.policy.weights.items()}

    def logits(self, one: dict) -> torch.Tensor:
        return self.policy.logits([*one["expanded"], *one["target"]], one["images"])[len(one["expanded"]) - 1 : -1]

    def packed(self, rank: int, segments: list, num_rows: int, *, leaves_none: bool) -> list:
        """What is learnt of the new and the waiting; what waits is scored by the weights of now."""
        waiting = self.waiting[rank] + [(len(c["expanded"]) + len(c["target"]), c) for c in segments]
        rows, waiting = rows_of(waiting, num_rows, self.keys["global_max_length"])
        brought = self.repeats * self.keys[f"{T}.per_device_train_batch_size"]
        brought *= self.keys[f"{T}.gradient_accumulation_steps"]
        most = 0 if leaves_none else self.keys.get(f"{T}.packing_buffer") or brought
        while len(waiting) > most:
            more, waiting = rows_of(waiting, 1, self.keys["global_max_length"])
            rows += more
        self.waiting[rank] = waiting
        for _, completion in self.waiting[rank]:
            if self.is_paid and completion["old"] is None:
                completion["old"] = self.scored(self.policy, completion)
        return [c for row in rows for _, c in row]
