"""The examples of the wire protocols are what a server takes and returns."""

import json
import re

import pytest
from starlette.testclient import TestClient

from conformance.doubles.digits import ROOT
from conformance.doubles.stand_in import make_stand_in

PAGE = (ROOT / "docs/reference/protocols.md").read_text(encoding="utf-8")
EXAMPLES = re.findall(r"```\nPOST (\S+)\n(.+?)\n\n(\d+)\n(.+?)\n```", PAGE, flags=re.DOTALL)


def form_of(value):
    """Names of fields, kinds of values, nesting: what a reader copies, without the numbers."""
    if isinstance(value, dict):
        return {name: form_of(inner) for name, inner in value.items()}
    if isinstance(value, list):
        return [form_of(inner) for inner in value[:1]]
    return type(value)


def test_each_dialect_that_we_serve_has_an_example():
    assert [route for route, *_ in EXAMPLES] == ["/native/infer/", "/generate/", "/infer/"]


@pytest.mark.parametrize(("route", "body", "status", "reply"), EXAMPLES, ids=[route for route, *_ in EXAMPLES])
def test_an_example_is_served_as_it_stands_there(route, body, status, reply):
    _, app = make_stand_in(drain_s=0.1)
    with TestClient(app) as client:
        answered = client.post(route, json=json.loads(body))
    assert answered.status_code == int(status), answered.text
    assert form_of(answered.json()) == form_of(json.loads(reply))
