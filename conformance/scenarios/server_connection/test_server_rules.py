"""Rollout servers are named in exactly one of three forms, each with a group port of its own."""

import pytest
from hypothesis import given
from hypothesis import strategies as st

from conformance.doubles.configs import LONG, config_with, rejected
from conformance.doubles.refusals import refused
from rollmatch.config.connection import ServerConfig
from rollmatch.config.servers import pair_servers, sync_mode
from rollmatch.config.servers_file import read_entries

SERVER = "~.vllm.mode=server"
LORA = "tuner.train_type=lora"
ALONE = ("~.vllm.sync.mode=adapter", "~.vllm.enable_lora=true")
A, B, C = (f"http://127.0.0.1:{port}" for port in (8000, 8001, 8002))


def named(text):
    return (SERVER, f"~.vllm.server={{{text}}}")


def entries(*pairs):
    return "servers: [" + ", ".join(f'{{base_url: "{url}", group_port: {port}}}' for url, port in pairs) + "]"


GOOD = named(entries((A, 51216), (B, 51217)))


def values(code, key, bad, good=None, *, port=None, url=None):
    """A wrong value in the second form, and a right one, or the first form."""
    texts = [each and named(f"base_url: {url or each}, group_port: {port or each}") for each in (bad, good)]
    return code, key, texts[0], texts[1] or GOOD


PAIRED = named(f'base_url: ["{A}"], group_port: [1]')
POSITIVE = named(f"{entries((A, 1))}, timeout_s: 0.5")
ONE, TWO = f'"{A}"', f'["{A}", "{B}"]'
BROKEN = [
    ("missing-key", "base_url", named("group_port: 51216"), named(f"group_port: 51216, base_url: {ONE}")),
    ("missing-key", "group_port", named(f"base_url: {ONE}"), named(f"base_url: {ONE}, group_port: 51216")),
    ("connection-form-ambiguous", "", named(f"{entries((A, 1))}, base_url: {ONE}, group_port: 51216"), GOOD),
    ("connection-form-ambiguous", "", named(f"{entries((A, 1), (A, 1))}, group_port: 51216"), GOOD),
    ("connection-form-ambiguous", "", named(f"{entries((A, 1))}, servers_file: a.yaml"), named("servers_file: a.yaml")),
    ("connection-form-ambiguous", "", named("group_port: 1, servers_file: a.yaml, base_url: 'http://a:1'"), GOOD),
    ("connection-form-missing", "", named("timeout_s: 60"), ("~.vllm.server={timeout_s: 60}",)),
    ("out-of-range", "servers", named("servers: []"), GOOD),
    ("missing-key", "servers.0.group_port", named(f"servers: [{{base_url: {ONE}}}]"), GOOD),
    ("wrong-type", "servers.0.group_port", named(entries((A, "true"))), GOOD),
    ("out-of-range", "servers.1.group_port", named(entries((A, 1), (B, 65536))), named(entries((A, 1), (B, 65535)))),
    ("base-url-invalid", "servers.0.base_url", named(entries(("127.0.0.1:8000", 1))), GOOD),
    ("server-named-twice", "servers", named(entries((A, 1), (f"{A}/", 2))), named(entries((A, 1), (f"{A}/b", 2)))),
    (
        "group-port-shared",
        "servers",
        named(entries((A, 1), (B, 1))),
        named(entries(("http://a:8001", 1), ("http://b:8001", 1))),
    ),
    (
        "group-port-shared",
        "servers",
        named(entries(("http://a:1", "7, group_host: g"), ("http://b:1", "7, group_host: g"))),
        named(entries(("http://proxy:1", "7, group_host: g"), ("http://proxy:2", "7, group_host: h"))),
    ),
    ("group-host-loopback", "servers", named(entries((A, 1), ("http://b:8001", 2))), GOOD),
    values("group-host-loopback", "base_url", f'["http://b:8001", "{A}"]', '["http://b:8001", "http://c:1"]', port=1),
    ("out-of-range", "timeout_s", named(f"{entries((A, 1))}, timeout_s: 0"), POSITIVE),
    ("wrong-type", "infer_timeout_s", named(f"{entries((A, 1))}, infer_timeout_s: x"), GOOD),
    ("wrong-type", "group_port", named(f"base_url: {ONE}, group_port: [1]"), PAIRED),
    values("pairing-length-mismatch", "group_port", "[1, 2]", "[1, 2, 3]", url=f'["{A}", "{B}", "{C}"]'),
    values("wrong-type", "group_port", "true", "1", url=ONE),
    values("wrong-type", "group_port", '"1"', "1", url=ONE),
    values("out-of-range", "group_port", "0", "1", url=ONE),
    values("out-of-range", "group_port", "65535", "65534", url=TWO),
    values("group-port-shared", "group_port", "[1, 1]", url=TWO),
    values("out-of-range", "base_url", "[]", f"[{ONE}]", port=1),
    values("wrong-type", "base_url", "8000", ONE, port=1),
    values("server-named-twice", "base_url", f"[{ONE}, {ONE}]", port=1),
    *(
        values("base-url-invalid", "base_url", f'"{url}"', port=1)
        for url in ("127.0.0.1:8000", "http://", "http://a:0", "http://a:x", "http://a/?b=1", "ftp://a:1")
    ),
]


