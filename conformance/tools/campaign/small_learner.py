"""A learner rank that learns nothing: the trainer's step with the real sources, fence, overlap and checkpoints."""

import errno
from collections import Counter
from contextlib import ExitStack
from types import SimpleNamespace

import torch

from conformance.doubles.attached import sender_of
from conformance.doubles.prompts import GREEDY, TEMPLATE, requests_of
from rollmatch.data import StepShape, WindowPlan
from rollmatch.dialects.session import ClientSettings, RolloutServer
from rollmatch.dialects.watch import WatchRules
from rollmatch.journal import Journal
from rollmatch.model.images import ImagePreparation
from rollmatch.model.source import checkpoints_in, step_of
from rollmatch.rollout.fence import Fence
from rollmatch.rollout.overlap import Ahead, Lockstep, RequestedWindow
from rollmatch.rollout.prefetch import Prefetch
from rollmatch.rollout.prefetch_rules import PrefetchRules
from rollmatch.rollout.retry import CallRules
from rollmatch.rollout.servers import VllmServerBackend
from rollmatch.rollout.source import RolloutSource
from rollmatch.training.checkpoint import find_damage, sealing
from rollmatch.training.report import StepReport

STEPS, PARTS, BUDGET_S = 4, 3, 3.0
"""A part is one sample."""
STATES = ("model.safetensors", "optimizer.pt", "scheduler.pt")
SETTINGS = ClientSettings(timeout_s=3, watch=WatchRules(poll_s=0.05, look_timeout_s=0.3, silence_s=0.6, stall_s=2.0))
PROMPTS = SimpleNamespace(
    **vars(TEMPLATE),
    prompt_token_ids=lambda sample: (100 + sample.sample_id, 5, 9, 6),
    preparation=ImagePreparation(lambda sample: None),
)


class LearnerKilled(BaseException):
    """The learner's process ends here."""


def plan_of(num_ranks, rank):
    """Which samples a rank learns from at each step."""
    shape = StepShape(batch_size=1, accumulation=PARTS, learner_world_size=num_ranks)
    return WindowPlan(STEPS * PARTS * num_ranks, seed=1, shape=shape, rank=rank)


def weights_at(step):
    """After ``step`` optimizer steps; zeros are those of a server that has just started."""
    return {"a": torch.full((2,), step + 1.0), "b": torch.full((3,), step + 1.0)}


class SmallLearner:
    """One rank of a run, from connecting to its end."""

    def __init__(self, folder, urls, shape, ranks, planned):
        self.folder, self.urls, self.shape, self.ranks, self.planned = folder, urls, shape, ranks, planned
        self.plan, self.reached, self.jumped = plan_of(shape.num_ranks, ranks.rank), Counter(), [0.0]
        self.samples = [request.sample for request in requests_of(STEPS * PARTS * shape.num_ranks)]

    def happen(self, place):
        """What is planned to go wrong here; a fault strikes once."""
        self.reached[place] += 1
        here = place, self.reached[place], self.ranks.rank
        fault = next((each for each in self.planned if (each.place, each.count, each.index) == here), None)
        if fault is None:
            return ""
        self.planned.remove(fault)
        return fault.kind

    def run(self):
        with ExitStack() as stack:
            name = "journal.jsonl" if self.ranks.is_primary else f"journal-rank{self.ranks.rank}.jsonl"
            self.journal = Journal(self.folder / name, rank=self.ranks.rank)
            stack.callback(self.journal.close)
            whole = (step_of(each) for each in checkpoints_in(self.folder) if not find_damage(each))
            start = self.ranks.gather(max(whole, default=0))[0]
            self.journal.write("run", resumed_from=start)
            if self.happen("resume"):
                raise LearnerKilled
            self.overlap = self.connect(stack)
            self.source = self.overlap.source
            for step in range(start, STEPS):
                self.take_step(step)
            self.journal.write("finished", step=STEPS)

    def connect(self, stack):
        """As ``cli.connect`` and ``cli.assemble``."""
        servers = [RolloutServer(url, SETTINGS) for url in self.urls]
        for server in servers:
            server.connect()
        sender = sender_of(servers) if self.ranks.is_primary else None
        backend = VllmServerBackend(servers, PROMPTS, self.ranks, sender=sender, journal=self.journal)
        stack.callback(backend.close)
        backend.remake_sender = lambda indices: sender_of([servers[index] for index in indices])
        backend.members.min_servers = self.shape.min_servers
        backend.calls.rules = CallRules(retry_budget_s=BUDGET_S, num_ids=200)
        fence = Fence(backend, self.ranks, self.journal)
        parts = {"template": PROMPTS, "decoding": GREEDY, "eval_decoding": GREEDY, "run_seed": 1}
        source = RolloutSource(fence=fence, journal=self.journal, ranks=self.ranks, **parts)
        if self.shape.mode == "off":
            return Lockstep(source)
        rules = PrefetchRules(max_windows=2, callers_per_server=2, pieces_per_server=self.shape.num_ranks)
        prefetch = Prefetch(backend, GREEDY, rules)
        stack.callback(prefetch.close)
        fence.quiet = prefetch.quiet
        return Ahead(source, prefetch, max_staleness=1, lead=1)

    def take_step(self, step):
        """As ``RolloutTrainer.get_batch_samples``: sync, rollout, target, learn."""
        report, overlap = StepReport(step, objective=None, num_batches=PARTS), self.overlap
        if isinstance(overlap, Ahead):
            overlap.wait_for_next()
        self.source.sync(step, lambda: iter(weights_at(step).items()))
        with report.phase("rollout"):
            report.rollouts = overlap.rollout(self.windows(step)).rollouts
        event = report.generated(report.rollouts, policy_version=self.source.policy_version)
        self.journal.write("generated", purpose="train", **event)
        self.learn(step, report)

    def windows(self, step):
        """The window of a step and those that follow, as far as the run goes."""
        steps = range(step, min(STEPS, step + self.overlap.lead + 1))
        return [RequestedWindow(each, self.samples_at(each)) for each in steps]

    def samples_at(self, step):
        return [self.samples[index] for index in self.plan.at(step).sample_indices]

    def learn(self, step, report):
        kind = self.happen("learning")
        if kind == "kill":
            raise LearnerKilled
        self.jumped[0] += {"clock back": -1.0, "clock ahead": 1.0}.get(kind, 0.0)
        sample_ids = [sample.sample_id for sample in self.samples_at(step)]
        read = [rollout.response_token_ids for rollout in report.rollouts]
        sent = [self.source.fence.step_of[rollout.policy_version] for rollout in report.rollouts]
        self.journal.write("learned", step=step, sample_ids=sample_ids, read=read, sent=sent)
        if self.overlap.prefetch is not None:
            self.journal.write("timeline", **report.times(self.overlap.prefetch)[1])
        self.save(self.folder / f"checkpoint-{step + 1}")

    def save(self, folder):
        folder.mkdir(exist_ok=True)
        kind = self.happen("checkpoint")
        self.ranks.barrier()
        with sealing(folder, SimpleNamespace(save_total_limit=None), self.ranks):
            for name in (f"rng_state_{self.ranks.rank}.pth", *(STATES if self.ranks.is_primary else ())):
                (folder / name).write_text(f"{folder.name} {name}")
                if kind == "disk full":
                    raise OSError(errno.ENOSPC, "No space left on device")
                if kind == "kill":
                    raise LearnerKilled
        if kind == "flip":
            (folder / STATES[1]).write_text(f"{folder.name} {STATES[2]}")
            raise LearnerKilled
