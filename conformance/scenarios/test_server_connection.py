"""Capability ``server-connection``, as far as a configuration decides it; what needs a server is pending."""

import pytest

from conformance.scenarios.configs import LONG, config_with, not_refused, problem_of, refusal_of
from rollmatch.config.servers import pair_servers

SERVER = f"{LONG}vllm.server"
URLS = [f"http://127.0.0.1:{port}" for port in (8000, 8001, 8002)]


def server(text):
    """A config in server mode."""
    return "~.vllm.mode=server", f"~.vllm.server={text}"


def pairs_of(text):
    with not_refused():
        servers = pair_servers(config_with(*server(text)).custom.extra.rollout_matching.vllm.server)
    return [(each.base_url, each.group_port) for each in servers]


@pytest.mark.scenario("server-connection/a-missing-base-url-is-refused")
def test_a_missing_base_url_is_refused():
    assert refusal_of(*server("{group_port: 51216}")) == ("missing-key", f"{SERVER}.base_url")


@pytest.mark.scenario("server-connection/a-missing-group-port-is-refused")
def test_a_missing_group_port_is_refused():
    assert refusal_of(*server(f"{{base_url: '{URLS[0]}'}}")) == ("missing-key", f"{SERVER}.group_port")


@pytest.mark.scenario(
    "server-connection/both-forms-at-once-are-refused",
    clauses=["server-connection/server-mode-is-told-its-servers-in-one-of-two-forms#1,4"],
)
def test_both_forms_at_once_are_refused():
    entry = f"{{base_url: '{URLS[0]}', group_port: 51216}}"
    told = f"{{servers: [{entry}], base_url: '{URLS[0]}', group_port: 51216}}"
    assert refusal_of(*server(told)) == ("connection-form-ambiguous", SERVER)


@pytest.mark.scenario(
    "server-connection/neither-form-is-refused",
    clauses=["server-connection/server-mode-is-told-its-servers-in-one-of-two-forms#5"],
)
def test_neither_form_is_refused():
    assert refusal_of(*server("{timeout_s: 60}")) == ("connection-form-missing", SERVER)


@pytest.mark.scenario("server-connection/an-empty-list-of-servers-is-refused")
def test_an_empty_list_of_servers_is_refused():
    assert refusal_of(*server("{servers: []}")) == ("out-of-range", f"{SERVER}.servers")


@pytest.mark.scenario(
    "server-connection/the-first-form-is-accepted",
    clauses=["server-connection/server-mode-is-told-its-servers-in-one-of-two-forms#2"],
)
def test_the_first_form_is_accepted():
    entries = ", ".join(f"{{base_url: '{url}', group_port: {51216 + i}}}" for i, url in enumerate(URLS[:2]))
    assert pairs_of(f"{{servers: [{entries}]}}") == [(URLS[0], 51216), (URLS[1], 51217)]


@pytest.mark.scenario(
    "server-connection/lists-of-different-lengths-are-refused",
    clauses=["server-connection/base-urls-and-group-ports-are-paired-one-to-one#1"],
)
def test_lists_of_different_lengths_are_refused():
    problem = problem_of(*server(f"{{base_url: {URLS}, group_port: [51216, 51217]}}"))
    assert (problem.code, problem.key) == ("pairing-length-mismatch", f"{SERVER}.group_port")
    assert "3" in problem.problem
    assert "2" in problem.problem


@pytest.mark.scenario(
    "server-connection/lists-of-one-length-are-paired",
    clauses=[
        "server-connection/server-mode-is-told-its-servers-in-one-of-two-forms#3",
        "server-connection/base-urls-and-group-ports-are-paired-one-to-one#1",
    ],
)
def test_lists_of_one_length_are_paired():
    assert pairs_of(f"{{base_url: {URLS[:2]}, group_port: [51300, 51216]}}") == [(URLS[0], 51300), (URLS[1], 51216)]


@pytest.mark.scenario(
    "server-connection/one-port-is-counted-on",
    clauses=["server-connection/base-urls-and-group-ports-are-paired-one-to-one#2"],
)
def test_one_port_is_counted_on():
    assert [port for _, port in pairs_of(f"{{base_url: {URLS}, group_port: 51216}}")] == [51216, 51217, 51218]


@pytest.mark.scenario(
    "server-connection/one-url-with-a-list-of-ports-is-refused",
    clauses=["server-connection/base-urls-and-group-ports-are-paired-one-to-one#3"],
)
def test_one_url_with_a_list_of_ports_is_refused():
    refused = refusal_of(*server(f"{{base_url: '{URLS[0]}', group_port: [51216]}}"))
    assert refused == ("wrong-type", f"{SERVER}.group_port")