@pytest.mark.scenario(
    "server-connection/a-missing-base-url-is-refused",
    "server-connection/a-missing-group-port-is-refused",
    "server-connection/both-forms-at-once-are-refused",
    "server-connection/neither-form-is-refused",
    "server-connection/an-empty-list-of-servers-is-refused",
    "server-connection/one-url-with-a-list-of-ports-is-refused",
    "server-connection/a-truth-value-is-no-port",
    "server-connection/a-host-and-a-port-are-no-url",
    "server-connection/an-entry-without-a-group-port-is-refused",
    "server-connection/a-server-named-twice-is-refused",
    "server-connection/two-servers-of-one-machine-with-one-group-port-are-refused",
    "server-connection/a-group-of-two-machines-does-not-meet-at-loopback",
    "server-connection/counting-past-the-last-port-is-refused",
    "server-connection/a-reachability-timeout-of-zero-is-refused",
    "server-connection/a-base-url-with-a-query-is-refused",
    "server-connection/two-machines-may-use-one-group-port-each",
    clauses=[
        "server-connection/server-mode-names-its-servers-in-one-of-three-forms#1,4,5",
        "server-connection/base-urls-and-group-ports-are-paired-one-to-one#3,4,5,6,7",
        "server-connection/a-base-url-is-the-prefix-of-every-route#3",
        "server-connection/reaching-and-generating-have-timeouts-of-their-own#1",
    ],
)
@pytest.mark.parametrize(("code", "key", "broken", "repaired"), BROKEN)
def test_a_wrong_naming_is_refused_and_the_repaired_one_accepted(code, key, broken, repaired):
    assert rejected(*broken) == [(code, ".".join(["~.vllm.server", *([key] if key else [])]))]
    config_with(*repaired)


@pytest.mark.scenario(
    "server-connection/lists-of-different-lengths-are-refused",
    clauses=["server-connection/base-urls-and-group-ports-are-paired-one-to-one#1"],
)
def test_the_problem_of_two_lengths_names_both():
    with refused("pairing-length-mismatch", problem="3") as caught:
        config_with(*named(f'base_url: ["{A}", "{B}", "{C}"], group_port: [51216, 51217]'))
    assert "2" in caught.value.errors[0].problem


@pytest.mark.scenario(clauses=["server-connection/servers-join-and-leave-a-running-job#10"])
@pytest.mark.parametrize(
    ("code", "overrides"),
    [
        ("servers-file-with-adapter", ("~.vllm.sync.mode=auto", "~.vllm.enable_lora=true", "tuner.train_type=lora")),
    ],
)
def test_what_a_list_that_changes_does_not_go_with(code, overrides):
    form = named("servers_file: servers.yaml")
    assert rejected(*form, *overrides) == [(code, "~.vllm.server.servers_file")]
    config_with(*form)
    config_with(*form, "~.overlap=ahead", "training.packing=false")
    config_with(*GOOD, *overrides)


