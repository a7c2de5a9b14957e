"""The rooms a step walks through, and the way from samples to rollouts that the learner may learn from."""

import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import nn

from rollmatch.journal import Journal
from rollmatch.learn.batch import Batcher, MicroBatch
from rollmatch.model.template import ImageFeatures, Template
from rollmatch.objectives.protocol import Objective
from rollmatch.ranks import Ranks
from rollmatch.records import Rollout, RolloutRequest, Sample
from rollmatch.rollout.ahead import Ahead, Wanted
from rollmatch.rollout.backend import Decoding, make_requests
from rollmatch.rollout.fence import Fence
from rollmatch.rollout.prefetch import Prefetch
from rollmatch.step_report import StepReport, measure

Weights = Callable[[], Any]
"""The learner's weights as they are when it is called."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Ring:
    """The rooms, ready to use. Made by ``launch.assemble``."""

    template: Template
    fence: Fence
    decoding: Decoding
    eval_decoding: Decoding
    objective: Objective
    batcher: Batcher
    journal: Journal
    ranks: Ranks
    run_seed: int
    reference: nn.Module | None = None
    """The policy before training, where it is not the policy without its adapters."""
    prefetch: Prefetch | None = None
    """Calls beside learning, for overlap stream and ahead."""
    ahead: Ahead | None = None
    graphs_kept: int = 1
    """Of micro-batches that overlap stream learns from before their step is whole."""
    rollout_threads: int | None = None
    learner_threads: int | None = None

    def roll_out(
        self, samples: Sequence[Sample], report: StepReport, weights: Weights, *, purpose: str
    ) -> list[Rollout]:
        """Sync if the learner has moved, then one rollout per place, in order; ``purpose`` is train or eval."""
        if self.ahead is not None:
            self.ahead.wait_for_next()
        self.sync(report, weights)
        with Threads(self.rollout_threads), report.phase("rollout"):
            requests = self.make_requests(samples, report.step, purpose=purpose)
            rollouts = self.fence.backend.generate(requests, self.decoding_of(purpose))
        self.tell_generated(rollouts, report, purpose=purpose)
        return rollouts

    def roll_out_ahead(self, wanted: Sequence[Wanted], report: StepReport, weights: Weights) -> list[Rollout]:
        """Sync if the learner has moved, ask for all windows that are ``wanted``, wait for the first."""
        assert self.ahead is not None
        with report.phase("rollout"):
            self.ahead.prefetch.wait_for(report.step)
        self.sync(report, weights)
        with report.phase("rollout"):
            collected = self.ahead.collect(wanted, self.make_requests, step_of=self.fence.step_of)
        report.staleness = collected.staleness
        again = self.ranks.gather(collected.num_asked_again)
        if any(again):
            self.journal.write("asked_again", step=report.step, num_rollouts=again[self.ranks.rank], by_rank=again)
        self.tell_generated(collected.rollouts, report, purpose="train")
        return collected.rollouts

    def ask_again(self, samples: Sequence[Sample], report: StepReport) -> list[Rollout]:
        """Rollouts by the newest weights for segments that waited too long."""
        requests = self.make_requests(samples, report.step, purpose="again")
        with report.phase("rollout"):
            rollouts = self.ask(requests, self.decoding)
        self.journal.write("asked_again", step=report.step, num_rollouts=len(rollouts))
        return rollouts

    def sync(self, report: StepReport, weights: Weights) -> None:
        """Bring the learner's weights to the rollout side if it has moved."""
        with Threads(self.rollout_threads):
            report.note("sync", self.fence.sync_if_due(report.step, weights))

    def ask(self, requests: Sequence[RolloutRequest], decoding: Decoding) -> list[Rollout]:
        """More rollouts by the weights that are there."""
        with Threads(self.rollout_threads):
            return self.fence.backend.generate(requests, decoding)

    def decoding_of(self, purpose: str) -> Decoding:
        """How training rollouts, or those of an evaluation, are sampled."""
        return self.eval_decoding if purpose == "eval" else self.decoding

    def check_alignment(self, samples: Sequence[Sample], rollouts: Sequence[Rollout]) -> dict[int, ImageFeatures]:
        """Features of each sample's images, by sample id, after checking that the engine saw the learner's prompt."""
        template = self.template
        features: dict[int, ImageFeatures] = {}
        for sample, rollout in zip(samples, rollouts, strict=True):
            if sample.sample_id not in features:
                features[sample.sample_id] = template.image_features(sample)
            prompt = template.expand(template.prompt_token_ids(sample), features[sample.sample_id])
            template.check_alignment(sample, prompt, rollout)
        return features

    def tell_generated(self, rollouts: Sequence[Rollout], report: StepReport, *, purpose: str) -> None:
        """Write down what came back; ``seconds`` is how long the learner waited for it."""
        self.journal.write(
            "generated",
            step=report.step,
            purpose=purpose,
            seconds=round(report.phase_s["rollout"], 4),
            num_rollouts=len(rollouts),
            num_tokens=sum(len(rollout.response_token_ids) for rollout in rollouts),
            policy_version=min((r.policy_version for r in rollouts), default=self.fence.backend.policy_version),
        )

    def tell_packed(self, batches: Sequence[MicroBatch], report: StepReport, *, order: Sequence[int] = ()) -> None:
        """Write down what an optimizer step learns from; ``order`` is that of learning, where it is another."""
        self.journal.write(
            "packed",
            step=report.step,
            rows=len(batches),
            segments=sum(len(batch.segments) for batch in batches),
            sample_ids=[[segment.sample.sample_id for segment in batch.segments] for batch in batches],
            tokens=sum(batch.num_tokens for batch in batches),
            fill=round(sum(batch.fill for batch in batches) / len(batches), 4),
            oldest_policy_version=min(segment.policy_version for batch in batches for segment in batch.segments),
            carried=report.num_carried,
            **({"order": list(order)} if order else {}),
        )

    def times_of(self, report: StepReport) -> tuple[dict[str, float], dict[str, Any]]:
        """When learner and servers were busy in a step that has ended: figures for the log, and its timeline.

        Called by all ranks: each one's seconds of rollout are among the figures.
        """
        now, calls = time.time(), self.prefetch.take_calls() if self.prefetch else []
        waits = [(begin, end) for name, begin, end in report.spans if name == "rollout"]
        busy = self.prefetch.spans_of(calls, now=now) if self.prefetch else [waits]
        times = measure((report.began, now), report.phase_s, busy)
        timeline = {
            "step": report.step,
            "began": round(report.began, 3),
            "ended": round(now, 3),
            "learner": [[name, round(begin, 3), round(end, 3)] for name, begin, end in sorted(report.spans)],
            "calls": [c.as_list() for c in calls] if self.prefetch else [[0, *wait, report.step] for wait in waits],
        }
        ages = report.staleness or {0: len(report.rollouts)}
        figures = times.figures() | {f"staleness/{age}": float(number) for age, number in ages.items()}
        by_rank = self.ranks.gather(report.phase_s["rollout"])
        figures |= {f"time/rollout_s/rank{rank}": seconds for rank, seconds in enumerate(by_rank)}
        return figures, timeline

    def begin_learning(self, report: StepReport) -> None:
        """All that the step learns from is there."""
        self.fence.backend.rest()
        report.learn_began = time.time()

    def check(self) -> None:
        """Raise what a call beside learning has failed with."""
        if self.prefetch is not None:
            self.prefetch.check()

    def close(self) -> None:
        """Leave the servers, or stop the engine."""
        if self.prefetch is not None:
            self.prefetch.close()
        self.fence.backend.close()

    @property
    def streams(self) -> bool:
        """Whether a step is learnt while its rollouts come back."""
        return self.prefetch is not None and self.ahead is None

    def make_requests(self, samples: Sequence[Sample], step: int, *, purpose: str = "train") -> list[RolloutRequest]:
        """The requests of an optimizer step, written down as they are asked for.

        What is asked for beside the step's own samples has ids and seeds of a rank that does not exist.
        """
        requests = make_requests(
            samples,
            prompt_of=self.template.prompt_token_ids,
            run_seed=self.run_seed,
            step=step,
            rank=self.ranks.rank + (self.ranks.learner_world_size if purpose == "again" else 0),
        )
        self.journal.write(
            "requested",
            step=step,
            purpose=purpose,
            num_requests=len(requests),
            seeds=[request.seed for request in requests],
            sample_ids=[sample.sample_id for sample in samples],
            decoding=self.decoding_of(purpose).as_dict(),
        )
        return requests


class Threads:
    """torch's CPU threads inside a phase, and back to what they were."""

    def __init__(self, num_threads: int | None) -> None:
        self.num_threads = num_threads
        self.before = torch.get_num_threads()

    def __enter__(self) -> None:
        if self.num_threads:
            torch.set_num_threads(self.num_threads)

    def __exit__(self, *exception: object) -> None:
        if self.num_threads:
            torch.set_num_threads(self.before)
