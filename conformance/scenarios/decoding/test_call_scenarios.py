"""Scenarios of calls: what a request names, what is written down of it, and a group that nobody joins."""

import time

import pytest

from conformance.doubles.client_calls import SECOND, backend_of, config_for, requests_of, tensors_of
from conformance.doubles.digits import scenes, template_of
from conformance.doubles.instance import free_port
from conformance.doubles.learner_side import TEMPLATE
from conformance.doubles.native_double import NativeDouble, serving
from conformance.doubles.refusals import refused
from rollmatch.journal import Journal, read_journal
from rollmatch.ranks import Ranks
from rollmatch.rollout.backend import Decoding, make_requests
from rollmatch.run.connect import connect_servers

WARM = Decoding(max_new_tokens=4, temperature=0.7, top_p=0.9, top_k=5)


@pytest.mark.scenario("decoding/the-request-names-the-stop-token", clauses=["decoding/decoding-is-greedy-by-default#4"])
def test_the_request_names_the_stop_token(double):
    template = template_of()
    backend = connect_servers(config_for(double.url), template, ranks=SECOND)
    backend.push([], version=1)
    double.infer = lambda handler, said: double.echo(handler, ["1"] * len(said))
    backend.generate(make_requests(scenes()[:2], prompt_of=template.prompt_token_ids, run_seed=7, step=0, rank=0), WARM)
    (body,) = double.bodies
    assert "<|im_end|>" in body["request_config"].get("stop", ())


@pytest.mark.scenario("decoding/a-split-call-is-written-down", clauses=["decoding/effective-decoding-can-be-audited#2"])
def test_a_split_call_is_written_down(double, tmp_path):
    drops = iter([True, True])

    def infer(handler, said):
        if next(drops, False):
            handler.connection.close()
        else:
            double.echo(handler, said)

    double.infer = infer
    journal = Journal(tmp_path / "journal.jsonl")
    backend = connect_servers(config_for(double.url), TEMPLATE, ranks=SECOND, journal=journal)
    backend.push([], version=1)
    requests = requests_of(4)
    assert len(backend.generate(requests, WARM)) == 4
    (event,) = [event for event in read_journal(tmp_path / "journal.jsonl") if event["event"] == "called"]
    assert (event["server"], event["num_retries"], event["num_splits"]) == (double.url, 1, 1)
    seeds = [request.seed for request in requests]
    assert [(call["first"], call["seeds"]) for call in event["sent"]] == [(0, seeds), (0, seeds[:2]), (2, seeds[2:])]
    reported = event["decoding"]
    assert (reported.get("temperature"), reported.get("top_p"), reported.get("top_k")) == (0.7, 0.9, 5)


@pytest.mark.scenario(clauses=["decoding/effective-decoding-can-be-audited#2"])
def test_a_call_that_fails_is_written_down_too(double, tmp_path):
    double.infer = lambda handler, said: handler.connection.close()
    journal = Journal(tmp_path / "journal.jsonl")
    config = config_for(double.url, "~.vllm.server.retry_budget_s=0")
    backend = connect_servers(config, TEMPLATE, ranks=SECOND, journal=journal)
    backend.push([], version=1)
    with refused("server-unreachable"):
        backend.generate(requests_of(2), WARM)
    (event,) = [event for event in read_journal(tmp_path / "journal.jsonl") if event["event"] == "called"]
    assert (event["num_retries"], event["num_splits"]) == (2, 1)
    double.infer = double.echo
    assert len(backend.generate(requests_of(2), WARM)) == 2


class NeverJoins(NativeDouble):
    def communicator(self, body):
        time.sleep(6)


@pytest.mark.scenario("server-connection/a-communicator-that-nobody-joins-is-given-up")
def test_a_communicator_that_nobody_joins_is_given_up():
    double = NeverJoins(tensors_of(0.0))
    with serving(double) as (url,):
        config = config_for(url, "~.vllm.server.timeout_s=2", port=free_port())
        backend = connect_servers(config, TEMPLATE, ranks=Ranks())
        began = time.monotonic()
        with refused("communicator-timeout", problem=url):
            backend.push(tensors_of(1.0).items(), version=1)
        assert time.monotonic() - began < 5
    with serving(NativeDouble(tensors_of(0.0))) as (url,):
        config = config_for(url, "~.vllm.server.timeout_s=2", port=free_port())
        joined = connect_servers(config, TEMPLATE, ranks=Ranks())
        joined.push(tensors_of(1.0).items(), version=1)
        joined.close()


def test_backends_that_write_nothing_down_go_on(double):
    assert len(backend_of(double.url).generate(requests_of(2), WARM)) == 2
