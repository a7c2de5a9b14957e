"""``/openapi.json`` is right: what it allows is read by its route, and what a route answers it describes."""

import os

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from jsonschema import Draft202012Validator
from starlette.testclient import TestClient

from conformance.server.stand_in import make_stand_in
from conformance.server.test_fuzz import BODIES, calls, encoded

NUM_BODIES = 600 if "ROLLMATCH_STRICT" in os.environ else 100
WITHOUT_BODY = {"/close_communicator/", "/get_engine_type/", "/process_weights_after_loading/"}
WITHOUT_BODY |= {"/get_num_background_tasks/", *(f"/reset_{name}_cache/" for name in ("prefix", "encoder", "mm"))}


@pytest.fixture(scope="module")
def client():
    _, app = make_stand_in(drain_s=0.01, max_model_len=512)
    with TestClient(app) as client:
        yield client


@pytest.fixture(scope="module")
def described(client):
    return client.get("/openapi.json").json()


def validator_of(described, part):
    schema = next(iter(part["content"].values()))["schema"]
    return Draft202012Validator(schema | {"components": described["components"]})


def bodies_of(described):
    """Route -> validator of its body."""
    return {
        path: validator_of(described, operation["requestBody"])
        for path, operations in described["paths"].items()
        for operation in operations.values()
        if "requestBody" in operation
    }


def test_every_route_that_reads_a_body_describes_it(described):
    posts = {path for path, operations in described["paths"].items() if "post" in operations}
    assert posts - bodies_of(described).keys() == WITHOUT_BODY
    for validator in bodies_of(described).values():
        Draft202012Validator.check_schema(validator.schema)


@pytest.mark.parametrize("dialect", sorted(BODIES))
def test_what_is_described_is_read_and_failures_are_as_described(client, described, dialect):
    bodies, seen = bodies_of(described), set()

    @settings(max_examples=NUM_BODIES)
    @given(calls(dialect), st.just("json"))
    def run(call, form):
        route, body = call
        if route not in bodies:
            return
        raw, kind = encoded(body, form)
        reply = client.post(route, content=raw, headers={"content-type": kind})
        is_allowed = bodies[route].is_valid(body)
        seen.add(is_allowed)
        if reply.status_code >= 400:
            failure = validator_of(described, described["paths"][route]["post"]["responses"]["default"])
            failure.validate(reply.json())
        if is_allowed:
            assert reply.status_code != 422 or reply.json()["code"] != "body-invalid", (body, reply.json())

    run()
    assert seen == {True, False}
