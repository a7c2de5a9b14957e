"""Where checks of trainers are registered, and the clauses and checks that several of them name."""

from collections.abc import Callable
from typing import Any

from conformance.judge.servers.check import Check, Judge
from conformance.judge.servers.exchange import Exchange
from conformance.judge.trainers.runs import PLAIN, TrainerRuns

REGISTERED: list[Check] = []
WEIGHTS = "trainers/weights-come-before-rollouts"
WHOLE = "trainers/an-update-is-the-whole-model"
SENDER = "trainers/one-process-sends-and-runs-repeat"
WRONG = "trainers/what-goes-wrong-is-not-learned-from"
FIRST, ENDS, SEEDS = "weights-before-the-first-rollout", "the-run-ends-well", "every-call-has-a-seed"


def asking(*names: str) -> Callable[[TrainerRuns], Exchange]:
    """The first run, with the events of the others beside it."""

    def ask(runs: TrainerRuns) -> Exchange:
        first = runs.run(names[0])
        others = {f"{name}_events": runs.run(name).notes["events"] for name in names[1:]}
        return Exchange(calls=first.calls, notes=first.notes | others, untestable=first.untestable)

    return ask


def check(check_id: str, sentence: str, *runs: str, **fields: Any) -> Callable[[Judge], Judge]:
    """Register the decorated function; ``runs`` are those that it reads, the plain one where none is named."""

    def register(judge: Judge) -> Judge:
        if runs and runs[0] != PLAIN:
            fields["requires"] = (ENDS, *fields.get("requires", ()))
        REGISTERED.append(
            Check(check_id=check_id, sentence=sentence, ask=asking(*(runs or (PLAIN,))), judge=judge, **fields)
        )
        return judge

    return register