@pytest.mark.scenario("server-connection/a-truth-value-is-no-port")
def test_a_truth_value_is_no_port():
    refused = refusal_of(*server(f"{{base_url: '{URLS[0]}', group_port: true}}"))
    assert refused == ("wrong-type", f"{SERVER}.group_port")


@pytest.mark.scenario(
    "server-connection/a-host-and-a-port-are-no-url",
    clauses=["server-connection/a-base-url-is-the-prefix-of-every-route#3"],
)
def test_a_host_and_a_port_are_no_url():
    refused = refusal_of(*server("{base_url: '127.0.0.1:8000', group_port: 51216}"))
    assert refused == ("base-url-invalid", f"{SERVER}.base_url")


@pytest.mark.scenario("server-connection/an-entry-without-a-group-port-is-refused")
def test_an_entry_without_a_group_port_is_refused():
    told = refusal_of(*server(f"{{servers: [{{base_url: '{URLS[0]}'}}]}}"))
    assert told == ("missing-key", f"{SERVER}.servers.0.group_port")


@pytest.mark.scenario(
    "server-connection/a-server-named-twice-is-refused",
    clauses=["server-connection/base-urls-and-group-ports-are-paired-one-to-one#4"],
)
def test_a_server_named_twice_is_refused():
    told = refusal_of(*server(f"{{base_url: ['{URLS[0]}', '{URLS[0]}/'], group_port: 51216}}"))
    assert told == ("server-named-twice", f"{SERVER}.base_url")


@pytest.mark.scenario(
    "server-connection/two-servers-of-one-machine-with-one-group-port-are-refused",
    clauses=["server-connection/base-urls-and-group-ports-are-paired-one-to-one#5"],
)
def test_two_servers_of_one_machine_with_one_group_port_are_refused():
    told = refusal_of(*server(f"{{base_url: {URLS[:2]}, group_port: [51216, 51216]}}"))
    assert told == ("group-port-shared", f"{SERVER}.group_port")


@pytest.mark.scenario("server-connection/two-machines-may-use-one-group-port-each")
def test_two_machines_may_use_one_group_port_each():
    urls = ["http://10.0.0.1:8000", "http://10.0.0.2:8000"]
    assert pairs_of(f"{{base_url: {urls}, group_port: [51216, 51216]}}") == [(url, 51216) for url in urls]


@pytest.mark.scenario(
    "server-connection/counting-past-the-last-port-is-refused",
    clauses=["server-connection/base-urls-and-group-ports-are-paired-one-to-one#6"],
)
def test_counting_past_the_last_port_is_refused():
    told = refusal_of(*server(f"{{base_url: {URLS[:2]}, group_port: 65535}}"))
    assert told == ("out-of-range", f"{SERVER}.group_port")


@pytest.mark.scenario(
    "server-connection/unset-timeouts-have-defaults",
    clauses=["server-connection/reaching-and-generating-have-timeouts-of-their-own#1,4"],
)
def test_unset_timeouts_have_defaults():
    told = config_with(*server(f"{{base_url: '{URLS[0]}', group_port: 51216}}"))
    servers = told.custom.extra.rollout_matching.vllm.server
    assert (servers.timeout_s, servers.infer_timeout_s) == (240.0, None)


@pytest.mark.scenario(
    "server-connection/a-reachability-timeout-of-zero-is-refused",
    clauses=["server-connection/reaching-and-generating-have-timeouts-of-their-own#1"],
)
def test_a_reachability_timeout_of_zero_is_refused():
    told = refusal_of(*server(f"{{base_url: '{URLS[0]}', group_port: 51216, timeout_s: 0}}"))
    assert told == ("out-of-range", f"{SERVER}.timeout_s")


@pytest.mark.scenario("server-connection/a-base-url-with-a-query-is-refused")
def test_a_base_url_with_a_query_is_refused():
    told = refusal_of(*server(f"{{base_url: '{URLS[0]}?key=1', group_port: 51216}}"))
    assert told == ("base-url-invalid", f"{SERVER}.base_url")


@pytest.mark.scenario("server-connection/a-whole-url-is-accepted")
def test_a_whole_url_is_accepted():
    assert pairs_of(f"{{base_url: '{URLS[0]}', group_port: 51216}}") == [(URLS[0], 51216)]
