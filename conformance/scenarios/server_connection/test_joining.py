"""The list of a running job: read again, followed where it can be, announced once where it cannot."""

import json
from contextlib import ExitStack

import pytest
import torch

from conformance.doubles.client_calls import SHORT, requests_of
from conformance.doubles.configs import config_with
from conformance.doubles.digits import load_digits
from conformance.doubles.instance import free_port
from conformance.doubles.learner_side import TEMPLATE
from conformance.doubles.native_double import NativeDouble, Refused, serving
from conformance.doubles.refusals import refused
from conformance.doubles.swift_double import running_double
from rollmatch.config import check_files
from rollmatch.config.server_rules import read_servers
from rollmatch.journal import Journal, read_journal
from rollmatch.ranks import Ranks
from rollmatch.rollout.fence import Fence
from rollmatch.run.connect import connect_servers

SERVER = "custom.extra.rollout_matching.vllm.server"


def tensors_of(model):
    return {name: tensor.detach().clone() for name, tensor in model.named_parameters()}


class Job:
    """A learner of a linear layer on some servers, whose list is written again between steps."""

    def __init__(self, folder, stack):
        self.path, self.stack = folder / "servers.yaml", stack
        self.model, self.journal = torch.nn.Linear(2, 3), Journal(folder / "journal.jsonl")
        self.backend = self.fence = None

    def double(self, tensors=None, **fields):
        double = NativeDouble(tensors or tensors_of(self.model), **fields)
        (url,) = self.stack.enter_context(serving(double))
        double.entry = {"base_url": url, "group_port": free_port()}
        return double

    def listed(self, *doubles):
        self.path.write_text(json.dumps([double.entry for double in doubles]))

    def start(self, *overrides):
        config = config_with("~.vllm.mode=server", f"~.vllm.server.servers_file={self.path}", *overrides)
        self.backend = connect_servers(config, TEMPLATE, ranks=Ranks(), journal=self.journal, model=self.model)
        self.stack.callback(self.backend.close)
        self.fence = Fence(self.backend, Ranks(), self.journal)
        return self.step(0)

    def step(self, step):
        """Sync and generate; the version of the rollouts."""
        self.fence.sync_if_due(step, lambda: iter(tensors_of(self.model).items()))
        (version,) = {rollout.policy_version for rollout in self.backend.generate(requests_of(4, step=step), SHORT)}
        return version

    def kept(self):
        return [event["code"] for event in read_journal(self.journal.path) if event["event"] == "servers_kept"]


def raising(error):
    def call(_given):
        raise error

    return call


def num_asked(double):
    return sum(len(body["requests"]) for name, body in double.calls if name == "infer")


@pytest.fixture
def job(tmp_path):
    with ExitStack() as stack:
        yield Job(tmp_path, stack)


@pytest.fixture
def one(job):
    """The only server of a running job."""
    double = job.double()
    job.listed(double)
    job.start("~.vllm.server.retry_budget_s=0")
    return double


@pytest.mark.scenario(
    "server-connection/a-broken-list-in-a-running-job",
    clauses=["server-connection/servers-join-and-leave-a-running-job#8"],
)
def test_a_broken_list_is_announced_once_and_changes_nothing(job, one, caplog):
    job.path.write_text("[{base_url:")
    assert [job.step(1), job.step(2)] == [2, 3]
    assert job.kept() == ["servers-file-invalid"]
    assert caplog.text.count(str(job.path)) == 1
    job.listed(one, one)
    job.step(3)
    job.listed(one)
    job.step(4)
    job.path.unlink()
    job.step(5)
    assert job.kept() == ["servers-file-invalid", "server-named-twice", "servers-file-invalid"]
    assert num_asked(one) == 24
    assert one.policy_version == 6


@pytest.mark.scenario(
    "server-connection/the-last-server-stays-until-another-has-joined",
    clauses=["server-connection/servers-join-and-leave-a-running-job#3,4,6,8,9"],
)
def test_the_last_server_stays_until_another_has_joined(job, one):
    other = job.double()
    health, other.health = other.health, raising(Refused("starting"))
    job.listed(other)
    job.step(1)
    assert (num_asked(one), num_asked(other)) == (8, 0)
    assert job.kept() == ["starting", "servers-file-too-short"]
    other.health = health
    job.step(2)
    assert (num_asked(one), num_asked(other)) == (8, 4)
    assert (one.policy_version, other.policy_version) == (2, 3)
    assert one.group is None
    assert torch.equal(other.served["bias"], job.model.bias)
    assert len(job.kept()) == 2


