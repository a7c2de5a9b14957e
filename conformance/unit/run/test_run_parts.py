"""What a run says, evaluates and writes around its training, with a trainer that only counts."""

import json
import stat
import sys
from types import SimpleNamespace
from unittest.mock import Mock

import pytest
import torch
from transformers.trainer_callback import PrinterCallback, ProgressCallback

from conformance.doubles.configs import config_with
from rollmatch.run import lifecycle as run
from rollmatch.run.callbacks import EarlyStop, RunWatcher, SceneImages

SERVED = ("~.vllm.mode=server", "~.vllm.server.base_url=http://a:1", "~.vllm.server.group_port=2")
COUNTS = {"num_skipped": 0, "num_truncated": 0, "limit": 9}


@pytest.fixture
def announce(monkeypatch, capsys, tmp_path):
    """Lines behind the header; the run directory has a journal of ``before`` training samples."""
    monkeypatch.setattr(run, "print_header", lambda event: None)

    def said(*overrides, prompts=None, slow=(), before=None, resumed=False):
        events = [{"event": "step"}, {"event": "run", "num_train_samples": before}, {"event": "run"}]
        (tmp_path / run.JOURNAL).write_text("".join(f"{json.dumps(event)}\n" for event in events))
        parts = {"tower": {"num_trained": 1, "num_tensors": 3}}
        event = {"prompts": prompts or {}, "parts": parts, "num_train_samples": 5}
        run._announce(event, config_with(f"training.output_dir={tmp_path}", *overrides), slow, resumed=resumed)
        first, *lines = capsys.readouterr().out.splitlines()
        assert first == "  tower: 1 of 3 tensors are trained" or prompts
        return lines

    return said


def test_prompts_that_do_not_fit_are_counted_and_what_takes_long_is_said(announce):
    prompts = {"a": COUNTS, "b": COUNTS | {"num_skipped": 2}, "c": COUNTS | {"num_truncated": 3}}
    assert announce(prompts=prompts, slow=["one", "two"]) == [
        "  c prompts of more than 9 tokens: 0 skipped, 3 truncated",
        "  tower: 1 of 3 tensors are trained",
        "  one",
        "  two",
    ]
    assert announce() == []


@pytest.mark.parametrize(("before", "resumed"), [(5, True), (None, True), (4, True), (4, False)])
def test_a_resumed_run_says_what_has_changed_and_keeps_the_new_configuration(announce, tmp_path, before, resumed):
    announce("training.seed=1")
    lines = announce("training.seed=2", before=before, resumed=resumed)
    expected = ["training.seed"] * resumed + ["training samples: 4 -> 5, which come in another order"] * (
        resumed and before == 4
    )
    assert len(lines) == len(expected)
    for line, part in zip(lines, expected, strict=True):
        assert line.startswith(f"  changed since the run began: {part}")
    path = tmp_path / run.RESOLVED
    assert "seed: 2" in path.read_text()
    assert stat.S_IMODE(path.stat().st_mode) == 0o600
    assert announce("training.seed=2", before=5, resumed=True) == []


@pytest.mark.parametrize(
    ("overrides", "gpu", "size", "lines"),
    [
        ((), False, 10**9, ["starting the engine"]),
        (
            (),
            True,
            10**9,
            [
                "starting the engine, which takes a minute or more",
                "the first step compiles the decoder layers, which takes a minute or more",
            ],
        ),
        (SERVED, True, 10**6, []),
        (("~.rollout_backend=hf",), True, 10**6, []),
    ],
)
def test_what_a_start_waits_for_is_named(monkeypatch, overrides, gpu, size, lines):
    monkeypatch.setattr(torch.cuda, "is_available", lambda: gpu)
    monkeypatch.setattr(run, "unwrap", lambda model: model)
    monkeypatch.setattr(run, "count_weights", lambda _: (size, 0))
    assert list(run._slow_parts(config_with(*overrides), None)) == lines


@pytest.mark.parametrize(("rank", "fresh", "said"), [(0, [1, 3], "rank 1, 3 of 4"), (0, [], ""), (1, [1], "")])
def test_ranks_without_a_random_state_are_named_once(monkeypatch, capsys, tmp_path, rank, fresh, said):
    monkeypatch.setattr(run, "ranks_without_rng_state", lambda _, learner_world_size: fresh)
    run._warn_about_rng(tmp_path, SimpleNamespace(learner_world_size=4, is_primary=rank == 0))
    printed = capsys.readouterr().out
    assert printed == (f"  warning: {tmp_path} has no random state for {said}\n" if said else "")


@pytest.mark.parametrize(
    ("overrides", "added", "min_fill"),
    [
        (("training.packing=true", "training.packing_min_fill_ratio=0.5"), [], 0.5),
        (("training.packing=false", "training.report_to=[wandb]"), [SceneImages], None),
        (
            ("training.packing=false", "training.eval_steps=1", "training.early_stopping={metric: f1, patience: 3}"),
            [EarlyStop],
            None,
        ),
    ],
)
def test_steps_are_reported_by_the_run_alone(overrides, added, min_fill):
    trainer = Mock(model=None)
    watcher = run._watch(trainer, config_with(*overrides), None)
    assert [call.args[0] for call in trainer.remove_callback.call_args_list] == [PrinterCallback, ProgressCallback]
    assert [type(call.args[0]) for call in trainer.add_callback.call_args_list] == [*added, RunWatcher]
    assert (watcher.trainer, watcher.min_fill) == (trainer, min_fill)


@pytest.mark.parametrize(("received", "agreed"), [([None, 15, 2], 15), ([None, None, None], None), ([2, None, 15], 2)])
def test_ranks_stop_by_the_first_signal_that_any_of_them_has_received(received, agreed):
    watcher = RunWatcher(None, min_fill=None)
    watcher.trainer = Mock()
    watcher.trainer.source.ranks.gather.return_value = received
    assert (watcher.agree_to_stop(), watcher.stop_signal) == (agreed, agreed)


@pytest.mark.parametrize(
    ("num_evaluations", "stopped", "lines"),
    [
        (2, None, ["0 -> 1", "page: p"]),
        (3, None, ["0 -> 2", "page: p"]),
        (1, None, ["page: p"]),
        (2, 7, ["stopped at step 7 with a checkpoint; continue with the same command and --resume", "page: p"]),
    ],
)
def test_the_end_shows_the_first_and_the_last_evaluation(
    monkeypatch, capsys, tmp_path, num_evaluations, stopped, lines
):
    events = [
        {"event": "evaluated", "step": number, "metrics": {"reward": number}} for number in range(num_evaluations)
    ]
    (tmp_path / run.JOURNAL).write_text("".join(f"{json.dumps(event)}\n" for event in events))
    monkeypatch.setattr(run, "write_page", lambda directory: "p")
    shown = "{0.before:.0f} -> {0.after:.0f}\n".format
    monkeypatch.setattr(run, "print_before_after", lambda changes, caption: sys.stdout.write(shown(changes[0])))
    run._tell_result(tmp_path, interrupted_at=stopped)
    assert capsys.readouterr().out.splitlines() == lines


@pytest.mark.parametrize(("max_steps", "counted"), [(1, 1), (7, 7), (-1, 12), (0, 12)])
def test_steps_of_a_run_are_the_configured_ones_or_those_of_all_epochs(max_steps, counted):
    trainer = Mock(args=SimpleNamespace(max_steps=max_steps, num_train_epochs=3.0))
    trainer.set_initial_training_values.return_value = (0, 4, 0)
    assert run._count_steps(trainer) == counted
