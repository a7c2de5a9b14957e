"""Every event is on disk at once, and a kill costs at most the line it cut."""

import json
import os
import signal
import subprocess
import sys

import pytest

from rollmatch.journal import Journal, read_journal

KILLED = """
import os, signal, sys
from pathlib import Path
from rollmatch.journal import Journal
journal = Journal(Path(sys.argv[1]))
journal.write("step", step=1)
os.kill(os.getpid(), signal.SIGKILL)
"""
SEPARATORS = "\u2028 and \u0085 and \u000c end lines elsewhere"


@pytest.fixture
def path(tmp_path):
    return tmp_path / "runs/one/journal.jsonl"


def steps_in(path):
    return [event["step"] for event in read_journal(path)]


def test_an_event_is_one_line_with_its_name_its_rank_and_its_time(path):
    journal = Journal(path, rank=3)
    event = journal.write("packed", step=2, fill=0.5, desc="caf\u00e9")
    journal.close()
    assert read_journal(path) == [event]
    assert event == {"event": "packed", "time": event["time"], "rank": 3, "step": 2, "fill": 0.5, "desc": "caf\u00e9"}
    assert event["time"] > 1.7e9
    assert path.read_bytes().count(b"\n") == 1


def test_an_event_can_be_read_before_the_journal_is_closed(path):
    journal = Journal(path)
    for step in range(3):
        journal.write("step", step=step)
        assert steps_in(path) == list(range(step + 1))
    journal.close()


def test_a_killed_process_keeps_what_it_wrote(path):
    done = subprocess.run([sys.executable, "-c", KILLED, str(path)], env=os.environ, check=False)
    assert done.returncode == -signal.SIGKILL
    assert steps_in(path) == [1]


def test_a_journal_that_is_opened_again_is_appended_to(path):
    for step in (1, 2):
        journal = Journal(path)
        journal.write("step", step=step)
        journal.close()
    assert steps_in(path) == [1, 2]
    assert path.read_bytes().count(b"\n") == 2


def test_other_line_separators_inside_a_text_end_no_event(path):
    journal = Journal(path)
    journal.write("run", config_path=SEPARATORS)
    journal.close()
    assert [event["config_path"] for event in read_journal(path)] == [SEPARATORS]


def test_wherever_a_kill_cuts_the_file_whole_events_stay_and_new_ones_are_whole(path):
    journal = Journal(path)
    for step in range(2):
        journal.write("step", step=step, desc="\u00e9\u2028")
    journal.close()
    raw = path.read_bytes()
    ends = [place for place in range(len(raw)) if raw[place : place + 1] == b"\n"]
    for cut in range(len(raw) + 1):
        path.write_bytes(raw[:cut])
        whole = list(range(sum(end <= cut for end in ends)))
        assert steps_in(path) == whole, cut
        resumed = Journal(path)
        resumed.write("step", step=9)
        resumed.close()
        assert steps_in(path) == [*whole, 9], cut
        assert [json.loads(line)["step"] for line in path.read_bytes().splitlines()] == [*whole, 9], cut


def test_a_long_cut_line_is_removed_whole(path):
    Journal(path).write("step", step=0, text="x" * 200_000)
    whole = path.read_bytes()
    path.write_bytes(whole + whole[:-9])
    Journal(path).write("step", step=1)
    assert [json.loads(line)["step"] for line in path.read_bytes().splitlines()] == [0, 1]


def test_a_whole_journal_gets_no_empty_lines(path):
    Journal(path).close()
    assert path.read_bytes() == b""
    for _ in range(2):
        journal = Journal(path)
        journal.write("step", step=0)
        journal.close()
    assert b"\n\n" not in path.read_bytes()


def test_a_journal_is_readable_by_its_owner_only(tmp_path):
    Journal(tmp_path / "journal.jsonl").close()
    assert (tmp_path / "journal.jsonl").stat().st_mode & 0o777 == 0o600
