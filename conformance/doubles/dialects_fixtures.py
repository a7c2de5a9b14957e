"""A server of the swift dialect without an engine."""

import pytest

from conformance.doubles.swift_double import running_double


@pytest.fixture
def double():
    with running_double() as made:
        yield made
