"""How a rank is connected to its servers: what is compared, who sends, and at how many servers a run ends."""

from types import SimpleNamespace
from unittest.mock import Mock

import pytest
import torch

from conformance.doubles.configs import config_with
from conformance.doubles.refusals import refused
from rollmatch.ranks import Ranks
from rollmatch.rollout.servers import VllmServerBackend
from rollmatch.run import connect

VLLM = "~.vllm"
TWO = (
    *(f"{VLLM}.mode=server", f"{VLLM}.server.base_url=[http://127.0.0.1:1, http://127.0.0.1:2]"),
    f"{VLLM}.server.group_port=7",
)
LISTED = (f"{VLLM}.mode=server", "training.packing=false")


@pytest.fixture
def world(monkeypatch):
    """``dialect`` of all servers, ``sharded`` weights, what senders were ``made`` of and what they ``compared``."""
    noted = SimpleNamespace(dialect="native", sharded=False, made=[], compared=[], rosters=[])

    def make_server(url, settings):
        server = Mock(base_url=url, settings=settings)
        server.dialect.name, server.health.return_value = noted.dialect, {}
        return server

    def make_sender(servers, places, *, stage):
        noted.made.append(([server.base_url for server in servers], [place.port for place in places], stage))
        return SimpleNamespace(check=lambda specs: noted.compared.append(specs) or True, instances=None, close=Mock())

    monkeypatch.setattr(connect, "RolloutServer", make_server)
    monkeypatch.setattr(connect, "connect_all", lambda servers: None)
    monkeypatch.setattr(connect, "make_sender", make_sender)
    monkeypatch.setattr(connect, "named_weights", lambda _: SimpleNamespace(is_sharded=noted.sharded))
    monkeypatch.setattr(connect, "checkpoint_tensors", lambda _: [("a", torch.zeros(2))])
    monkeypatch.setattr(connect, "make_roster", lambda admission, *_: noted.rosters.append(admission) or "a roster")
    return noted


def connected_with(*overrides, rank=0, model="a model", journal=None):
    ranks = Ranks(rank=rank, learner_world_size=1 + rank)
    made = connect.connect_servers(config_with(*overrides), Mock(), ranks=ranks, model=model, journal=journal)
    assert isinstance(made, VllmServerBackend)
    return made


@pytest.mark.parametrize(("changed", "least"), [((), 2), ((f"{VLLM}.server.min_servers=1",), 1)])
def test_all_servers_are_needed_unless_fewer_are_named(world, changed, least):
    backend = connected_with(*TWO, *changed, f"{VLLM}.server.retry_budget_s=9", f"{VLLM}.sync.stage=true")
    assert (backend.members.min_servers, backend.members.roster) == (least, None)
    assert (backend.call_rules.retry_budget_s, backend.call_rules.num_ids) == (9.0, None)
    urls = ["http://127.0.0.1:1", "http://127.0.0.1:2"]
    assert world.made == [(urls, [7, 8], True)]
    backend.remake_sender([1])
    assert world.made[1] == (urls[1:], [8], True)


@pytest.mark.parametrize(
    ("rank", "model", "sharded", "compared"),
    [(0, "a model", False, True), (1, "a model", False, False), (0, None, False, False), (0, "a model", True, False)],
)
def test_rank_0_compares_its_tensors_where_it_holds_them_whole(world, rank, model, sharded, compared):
    world.sharded, journal = sharded, Mock()
    connected_with(*TWO, rank=rank, model=model, journal=journal)
    assert len(world.made) == (rank == 0)
    assert [[spec.name for spec in specs] for specs in world.compared] == [["a"]] * compared
    assert journal.write.call_count == compared


@pytest.mark.parametrize(("timeout_s", "broadcast_s"), [(5, 5.0), (240, 20.0)])
def test_a_broadcast_has_twenty_seconds_or_as_long_as_a_server_is_waited_for(world, timeout_s, broadcast_s):
    config = config_with(*TWO, f"{VLLM}.server.timeout_s={timeout_s}", "training.output_dir=runs/../here")
    section = config.custom.extra.rollout_matching.vllm.server
    made = connect._rendezvous(config, connect.pair_servers(section)[1])
    assert (made.host, made.port, made.timeout_s, made.join_timeout_s) == ("127.0.0.1", 8, broadcast_s, timeout_s)
    assert made.client.endswith("/here")


@pytest.mark.parametrize(
    ("overlong", "dialect", "code"),
    [
        *(("truncate_left", "native", None), ("truncate_left", "trl", None), ("skip", "swift", None)),
        ("truncate_left", "swift", "prompt-not-truncated"),
    ],
)
def test_a_server_that_renders_chats_itself_gets_no_prompts_that_are_cut(world, overlong, dialect, code):
    world.dialect = dialect
    if code is None:
        connected_with(*TWO, f"overlong={overlong}")
        return
    with refused(code, "overlong", problem="http://127.0.0.1:1 speaks swift"):
        connected_with(*TWO, f"overlong={overlong}")


@pytest.mark.parametrize("dialect", ["native", "trl"])
def test_a_list_of_servers_is_followed_where_all_can_join(world, tmp_path, dialect):
    world.dialect = dialect
    (tmp_path / "servers.yaml").write_text("[{base_url: http://127.0.0.1:5, group_port: 6}]")
    listed = (*LISTED, f"{VLLM}.server.servers_file={tmp_path}/servers.yaml")
    if dialect != "native":
        with refused("dialect-not-elastic", problem="http://127.0.0.1:5 speaks trl"):
            connected_with(*listed)
        return
    backend = connected_with(*listed)
    (admission,) = world.rosters
    assert (backend.members.roster, [spec.name for spec in admission.specs]) == ("a roster", ["a"])
    assert [address.group_port for address in admission.places.values()] == [6]


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
