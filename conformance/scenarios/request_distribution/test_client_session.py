"""A generate call may be tried again, a control call never; a dead server is an error, not a hang."""

import dataclasses
import threading
import time

import pytest
import responses

from conformance.doubles.configs import config_with
from conformance.doubles.learner_side import TEMPLATE
from conformance.doubles.refusals import refused
from conformance.doubles.swift_double import QUICK, RULES, prompts
from rollmatch.dialects.http import HttpServer, ServerRefused
from rollmatch.dialects.session import ClientSettings, RolloutServer
from rollmatch.errors import RollmatchError
from rollmatch.ranks import Ranks
from rollmatch.run.connect import connect_servers


@pytest.fixture
def server(double):
    made = RolloutServer(double.url, ClientSettings(timeout_s=3, watch=QUICK))
    made.connect()
    double.num_connections, double.calls = 0, []
    return made


def drop(handler, said):
    """End the connection without an answer."""
    handler.close_connection = True
    handler.connection.close()


@pytest.mark.scenario(clauses=["request-distribution/rollouts-come-back-in-the-order-of-the-requests#1"])
def test_answers_come_back_in_order(server):
    replies = server.infer(prompts(4), RULES)
    assert [reply.prompt_token_ids for reply in replies] == [(1, i) for i in range(4)]
    assert [reply.response_token_ids for reply in replies] == [(i, 9) for i in range(4)]


@pytest.mark.scenario(
    "request-distribution/one-lost-connection-is-invisible",
    clauses=["request-distribution/a-broken-connection-is-tried-once-more#1"],
)
def test_one_lost_connection_is_invisible(server, double):
    answer = double.infer

    def first_drops(handler, said):
        double.infer = answer
        drop(handler, said)

    double.infer = first_drops
    assert len(server.infer(prompts(4), RULES)) == 4
    assert double.num_connections >= 2
    assert double.asked == ["/infer", "/infer"]


@pytest.mark.scenario(
    "request-distribution/a-stubborn-request-is-isolated",
    clauses=["request-distribution/a-broken-connection-is-tried-once-more#2,3"],
)
@pytest.mark.parametrize("start", [0, 10])
def test_a_stubborn_request_is_isolated_and_named(server, double, start):
    answer = double.infer
    double.infer = lambda handler, said: (drop if "2" in said else answer)(handler, said)
    with refused("server-unreachable", double.url) as caught:
        server.infer(prompts(4), RULES, start=start)
    assert f"request {start + 2} " in caught.value.problem.replace(":", " ")
    sizes = [len(body["infer_requests"]) for body in double.bodies]
    assert sizes == [4, 4, 2, 2, 2, 1, 1]


def test_halves_that_go_through_are_put_together(server, double):
    answer = double.infer
    double.infer = lambda handler, said: (drop if len(said) > 2 else answer)(handler, said)
    assert [reply.response_token_ids[0] for reply in server.infer(prompts(5), RULES)] == [0, 1, 2, 3, 4]


@pytest.mark.scenario(
    "request-distribution/an-html-page-is-refused",
    "request-distribution/an-entry-without-prompt-ids-is-refused",
    "request-distribution/an-error-without-a-code-of-its-own",
    "request-distribution/too-few-answers-are-refused",
    clauses=[
        "request-distribution/rollouts-come-back-in-the-order-of-the-requests#2,3,4,5",
        "request-distribution/a-broken-connection-is-tried-once-more#4",
    ],
)
@pytest.mark.parametrize(
    ("body", "status", "code", "words"),
    [
        ("<html>Oops</html>", 200, "reply-malformed", "html"),
        ([], 200, "reply-count-mismatch", "0 answers to 2"),
        ([{}] * 3, 200, "reply-count-mismatch", "3 answers to 2"),
        ({"a": 1}, 200, "reply-malformed", "dict"),
        (
            [
                {"response": {"prompt_token_ids": [1], "choices": [{"token_ids": [1], "finish_reason": "stop"}]}},
                {"response": {"choices": [{"token_ids": [1], "finish_reason": "stop"}]}},
            ],
            200,
            "reply-malformed",
            "entry 1",
        ),
        (
            [{"response": {"prompt_token_ids": [1], "choices": [{"finish_reason": "stop"}]}}] * 2,
            200,
            "reply-malformed",
            "entry 0",
        ),
        (
            [{"response": {"prompt_token_ids": [1], "choices": [{"token_ids": [1], "finish_reason": "abort"}]}}] * 2,
            200,
            "reply-malformed",
            "abort",
        ),
        ("out of memory", 500, "server-refused", "500: out of memory"),
        ({"code": "prompt-too-long", "problem": "has 80 tokens", "item": 1}, 400, "prompt-too-long", "has 80 tokens"),
    ],
)
def test_a_bad_reply_is_refused_and_not_requested_again(server, double, body, status, code, words):
    double.infer = lambda handler, said: double.send(handler, body, status)
    with refused(code, double.url, problem=words) as caught:
        server.infer(prompts(2), RULES, start=2)
    assert "requests 2 and 3" in caught.value.problem
    assert double.asked == ["/infer"]


