"""VinePPO whose windows are written and judged while it learns.

As a script (``FOLDER OVERRIDE...``) it is one of two ranks, beside servers in its process, once in each mode.
"""

import sys
import time
from pathlib import Path

import pytest

from conformance.doubles.digits import scenes, unseen
from conformance.doubles.overlapped import ScriptedServers, attach_servers, note_what_is_learnt, overlapped
from conformance.doubles.small_run import events
from conformance.doubles.started import finish_ranks, journals_of
from conformance.doubles.turns import make_trainer
from rollmatch.rollout.retry import ServerRestarted

R, V = "custom.extra.rollout_matching", "custom.extra.vineppo"
VINEPPO = (
    "custom.extra.grpo.num_generations=2",
    "custom.extra.grpo.rewards=[{function: conformance.doubles.rewards:spelling}]",
    f"{R}.decoding.temperature=1",
    f"{R}.max_new_tokens=12",
    f"{V}.num_continuations=2",
    f"{V}.steps=tokens",
    f"{V}.step_tokens=5",
    f"{V}.unfinished_return=null",
    f"{V}.search.num_rounds=1",
    f"{V}.search.num_per_round=2",
    f"{V}.search.num_least=1",
    "training.per_device_train_batch_size=2",
    "training.packing=false",
    "training.max_steps=4",
)
VARIANTS = ("vineppo", "vineppo_mcts")
BRIEF = {"samples": unseen(scenes("train")[:8]), "eval_samples": unseen(scenes()[:1])}
SCRIPTED = BRIEF | {"is_shallow": True, "kind": ScriptedServers}
WORKER = ("-m", "conformance.scenarios.prefetch.test_values_ahead")
RESTARTED = "-restarted"
MODES = ("off", "ahead", f"ahead{RESTARTED}")


def ran(folder, mode, *overrides, before_call=lambda servers, ids: None):
    trainer, servers = overlapped(folder, mode.removesuffix(RESTARTED), *VINEPPO, *overrides, **SCRIPTED)
    servers.before_call = lambda server, ids: before_call(servers, ids)
    note_what_is_learnt(trainer)
    trainer.train()
    return trainer, servers


def valued(trainer):
    return [{name: event[name] for name in event if name != "time"} for event in events(trainer, "valued")]


@pytest.mark.scenario(
    "prefetch/values-ahead-are-those-of-off",
    clauses=["prefetch/values-are-sampled-before-weights-change#1,2"],
)
@pytest.mark.parametrize("variant", VARIANTS)
def test_values_ahead_are_those_of_off_where_weights_stay(tmp_path, variant):
    fixed = (f"custom.trainer_variant={variant}", "training.learning_rate=0")
    (off, _), (ahead, servers) = (ran(tmp_path / mode, mode, *fixed) for mode in ("off", "ahead"))
    assert valued(ahead) == valued(off)
    assert [event["step"] for event in valued(ahead)] == [0, 1, 2, 3]
    assert any(len(set(values)) > 1 for event in valued(ahead) for values in event["values"])
    first, second = (servers.events.index(("sync", version)) for version in (1, 2))
    judged = [event for event in servers.events[first:second] if event[0] == "whole"]
    in_a_step = [event for event in servers.events[second:] if event[0] == "whole" and event[1] == 2]
    assert len(judged) == 2 * len(in_a_step), "windows 0 and 1 are judged by the weights that wrote them"


@pytest.mark.parametrize("variant", VARIANTS)
def test_continuations_are_of_the_weights_that_wrote_the_response(tmp_path, variant):
    trainer, servers = ran(tmp_path, "ahead", f"custom.trainer_variant={variant}", "training.learning_rate=0.3")
    assert trainer.ages == [0, 1, 1, 1]
    written = [event[1] for event in servers.events if event[0] == "answer"]
    judged = [event[1] for event in servers.events if event[0] == "whole"]
    assert set(written) == set(judged) == {1, 2, 3}, "the last window is written and judged in the last step but one"


