"""A stock ``vllm serve``: routes for generation alone, in the profile that asks for no others."""

import pytest

from conformance.doubles.digits import MODEL
from conformance.judge.servers.broken.app import BrokenServer, listening, make_app
from conformance.judge.servers.broken.engine import TinyEngine
from conformance.judge.servers.broken.switches import Switches
from conformance.judge.servers.checks import BY_ID
from conformance.judge.servers.judgement import JudgingRules, ServerJudgement
from conformance.judge.servers.profiles import checks_of
from conformance.judge.servers.subject import Subject, find_dialect

ROUTES = ("/health", "/version", "/v1/completions", "/v1/chat/completions")


class StockServer(BrokenServer):
    """No route for weights."""

    def __init__(self, engine):
        super().__init__(engine)
        self.posts = {}
        del self.gets["get_world_size"], self.gets["weight_info"], self.gets["native/identity"]

    def routes(self):
        return {"paths": {path: {} for path in ROUTES}}


@pytest.mark.wide
@pytest.mark.scenario(
    "judging/a-server-without-routes-for-weights", clauses=["judging/a-server-is-judged-by-its-url-alone#3"]
)
def test_a_server_that_only_generates_misses_nothing_by_http():
    server = StockServer(TinyEngine(str(MODEL), Switches()))
    with listening(make_app(server)) as (url, _):
        dialect = find_dialect(url)
        subject = Subject(name="stock", version="", url=url, dialect=dialect)
        asked = checks_of(dialect.name, profile="http", lacks=subject.lacks)
        judgement = ServerJudgement(subject, JudgingRules())
        verdicts = {check.check_id: judgement.verdict_of(check).state for check in asked if not check.is_timed}
    assert dialect.name == "vllm"
    assert {*verdicts.values()} == {"pass"}, verdicts
    assert "routes-are-listed" in verdicts


def test_with_a_transport_its_routes_for_weights_are_asked_for():
    server = StockServer(TinyEngine(str(MODEL), Switches()))
    with listening(make_app(server)) as (url, _):
        subject = Subject(name="stock", version="", url=url, dialect=find_dialect(url), transport="gloo")
        judgement = ServerJudgement(subject, JudgingRules())
        names = ("routes-are-listed", "world-size-is-returned", "missing-field-is-named", "a-reset-returns-its-success")
        states = {name: judgement.verdict_of(BY_ID[name]).state for name in names}
    assert states == dict(zip(names, ("must", "must", "blocked-by", "blocked-by"), strict=True))
