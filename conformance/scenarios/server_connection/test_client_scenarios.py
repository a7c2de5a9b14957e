"""Scenarios of the learner's side with their own values: a configuration, a backend, and servers that only pretend."""

import signal
import sys
import time
from types import SimpleNamespace

import pytest
import torch

from conformance.doubles.client_calls import SECOND, SHORT, backend_of, config_for, requests_of, tensors_of
from conformance.doubles.instance import free_port
from conformance.doubles.learner_side import TEMPLATE
from conformance.doubles.native_double import NativeDouble, serving
from conformance.doubles.refusals import refused
from conformance.doubles.started import started
from conformance.judge.servers.bounded import in_thread
from rollmatch.dialects.watch import WatchRules
from rollmatch.journal import Journal, read_journal
from rollmatch.ranks import Ranks
from rollmatch.rollout.backend import derive_seed
from rollmatch.rollout.fence import Fence, SyncMode
from rollmatch.run.assemble import make_parts
from rollmatch.run.connect import connect_servers

BOUND_S = 10
"""Until a server that has ended counts as dead."""
REACH_S, LIMIT = "~.vllm.server.timeout_s=", "~.vllm.server.infer_timeout_s="


@pytest.mark.scenario(
    "server-connection/no-limit-unless-asked-for",
    "server-connection/zero-means-no-limit",
    clauses=["server-connection/reaching-and-generating-have-timeouts-of-their-own#3"],
)
@pytest.mark.parametrize(("seconds", "overrides"), [(1.5, (REACH_S + "1", LIMIT + "null")), (0.5, (LIMIT + "0",))])
def test_no_limit_unless_one_is_set(double, seconds, overrides):
    double.infer = lambda handler, said: (time.sleep(seconds), double.echo(handler, said))
    rollouts = backend_of(double.url, *overrides).generate(requests_of(2), SHORT)
    assert [rollout.response_token_ids for rollout in rollouts] == [(0,), (1,)]


@pytest.mark.scenario(
    "server-connection/nobody-listens",
    clauses=[
        "server-connection/reaching-and-generating-have-timeouts-of-their-own#2",
        "server-connection/a-server-that-cannot-be-reached-stops-the-start#1,2,3",
    ],
)
def test_nobody_listens():
    config, began = config_for("http://127.0.0.1:9", REACH_S + "2"), time.monotonic()
    with refused("server-unreachable", "http://127.0.0.1:9", remedy="colocate") as caught:
        make_parts_with_server(config, Ranks())
    assert "hf" in caught.value.remedy
    assert time.monotonic() - began < 5


def make_parts_with_server(config, ranks):
    """All parts of a trainer; making the backend is the first that touches a server."""
    model = torch.nn.Linear(1, 1)
    template = SimpleNamespace(**vars(TEMPLATE), pad_id=0, image_id=-1, image_size=None)
    template.vocabulary.bin_of, template.vocabulary.coord_ids, template.vocabulary.is_control = {}, (), bool
    return make_parts(config, model, template, journal=SimpleNamespace(write=lambda *_, **__: {}), ranks=ranks)


ALONE = """
import threading
from conformance.doubles.native_double import NativeDouble, serving
double = NativeDouble({})
double.infer = lambda body: (print("asked", flush=True), threading.Event().wait(60))
with serving(double) as urls:
    print(urls[0], flush=True)
    threading.Event().wait(60)
"""


@pytest.mark.scenario(
    "server-connection/the-server-dies-in-the-middle-of-a-call",
    "server-connection/the-server-hangs-with-an-open-connection",
)
@pytest.mark.parametrize("end", [signal.SIGSTOP, signal.SIGKILL])
def test_a_server_that_ends_in_the_middle_of_a_call_is_noticed(end, tmp_path):
    with started([sys.executable, "-c", ALONE], tmp_path / "log") as server:
        server.wait_until(lambda: "\n" in server.output())
        url = server.output().strip()
        # a busy machine takes seconds longer than the rules say
        rules = (LIMIT + "null", "~.vllm.server.retry_budget_s=0", "~.vllm.server.health_timeout_s=3")
        backend = backend_of(url, *rules)
        call = in_thread(backend.generate, requests_of(2), SHORT)
        server.wait_until(lambda: server.output().endswith("asked\n"))
        server.process.send_signal(end)
        with refused("server-died", url):
            call.result(timeout=BOUND_S)
    assert WatchRules().silence_s + WatchRules().poll_s < BOUND_S


@pytest.mark.scenario("determinism/a-call-carries-a-seed-that-is-known-in-advance")
def test_the_seed_of_a_call_is_known_in_advance(double):
    for _ in range(2):
        backend_of(double.url).generate(requests_of(3, step=4), SHORT)
    first, second = (body["request_config"]["seed"] for body in double.bodies)
    assert first == second == derive_seed(7, step=4, rank=0, index=0)
    assert first != 0


def calls_of(double, *names):
    return [name for name, _ in double.calls if name in names]


@pytest.mark.scenario("learner-ranks/rank-1-generates-but-does-not-sync")
def test_rank_1_generates_but_does_not_sync():
    double = NativeDouble(tensors_of(0.0))
    with serving(double) as (url,):
        backend = connect_servers(config_for(url), TEMPLATE, ranks=SECOND)
        backend.push(tensors_of(1.0).items(), version=1)
        assert calls_of(double, "communicator", "sync", "commit") == []
        double.policy_version = 1
        assert len(backend.generate(requests_of(2), SHORT)) == 2
        assert calls_of(double, "infer") == ["infer"]
        backend.close()


