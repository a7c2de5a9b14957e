"""A killed or interrupted run continues as if nothing had happened: same samples, seeds, rows, losses and weights."""

import hashlib
import json
import signal
from contextlib import ExitStack
from itertools import chain

import pytest
import torch
from safetensors.torch import load_file

from conformance.doubles.digits import ROOT, write_cut
from conformance.doubles.started import HF, finish, journal_of, started, train_command
from rollmatch.run.directory import last_checkpoint

NUM_STEPS, NUM_SAMPLES, STEPS_OF_EPOCH, SAVE_STEPS = 8, 10, 3, 3
"""Steps of 4, 4 and 2 samples: an epoch ends where a checkpoint stands."""


def command_of(folder, name, *, flags=()):
    overrides = (
        *(*HF, f"model.model={folder}/model", f"custom.train_jsonl={folder}/train.jsonl"),
        *(f"custom.image_root={ROOT}/fixtures/digits", f"training.output_dir={folder / name}"),
        *(f"training.max_steps={NUM_STEPS}", f"training.save_steps={SAVE_STEPS}", "training.eval_scenes=2"),
        *("training.per_device_train_batch_size=4", "training.save_total_limit=null", "training.learning_rate=1e-3"),
        "custom.extra.rollout_matching.max_new_tokens=8",
        "custom.extra.rollout_matching.decoding.temperature=0.7",
        "global_max_length=330",  # rows of two or three segments: some wait
    )
    return train_command(*overrides, flags=flags)


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    """Holds a data set of a few samples, and a model of a few layers."""
    folder = tmp_path_factory.mktemp("resumed")
    write_cut(folder / "model")
    lines = (ROOT / "fixtures/digits/train.jsonl").read_text().splitlines(keepends=True)
    (folder / "train.jsonl").write_text("".join(lines[:NUM_SAMPLES]))
    return folder


def newest_state(folder):
    """Of the killed run: the last file of its last checkpoint."""
    return folder / f"killed/checkpoint-{2 * SAVE_STEPS}/trainer_state.json"


@pytest.fixture(scope="module")
def first_starts(folder):
    """``whole`` runs to its end, ``killed`` is killed in its third epoch, ``stopped`` gets a Ctrl-C in its first."""
    with ExitStack() as stack:
        whole, killed, stopped = (
            stack.enter_context(started(command_of(folder, name), folder / f"{name}.txt"))
            for name in ("whole", "killed", "stopped")
        )
        stopped.wait_until(lambda: len(journal_of(folder / "stopped", "step")) >= 1)
        stopped.process.send_signal(signal.SIGINT)
        killed.wait_until(lambda: newest_state(folder).exists())  # though it may not be whole yet
        killed.process.kill()
        killed.wait()
        codes = {"whole": whole.wait(), "stopped": stopped.wait()}
        output = {"whole": whole.output(), "stopped": stopped.output()}
    assert codes == {"whole": 0, "stopped": 128 + signal.SIGINT}, output
    return output


@pytest.fixture(scope="module")
def resumed(folder, first_starts):
    """Resume the two others; the newest checkpoint of the killed one is cut short. Returns what they continued from."""
    cut = newest_state(folder)
    cut.write_text(cut.read_text()[:100])
    went_on_from = {name: last_checkpoint(folder / name) for name in ("killed", "stopped")}
    with ExitStack() as stack:
        runs = [
            stack.enter_context(started(command_of(folder, name, flags=("--resume",)), folder / f"{name}-again.txt"))
            for name in went_on_from
        ]
        for run in runs:
            assert run.wait() == 0, run.output()
    return went_on_from


def by_step(directory, event, *names):
    """The last line of each step counts."""
    lines = [line for line in journal_of(directory, event) if line.get("purpose", "train") == "train"]
    return {line["step"]: tuple(line[name] for name in names) for line in lines}


def test_a_whole_run_walks_through_epochs_and_carries_segments(folder, first_starts):
    steps = [line["sample_ids"] for line in journal_of(folder / "whole", "requested") if line["purpose"] == "train"]
    assert [len(step) for step in steps] == [4, 4, 2, 4, 4, 2, 4, 4]
    epochs = [[*chain(*steps[first : first + STEPS_OF_EPOCH])] for first in (0, STEPS_OF_EPOCH)]
    assert [sorted(epoch) for epoch in epochs] == [list(range(NUM_SAMPLES))] * 2
    assert epochs[0] != epochs[1]
    assert sum(carried > 0 for (carried,) in by_step(folder / "whole", "packed", "carried").values()) > 4
    assert "page:" in first_starts["whole"]


