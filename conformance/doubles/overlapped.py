"""A trainer whose rollouts are made beside it: servers that are a copy of the policy, in this process."""

import copy
import dataclasses
import random
import threading
from itertools import count

from conformance.doubles.small_run import events, make_trainer
from rollmatch.rollout.backend import RolloutBackend, make_rollout
from rollmatch.rollout.fence import Fence
from rollmatch.rollout.hf import HfBackend
from rollmatch.rollout.overlap import Lockstep, run_ahead, work_early
from rollmatch.rollout.prefetch_rules import PrefetchRules


class CopyServers(RolloutBackend):
    """Two servers that share one copy of the policy; ``before_call`` gets (server, sample ids) in the caller's
    thread, ``events`` are syncs and calls in the order they began and ended."""

    num_servers, lost = 2, ()

    def __init__(self, trainer):
        self.policy = trainer.model
        self.held = HfBackend(copy.deepcopy(trainer.model).eval(), trainer.source.template, batch_size=8)
        self.lock, self.events = threading.Lock(), []
        self.before_call = lambda server, ids: None
        self.is_well = lambda: True

    @property
    def policy_version(self):
        return self.held.policy_version

    def rest(self):
        pass

    def push(self, weights, *, version):
        self.events.append(("sync", version))
        self.held.model.load_state_dict(self.policy.state_dict())
        self.held.push(weights, version=version)
        self.is_well = lambda: True

    def is_current(self):
        return self.is_well()

    def generate(self, requests, decoding):
        self.events.append(("whole", self.policy_version, [request.sample.sample_id for request in requests]))
        self.before_call(0, [request.sample.sample_id for request in requests])
        return self._write(requests, decoding)

    def _write(self, requests, decoding):
        with self.lock:
            return self.held.generate(requests, decoding)

    def generate_on(self, server_index, requests, decoding, *, start):
        ids = [request.sample.sample_id for request in requests]
        self.events.append(("call", self.policy_version, ids))
        self.before_call(server_index, ids)
        rollouts = self._write(requests, decoding)
        self.events.append(("answer", self.policy_version, ids))
        return rollouts


class ScriptedServers(CopyServers):
    """Responses follow from prompt and seed alone, whatever thread asks, in whatever company."""

    def _write(self, requests, decoding):
        return [self._rollout(request, decoding) for request in requests]

    def _rollout(self, request, decoding):
        template, chance = self.held.template, random.Random(f"{request.seed} {request.token_ids}")
        ids, limit = template.vocabulary.encode("ab 1."), request.limit(decoding.max_new_tokens)
        written = [*chance.choices(ids, k=chance.randint(0, limit)), template.vocabulary.stop_id][:limit]
        prompt = template.expand(request.token_ids, template.image_features(request.sample))
        logprobs = [chance.uniform(-8, -6) for _ in written] if decoding.logprobs else None
        stop_ids, version = template.vocabulary.stop_ids, self.policy_version
        return make_rollout(request, prompt, written, logprobs, stop_ids=stop_ids, version=version)


def overlapped(
    folder, mode, *overrides, max_staleness=1, lead=None, pieces=1, callers=4, kind=CopyServers, **arguments
):
    """The trainer and its servers."""
    trainer = make_trainer(folder, *overrides, **arguments)
    return trainer, attach_servers(trainer, mode, max_staleness, lead, pieces, callers, kind=kind)


def attach_servers(
    trainer,
    mode="off",
    max_staleness=1,
    lead=None,
    pieces=1,
    callers=4,
    in_flight="wait",
    group_size=None,
    kind=CopyServers,
):
    """Servers in place of the backend that the trainer has; ``mode`` as in the configuration."""
    servers, lead = kind(trainer), max_staleness if lead is None else lead
    fence = Fence(servers, trainer.source.ranks, trainer.source.journal)
    source = trainer.source = dataclasses.replace(trainer.source, fence=fence)
    if mode == "ahead":
        rules = PrefetchRules(
            max_windows=lead + 1 if group_size is None else lead + 1 + max_staleness,
            callers_per_server=callers,
            pieces_per_server=pieces,
            group_size=group_size,
        )
        trainer.overlap = run_ahead(source, rules, max_staleness=max_staleness, lead=lead, in_flight=in_flight)
        if hasattr(trainer.learner.objective, "arrived"):
            trainer.overlap.prefetch.arrived = trainer.learner.objective.arrived
        if hasattr(trainer.learner.objective, "judge_early"):
            work_early(trainer.overlap, trainer.learner.objective.judge_early)
    else:
        trainer.overlap = Lockstep(source)
    return servers


def note_what_is_learnt(trainer):
    """``trainer.learnt`` gets (policy version, segments) of each optimizer step, ``trainer.ages`` the oldest age."""
    trainer.learnt, trainer.ages = [], []
    get = trainer.get_batch_samples

    def noted(*arguments):
        batches, totals = get(*arguments)
        segments = [segment for batch in trainer.report.batches for segment in batch.segments]
        step, fence = trainer.state.global_step, trainer.source.fence
        trainer.learnt.append((fence.backend.policy_version, segments))
        trainer.ages.append(max((step - fence.step_of[segment.policy_version] for segment in segments), default=0))
        return batches, totals

    trainer.get_batch_samples = noted


def ids_learnt(trainer):
    """Sample ids by optimizer step."""
    return [[segment.sample.sample_id for segment in segments] for _, segments in trainer.learnt]


def forget_between_steps(trainer, servers):
    """The servers are restarted between two steps, every third time."""
    looks = count(1)
    servers.is_well = lambda: next(looks) % 3 != 0


def in_order_of_time(trainer, *names):
    """(event, step) of learning, not of evaluations."""
    found = [event for name in names for event in events(trainer, name) if event.get("purpose") != "eval"]
    return [(event["event"], event.get("step")) for event in sorted(found, key=lambda event: event["time"])]
