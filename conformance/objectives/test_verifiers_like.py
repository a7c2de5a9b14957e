"""Environments of an unmodified verifiers 0.1.x, played turn by turn as environments of ours."""

import json
import subprocess
from pathlib import Path

import pytest

from conformance.outside_tools import verifiers_python
from conformance.rollout.digits import ROOT

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
from rollmatch.objectives.environment import begin, generator_of, load_environment, take_step
from rollmatch.records import Sample

sample = Sample(sample_id=3, origin="x:1", images=(), messages=(("user", "?"),), metadata={"answer": "4"})
def begun(**options):
    return begin(load_environment("game:load_environment", options, key="name"), sample, run_seed=1)

first, shown = begun()
told = {"shown": shown, "wrong": take_step(first, "1", key="x:1")}
twin = pickle.loads(pickle.dumps(first.clone(generator_of(1))))
told |= {"alike": twin.fingerprint() == first.fingerprint(), "right": take_step(twin, "4", key="x:1")}
told |= {"again": take_step(first, "2", key="x:1"), "last": take_step(first, "3", key="x:1")}
broken, _ = begun(function="fails")
try:
    take_step(broken, "4", key="x:1")
except RollmatchError as error:
    told |= {"code": error.code, "problem": error.problem}
print(json.dumps(told))
"""


@pytest.mark.scenario(
    "environments/an-environment-of-verifiers-is-played",
    clauses=["environments/an-environment-is-a-class-that-answers-the-policy#10,11"],
)
def test_an_environment_of_verifiers_is_played_cloned_and_scored(tmp_path: Path):
    (tmp_path / "game.py").write_text(GAME)
    command = [verifiers_python(), "-c", PLAY, str(ROOT / "impl")]
    ran = subprocess.run(command, capture_output=True, text=True, timeout=300, cwd=tmp_path)
    assert ran.returncode == 0, ran.stderr[-3000:]
    told = json.loads(ran.stdout.splitlines()[-1])
    assert told["shown"] == ""
    assert told["wrong"] == ["no (1)", 0.0, False, False]
    assert told["alike"]
    assert told["right"] == ["", 0.5, True, False]
    assert told["again"] == ["no (2)", 0.0, False, False]
    assert told["last"] == ["", 0.0, False, True]
    assert told["code"] == "environment-failed"
    assert "nothing to divide by" in told["problem"]
