"""What watches a run beside our own console: callbacks by name, early stopping, Weights & Biases, kept completions."""

import io
import json
import os
import shutil
import signal
import sys
import time

import pytest
from pydantic import TypeAdapter
from transformers import TrainerCallback

from conformance.doubles.digits import CONFIG, write_cut
from conformance.doubles.refusals import refused
from conformance.doubles.runs import box, found, scene
from conformance.doubles.started import HF, finish, journal_of, train_command
from rollmatch.cli.main import main
from rollmatch.config import load_config
from rollmatch.errors import ErrorList
from rollmatch.report.console import StepConsole
from rollmatch.report.evaluations import Scene
from rollmatch.report.facts import make_completion_groups, spread
from rollmatch.report.history import load_history, make_history
from rollmatch.run.callbacks import RunWatcher, boxes_of, check_metric

NEVER = "{metric: f1, patience: 1, threshold: 9}"
SMALL = (
    *HF,
    "custom.extra.rollout_matching.max_new_tokens=8",
    "training.per_device_train_batch_size=2",
    "training.packing=false",
    "training.eval_scenes=2",
)


class Noting(TrainerCallback):
    """As people write one."""

    def on_step_end(self, args, state, control, **_):
        sys.stdout.write(f"noted step {state.global_step}\n")


class Demanding(TrainerCallback):
    """Cannot be made without arguments."""

    def __init__(self, path):
        self.path = path


class Interrupted(io.RawIOBase):
    """A terminal at which somebody presses Ctrl-C while the first line is being written."""

    def __init__(self):
        self.written = b""

    def writable(self):
        return True

    def write(self, data):
        if not self.written:
            os.kill(os.getpid(), signal.SIGINT)
        self.written += bytes(data)
        return len(data)


def test_a_signal_that_comes_while_a_line_is_written_stops_the_run_and_is_answered():
    terminal = Interrupted()
    stream = io.TextIOWrapper(io.BufferedWriter(terminal), encoding="utf-8", line_buffering=True)
    console = StepConsole(60, stream)
    watcher = RunWatcher(console, min_fill=None)
    with watcher.listening():
        console.step({"step": 7, "loss": 1.8})
    end = time.monotonic() + 60
    while b"again to stop at once" not in terminal.written and time.monotonic() < end:
        time.sleep(0.01)
    assert watcher.stop_signal == signal.SIGINT
    first, second, *_ = terminal.written.decode().splitlines()
    assert first.startswith("step  7/60")
    assert second == "warning: stopping after this step, with a checkpoint (again to stop at once)"


@pytest.fixture(scope="module")
def run(tmp_path_factory):
    """Of six steps, that every evaluation stops after the second; wandb is offline."""
    folder = tmp_path_factory.mktemp("callbacks")
    words = (
        *SMALL,
        *(f"model.model={write_cut(folder / 'model')}", f"training.output_dir={folder / 'run'}"),
        *("training.max_steps=6", "training.eval_steps=1", f"training.early_stopping={NEVER}"),
        *("training.report_to=wandb", "training.callbacks=[conformance.unit.run.test_callbacks:Noting]"),
        "training.logged_completions=2",
    )
    variables = {"WANDB_MODE": "offline", "WANDB_DIR": str(folder), "WANDB_SILENT": "true"}
    code, output = finish(train_command(*words), folder / "log.txt", **variables)
    return folder, output, words, code


def test_a_run_whose_evaluations_get_no_better_ends_with_a_checkpoint(run):
    folder, output, _, code = run
    assert code == 0, output[-3000:]
    assert "early stopping: f1 has not got better than" in output
    assert [event["step"] for event in journal_of(folder / "run", "step")] == [1, 2]
    assert [event["step"] for event in journal_of(folder / "run", "finished")] == [2]
    assert (folder / "run/checkpoint-2/manifest.json").is_file()


def test_a_callback_of_the_working_directory_sees_every_step(run):
    assert [line for line in run[1].splitlines() if line.startswith("noted")] == ["noted step 1", "noted step 2"]


def test_wandb_gets_the_scenes_of_each_evaluation_with_their_boxes(run):
    (media,) = run[0].glob("wandb/offline-run-*/files/media")
    assert len(list(media.glob("images/eval/scenes_*.png"))) == 3 * 2, "two scenes before training and after each step"
    described = [json.loads(path.read_text()) for path in media.glob("metadata/boxes2D/eval/*.json")]
    truth = [each["box_data"] for each in described if each["class_labels"] == {"0": "ground_truth"}]
    assert truth
    for one in truth[0]:
        assert 0 <= one["position"]["minX"] < one["position"]["maxX"] <= 1
        assert one["box_caption"]


