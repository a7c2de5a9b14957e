"""The judge of trainers, judged: a correct trainer passes every check, and each mistake is found by its own check.

Only runs in which the mistake shows are made again; the others are those of the correct trainer. A mistake that the
plain run asks for shows there, and is not made again in the runs whose server goes wrong.
"""

import pytest
import requests
import torch
from transformers import AutoModelForCausalLM

from conformance.doubles.digits import ROOT
from conformance.judge.servers.broken.engine import TinyEngine
from conformance.judge.servers.broken.switches import Switches
from conformance.judge.trainers.checks import BY_ID, CHECKS
from conformance.judge.trainers.judgement import TrainerJudgement
from conformance.judge.trainers.runs import AGAIN, PLAIN, RUNS, TrainerRuns, TrainerSubject
from conformance.judge.trainers.server import RecordingServer, recording
from conformance.judge.trainers.small_trainer import SmallTrainer, launch_of

MODEL = ROOT / "fixtures/models/tape"
MISTAKES = {
    "the run ends with 1": "the-run-ends-well",
    "the first update is left out": "weights-before-the-first-rollout",
    "the second update is left out": "weights-after-every-step",
    "the last step is left out": "weights-after-every-step",
    "the second step learns nothing": "updates-hold-new-weights",
    "training begins with other weights": "the-first-update-is-the-checkpoint",
    "one tensor is left out": "every-tensor-is-sent",
    "one tensor has another name": "only-tensors-of-the-model-are-sent",
    "one tensor is sent twice": "a-tensor-is-sent-once",
    "one tensor is transposed": "shapes-are-the-model-s",
    "one tensor is rounded": "dtypes-are-the-server-s",
    "rollouts are requested during an update": "nothing-is-requested-during-an-update",
    "every rank opens a group": "one-sender",
    "the world size leaves out the learner": "the-world-size-is-the-workers-and-one",
    "the group is left open": "the-group-is-closed",
    "one call has no seed": "every-call-has-a-seed",
    "every call has the same seed": "seeds-differ",
    "seeds come from the clock": "seeds-repeat",
    "prompts are shuffled without a seed": "calls-repeat",
    "a late answer is given up": "a-late-answer-is-waited-for",
    "a short answer is enough": "a-short-answer-is-not-learned-from",
    "a 429 is no rollouts": "a-busy-server-is-not-ignored",
    "a 503 is no rollouts": "an-unavailable-server-is-not-ignored",
    "a 429 ends the run": "a-busy-server-is-asked-again",
    "a 503 ends the run": "an-unavailable-server-is-asked-again",
    "a restart goes unnoticed": "a-restarted-server-gets-weights-first",
    "a restart ends the run": "the-run-outlives-a-restart",
}
"""Switch -> the check that must miss, and no other."""
QUICK = {
    *("the first update is left out", "the second step learns nothing", "one tensor has another name"),
    *("every rank opens a group", "every call has the same seed", "a short answer is enough"),
    *("a 429 is no rollouts", "a restart goes unnoticed"),
}
"""One of each kind; the others are made where ``wide`` tests run."""
OF_NATIVE = {
    "one tensor is left out",
    "one tensor has another name",
    "one tensor is transposed",
    "one tensor is rounded",
    "the group is left open",
    "seeds come from the clock",
    "a short answer is enough",
    "a restart goes unnoticed",
}
"""What the native dialect is asked beside; the swift dialect is asked everything."""


class TrainerBench:
    """Verdicts on the small trainer; the correct one's runs, and the mistakes that were asked for in each."""

    def __init__(self, dialect):
        self.engine, self.broken, self.dialect = TinyEngine(str(MODEL), Switches()), Switches(), dialect
        self.clean, self.asked = {}, {}
        for name in RUNS:
            self.broken.turn("")
            self.clean[name] = self.runs().run(name)
            self.asked[name] = frozenset(self.broken.asked)

    def runs(self):
        runs = TrainerRuns(None)
        launch = launch_of(self.engine.weights, self.dialect, self.broken, lambda: runs.server.is_holding)
        runs.subject = TrainerSubject(
            launch=launch, engine=self.engine, dialect=self.dialect, dtype="float32", steps=3, late_s=0.3, down_s=0.1
        )
        return runs

    def verdicts(self, mistake=""):
        """Check -> state and reason."""
        self.broken.turn(mistake)
        judgement = TrainerJudgement(self.runs().subject, lambda check: "")
        judgement.runs = self.runs()
        again = {name for name, asked in self.asked.items() if mistake in asked}
        again = again & {PLAIN, AGAIN} if mistake in self.asked[PLAIN] else again
        judgement.runs.made = {name: made for name, made in self.clean.items() if name not in again}
        judgement.look()
        return {check.check_id: judgement.verdict_of(check) for check in CHECKS}