def test_a_refused_item_is_counted_in_the_whole_list(server, double):
    double.infer = lambda handler, said: double.send(handler, {"code": "x", "problem": "", "item": 1}, 400)
    with pytest.raises(ServerRefused) as caught:
        server.infer(prompts(2), RULES, start=6)
    assert caught.value.item == 7


@pytest.mark.scenario(clauses=["determinism/every-request-has-a-seed-of-its-own#3"])
def test_the_call_carries_the_first_requests_seed(server, double):
    server.infer(prompts(3)[1:], RULES)
    config = double.bodies[0]["request_config"]
    assert (config["seed"], config["return_details"], config["max_tokens"]) == (6, True, 8)


@pytest.mark.scenario(clauses=["request-distribution/a-broken-connection-is-tried-once-more#5"])
def test_a_control_call_is_sent_once(server, double):
    with refused("transport-failed"):
        server.control("/update_flattened_params", {"metadatas": []})
    assert double.asked == ["/update_flattened_params"]


@pytest.mark.scenario(
    "server-connection/a-generate-call-in-time",
    "server-connection/a-generate-call-out-of-time",
    clauses=["server-connection/reaching-and-generating-have-timeouts-of-their-own#5,6"],
)
def test_a_time_limit_ends_the_call_and_is_named(double):
    server = RolloutServer(double.url, ClientSettings(timeout_s=3, infer_timeout_s=0.5, watch=QUICK))
    server.connect()
    double.infer = lambda handler, said: time.sleep(2)
    with refused("infer-timeout", double.url, problem="0.5 s") as caught:
        server.infer(prompts(2), RULES)
    assert double.url in caught.value.problem
    double.infer = double.echo
    assert len(server.infer(prompts(2), RULES)) == 2


@pytest.mark.scenario(clauses=["server-connection/a-dead-server-is-noticed-without-a-timeout#1,3"])
def test_a_slow_call_to_a_healthy_server_is_not_ended(server, double):
    def slow(handler, said):
        time.sleep(1.5)  # fifteen looks
        double.echo(handler, said)

    double.infer = slow
    assert len(server.infer(prompts(2), RULES)) == 2
    assert double.calls.count("/health") > 3


def test_a_server_that_stops_listening_in_mid_call_is_dead(server, double):
    def leave(handler, said):
        double.front.server_close()
        double.front.shutdown()
        time.sleep(20)

    double.infer, began = leave, time.monotonic()
    with refused("server-died", double.url):
        server.infer(prompts(2), RULES)
    assert time.monotonic() - began < 5


@pytest.mark.scenario(clauses=["server-connection/a-dead-server-is-noticed-without-a-timeout#2"])
def test_a_sick_server_is_dead(server, double):
    def fall_ill(handler, said):
        double.health_status = 503
        time.sleep(20)

    double.infer, began = fall_ill, time.monotonic()
    with refused("server-died"):
        server.infer(prompts(2), RULES)
    assert time.monotonic() - began < 5