def test_boxes_of_wandb_are_shares_of_the_image_also_those_of_polygons():
    outlines = [box(bins=(0, 666, 333, 999)), box("star", (0, 0, 999, 333, 666, 111), geometry="poly")]
    drawn = boxes_of(TypeAdapter(Scene).validate_python(scene(truth=outlines, predicted=[found()])))
    assert drawn["ground_truth"]["class_labels"] == {0: "ground_truth"}
    assert [tuple(one.values()) for one in drawn["ground_truth"]["box_data"]] == [
        ({"minX": 0.0, "maxX": 333 / 999, "minY": 666 / 999, "maxY": 1.0}, 0, "seven"),
        ({"minX": 0.0, "maxX": 1.0, "minY": 0.0, "maxY": 333 / 999}, 0, "star"),
    ]
    assert drawn["predictions"]["class_labels"] == {0: "predictions"}


def test_completions_are_kept_and_shown(run):
    directory = run[0] / "run"
    kept = journal_of(directory, "completions")
    assert [event["step"] for event in kept] == [0, 1]
    asked = {event["step"]: event for event in journal_of(directory, "requested") if event["purpose"] == "train"}
    for event in kept:
        assert [one["sample_id"] for one in event["completions"]] == asked[event["step"]]["sample_ids"][:2]
        for one in event["completions"]:
            assert 0 < one["num_tokens"] <= 8
            assert one["finish_reason"] in ("stop", "length")
            assert 0 <= one["worth"]["f1"] <= 1
    groups = make_completion_groups(load_history(directory))
    assert sum(len(group.rows) for group in groups) == 4
    assert "Training completions" in (directory / "run.html").read_text()


def test_the_page_shows_completions_of_all_of_a_long_run():
    events = [{"event": "completions", "step": step, "completions": [{"text": "<b>"}, 3]} for step in range(100)]
    assert [group.step for group in make_completion_groups(make_history(events))] == [
        step + 1 for step in spread(100, 12)
    ]


def test_a_resumed_run_remembers_how_long_nothing_has_got_better(run):
    folder, _, words, _ = run
    directory = shutil.copytree(folder / "run", folder / "resumed")
    again = (*words, f"training.output_dir={directory}", "training.report_to=none")
    code, output = finish(train_command(*again, flags=("--resume",)), folder / "resumed.txt")
    assert code == 0, output[-3000:]
    assert "early stopping: f1 has not got better than" in output
    assert [event["step"] for event in journal_of(directory, "finished")] == [2, 3]
    assert (directory / "checkpoint-3/manifest.json").is_file()


def test_what_cannot_be_used_is_refused_before_anything_is_loaded(capsys, tmp_path):
    named = "[nowhere:X, json:dumps, conformance.unit.run.test_callbacks:Demanding]"
    assert main(["check", str(CONFIG), "--set", f"training.callbacks={named}"]) == 1
    errors = capsys.readouterr().err
    assert errors.count("[callback-unknown]") == 3
    for problem in ("No module named 'nowhere'", "has no method that begins with on_", "missing a required argument"):
        assert problem in errors


def test_early_stopping_needs_evaluations_and_a_metric_that_they_have(capsys):
    assert main(["check", str(CONFIG), "--set", "training.early_stopping={metric: f1}"]) == 1
    assert "[early-stopping-blind] training.early_stopping" in capsys.readouterr().err
    stopping = ["training.early_stopping={metric: fi}", "training.eval_steps=1"]
    metrics = {"eval_f1": 0.5, "eval_seconds": 1.0}
    with refused("early-stopping-metric", key="training.early_stopping.metric", remedy="Name one of: f1."):
        check_metric("fi", metrics)
    for metric in ("f1", "eval_f1"):
        check_metric(metric, metrics)
    twice = [*stopping, "training.extra_arguments={greater_is_better: false}"]
    with pytest.raises(ErrorList) as found:
        load_config(CONFIG, twice)
    assert [(error.code, error.key) for error in found.value.errors] == [
        ("argument-has-own-key", "training.extra_arguments.greater_is_better")
    ]
