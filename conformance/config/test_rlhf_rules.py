"""Keys of the section rlhf that contradict each other or other sections are told."""

import pytest

from rollmatch.config.servers import max_model_len, pair_servers, server_key, server_section, uses_servers

GRPO = (
    "custom.trainer_variant=grpo",
    "custom.extra.grpo.rewards=[{function: builtins:len}]",
    "custom.extra.rollout_matching.decoding.temperature=1",
)
MODE = (*GRPO, "rlhf.use_vllm=true", "rlhf.vllm_mode=server")
HOSTS, PORTS = "rlhf.vllm_server_host=[a, b]", "rlhf.vllm_server_port=[8080, 8081]"
NAMED = (*MODE, HOSTS, PORTS)
LAUNCHED = "custom.extra.rollout_server."
COLOCATE = (*GRPO, "rlhf.use_vllm=true", "rlhf.vllm_mode=colocate")
OTHER = '~.vllm.server={base_url: "http://c:1", group_port: 1}'
BROKEN = [
    ("missing-key", "rlhf.vllm_mode", (*GRPO, "rlhf.use_vllm=true"), COLOCATE),
    ("vllm-mode-unused", "rlhf.vllm_mode", (*GRPO, "rlhf.vllm_mode=server"), NAMED),
    ("not-a-choice", "rlhf.vllm_mode", (*NAMED, "rlhf.vllm_mode=both"), NAMED),
    ("not-a-choice", "rlhf.rlhf_type", (*NAMED, "rlhf.rlhf_type=dpo"), (*NAMED, "rlhf.rlhf_type=grpo")),
    ("rlhf-not-read", "rlhf.use_vllm", (*NAMED, "custom.trainer_variant=rollout_matching_sft"), NAMED),
    ("wrong-type", "rlhf.vllm_server_port", (*NAMED, "rlhf.vllm_server_port=8080"), NAMED),
    ("wrong-type", "rlhf.vllm_server_host", (*NAMED, "rlhf.vllm_server_host=a"), NAMED),
    ("missing-key", "rlhf.vllm_server_host", (*MODE, PORTS), NAMED),
    ("missing-key", "rlhf.vllm_server_port", (*MODE, HOSTS), NAMED),
    ("out-of-range", "rlhf.vllm_server_host", (*NAMED, "rlhf.vllm_server_host=[]"), NAMED),
    ("out-of-range", "rlhf.vllm_server_port", (*NAMED, "rlhf.vllm_server_port=[]"), NAMED),
    ("out-of-range", "rlhf.vllm_server_host", (*NAMED, "rlhf.vllm_server_host=[a, a]"), NAMED),
    ("pairing-length-mismatch", "rlhf.vllm_server_port", (*NAMED, "rlhf.vllm_server_port=[1, 2, 3]"), NAMED),
    ("engine-setting-in-rlhf", "rlhf.vllm_max_model_len", (*NAMED, "rlhf.vllm_max_model_len=1024"), NAMED),
    *(
        (code, f"{LAUNCHED}{key}", (*NAMED, f"{LAUNCHED}{key}={bad}"), (*NAMED, f"{LAUNCHED}{key}={good}"))
        for code, key, bad, good in (
            ("engine-shorter-than-segment", "vllm_max_model_len", "1023", "1024"),
            ("out-of-range", "vllm_max_model_len", "0", "1024"),
            ("wrong-type", "vllm_max_model_len", "99.5", "1024"),
            ("out-of-range", "vllm_data_parallel_size", "0", "1"),
            ("wrong-type", "vllm_data_parallel_size", "1.5", "2"),
            ("out-of-range", "vllm_tensor_parallel_size", "0", "1"),
            ("wrong-type", "vllm_tensor_parallel_size", "1.5", "2"),
            ("lora-on-rollout-server", "vllm_enable_lora", "true", "false"),
        )
    ),
    ("out-of-range", "rlhf.vllm_server_port.1", (*NAMED, "rlhf.vllm_server_port=[1, 0]"), NAMED),
    ("host-invalid", "rlhf.vllm_server_host.0", (*NAMED, 'rlhf.vllm_server_host=["http://a", b]'), NAMED),
    ("host-invalid", "rlhf.vllm_server_host.1", (*NAMED, 'rlhf.vllm_server_host=[a, "b:80"]'), NAMED),
    ("host-invalid", "rlhf.vllm_server_host.0", (*NAMED, 'rlhf.vllm_server_host=["", b]'), NAMED),
    ("out-of-range", "rlhf.vllm_server_timeout", (*NAMED, "rlhf.vllm_server_timeout=0"), NAMED),
    (
        "pairing-length-mismatch",
        "rlhf.vllm_server_group_port",
        (*NAMED, "rlhf.vllm_server_group_port=[1]"),
        (*NAMED, "rlhf.vllm_server_group_port=[1, 2]"),
    ),
    (
        "out-of-range",
        "rlhf.vllm_server_group_port",
        (*NAMED, "rlhf.vllm_server_group_port=65535"),
        (*NAMED, "rlhf.vllm_server_group_port=65534"),
    ),
    ("connection-form-ambiguous", "~.vllm.server", (*NAMED, OTHER), (*GRPO, "~.vllm.mode=server", OTHER)),
    (
        "connection-form-ambiguous",
        "~.vllm.mode",
        (*COLOCATE, "~.vllm.mode=server", OTHER),
        (*GRPO, "~.vllm.mode=server", OTHER),
    ),
    ("connection-form-ambiguous", "~.rollout_backend", (*NAMED, "~.rollout_backend=hf"), NAMED),
    (
        "adapter-sync-in-grpo",
        "~.vllm.sync.mode",
        (*NAMED, "~.vllm.sync.mode=auto", "~.vllm.enable_lora=true"),
        (*NAMED, "~.vllm.sync.mode=auto"),
    ),
]