def test_a_server_that_is_ill_at_every_second_look_is_not_dead(server, double):
    looks = []

    def alternate():
        looks.append(double.health_status)
        double.health_status = 200 if double.health_status == 503 else 503

    def wait_for_looks(handler, said):
        ends_at = time.monotonic() + 10
        while looks.count(503) <= QUICK.max_failures and time.monotonic() < ends_at:
            time.sleep(0.02)
        double.echo(handler, said)

    double.progress, double.infer = alternate, wait_for_looks
    assert len(server.infer(prompts(2), RULES)) == 2
    assert looks.count(503) > QUICK.max_failures


def test_silence_is_death_after_a_limit_and_only_where_health_is_answered_while_generating(server, double):
    is_over = threading.Event()

    def fall_silent(handler, said):
        double.is_silent = True
        is_over.wait(60 if server.watch.silence_s == 1.0 else 1.5)
        double.is_silent = False
        double.echo(handler, said)

    double.infer = fall_silent
    assert len(server.infer(prompts(2), RULES)) == 2  # real servers of this dialect do just that
    server.watch = dataclasses.replace(QUICK, silence_s=30.0)
    assert len(server.infer(prompts(2), RULES)) == 2
    server.watch = dataclasses.replace(QUICK, silence_s=1.0)
    with refused("server-died", remedy="health_timeout_s"):
        server.infer(prompts(2), RULES)
    is_over.set()


def test_a_server_that_comes_late_is_waited_for(double):
    double.health_status = 503
    threading.Timer(0.6, lambda: setattr(double, "health_status", 200)).start()
    RolloutServer(double.url, ClientSettings(timeout_s=5)).connect()


def test_a_server_that_applies_the_chat_template_itself_gets_no_truncated_prompts(double):
    named = ("~.vllm.mode=server", f"~.vllm.server.base_url={double.url}", "~.vllm.server.group_port=7")
    with refused("prompt-not-truncated", "overlong", problem=double.url):
        connect_servers(config_with(*named, "overlong=truncate_left"), TEMPLATE, ranks=Ranks())
    connect_servers(config_with(*named, "overlong=skip"), TEMPLATE, ranks=Ranks()).close()


@pytest.mark.scenario(
    "server-connection/a-proxy-of-the-environment-is-passed-by",
    clauses=["server-connection/a-server-that-cannot-be-reached-stops-the-start#4"],
)
def test_a_proxy_of_the_environment_is_passed_by(double, monkeypatch):
    for name in ("http_proxy", "HTTP_PROXY", "all_proxy", "ALL_PROXY"):
        monkeypatch.setenv(name, "http://127.0.0.1:9")
    for name in ("no_proxy", "NO_PROXY"):
        monkeypatch.delenv(name, raising=False)
    assert HttpServer(double.url).status_of("/health/", timeout_s=2) == 200
    RolloutServer(double.url, ClientSettings(timeout_s=2)).connect()
    with refused("transport-failed"):
        HttpServer("http://192.0.2.1:80").get("/health/", timeout_s=2)


@pytest.mark.scenario(
    "server-connection/a-base-url-with-a-path",
    clauses=["server-connection/a-base-url-is-the-prefix-of-every-route#1,2"],
)
@responses.activate
def test_a_base_url_may_have_a_path_of_its_own():
    responses.get("http://127.0.0.1:8000/rollout/health/", json={"instance": "a"})
    for base_url in ("http://127.0.0.1:8000/rollout/", "http://127.0.0.1:8000/rollout"):
        assert RolloutServer(base_url, ClientSettings(timeout_s=5)).health(timeout_s=1) == {"instance": "a"}


@responses.activate
def test_the_bearer_key_goes_with_every_call():
    responses.get(
        "http://h:1/health/", json={}, match=[responses.matchers.header_matcher({"Authorization": "Bearer k"})]
    )
    RolloutServer("http://h:1", ClientSettings(timeout_s=5, api_key="k")).health(timeout_s=1)
    with pytest.raises(RollmatchError):
        RolloutServer("http://h:1", ClientSettings(timeout_s=5)).health(timeout_s=1)
