"""How a rank is connected to its servers: what is compared, who sends, and at how many servers a run ends."""

from contextlib import ExitStack, contextmanager, nullcontext

import pytest
import torch
from torch import distributed as dist
from torch.distributed.fsdp import fully_shard

from conformance.doubles.adapted_policy import TOWER
from conformance.doubles.configs import config_with
from conformance.doubles.digits import load_model
from conformance.doubles.http_server import answering
from conformance.doubles.learner_side import TEMPLATE
from conformance.doubles.native_double import NativeDouble, serving
from conformance.doubles.refusals import refused
from rollmatch.config.training import TunerConfig
from rollmatch.dialects.calls import run_all
from rollmatch.dialects.session import ClientSettings, RolloutServer
from rollmatch.dialects.swift.sender import ADAPTER_ROUTE
from rollmatch.journal import Journal, read_journal
from rollmatch.ranks import Ranks
from rollmatch.rollout.servers import VllmServerBackend
from rollmatch.run import connect

VLLM = "~.vllm"
SWIFT = ("/health/", "/infer/", "/get_world_size/", "/init_communicator/", "/update_flattened_params/")


@pytest.fixture
def model():
    return torch.nn.Linear(2, 3)


@pytest.fixture
def urls(model):
    """Of two servers that hold the model."""
    with serving(*(NativeDouble(dict(model.named_parameters())) for _ in range(2))) as found:
        yield found


@pytest.fixture
def alone():
    """torch's process group of this process, unless an engine that another test opened has made one."""
    if is_made := not dist.is_initialized():
        dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
    yield
    if is_made:
        dist.destroy_process_group()


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
    assert (backend.calls.rules.retry_budget_s, backend.calls.rules.num_ids) == (9.0, None)
    assert places_of(backend.sender) == (urls, 7, True)
    assert places_of(backend.remake_sender([1])) == (urls[1:], 8, True)


@pytest.mark.parametrize(
    ("rank", "has_model", "sharded", "compared"),
    [(0, True, False, True), (1, True, False, False), (0, False, False, False), (0, True, True, False)],
)
def test_rank_0_compares_its_tensors_where_it_holds_them_whole(
    urls, model, tmp_path, alone, rank, has_model, sharded, compared
):
    split = fully_shard if sharded else lambda module: module
    journal, given = Journal(tmp_path / "journal.jsonl"), split(model) if has_model else None
    backend = connected_with(urls, rank=rank, model=given, journal=journal)
    assert (backend.sender is not None) == (rank == 0)
    journal.close()
    written = [(line["number"], line["are_compared_with_servers"]) for line in read_journal(journal.path)]
    assert written == [(2, True)] * compared
    other = split(torch.nn.Linear(2, 4)) if has_model else None
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


@contextmanager
def swift_server(*, has_route, has_lora):
    """As ``swift rollout`` describes itself."""
    routes = [*SWIFT, *[f"{ADAPTER_ROUTE}/"] * has_route]
    replies = {"openapi.json": {"paths": {route: {} for route in routes}}, "get_engine_type": {"enable_lora": has_lora}}
    with answering(lambda name, _: (200, replies.get(name, {"status": "ok"}))) as url:
        yield url


@pytest.mark.parametrize("places", [(0, 0), (0, 1), (1, 0), (0, 2)])
def test_adapters_are_tried_out_where_every_server_takes_them(places):
    """One of the vision tower is refused before anything is sent."""
    kinds = {"has_route": True, "has_lora": True}, {"has_route": True, "has_lora": False}
    kinds += ({"has_route": False, "has_lora": True},)
    policy = load_model(TunerConfig(train_type="lora", target_regex=TOWER))
    with ExitStack() as stack:
        urls = [stack.enter_context(swift_server(**kinds[place])) for place in places]
        servers = [RolloutServer(url, ClientSettings(timeout_s=5)) for url in urls]
        run_all(server.connect for server in servers)
        backend = VllmServerBackend(servers, TEMPLATE, Ranks(), sender=None)
        with refused("adapter-not-applied", "tuner.target_regex") if places == (0, 0) else nullcontext():
            connect.try_out_adapters(backend, policy)
