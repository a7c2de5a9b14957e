"""``/openapi.json`` is right: what it allows is read by its route, and what a route answers it describes."""

import copy
import os

import pytest
from hypothesis import given, settings
from jsonschema import Draft202012Validator
from starlette.testclient import TestClient

from conformance.doubles.fuzzed_bodies import BODIES, calls, encoded, places_in, set_at, value_at
from conformance.doubles.stand_in import make_stand_in

NUM_BODIES = 600 if "ROLLMATCH_STRICT" in os.environ else 100
WHOLE_NUMBERS = (3.0, -0.0, 2.0**63, 1e308)
BOUNDS = {"minimum", "maximum", "exclusiveMaximum"}
WITHOUT_BODY = {"/close_communicator/", "/get_engine_type/", "/process_weights_after_loading/"}
WITHOUT_BODY |= {"/shutdown_weight_transfer_engine/", "/pause/", "/resume/"}
OF_GET = {"/health/", "/metrics/", "/get_world_size/", "/get_model_state_keys/", "/native/identity/", "/v1/models/"}
OF_GET |= {"/server_info/", "/weight_info/", "/is_paused/"}
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


def answer_to(client, route, body, bodies):
    """The reply to a body; one that the schema allows is read."""
    raw, kind = encoded(body, "json")
    reply = client.post(route, content=raw, headers={"content-type": kind})
    is_unread = reply.status_code == 422 and reply.json()["code"] == "body-invalid"
    assert not (is_unread and bodies[route].is_valid(body)), (route, body, reply.json())
    return reply


def test_every_route_that_reads_a_body_describes_it(described):
    posts = {path for path, operations in described["paths"].items() if "post" in operations}
    assert described["paths"].keys() - posts == OF_GET
    assert posts - bodies_of(described).keys() == WITHOUT_BODY
    assert {route for calls in BODIES.values() for route, _ in calls} <= posts
    bodies = [
        each["requestBody"] for calls in described["paths"].values() for each in calls.values() if "requestBody" in each
    ]
    assert all(body["required"] for body in bodies)
    failures = [call["responses"]["default"] for calls in described["paths"].values() for call in calls.values()]
    assert {kind for failure in failures for kind in failure["content"]} == {"application/json"}
    for validator in bodies_of(described).values():
        Draft202012Validator.check_schema(validator.schema)


@pytest.mark.parametrize("dialect", sorted(BODIES))
def test_what_is_described_is_read_and_failures_are_as_described(client, described, dialect):
    bodies, seen = bodies_of(described), set()

    @settings(max_examples=NUM_BODIES)
    @given(calls(dialect))
    def run(call):
        route, body = call
        if route not in bodies:
            return
        reply, is_allowed = answer_to(client, route, body, bodies), bodies[route].is_valid(body)
        seen.add(is_allowed)
        assert is_allowed or dialect == "openai" or reply.status_code >= 400, (route, body)
        if reply.status_code >= 400:
            failure = validator_of(described, described["paths"][route]["post"]["responses"]["default"])
            failure.validate(reply.json())

    run()
    assert seen == {True, False}


@pytest.mark.parametrize("dialect", sorted(BODIES))
def test_whole_numbers_are_those_of_json_schema(client, described, dialect):
    """3.0 is an integer there, and so is 1e308."""
    bodies, num_allowed = bodies_of(described), 0
    for route, template in BODIES[dialect]:
        for path in places_in(template) if route in bodies else ():
            for number in WHOLE_NUMBERS:
                body = set_at(copy.deepcopy(template), path, number)
                answer_to(client, route, body, bodies)
                num_allowed += bodies[route].is_valid(body)
    assert num_allowed


def test_every_reference_leads_to_a_schema(described):
    parts = [part for path in places_in(described) if isinstance(part := value_at(described, path), dict)]
    references = {part["$ref"] for part in parts if isinstance(part.get("$ref"), str)}
    assert references
    assert references <= {f"#/components/schemas/{name}" for name in described["components"]["schemas"]}


def test_every_integer_of_a_body_is_bounded(described):
    schemas = {name: schema for name, schema in described["components"]["schemas"].items() if "Failure" not in name}
    parts = [(path, part) for path in places_in(schemas) if isinstance(part := value_at(schemas, path), dict)]
    integers = {path: part.keys() for path, part in parts if part.get("type") == "integer" and "const" not in part}
    assert integers
    assert [path for path, keys in integers.items() if len(keys & BOUNDS) < 2] == []
