"""Keys of the section rlhf that contradict each other or other sections are refused."""

import pytest

from conformance.doubles.configs import GRPO, LONG, config_with, rejected
from conformance.doubles.refusals import refused
from rollmatch.config.servers import (
    disables_custom_all_reduce,
    max_model_len,
    pair_servers,
    server_key,
    server_section,
    uses_servers,
)

MODE = (*GRPO, "rlhf.use_vllm=true", "rlhf.vllm_mode=server")
HOSTS, PORTS = "rlhf.vllm_server_host=[a, b]", "rlhf.vllm_server_port=[8080, 8081]"
NAMED = (*MODE, HOSTS, PORTS)
URL = "rlhf.vllm_server_base_url"
LAUNCHED = "custom.extra.rollout_server."
COLOCATE = (*GRPO, "rlhf.use_vllm=true", "rlhf.vllm_mode=colocate")
OTHER = '~.vllm.server={base_url: "http://c:1", group_port: 2}'
AUTO = ("~.vllm.sync.mode=auto", "~.vllm.enable_lora=true", "tuner.train_type=lora")
OTHERS = (*GRPO, "~.vllm.mode=server", OTHER)


def value(code, key, bad, good=None):
    """A wrong value of a key beside named servers; a right one, or the servers alone."""
    return code, key, (*NAMED, f"{key}={bad}"), NAMED if good is None else (*NAMED, f"{key}={good}")


BROKEN = [
    ("missing-key", "rlhf.vllm_mode", (*GRPO, "rlhf.use_vllm=true"), COLOCATE),
    ("vllm-mode-unused", "rlhf.vllm_mode", (*GRPO, "rlhf.vllm_mode=server"), NAMED),
    ("rlhf-not-read", "rlhf.use_vllm", (*NAMED, "custom.trainer_variant=rollout_matching_sft"), NAMED),
    ("missing-key", "rlhf.vllm_server_host", (*MODE, PORTS), NAMED),
    ("missing-key", "rlhf.vllm_server_port", (*MODE, HOSTS), NAMED),
    ("out-of-range", "rlhf.vllm_server_port.1", (*NAMED, "rlhf.vllm_server_port=[1, 0]"), NAMED),
    ("connection-form-ambiguous", "~.vllm.server", (*NAMED, OTHER), OTHERS),
    ("connection-form-ambiguous", "~.vllm.server", (*NAMED, "~.vllm.server={servers_file: a.yaml}"), NAMED),
    ("connection-form-ambiguous", "~.vllm.mode", (*COLOCATE, *OTHERS[3:]), OTHERS),
    ("connection-form-ambiguous", "~.rollout_backend", (*NAMED, "~.rollout_backend=hf"), NAMED),
    ("adapter-sync-in-grpo", AUTO[0].partition("=")[0], (*NAMED, *AUTO), (*NAMED, AUTO[0])),
    *(
        ("host-invalid", f"rlhf.vllm_server_host.{place}", (*NAMED, f"rlhf.vllm_server_host={hosts}"), NAMED)
        for place, hosts in ((0, '["http://a", b]'), (1, '[a, "b:80"]'), (0, '["", b]'))
    ),
    ("connection-form-ambiguous", URL, (*NAMED, f"{URL}=http://a:1"), (*MODE, f"{URL}=http://a:1")),
    (
        "server-named-twice",
        URL,
        (*MODE, f"{URL}=[http://a:1, http://a:1/]"),
        (*MODE, f"{URL}=[http://a:1, http://a:2]"),
    ),
    ("base-url-invalid", URL, (*MODE, f"{URL}=[a]"), (*MODE, f"{URL}=[http://a/b]")),
    value("not-a-choice", "rlhf.vllm_mode", "both"),
    value("not-a-choice", "rlhf.rlhf_type", "dpo", "grpo"),
    value("wrong-type", "rlhf.vllm_server_port", 8080),
    value("wrong-type", "rlhf.vllm_server_host", "a"),
    value("out-of-range", "rlhf.vllm_server_host", "[]"),
    value("out-of-range", "rlhf.vllm_server_port", "[]"),
    value("out-of-range", "rlhf.vllm_server_host", "[a, a]"),
    value("group-host-loopback", "rlhf.vllm_server_host", "[localhost, b]", "[localhost, 127.0.0.1]"),
    value("pairing-length-mismatch", "rlhf.vllm_server_port", "[1, 2, 3]"),
    value("engine-setting-in-rlhf", "rlhf.vllm_max_model_len", 1024),
    value("out-of-range", "rlhf.vllm_server_timeout", 0),
    value("pairing-length-mismatch", "rlhf.vllm_server_group_port", "[1]", "[1, 2]"),
    value("out-of-range", "rlhf.vllm_server_group_port", 65535, 65534),
    value("engine-shorter-than-segment", f"{LAUNCHED}vllm_max_model_len", 1023, 1024),
    value("out-of-range", f"{LAUNCHED}vllm_max_model_len", 0, 1024),
    value("wrong-type", f"{LAUNCHED}vllm_max_model_len", 99.5, 1024),
    value("out-of-range", f"{LAUNCHED}vllm_data_parallel_size", 0, 1),
    value("wrong-type", f"{LAUNCHED}vllm_data_parallel_size", 1.5, 2),
    value("out-of-range", f"{LAUNCHED}vllm_tensor_parallel_size", 0, 1),
    value("wrong-type", f"{LAUNCHED}vllm_tensor_parallel_size", 1.5, 2),
    value("lora-on-rollout-server", f"{LAUNCHED}vllm_enable_lora", "true", "false"),
]