@pytest.mark.parametrize(
    ("text", "problem"),
    [
        *(
            ("{}", "holds no list"),
            ("[]", "at least 1 item"),
            ("[1", "servers.yaml: "),
            (None, "cannot be read: No such"),
        ),
        (b"\xff", "is not UTF-8"),
        ("[{base_url: http://a:1}]", "servers.0.group_port: Field required"),
    ],
)
def test_a_list_in_a_file_says_what_is_wrong_with_it(tmp_path, text, problem):
    path = tmp_path / "servers.yaml"
    if text is not None:
        path.write_bytes(text if isinstance(text, bytes) else text.encode())
    with refused("servers-file-invalid", f"{LONG}vllm.server.servers_file", problem=problem):
        read_entries(str(path))
    path.write_text("[{base_url: http://a:1, group_port: 2}]")
    assert [(entry.base_url, entry.group_port) for entry in read_entries(str(path))] == [("http://a:1", 2)]


def pairs_of(config):
    return [(a.base_url, a.group_port) for a in pair_servers(config.custom.extra.rollout_matching.vllm.server)]


@pytest.mark.scenario(
    "server-connection/the-first-form-is-accepted",
    "server-connection/a-whole-url-is-accepted",
    clauses=["server-connection/server-mode-names-its-servers-in-one-of-three-forms#2"],
)
def test_both_forms_say_the_same():
    expected = [(A, 51216), (B, 51217)]
    assert pairs_of(config_with(*GOOD)) == expected
    assert pairs_of(config_with(*named(f'base_url: ["{A}", "{B}/"], group_port: [51216, 51217]'))) == expected
    assert pairs_of(config_with(*named(f'base_url: ["{A}", "{B}"], group_port: 51216'))) == expected
    assert pairs_of(config_with(*named(f'base_url: "{A}", group_port: 51216'))) == expected[:1]
    assert config_with(*GOOD[1:]).custom.extra.rollout_matching.vllm.mode == "colocate"


@pytest.mark.scenario(
    "server-connection/lists-of-one-length-are-paired",
    clauses=[
        "server-connection/server-mode-names-its-servers-in-one-of-three-forms#3",
        "server-connection/base-urls-and-group-ports-are-paired-one-to-one#1",
    ],
)
def test_lists_are_paired_by_index():
    found = pairs_of(config_with(*named(f'base_url: ["{A}", "{B}"], group_port: [51300, 51216]')))
    assert found == [(A, 51300), (B, 51216)]


@pytest.mark.scenario(
    "server-connection/one-port-is-counted-on",
    clauses=["server-connection/base-urls-and-group-ports-are-paired-one-to-one#2"],
)
@given(st.integers(1, 20), st.integers(1, 60000))
def test_one_port_counts_on(num_servers, first):
    urls = tuple(f"http://host{place}:8000" for place in range(num_servers))
    addresses = pair_servers(ServerConfig(base_url=urls, group_port=first))
    assert [(a.base_url, a.group_port) for a in addresses] == [(url, first + place) for place, url in enumerate(urls)]


@pytest.mark.scenario(
    "server-connection/unset-timeouts-have-defaults",
    clauses=["server-connection/reaching-and-generating-have-timeouts-of-their-own#1,4"],
)
def test_timeouts_have_defaults():
    server = config_with(*GOOD).custom.extra.rollout_matching.vllm.server
    assert (server.timeout_s, server.infer_timeout_s) == (240.0, None)
    assert config_with(*named(f"{entries((A, 1))}, infer_timeout_s: -1")).custom.extra.rollout_matching.vllm.server


@pytest.mark.scenario(
    "weight-sync/auto-with-lora-means-adapter",
    "weight-sync/auto-without-lora-means-full",
    clauses=["weight-sync/the-sync-mode-is-chosen-in-yaml#1,3"],
)
@pytest.mark.parametrize(
    ("mode", "enable_lora", "resolved"),
    [("full", False, "full"), ("full", True, "full"), ("auto", False, "full"), ("auto", True, "adapter")],
)
def test_auto_follows_the_engine(mode, enable_lora, resolved):
    config = config_with(LORA, f"~.vllm.sync.mode={mode}", f"~.vllm.enable_lora={str(enable_lora).lower()}")
    assert sync_mode(config, learner_world_size=1) == resolved


