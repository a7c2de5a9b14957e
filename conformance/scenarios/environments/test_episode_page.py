"""Where episodes spend their time: as the journal holds it, and as the page shows it."""

import html
import json
from dataclasses import replace

import pytest

from conformance.doubles.ladders import TurnSide, climbing, grouped, world
from conformance.doubles.locks import VOCABULARY, sample_of
from conformance.doubles.page_outline import read, visible
from conformance.doubles.records import make_reply
from conformance.doubles.runs import run_event, step_events, write_journal
from conformance.doubles.tool_functions import right
from rollmatch.environments.limits import DEFAULTS
from rollmatch.environments.loading import load_tool_environment
from rollmatch.objectives.grpo.reward import Reward
from rollmatch.report import write_page
from rollmatch.report.episodes import make_episode_sheet
from rollmatch.report.history import load_history
from rollmatch.rollout.backend import Decoding

FUNCTIONS = "conformance.doubles.tool_functions"
HOSTILE = "<script>alert(1)</script>"


class Waiting(TurnSide):
    """Waits by a tool, or, in the third episode, reads a file that is not there; then writes HTML."""

    def write(self, request, decoding):
        called = {"name": "wait", "arguments": {"seconds": 0.2}}
        if request.request_id.split(".")[0] == "2":
            called = {"name": "read", "arguments": {"path": "/no/such/file"}}
        text = f"<tool_call>{json.dumps(called)}</tool_call>" if not request.prefix_token_ids else HOSTILE
        return make_reply(request, VOCABULARY.encode(text), version=self.version, finish_reason="stop")


def window_of(objective, tmp_path):
    """A window's event, and the page of a run that had it."""
    tools = (f"{FUNCTIONS}:wait", f"{FUNCTIONS}:read")
    in_world = world(load_tool_environment(tools, limits=DEFAULTS), max_response_tokens=400, failed_share=0.5)
    side = Waiting(decoding=Decoding(max_new_tokens=120, temperature=1.0))
    samples = [replace(sample_of(number), metadata={"answer": HOSTILE}) for number in (0, 1)]
    rollouts = side.answer(samples, in_world=in_world)
    replace(objective, world=in_world).make_segments(samples, rollouts, side.context())
    (note,) = [note for event, note in side.notes if event == "episodes"]
    event = json.loads(json.dumps({"event": "episodes", "time": 1_750_000_009.0, "rank": 0, **note}))
    run = write_journal(tmp_path / "run", [run_event(), *step_events(event["step"]), event])
    return event, write_page(run).read_text()


@pytest.mark.scenario(
    "environments/a-window-with-a-slow-tool-and-a-failed-episode",
    clauses=["environments/where-episodes-spend-their-time-is-shown#1,2,3"],
)
def test_a_slow_tool_and_a_failed_episode_are_written_down_and_shown(tmp_path):
    event, page = window_of(replace(grouped(), rewards=(Reward.of(right, name="right"),)), tmp_path)
    assert len(event["durations"]) == len(event["shown"]) == 4
    calls, seconds = event["tools"]["wait"]
    assert calls == 3
    assert seconds >= 0.2 * calls
    for one in event["shown"]:
        for requested, written, replied, tools in one["turns"]:
            assert 0 <= requested <= written <= replied
            assert replied - written >= 0.2 or tools != ["wait"]
    assert [one["reward"] for one in event["shown"]] == [1.0, 1.0, None, 1.0]
    assert event["num_failed"] == 1
    assert "x:2: step(" in event["failures"][0]
    (best, _) = event["chats"]
    assert [role for role, _ in best["messages"]] == ["user", "policy", "environment", "policy"]
    assert best["messages"][-1][1] == HOSTILE
    read(page)
    seen = visible(page)
    for text in ("Episodes", "wait", "FileNotFoundError", "Best episode", "waited", html.escape(HOSTILE), "p99"):
        assert text in seen
    assert HOSTILE not in page


def test_the_tail_is_of_all_windows_and_of_the_last_one(tmp_path):
    """Two ranks write in each of two windows."""
    head = {"event": "episodes", "time": 1_750_000_009.0, "engine_s": 10.0, "environment_s": 5.0}
    durations = {(1, 0): [1.0, 2.0], (1, 1): [40.0, 80.0], (2, 0): [3.0, 5.0, 6.0], (2, 1): [4.0]}
    events = [head | {"step": step, "rank": rank, "durations": own} for (step, rank), own in durations.items()]
    sheet = make_episode_sheet(load_history(write_journal(tmp_path, [run_event(), *events])))
    assert dict(sheet.figures)["waiting for other episodes"] == "57.4%", "81 of 141 s"
    assert sheet.tail == (
        ("p50", "4.00", "4.00"),
        ("p90", "80.00", "6.00"),
        ("p99", "80.00", "6.00"),
        ("max", "80.00", "6.00"),
    )


def test_vineppo_writes_the_same(tmp_path):
    made = climbing(num_continuations=1)
    rewards = replace(made.rewards, rewards=(Reward.of(right, name="right"),))
    event, page = window_of(replace(made, rewards=rewards), tmp_path)
    assert [one["reward"] for one in event["shown"]] == [1.0, 1.0, None, 1.0]
    assert "Episodes" in visible(page)