@pytest.mark.scenario(
    "grpo-server-mode/an-empty-list-of-ports-is-refused",
    "grpo-server-mode/two-ports-for-one-host-are-refused",
    "grpo-server-mode/a-missing-host-is-refused",
    "grpo-server-mode/an-engine-that-is-too-short-is-refused",
    "grpo-server-mode/a-data-parallel-size-of-zero-is-refused",
    "grpo-server-mode/lora-on-the-server-is-refused",
    "grpo-server-mode/equal-lengths-are-accepted",
    "grpo-server-mode/lora-off-is-accepted",
    clauses=[
        "grpo-server-mode/grpo-names-its-server-by-lists-of-hosts-and-ports#2,3,5",
        "grpo-server-mode/the-rollout-server-of-grpo-has-a-section-of-its-own#2,4,5,6",
        "grpo-server-mode/grpo-syncs-merged-weights-only#1,2",
    ],
)
@pytest.mark.parametrize(("code", "key", "broken", "repaired"), BROKEN)
def test_a_contradiction_is_refused_and_the_repaired_section_accepted(code, key, broken, repaired):
    assert rejected(*broken) == [(code, key)]
    config_with(*repaired)


@pytest.mark.scenario(
    "grpo-server-mode/one-host-and-one-port-are-accepted", clauses=["grpo-server-mode/two-jobs-can-share-a-machine#1"]
)
def test_servers_of_rlhf_are_paired_by_place():
    config = config_with(*NAMED, 'rlhf.vllm_server_host=["fd00::1", b]')
    found = [(server.base_url, server.host, server.group_port) for server in pair_servers(server_section(config))]
    assert found == [("http://[fd00::1]:8080", "fd00::1", 51216), ("http://b:8081", "b", 51217)]
    assert server_key(config) == "rlhf.vllm_server_host"


def test_servers_are_used_where_one_section_says_so():
    assert uses_servers(config_with(*NAMED))
    assert uses_servers(config_with("~.vllm.mode=server", OTHER))
    assert not uses_servers(config_with(*COLOCATE))
    assert not uses_servers(config_with("~.vllm.mode=server", OTHER, "~.rollout_backend=hf"))
    assert not uses_servers(config_with())
    lengths = [max_model_len(config_with(*named, "~.vllm.max_model_len=600")) for named in ((), NAMED)]
    assert lengths == [600, 1024], "only rollout matching's server follows its engine"


def test_servers_that_rlhf_names_keep_what_else_is_set_of_servers():
    """The time to start is ``rlhf``'s own; every other limit stays where it is set."""
    limits = {"infer_timeout_s": 7, "health_timeout_s": 3, "stall_timeout_s": 11, "retry_budget_s": 13}
    limits["min_servers"] = 2
    given = (f"~.vllm.server.{name}={value}" for name, value in limits.items())
    section = server_section(config_with(*NAMED, "rlhf.vllm_server_timeout=17", *given))
    assert {name: getattr(section, name) for name in (*limits, "timeout_s")} == limits | {"timeout_s": 17}
    with refused("out-of-range", f"{LONG}vllm.server.min_servers", problem="2 servers are named"):
        config_with(*NAMED, "~.vllm.server.min_servers=3")


@pytest.mark.parametrize(
    ("urls", "expected"),
    [
        ("http://a:80/x", [("http://a:80/x", 51216)]),
        ("[http://a:1, http://b:2]", [("http://a:1", 51216), ("http://b:2", 51217)]),
    ],
)
def test_servers_are_named_by_url_as_well(urls, expected):
    config = config_with(*MODE, f"{URL}={urls}")
    assert [(one.base_url, one.group_port) for one in pair_servers(server_section(config))] == expected
    assert (uses_servers(config), server_key(config)) == (True, URL)


@pytest.mark.parametrize(
    ("there", "here", "used"), [("true", "null", True), ("true", "false", False), ("false", "true", True)]
)
def test_servers_may_reduce_otherwise_than_a_colocated_engine(there, here, used):
    config = config_with(
        *NAMED, f"~.vllm.disable_custom_all_reduce={there}", f"{LAUNCHED}vllm_disable_custom_all_reduce={here}"
    )
    assert disables_custom_all_reduce(config) is used