@pytest.mark.scenario(
    "learner-ranks/adapter-mode-with-two-ranks-is-refused",
    "learner-ranks/auto-mode-that-means-adapter-is-refused",
    clauses=["learner-ranks/several-ranks-take-full-sync-only#2"],
)
@pytest.mark.parametrize("mode", ["adapter", "auto"])
@pytest.mark.parametrize("rank", [0, 1])
def test_adapter_mode_with_two_ranks_is_refused_before_a_server_is_called(double, mode, rank):
    config = config_for(double.url, "tuner.train_type=lora", f"~.vllm.sync.mode={mode}", "~.vllm.enable_lora=true")
    with refused("adapter-with-several-ranks", "custom.extra.rollout_matching.vllm.sync.mode", remedy="full"):
        make_parts_with_server(config, Ranks(rank=rank, learner_world_size=2))
    assert double.calls == []


@pytest.mark.scenario("learner-ranks/auto-mode-that-means-full-is-accepted")
def test_auto_mode_that_means_full_syncs_before_the_first_rollouts(tmp_path):
    weights = {"weight": torch.ones(1, 1), "bias": torch.ones(1)}
    double = NativeDouble(dict(weights))
    with serving(double) as (url,):
        named = ("~.vllm.sync.mode=auto", "~.vllm.enable_lora=false", "model.torch_dtype=float32")
        config = config_for(url, *named, port=free_port())
        source = make_parts_with_server(config, Together(rank=0, learner_world_size=2)).source
        assert source.fence.mode.mode == "full"
        source.fence.sync_if_due(0, lambda: iter(weights.items()))
        source.fence.backend.generate(requests_of(2), SHORT)
        assert calls_of(double, "sync", "infer") == ["sync", "infer"]
        assert double.policy_version == 1
        source.fence.backend.close()


class Together(Ranks):
    """Rank 0 of two that agree in everything."""

    def barrier(self):
        pass

    def gather(self, item):
        return [item, item]


@pytest.mark.scenario("weight-sync/a-restarted-server-is-synced-before-it-is-trusted")
def test_a_restarted_server_is_synced_before_it_is_trusted():
    double = NativeDouble(tensors_of(0.0))
    with serving(double) as (url,):
        backend = connect_servers(config_for(url, port=free_port()), TEMPLATE, ranks=Ranks())
        fence = Fence(backend, Ranks(), SimpleNamespace(write=lambda *_, **__: {}), mode=SyncMode())
        fence.sync_if_due(0, lambda: iter(tensors_of(1.0).items()))
        backend.generate(requests_of(1), SHORT)
        double.restart(tensors_of(0.0))
        double.calls = []
        fence.sync_if_due(0, lambda: iter(tensors_of(1.0).items()))
        whole = ["sync_again", "sync"]  # the first one is refused: there is no group any more
        assert calls_of(double, "sync_again", "sync") == whole
        (rollout,) = backend.generate(requests_of(1), SHORT)
        assert calls_of(double, "sync_again", "sync", "infer") == [*whole, "infer"]
        assert rollout.policy_version == double.policy_version == 2
        backend.close()


@pytest.mark.scenario(clauses=["weight-sync/full-sync-sends-every-weight-merged#7"])
def test_the_journal_says_whether_servers_list_their_tensors(double, tmp_path):
    """A server of the swift dialect does not; one of ours with other tensors is refused."""
    journal, model = Journal(tmp_path / "journal.jsonl"), torch.nn.Linear(2, 3)
    backend = connect_servers(config_for(double.url), TEMPLATE, ranks=Ranks(), journal=journal, model=model)
    backend.close()
    with serving(NativeDouble({"weight": torch.zeros(3, 2)})) as (url,), refused("tensor-unknown", "bias"):
        connect_servers(config_for(url), TEMPLATE, ranks=Ranks(), journal=journal, model=model)
    with serving(NativeDouble(dict(model.named_parameters()))) as (url,):
        connect_servers(config_for(url), TEMPLATE, ranks=Ranks(), journal=journal, model=model).close()
    error = [event["are_compared_with_servers"] for event in read_journal(tmp_path / "journal.jsonl")]
    assert error == [False, True]


@pytest.mark.scenario(
    "data-ownership/the-bodies-of-a-step",
    clauses=[
        "data-ownership/only-requests-rollouts-and-weights-cross-the-border#1,2,3",
        "data-ownership/the-learner-owns-the-order-of-the-data#2",
        "topologies/three-rollout-gpus-and-one-learner-gpu-work-together#5",
    ],
)
def test_the_bodies_of_a_step():
    double = NativeDouble(tensors_of(0.0))
    with serving(double) as (url,):
        backend = connect_servers(config_for(url, port=free_port()), TEMPLATE, ranks=Ranks())
        backend.push(tensors_of(1.0).items(), version=1)
        backend.generate(requests_of(2), SHORT)
        backend.close()
    bodies = {name: body for name, body in double.calls if body is not None}
    assert bodies.keys() == {"communicator", "sync", "infer", "close_communicator"}
    assert bodies["infer"].keys() == {"requests", "sampling", "images"}
    for request in bodies["infer"]["requests"]:
        assert request.keys() == {"request_id", "prompt_token_ids", "images", "seed"}
    described = {"client", "sync_id", "version", "tensors", "buckets", "digests", "commit", "adapter"}
    assert bodies["sync"].keys() == described
    assert all(tensor.keys() == {"name", "dtype", "shape"} for tensor in bodies["sync"]["tensors"])