@pytest.mark.scenario(
    "weight-sync/adapter-without-lora-is-refused",
    "weight-sync/adapter-with-lora-is-accepted",
    clauses=["weight-sync/the-sync-mode-is-chosen-in-yaml#4"],
)
def test_adapters_alone_need_an_engine_that_takes_them():
    assert rejected(LORA, "~.vllm.sync.mode=adapter") == [("adapter-needs-enable-lora", "~.vllm.sync.mode")]
    assert sync_mode(config_with(LORA, *ALONE), learner_world_size=1) == "adapter"


@pytest.mark.scenario(clauses=["weight-sync/the-sync-mode-is-chosen-in-yaml#5,6"])
@pytest.mark.parametrize("mode", ["adapter", "auto"])
def test_adapters_alone_need_adapters_that_the_engine_applies(mode):
    alone, key = ("~.vllm.enable_lora=true", f"~.vllm.sync.mode={mode}"), "~.vllm.sync.mode"
    assert rejected(*alone) == [("adapter-option-without-lora", key)]
    assert rejected(LORA, "tuner.use_dora=true", *alone) == [("adapter-incomplete", "tuner.use_dora")]
    assert rejected(LORA, "training.strategy=fsdp2", *alone) == [("adapter-incomplete", key)]
    config_with(LORA, "tuner.use_dora=true", *alone, *GOOD)  # merged by a server of ours


@pytest.mark.parametrize(
    ("overrides", "problem"),
    [
        (("~.vllm.mode=colocate",), "no server"),
        ((*GOOD, LORA, *ALONE), "adapters"),
        ((*GOOD, "custom.extra.rollout_server.vllm_tensor_parallel_size=2"), "parts of a model"),
    ],
)
def test_full_syncs_to_servers_are_staged(overrides, problem):
    with refused("cannot-stage", "custom.extra.rollout_matching.vllm.sync.stage", problem=problem):
        config_with(*overrides, "~.vllm.sync.stage=true")
    config_with(*GOOD, "~.vllm.sync.stage=true")


@pytest.mark.scenario(
    "weight-sync/a-quantized-engine-of-float32-is-refused",
    "weight-sync/a-quantized-engine-of-bfloat16-is-accepted",
    clauses=["weight-sync/an-engine-may-quantize-what-it-is-sent#5"],
)
@pytest.mark.parametrize("mode", ["colocate", "server"])
def test_a_quantized_engine_takes_all_weights_in_half_precision(mode):
    own = (f"~.vllm.mode={mode}", *(GOOD if mode == "server" else ()), "~.vllm.quantization=fp8")
    key = "custom.extra.rollout_matching.vllm.quantization"
    with refused("cannot-quantize", key, problem="float32", remedy="bfloat16"):
        config_with(*own, "~.vllm.dtype=float32")
    with refused("cannot-quantize", key, problem="adapters", remedy="full"):
        config_with(*own, LORA, *ALONE, "~.vllm.dtype=bfloat16")
    with refused("cannot-quantize", key, problem="ms-swift", remedy="rollmatch"):
        config_with(*own, "~.vllm.dtype=bfloat16", "custom.extra.rollout_server.engine=swift")
    config_with(*own, "~.vllm.dtype=bfloat16")
    config_with(*own, "training.bf16=true")


@pytest.mark.scenario(clauses=["learner-ranks/several-ranks-take-full-sync-only#1"])
@pytest.mark.parametrize("mode", ["adapter", "auto"])
def test_several_ranks_send_all_weights_to_servers(mode):
    config = config_with(*GOOD, LORA, f"~.vllm.sync.mode={mode}", "~.vllm.enable_lora=true")
    with refused("adapter-with-several-ranks", "custom.extra.rollout_matching.vllm.sync.mode", remedy="full"):
        sync_mode(config, learner_world_size=2)
    assert sync_mode(config_with("~.vllm.sync.mode=auto"), learner_world_size=2) == "full"
    assert sync_mode(config_with(LORA, *ALONE), learner_world_size=2) == "adapter"  # each rank's engine takes its own