@pytest.mark.scenario(
    "grpo-server-mode/an-empty-list-of-ports-is-refused",
    "grpo-server-mode/two-ports-for-one-host-are-refused",
    "grpo-server-mode/a-missing-host-is-refused",
    "grpo-server-mode/an-engine-that-is-too-short-is-refused",
    "grpo-server-mode/a-data-parallel-size-of-zero-is-refused",
    "grpo-server-mode/lora-on-the-server-is-refused",
    clauses=[
        "grpo-server-mode/grpo-names-its-server-by-lists-of-hosts-and-ports#2,3,5",
        "grpo-server-mode/the-rollout-server-of-grpo-has-a-section-of-its-own#2,4,5,6",
        "grpo-server-mode/grpo-syncs-merged-weights-only#2",
    ],
)
@pytest.mark.parametrize(("code", "key", "broken", "_repaired"), BROKEN)
def test_a_contradiction_is_told(problems_with, code, key, broken, _repaired):
    assert problems_with(*broken) == [(code, key)]


@pytest.mark.scenario(
    "grpo-server-mode/equal-lengths-are-accepted",
    "grpo-server-mode/lora-off-is-accepted",
    clauses=["grpo-server-mode/grpo-syncs-merged-weights-only#1"],
)
@pytest.mark.parametrize(("_code", "_key", "_broken", "repaired"), BROKEN)
def test_the_repaired_section_is_taken(make_with, _code, _key, _broken, repaired):
    make_with(*repaired)


@pytest.mark.scenario(
    "grpo-server-mode/one-host-and-one-port-are-accepted", clauses=["grpo-server-mode/two-jobs-can-share-a-machine#1"]
)
def test_servers_of_rlhf_are_paired_by_place(make_with):
    config = make_with(*NAMED, 'rlhf.vllm_server_host=["::1", b]')
    told = [(server.base_url, server.host, server.group_port) for server in pair_servers(server_section(config))]
    assert told == [("http://[::1]:8080", "::1", 51216), ("http://b:8081", "b", 51217)]
    assert server_key(config) == "rlhf.vllm_server_host"


def test_servers_are_used_where_somebody_says_so(make_with):
    assert uses_servers(make_with(*NAMED))
    assert uses_servers(make_with("~.vllm.mode=server", OTHER))
    assert not uses_servers(make_with(*COLOCATE))
    assert not uses_servers(make_with("~.vllm.mode=server", OTHER, "~.rollout_backend=hf"))
    assert not uses_servers(make_with())


def test_the_limit_of_a_generate_call_stays_in_its_section(make_with):
    assert server_section(make_with(*NAMED, "~.vllm.server.infer_timeout_s=7")).infer_timeout_s == 7


def test_only_rollout_matching_s_server_follows_its_engine(make_with):
    assert max_model_len(make_with("~.vllm.max_model_len=600")) == 600
    assert max_model_len(make_with(*NAMED, "~.vllm.max_model_len=600")) == 1024
