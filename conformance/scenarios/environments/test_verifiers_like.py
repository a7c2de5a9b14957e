"""Environments of an unmodified verifiers 0.1.x, played turn by turn as environments of ours."""

import json
import subprocess
from pathlib import Path

import pytest

from conformance.doubles.digits import ROOT
from conformance.tools.outside_tools import python_of

pytestmark = pytest.mark.verifiers

GAME = """
import verifiers as vf
from datasets import Dataset

class Guess(vf.MultiTurnEnv):
    async def setup_state(self, state):
        state["tries"] = []
        return state

    async def env_response(self, messages, state, **kwargs):
        state["tries"].append(messages[-1]["content"])
        if messages[-1]["content"] == state["answer"]:
            state["final_env_response"] = [{"role": "user", "content": "right"}]
            return []
        return [{"role": "user", "content": f"no ({len(state['tries'])})"}]

def score(completion, answer, state) -> float:
    return (answer in state["tries"]) / len(state["tries"])

def fails(completion, answer) -> float:
    raise ZeroDivisionError("nothing to divide by")

def load_environment(function="score"):
    rows = Dataset.from_list([{"question": "?", "answer": "4"}])
    return Guess(dataset=rows, rubric=vf.Rubric(funcs=[globals()[function]]), max_turns=3)
"""
PLAY = """
import json, pickle, sys
sys.path[:0] = [sys.argv[1]]
from rollmatch.errors import RollmatchError
from rollmatch.environments.environment import begin, generator_of, take_step
from rollmatch.environments.loading import load_environment
from rollmatch.records import Sample

sample = Sample(sample_id=3, origin="x:1", images=(), messages=(("user", "?"),), metadata={"answer": "4"})
def begun(**options):
    return begin(load_environment("game:load_environment", options, key="name"), sample, run_seed=1)

first, shown = begun()
seen = {"shown": shown, "wrong": take_step(first, "1", key="x:1")[:4]}
twin = pickle.loads(pickle.dumps(first.clone(generator_of(1))))
seen |= {"alike": twin.fingerprint() == first.fingerprint(), "right": take_step(twin, "4", key="x:1")[:4]}
seen |= {"again": take_step(first, "2", key="x:1")[:4], "last": take_step(first, "3", key="x:1")[:4]}
broken, _ = begun(function="fails")
try:
    take_step(broken, "4", key="x:1")
except RollmatchError as error:
    seen |= {"code": error.code, "problem": error.problem}
print(json.dumps(seen))
"""


def played(folder, game, script):
    """What a script prints that plays a game, where verifiers is."""
    (folder / "game.py").write_text(game)
    command = [python_of("verifiers"), "-c", script, str(ROOT / "impl")]
    ran = subprocess.run(command, capture_output=True, text=True, timeout=300, cwd=folder)
    assert ran.returncode == 0, ran.stderr[-3000:]
    return json.loads(ran.stdout.splitlines()[-1])


@pytest.mark.scenario(
    "environments/an-environment-of-verifiers-is-played",
    clauses=["environments/an-environment-is-a-class-that-answers-the-policy#10,11"],
)
def test_an_environment_of_verifiers_is_played_cloned_and_scored(tmp_path: Path):
    seen = played(tmp_path, GAME, PLAY)
    assert seen["shown"] == ""
    assert seen["wrong"] == ["no (1)", 0.0, False, False]
    assert seen["alike"]
    assert seen["right"] == ["", 0.5, True, False]
    assert seen["again"] == ["no (2)", 0.0, False, False]
    assert seen["last"] == ["", 0.0, False, True]
    assert seen["code"] == "environment-failed"
    assert "nothing to divide by" in seen["problem"]


TOOLS = """
import verifiers as vf
from datasets import Dataset

def add(a: int, b: int) -> int:
    \"\"\"Adds two numbers.\"\"\"
    return a + b

def score(completion, answer) -> float:
    return float(completion[-1]["content"] == answer)

def load_environment():
    rows = Dataset.from_list([{"question": "?", "answer": "4"}])
    return vf.ToolEnv(tools=[add], dataset=rows, rubric=vf.Rubric(funcs=[score]), max_turns=4)
"""
CALLS = """
import json, sys
sys.path[:0] = [sys.argv[1]]
from rollmatch.environments.environment import begin, take_step
from rollmatch.environments.loading import load_environment
from rollmatch.records import Sample

sample = Sample(sample_id=3, origin="x:1", images=(), messages=(("user", "?"),), metadata={"answer": "4"})
played, shown = begin(load_environment("game:load_environment", {}, key="name"), sample, run_seed=1)
turns = ['I add. <tool_call>\\n{"name": "add", "arguments": {"a": 1, "b": 3}}\\n</tool_call>',
         '<tool_call>{"name": "subtract", "arguments": {}}</tool_call><tool_call>no json</tool_call>', "4"]
print(json.dumps([shown, *(take_step(played, turn, key="x:1")[:4] for turn in turns)]))
"""


@pytest.mark.scenario(
    "environments/an-environment-of-verifiers-with-tools-is-played",
    clauses=["environments/an-environment-is-a-class-that-answers-the-policy#12"],
)
def test_an_environment_with_tools_calls_them_and_replies(tmp_path: Path):
    shown, added, failed, ended = played(tmp_path, TOOLS, CALLS)
    assert '"name": "add"' in shown
    assert "<tool_call>" in shown
    assert added == ["<tool_response>\n4\n</tool_response>", 0.0, False, False]
    assert failed[0].count("<tool_response>") == 2
    assert "subtract" in failed[0]
    assert ended == ["", 1.0, True, False]
