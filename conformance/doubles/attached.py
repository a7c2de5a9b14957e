"""Native doubles behind a real backend with a real group, in this process, and how they die and restart."""

from contextlib import ExitStack, contextmanager

import torch

from conformance.doubles.learner_side import rendezvous
from conformance.doubles.native_double import NativeDouble, Refused, serving
from conformance.doubles.prompts import GREEDY, TEMPLATE
from rollmatch.dialects.native.sender import NativeSender
from rollmatch.dialects.session import ClientSettings, RolloutServer
from rollmatch.dialects.watch import ServerDied, WatchRules
from rollmatch.journal import Journal, read_journal
from rollmatch.ranks import Ranks
from rollmatch.rollout.fence import Fence
from rollmatch.rollout.retry import CallRules
from rollmatch.rollout.servers import VllmServerBackend
from rollmatch.rollout.source import RolloutSource

QUICK = ClientSettings(timeout_s=5, watch=WatchRules(poll_s=0.05, look_timeout_s=0.3, silence_s=0.5))
WEIGHTS = {"a": torch.ones(2), "b": torch.full((3,), 2.0)}


@contextmanager
def attaching(journal_path):
    """A function that makes doubles, their backend with a real group, and a source that has synced once."""
    with ExitStack() as stack:

        def make(num_servers=1, *, budget_s=5.0, **fields):
            doubles = [
                NativeDouble({name: torch.zeros_like(t) for name, t in WEIGHTS.items()}) for _ in range(num_servers)
            ]
            servers = [RolloutServer(url, QUICK) for url in stack.enter_context(serving(*doubles))]
            for server in servers:
                server.connect()
            journal = Journal(journal_path)
            backend = VllmServerBackend(servers, TEMPLATE, Ranks(), sender=sender_of(servers), journal=journal)
            backend.remake_sender = lambda indices: sender_of([servers[index] for index in indices])
            backend.calls.rules = CallRules(retry_budget_s=budget_s, num_ids=200)
            stack.callback(backend.close)
            return doubles, backend, source_of(backend, journal, **fields)

        yield make


def sender_of(servers):
    return NativeSender(servers, rendezvous(timeout_s=5, join_timeout_s=5), stage=False)


def source_of(backend, journal, *, learner_world_size=1):
    fence = Fence(backend, Ranks(), journal)
    fence.sync_if_due(0, lambda: iter(WEIGHTS.items()))
    return RolloutSource(
        template=TEMPLATE,
        fence=fence,
        decoding=GREEDY,
        eval_decoding=GREEDY,
        journal=journal,
        ranks=Ranks(rank=0, learner_world_size=learner_world_size),
        run_seed=1,
    )


def events_of(backend, name):
    return [event for event in read_journal(backend.journal.path) if event["event"] == name]


def restarting(double, times=1):
    """Loses its weights in the middle of the first calls."""
    infer, restarts = double.infer, [True] * times

    def call(body):
        if restarts:
            restarts.pop()
            double.restart({name: torch.zeros_like(tensor) for name, tensor in WEIGHTS.items()})
            raise Refused("weights-missing")
        return infer(body)

    double.infer = call


def failing(call, *errors):
    """The call, which first fails with these, one after the other."""
    left = list(errors)

    def tried(*given, **named):
        if left:
            raise left.pop(0)
        return call(*given, **named)

    return tried


def dying(backend, times=1):
    """The first server dies in the middle of the first calls and stands there again, without the weights, after it."""
    server = backend.servers[0]
    server.infer = failing(server.infer, *times * [ServerDied("is gone", key=server.base_url)])