def test_a_killed_run_goes_on_from_its_last_whole_checkpoint(folder, resumed):
    """Which stands at the end of an epoch; the one after it was cut short."""
    assert resumed["killed"].name == f"checkpoint-{STEPS_OF_EPOCH}"
    assert [line["resumed_from"] for line in journal_of(folder / "killed", "run")] == [None, STEPS_OF_EPOCH]


def test_an_interrupted_run_stops_with_a_checkpoint_and_says_how_to_go_on(folder, first_starts, resumed):
    (line,) = journal_of(folder / "stopped", "interrupted")
    assert line["signal"] == signal.SIGINT
    assert resumed["stopped"].name == f"checkpoint-{line['step']}"
    assert line["step"] < NUM_STEPS
    assert f"stopped at step {line['step']} with a checkpoint" in first_starts["stopped"]
    assert "--resume" in first_starts["stopped"]
    assert [line["resumed_from"] for line in journal_of(folder / "stopped", "run")] == [None, line["step"]]


@pytest.mark.scenario(
    "data-ownership/a-killed-run-goes-on-where-it-was",
    clauses=["data-ownership/the-learner-owns-the-order-of-the-data#4", "packing/the-waiting-list-is-bounded#6"],
)
@pytest.mark.parametrize("name", ["killed", "stopped"])
def test_a_resumed_run_is_the_whole_run(name, folder, resumed):
    whole, again = folder / "whole", folder / name
    for event, fields in {
        "requested": ("sample_ids", "seeds", "decoding"),
        "generated": ("num_rollouts", "num_tokens"),
        "packed": ("sample_ids", "tokens", "carried"),
    }.items():
        expected = by_step(whole, event, *fields)
        assert list(expected) == list(range(NUM_STEPS))
        assert by_step(again, event, *fields) == expected
    for field in ("loss", "grad_norm", "learning_rate"):
        expected = {step: values[0] for step, values in by_step(whole, "step", field).items()}
        assert len(expected) == NUM_STEPS
        assert {step: values[0] for step, values in by_step(again, "step", field).items()} == pytest.approx(
            expected, rel=1e-4
        )


@pytest.mark.parametrize("name", ["killed", "stopped"])
def test_a_resumed_run_measures_and_ends_with_the_weights_of_the_whole_run(name, folder, resumed):
    for step in (0, NUM_STEPS):
        expected, scenes = (
            json.loads((folder / run / f"evaluations/step-{step:06d}.json").read_text())["scenes"]
            for run in ("whole", name)
        )
        assert [scene["response_text"] for scene in scenes] == [scene["response_text"] for scene in expected]
    assert (folder / name / "run.html").exists()
    expected, weights = (
        load_file(folder / run / f"checkpoint-{NUM_STEPS}" / "model.safetensors") for run in ("whole", name)
    )
    assert expected.keys() == weights.keys()
    assert max(float((weights[key] - weight).abs().max()) for key, weight in expected.items()) < 1e-5
    first = load_file(folder / "whole" / f"checkpoint-{SAVE_STEPS}" / "model.safetensors")
    assert max(float((first[key] - weight).abs().max()) for key, weight in expected.items()) > 1e-3
    assert all(weight.isfinite().all() for weight in weights.values())
    assert not torch.equal(*(some["model.language_model.norm.weight"] for some in (first, expected)))


def contents(directory):
    files = sorted(path for path in directory.rglob("*") if path.is_file())
    return {str(path.relative_to(directory)): hashlib.sha256(path.read_bytes()).hexdigest() for path in files}


def test_a_second_start_without_resume_is_refused_and_nothing_is_lost(folder, first_starts):
    before = contents(folder / "whole")
    code, output = finish(command_of(folder, "whole"), folder / "refused.txt")
    assert code == 1
    assert "[run-directory-taken] training.output_dir" in output
    assert "--resume" in output
    assert "--overwrite" in output
    assert contents(folder / "whole") == before
