"""Recordings grow old: the suite says so, and what is old is recorded again."""

from datetime import date

import pytest

from conformance.judge.rule_sets import NEWEST
from conformance.judge.servers import judge
from conformance.judge.servers.known import KNOWN
from conformance.judge.servers.recording import (
    MAX_AGE_DAYS,
    Recording,
    age_lines,
    days_old,
    is_due,
    path_of,
    write_recording,
)
from conformance.judge.trainers.recording import TRAINERS

RECORDED, LATER = date(2026, 1, 1), date(2026, 4, 2)
"""91 days apart."""


@pytest.fixture
def folder(tmp_path):
    """A server's recording and a trainer's."""
    write_recording(Recording(server="x-1", dialect="trl", facts={"date": RECORDED.isoformat()}), tmp_path)
    (tmp_path / "trainers").mkdir()
    kept = next(TRAINERS.glob("*.json")).read_text().replace('"date": "2', '"date": "2026-01-02", "was": "2', 1)
    (tmp_path / "trainers/y-1.json").write_text(kept)
    return tmp_path / NEWEST, tmp_path / "trainers"


def test_old_recordings_are_named_with_the_command_that_refreshes_them(folder):
    assert (MAX_AGE_DAYS, age_lines(date(2026, 4, 1), folder)) == (90, [])
    server = ["recorded 91 days ago: x/1", "again: python -m conformance.judge.servers.judge --all --older-than 90"]
    assert age_lines(LATER, folder) == server
    assert age_lines(date(2026, 4, 3), folder) == [
        "recorded 92 days ago: x/1",
        "recorded 91 days ago: y-1",
        server[1],
        "again: python -m conformance.judge.trainers.known --older-than 90",
    ]


def test_what_was_not_recorded_in_so_many_days_is_due(folder):
    path = path_of("x-1", folder[0].parent)
    assert days_old(path, LATER) == 91
    assert [is_due(path, limit, LATER) for limit in (90, 91, None)] == [True, False, True]
    assert is_due(folder[0] / "new-1.json", 90, LATER)


def test_with_older_than_what_is_young_is_left_alone(monkeypatch, tmp_path):
    """All but one were recorded just now."""
    judged = []
    today = date.today().isoformat()
    for known in KNOWN:
        day = "2026-01-01" if known.server == "trl-1.10.0" else today
        write_recording(Recording(server=known.server, dialect=known.dialect, facts={"date": day}), tmp_path)
    monkeypatch.setattr(judge, "path_of", lambda server: path_of(server, tmp_path))
    monkeypatch.setattr(judge, "judge_known", lambda known, *_, **__: judged.append(known.server) or 0)
    monkeypatch.setattr(judge, "write_pages", lambda: None)
    monkeypatch.setattr(judge.os, "_exit", lambda code: None)
    judge.main(["--all", "--older-than", "30"])
    assert judged == ["trl-1.10.0"]