@pytest.mark.scenario(
    "prefetch/a-restart-while-values-are-sampled",
    clauses=["prefetch/values-are-sampled-before-weights-change#3"],
)
@pytest.mark.parametrize(("call", "ages"), [(1, [0, 1, 1, 1]), (2, [0, 0, 1, 1]), (3, [0, 1, 0, 1])])
def test_a_restart_while_values_are_sampled_costs_a_window_its_age(tmp_path, call, ages):
    """A window is one call for continuations; the first one is judged in its own step."""
    left = [call]

    def restart(servers, ids):
        if servers.events[-1][0] == "whole":
            left[0] -= 1
            if left[0] == 0:
                servers.is_well = lambda: False
                raise ServerRestarted("was restarted", key="server")

    fixed = ("custom.trainer_variant=vineppo", "training.learning_rate=0.3")
    trainer, _ = ran(tmp_path, "ahead", *fixed, before_call=restart)
    assert [event["step"] for event in events(trainer, "valued")] == [0, 1, 2, 3]
    assert trainer.ages == ages


def test_episodes_are_judged_ahead(tmp_path):
    trainer = make_trainer(tmp_path, "training.max_steps=9")
    servers = attach_servers(trainer, "ahead", max_staleness=7, lead=1)
    note_what_is_learnt(trainer)
    trainer.train()
    assert [event["step"] for event in valued(trainer)] == [0, 4, 6]
    assert trainer.ages == [0, 1, 2, 3, 4, 5, 2, 3, 4], "each window was written beside the one before it"
    first, second = (servers.events.index(("sync", version)) for version in (1, 2))
    assert {event[1] for event in servers.events[first:second] if event[0] == "whole"} == {1}


@pytest.fixture(scope="module", params=[VARIANTS[0], *(pytest.param(v, marks=pytest.mark.wide) for v in VARIANTS[1:])])
def two_ranks(request, tmp_path_factory):
    folder = tmp_path_factory.mktemp(request.param)
    finish_ranks(folder, 2, sys.executable, *WORKER, str(folder), f"custom.trainer_variant={request.param}")
    return folder


def test_two_ranks_judge_together_beside_learning(two_ranks):
    found = {mode: journals_of(two_ranks / mode, num_ranks=2) for mode in MODES}
    said = {
        mode: [[(e["step"], e["sample_ids"], e["values"]) for e in own if e["event"] == "valued"] for own in journals]
        for mode, journals in found.items()
    }
    assert said["ahead"] == said["off"] == said[f"ahead{RESTARTED}"]
    assert [step for step, *_ in said["off"][1]] == [0, 1, 2, 3]
    for own in found[f"ahead{RESTARTED}"]:
        assert len({event["version"] for event in own if event["event"] == "synced"}) >= 4


def run(folder: Path, mode: str, *overrides: str) -> None:
    """Fixed weights; values of a restarted server's window are made again."""
    num_whole = 0

    def before_call(servers, ids):
        nonlocal num_whole
        time.sleep(0.1 if servers.rank else 0.0)
        num_whole += servers.events[-1][0] == "whole"
        if mode.endswith(RESTARTED) and servers.rank and num_whole in (1, 4):
            num_whole += 1
            servers.is_well = lambda: False
            raise ServerRestarted("was restarted", key="server")

    overrides = (*overrides, "training.learning_rate=0", "training.per_device_train_batch_size=1")
    trainer, servers = overlapped(folder / mode, mode.removesuffix(RESTARTED), *VINEPPO, *overrides, **SCRIPTED)
    servers.rank = trainer.source.ranks.rank
    servers.before_call = lambda server, ids: before_call(servers, ids)
    trainer.train()


if __name__ == "__main__":
    for mode in MODES:
        run(Path(sys.argv[1]), mode, *sys.argv[2:])
