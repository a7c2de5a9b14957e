"""Control calls of senders, field by field: what a server needs to join, receive and commit; none says less or more."""

from types import SimpleNamespace

import pytest
import torch

from conformance.doubles.native_double import NativeDouble, tensors_of
from conformance.doubles.stock_server import StockDouble
from rollmatch.dialects.dialect import Dialect
from rollmatch.dialects.native.group import Rendezvous
from rollmatch.dialects.trl import sender as trl_sender
from rollmatch.dialects.trl.sender import TrlSender
from rollmatch.weights.gloo import CHAIN_PROTOCOL

LIMITS = {"timeout_s": 2.5, "join_timeout_s": 6.5}
WEIGHTS = {"a": torch.ones(3, 2), "b": torch.ones(4, dtype=torch.bfloat16)}
SECRET_LENGTH = 64


def group_of(sender):
    return {"client": "learner", "host": "127.0.0.1", "port": sender.rendezvous.port}


@pytest.mark.parametrize("keep", [False, True])
def test_servers_of_the_native_dialect_are_called_with_all_that_they_need(start_sender, keep):
    doubles = [NativeDouble(tensors_of(0)) for _ in range(2)]
    sender = start_sender(*doubles, **LIMITS)
    sender.keep = keep
    for version in (7, 9):
        sender.send(tensors_of(version).items(), version=version)
    sender.close()
    kept, secrets = {"keep": True} if keep else {}, set()
    for place, double in enumerate(doubles):
        calls = [call for call in double.calls if call[0] not in ("health", "openapi", "identity")]
        names = ["close_communicator", "communicator", "sync", "commit", "sync_again", "commit", "close_communicator"]
        assert [name for name, _ in calls] == names
        (_, left), (_, opened), (_, synced), (_, committed), (_, again), *later = calls
        secrets.add(opened.pop("secret"))
        place_in_group = {"world_size": 3, "rank_offset": place, "transport": "gloo", "replace": True}
        assert opened == group_of(sender) | LIMITS | place_in_group
        assert left == later[1][1] == {"client": "learner", "force": False}
        assert {each["name"] for each in synced.pop("tensors")} == tensors_of(7).keys()
        assert sum(synced.pop("buckets")) == len(tensors_of(7))
        sync = {"client": "learner", "sync_id": "7-0", "version": 7, "commit": False} | kept
        assert synced == sync | {"digests": None, "adapter": None}
        assert again == sync | {"sync_id": "9-1", "version": 9, "like": "7-0"}
        assert [committed, later[0][1]] == [{"client": "learner", "sync_id": name} for name in ("7-0", "9-1")]
    (secret,) = secrets
    assert len(secret) == SECRET_LENGTH


class Recording(StockDouble):
    """Keeps what it was called with."""

    def __init__(self):
        super().__init__()
        self.bodies = []

    def reply(self, name, body, query):
        self.bodies.append((name, query, body))
        return super().reply(name, body, query)


def test_stock_servers_are_called_with_all_that_they_need(start_sender):
    doubles = [Recording() for _ in range(2)]
    sender = start_sender(*doubles, **LIMITS)
    sender.send(WEIGHTS.items(), version=7)
    secrets = set()
    for place, double in enumerate(doubles):
        asked = ("health", "openapi.json", "get_world_size", "weight_info")
        calls = {name: (query, body) for name, query, body in double.bodies if name not in asked}
        (_, opened) = calls.pop("init_weight_transfer_engine")
        secrets.add(opened["init_info"].pop("secret"))
        address = {"master_address": "127.0.0.1", "master_port": sender.rendezvous.port, "world_size": 3}
        assert opened == {"init_info": address | {"rank_offset": 1 + place, "protocol": CHAIN_PROTOCOL} | LIMITS}
        assert calls == {
            "pause": ("mode=wait&clear_cache=true", None),
            "start_weight_update": ("", None),
            "update_weights": (
                "",
                {
                    "update_info": {
                        "names": ["a", "b"],
                        "dtype_names": ["float32", "bfloat16"],
                        "shapes": [[3, 2], [4]],
                        "buckets": [1, 1],
                    }
                },
            ),
            "finish_weight_update": ("", {"weight_version": "rollmatch-7"}),
            "reset_prefix_cache": ("", None),
            "resume": ("", None),
        }
    (secret,) = secrets
    assert len(secret) == SECRET_LENGTH


PLACES = [
    {"name": "a", "dtype": "torch.float32", "shape": [3, 2], "start_idx": 0, "end_idx": 24, "numel": 24},
    {"name": "b", "dtype": "torch.bfloat16", "shape": [4], "start_idx": 0, "end_idx": 8, "numel": 8},
]
NAMED = [{name: each[name] for name in ("name", "dtype", "shape")} for each in PLACES]


@pytest.mark.parametrize(
    ("dialect", "updates"),
    [
        ("trl", [("/update_named_param", each) for each in NAMED]),
        ("swift", [("/update_flattened_params", {"metadatas": [each]}) for each in PLACES]),
    ],
)
def test_servers_of_older_dialects_are_called_with_all_that_they_need(monkeypatch, dialect, updates):
    """Each has a group of its own, at its own host and port, whose last rank is the learner."""
    calls, sent = {0: [], 1: []}, []

    def server_of(place):
        def control(route, body=None, *, timeout_s=None):
            calls[place].append((route, body))
            assert timeout_s == (6.5 + place if route == "/init_communicator" else None)

        kind = type("Named", (Dialect,), {"name": dialect, "exchange": lambda *_: []})
        fields = {"dialect": kind("http://s"), "routes": {}, "world_size": lambda: 2 + place, "control": control}
        return SimpleNamespace(**fields, empty_caches=lambda: calls[place].append("emptied"))

    def group_at(address, device):
        return SimpleNamespace(
            address=address, device=device, broadcast=lambda tensor: sent.append((address.port, tensor.nbytes)),
            close=lambda: None,
        )  # fmt: skip

    monkeypatch.setattr(trl_sender, "StatelessGroup", group_at)
    places = [
        Rendezvous(host=f"127.0.0.{place}", port=23001 + place, client="c", timeout_s=2.5, join_timeout_s=6.5 + place)
        for place in (0, 1)
    ]
    TrlSender([server_of(0), server_of(1)], places).send(WEIGHTS.items(), version=7)
    for place, made in calls.items():
        opened = {"host": f"127.0.0.{place}", "port": 23001 + place, "world_size": 3 + place}
        join = [("/close_communicator", None), ("/init_communicator", opened | {"client_device_uuid": "none"})]
        assert made == [*join, *updates, "emptied"]
        assert [size for port, size in sent if port == 23001 + place] == [24, 8]
