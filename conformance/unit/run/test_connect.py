"""How a rank is connected to its servers: what is compared, who sends, and at how many servers a run ends."""

from contextlib import nullcontext
from types import SimpleNamespace
from unittest.mock import Mock

import pytest
import torch

from conformance.doubles.configs import config_with
from conformance.doubles.learner_side import TEMPLATE
from conformance.doubles.native_double import NativeDouble, serving
from conformance.doubles.refusals import refused
from rollmatch.journal import Journal, read_journal
from rollmatch.ranks import Ranks
from rollmatch.rollout.servers import VllmServerBackend
from rollmatch.run import connect

VLLM = "~.vllm"


@pytest.fixture
def model():
    return torch.nn.Linear(2, 3)


@pytest.fixture
def urls(model):
    """Of two servers that hold the model."""
    with serving(*(NativeDouble(dict(model.named_parameters())) for _ in range(2))) as found:
        yield found


def connected_with(urls, *overrides, rank=0, **more):
    named = (f"{VLLM}.mode=server", f"{VLLM}.server.base_url=[{', '.join(urls)}]", f"{VLLM}.server.group_port=7")
    ranks = Ranks(rank=rank, learner_world_size=1 + rank)
    return connect.connect_servers(config_with(*named, *overrides), TEMPLATE, ranks=ranks, **more)


def places_of(sender):
    return [server.base_url for server in sender.servers], sender.rendezvous.port, sender.stage


@pytest.mark.parametrize(("changed", "least"), [((), 2), ((f"{VLLM}.server.min_servers=1",), 1)])
def test_all_servers_are_needed_unless_fewer_are_named(urls, changed, least):
    settings = (f"{VLLM}.server.retry_budget_s=9", f"{VLLM}.sync.stage=true", "overlong=truncate_left")
    backend = connected_with(urls, *changed, *settings)
    assert (backend.members.min_servers, backend.members.roster) == (least, None)
    assert (backend.call_rules.retry_budget_s, backend.call_rules.num_ids) == (9.0, None)
    assert places_of(backend.sender) == (urls, 7, True)
    assert places_of(backend.remake_sender([1])) == (urls[1:], 8, True)


@pytest.mark.parametrize(
    ("rank", "has_model", "sharded", "compared"),
    [(0, True, False, True), (1, True, False, False), (0, False, False, False), (0, True, True, False)],
)
def test_rank_0_compares_its_tensors_where_it_holds_them_whole(
    urls, model, tmp_path, monkeypatch, rank, has_model, sharded, compared
):
    if sharded:
        monkeypatch.setattr(connect, "named_weights", lambda _: SimpleNamespace(is_sharded=True))
    journal, given = Journal(tmp_path / "journal.jsonl"), model if has_model else None
    backend = connected_with(urls, rank=rank, model=given, journal=journal)
    assert (backend.sender is not None) == (rank == 0)
    journal.close()
    written = [(line["number"], line["are_compared_with_servers"]) for line in read_journal(journal.path)]
    assert written == [(2, True)] * compared
    other = torch.nn.Linear(2, 4) if has_model else None
    with refused("tensor-shape-mismatch") if compared else nullcontext():
        connected_with(urls, rank=rank, model=other)


@pytest.mark.parametrize(("timeout_s", "broadcast_s"), [(5, 5.0), (240, 20.0)])
def test_a_broadcast_has_twenty_seconds_or_as_long_as_a_server_is_waited_for(urls, timeout_s, broadcast_s):
    settings = (f"{VLLM}.server.timeout_s={timeout_s}", "training.output_dir=runs/../here")
    made = connected_with(urls, *settings).sender.rendezvous
    assert (made.host, made.port, made.timeout_s, made.join_timeout_s) == ("127.0.0.1", 7, broadcast_s, timeout_s)
    assert made.client.endswith("/here")


@pytest.mark.parametrize(("limit", "used"), [("null", None), ("0", None), ("-1", None), ("0.5", 0.5)])
def test_a_call_has_no_limit_unless_it_is_above_zero(urls, monkeypatch, limit, used):
    monkeypatch.setenv("ROLLMATCH_API_KEY", "")
    settings = {server.settings for server in connected_with(urls, f"{VLLM}.server.infer_timeout_s={limit}").servers}
    assert {(one.infer_timeout_s, one.api_key) for one in settings} == {(used, None)}


@pytest.mark.parametrize(
    ("dialects", "is_proved"), [((True, True), True), ((True, False), False), ((False, False), False)]
)
def test_adapters_are_tried_out_where_every_server_takes_them(monkeypatch, dialects, is_proved):
    proved, backend = [], Mock(spec=VllmServerBackend, servers=dialects)
    monkeypatch.setattr(connect, "takes_adapters", lambda server: server)
    monkeypatch.setattr(connect, "prove_adapters", lambda *given: proved.append(given))
    connect.try_out_adapters(backend, "a model")
    assert proved == [(backend, "a model")] * is_proved
    connect.try_out_adapters(Mock(), "a model")
    assert len(proved) == is_proved
