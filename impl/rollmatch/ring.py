"""The rooms a step walks through, and the way from samples to rollouts that the learner may learn from."""

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import nn

from rollmatch.journal import Journal
from rollmatch.learn.batch import Batcher
from rollmatch.objective.seam import Objective
from rollmatch.ranks import Ranks
from rollmatch.records import Rollout, RolloutRequest, Sample
from rollmatch.rollout.backend import Decoding
from rollmatch.rollout.request import make_requests
from rollmatch.step_report import StepReport
from rollmatch.sync.fence import Fence
from rollmatch.template import ImageFeatures, Template

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
    rollout_threads: int | None = None
    learner_threads: int | None = None

    def roll_out(
        self, samples: Sequence[Sample], report: StepReport, weights: Weights, *, purpose: str
    ) -> list[Rollout]:
        """Sync if the learner has moved, then one rollout per place, in order; ``purpose`` is train or eval."""
        step, decoding = report.step, self.decoding_of(purpose)
        with Threads(self.rollout_threads):
            report.phase_s["sync"] += self.fence.sync_if_due(step, weights)
            with report.phase("rollout"):
                requests = self._make_requests(samples, step=step, purpose=purpose)
                rollouts = self.fence.backend.generate(requests, decoding)
        self.journal.write(
            "generated",
            step=step,
            purpose=purpose,
            seconds=round(report.phase_s["rollout"], 4),
            num_rollouts=len(rollouts),
            num_tokens=sum(len(rollout.response_token_ids) for rollout in rollouts),
            policy_version=self.fence.backend.policy_version,
        )
        return rollouts

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

    def _make_requests(self, samples: Sequence[Sample], *, step: int, purpose: str) -> list[RolloutRequest]:
        requests = make_requests(
            samples,
            prompt_of=self.template.prompt_token_ids,
            run_seed=self.run_seed,
            step=step,
            rank=self.ranks.rank,
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
