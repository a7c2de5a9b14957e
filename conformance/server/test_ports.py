"""Ports that tests take."""

import random

import pytest

from conformance.server import instance


@pytest.fixture(autouse=True)
def nothing_given(monkeypatch):
    monkeypatch.setattr(instance, "_GIVEN", set())


def draw(monkeypatch, worker, num_ports):
    monkeypatch.setenv("PYTEST_XDIST_WORKER", worker)
    monkeypatch.setenv("PYTEST_XDIST_WORKER_COUNT", "2")
    return [instance.free_port() for _ in range(num_ports)]


def test_no_seed_fixes_them(monkeypatch):
    drawn = []
    for _ in range(2):
        random.seed(42)
        monkeypatch.setattr(instance, "_GIVEN", set())
        drawn.append(draw(monkeypatch, "gw0", 5))
    assert drawn[0] != drawn[1]


def test_two_workers_never_draw_the_same(monkeypatch):
    first, second = draw(monkeypatch, "gw0", 500), draw(monkeypatch, "gw1", 500)
    assert len({*first, *second}) == 1000
    assert {port % 2 for port in first} == {0}
    assert {port % 2 for port in second} == {1}