@pytest.mark.parametrize("min_servers", [1, 2])
@pytest.mark.scenario(clauses=["server-connection/servers-join-and-leave-a-running-job#9"])
def test_a_lost_server_does_not_count_among_those_that_would_be_left(job, min_servers):
    doubles = [job.double() for _ in range(3)]
    job.listed(*doubles)
    job.start(f"~.vllm.server.min_servers={min_servers}")
    assert job.backend.members.leave_out(0)
    doubles[0].health = raising(Refused("gone"))
    job.listed(*doubles[:2])
    job.step(1)
    assert [double.policy_version for double in doubles] == [1, 2, 1 if min_servers == 1 else 2]
    assert job.kept() == ([] if min_servers == 1 else ["servers-file-too-short"])


def other_transports(double):
    identity = double.identity
    double.identity = lambda body: identity(body) | {"transports": ["gloo", "direct"]}


@pytest.mark.scenario(
    "server-connection/a-server-of-another-model-does-not-join",
    clauses=["server-connection/servers-join-and-leave-a-running-job#5,8"],
)
@pytest.mark.parametrize("code", ["tensor-unknown", "tensor-shape-mismatch", "transports-differ", "group-host-unknown"])
def test_a_server_that_does_not_fit_does_not_join(job, one, code, monkeypatch):
    tensors = {"tensor-unknown": {"a": torch.zeros(2)}, "tensor-shape-mismatch": {"weight": torch.zeros(5, 5)}}
    other = job.double(tensors.get(code))
    if code == "transports-differ":
        other_transports(other)
    if code == "group-host-unknown":
        monkeypatch.setattr(
            "rollmatch.run.joining.resolve", lambda host: (_ for _ in ()).throw(OSError("no such name"))
        )
    job.listed(one, other)
    job.step(1)
    job.step(2)
    assert job.kept() == [code]
    assert (num_asked(one), num_asked(other), other.policy_version) == (12, 0, 0)


@pytest.mark.scenario(clauses=["server-connection/servers-join-and-leave-a-running-job#5,6,7"])
def test_a_server_leaves_and_returns_with_the_version_of_another_learner(job, one):
    other = job.double(policy_version=7)
    job.listed(one, other)
    assert job.step(1) == one.policy_version == other.policy_version == 8
    job.listed(one)
    assert job.step(2) == 9
    assert (other.policy_version, other.group) == (8, None)
    job.listed(other, one)
    assert job.step(3) == other.policy_version == 10
    assert (num_asked(one), num_asked(other)) == (4 + 2 + 4 + 2, 2 + 2)


@pytest.mark.scenario(
    "server-connection/a-broken-list-at-the-start",
    clauses=["server-connection/servers-join-and-leave-a-running-job#1,2"],
)
@pytest.mark.parametrize(
    ("text", "code", "problem"),
    [
        (None, "servers-file-invalid", "cannot be read"),
        ("[", "servers-file-invalid", "line"),
        ("", "servers-file-invalid", "no list"),
        ("[]", "servers-file-invalid", "at least 1"),
        ("servers: []", "servers-file-invalid", "no list"),
        ("[{base_url: 'http://a:1'}]", "servers-file-invalid", "0.group_port"),
        ("[{base_url: 'http://a:1', group_port: 1, x: 2}]", "servers-file-invalid", "0.x"),
        ("[{base_url: 'a:1', group_port: 1}]", "servers-file-invalid", "http://127.0.0.1:8000"),
        (b"[\xff]", "servers-file-invalid", "UTF-8"),
        ("[{base_url: 'http://a:1', group_port: 1}, {base_url: 'http://a:2', group_port: 1}]", "group-port-shared", ""),
    ],
)
def test_a_broken_list_stops_the_start_before_a_server_is_called(tmp_path, text, code, problem):
    path = tmp_path / "servers.yaml"
    if text is not None:
        path.write_bytes(text if isinstance(text, bytes) else text.encode())
    config = load_digits(f"{SERVER}.servers_file={path}", "custom.extra.rollout_matching.vllm.mode=server")
    with refused(code, f"{SERVER}.servers_file", problem=problem):
        check_files(config)


@pytest.mark.scenario(clauses=["server-connection/servers-join-and-leave-a-running-job#1"])
def test_a_list_is_yaml_or_json(tmp_path):
    entry, path = {"base_url": "http://a:8000", "group_port": 51216, "group_host": "10.0.0.7"}, tmp_path / "list"
    config = config_with("~.vllm.mode=server", f"~.vllm.server.servers_file={path}")
    section, found = config.custom.extra.rollout_matching.vllm.server, []
    for text in (json.dumps([entry]), "- base_url: http://a:8000/\n  group_port: 51216\n  group_host: 10.0.0.7\n"):
        path.write_text(text)
        found += read_servers(section)
    assert {(one.base_url, one.group_port, one.group_host) for one in found} == {tuple(entry.values())}


@pytest.mark.scenario(clauses=["server-connection/servers-join-and-leave-a-running-job#10"])
def test_servers_of_other_dialects_are_refused_at_the_start(job):
    with running_double() as double:
        double.entry = {"base_url": double.url, "group_port": free_port()}
        job.listed(double)
        with refused("dialect-not-elastic", f"{SERVER}.servers_file", problem="swift"):
            job.start()