@pytest.fixture(scope="module")
def bench():
    return TrainerBench("swift")


@pytest.fixture(scope="module")
def native_bench():
    return TrainerBench("native")


@pytest.mark.scenario("judging/a-correct-trainer", clauses=["judging/a-trainer-is-judged-by-what-arrives#1"])
@pytest.mark.parametrize(
    "dialect", ["native", *(pytest.param(name, marks=pytest.mark.wide) for name in ("swift", "trl", "vllm"))]
)
def test_a_correct_trainer_passes(dialect, request):
    kept = {"swift": "bench", "native": "native_bench"}
    made = request.getfixturevalue(kept[dialect]) if dialect in kept else TrainerBench(dialect)
    assert {name: row.reason for name, row in made.verdicts().items() if row.state != "pass"} == {}


@pytest.mark.scenario(
    "judging/one-mistake-of-a-trainer",
    "trainers/the-second-update-is-left-out",
    "trainers/a-tensor-comes-twice",
    "trainers/every-rank-opens-a-group",
    "trainers/seeds-come-from-the-clock",
    "trainers/a-restart-goes-unnoticed",
    clauses=[
        "judging/the-judge-is-judged#3",
        "trainers/weights-come-before-rollouts#1,2,3,4",
        "trainers/an-update-is-the-whole-model#1,2,3,4,5",
        "trainers/one-process-sends-and-runs-repeat#1,2,3,4,5,6,7,8",
        "trainers/what-goes-wrong-is-not-learned-from#1,2,3,4,5,6,7,8,9",
    ],
)
@pytest.mark.parametrize(
    "mistake", [pytest.param(one, marks=[pytest.mark.wide] * (one not in QUICK)) for one in MISTAKES]
)
def test_a_mistake_of_a_trainer_is_found_by_its_check_alone(bench, mistake):
    assert any(mistake in asked for asked in bench.asked.values()), "nobody asks for this mistake"
    red = {name: row.reason for name, row in bench.verdicts(mistake).items() if row.state not in ("pass", "blocked-by")}
    assert red.keys() == {MISTAKES[mistake]}, red


@pytest.mark.wide
@pytest.mark.parametrize("mistake", sorted(OF_NATIVE))
def test_a_mistake_in_the_native_dialect_is_found_by_its_check_alone(native_bench, mistake):
    test_a_mistake_of_a_trainer_is_found_by_its_check_alone(native_bench, mistake)


def test_every_check_of_trainers_has_a_mistake():
    assert BY_ID.keys() == {*MISTAKES.values()}


@pytest.mark.scenario("judging/each-run-has-its-fault", clauses=["judging/a-trainer-is-judged-by-what-arrives#3"])
def test_each_run_has_its_fault_and_two_have_none(bench):
    hit = {name: [e["fault"] for e in run.notes["events"] if "fault" in e] for name, run in bench.clean.items()}
    assert hit == {"plain": [], "again": []} | {name: [name] for name in ("late", "short", "429", "503", "restart")}


@pytest.mark.scenario("judging/the-weights-sent-last-answer", clauses=["judging/a-trainer-is-judged-by-what-arrives#2"])
def test_the_weights_sent_last_answer(bench):
    server = RecordingServer(bench.engine, "trl", dtype="float32")
    body = {"prompts": [[5, 6, 7]], "max_tokens": 1, "temperature": 0.0, "logprobs": 0}
    model = AutoModelForCausalLM.from_pretrained(MODEL, dtype=torch.float32).eval()
    with recording(server, down_s=0.1), torch.no_grad():
        values = {"url": server.url, "group_port": "0", "steps": "1"}
        trainer = SmallTrainer(values, bench.engine.weights, "trl", Switches(), lambda: False)
        trainer.peer.open()
        for scale in (1.0, 0.5, 2.0):
            trainer.peer.send({name: tensor * scale for name, tensor in trainer.weights.items()})
            trainer.peer.finish()
            model.load_state_dict({n: t * scale for n, t in trainer.weights.items()}, strict=False)
            answer = requests.post(f"{server.url}/generate/", json=body, timeout=60).json()
            due = model(torch.tensor(body["prompts"])).logits[0, -1].log_softmax(-1).max()
            assert answer["logprobs"][0][0][0] == pytest.approx(due.item(), abs=1e-4)
        trainer.peer.close()
