"""Capability ``observability``, scenario by scenario."""

import io
import json
import signal
import time
from itertools import zip_longest
from pathlib import Path
from types import SimpleNamespace

import pytest
from torch import nn
from transformers import TrainerControl

from conformance.doubles.digits import load_digits, load_model, template_of
from conformance.doubles.engine import make_remembering_backend
from conformance.doubles.records import make_rollout
from conformance.doubles.segments import make_row, plain_segments
from conformance.doubles.small_run import events, make_trainer
from rollmatch.config import load_config
from rollmatch.data import Window
from rollmatch.journal import Journal, read_journal
from rollmatch.model.checkpoint import merged_weights
from rollmatch.ranks import Ranks
from rollmatch.report.console import StepConsole
from rollmatch.rollout.fence import Fence
from rollmatch.run.callbacks import RunWatcher, make_step_fields
from rollmatch.run.directory import JOURNAL, RESOLVED
from rollmatch.run.lifecycle import _announce, describe
from rollmatch.training.packer_state import WindowTargets
from rollmatch.training.report import PHASES

STOPPING = (signal.SIGINT, signal.SIGTERM, signal.SIGHUP)
SAMPLING = {"max_new_tokens", "temperature", "top_p", "top_k"}


@pytest.fixture(scope="module")
def trained(tmp_path_factory):
    overrides = "training.packing=true", "training.max_steps=3", "custom.extra.rollout_matching.max_new_tokens=9"
    trainer = make_trainer(tmp_path_factory.mktemp("run"), *overrides, is_shallow=True)
    watcher = RunWatcher(None, min_fill=None)
    watcher.trainer = trainer
    trainer.add_callback(watcher)
    trainer.train()
    return trainer


@pytest.mark.scenario(
    "observability/the-events-of-one-step",
    clauses=[
        "observability/a-run-keeps-a-journal#1,2,3",
        "observability/quality-is-measured-by-counts#4",
        "packing/packing-happens-after-the-rollouts#1",
    ],
)
def test_the_events_of_one_step(trained):
    lines = [json.loads(line) for line in trained.source.journal.path.read_text().splitlines()]
    names = [line["event"] for line in lines]
    assert names[:6] == ["synced", "requested", "generated", "completions", "packed", "step"]
    assert all({"event", "time", "rank"} <= line.keys() for line in lines)
    for event in events(trained, "packed"):
        assert event["fill"] == pytest.approx(event["tokens"] / load_digits().global_max_length, abs=1e-3)
        assert event["segments"] == 4


@pytest.mark.scenario("observability/a-sync-is-written-down", clauses=["observability/rollouts-can-be-audited#1,2,4"])
def test_a_sync_is_written_down(trained, tmp_path, monkeypatch):
    model, journal = load_model(), Journal(tmp_path / "journal.jsonl")
    backend = make_remembering_backend(model, template_of(), Ranks(), monkeypatch)
    Fence(backend, Ranks(), journal).sync_if_due(0, lambda: merged_weights(model))
    (synced,) = read_journal(journal.path)
    assert (synced["version"], synced["mode"], synced["num_tensors"]) == (1, "full", len(list(model.parameters())))
    assert synced["num_bytes"] == sum(w.numel() * w.element_size() for w in model.parameters())
    assert synced["seconds"] >= 0
    requested = events(trained, "requested")[0]
    assert len(requested["seeds"]) == len(requested["sample_ids"]) == 4
    assert requested["decoding"].keys() >= SAMPLING
    assert [event.get("policy_version") for event in events(trained, "generated")] == [1, 2, 3]


@pytest.mark.scenario(
    "observability/the-phases-of-a-step-add-up", clauses=["observability/time-is-measured-by-phase#1,2,3"]
)
def test_the_phases_of_a_step_add_up(trained):
    steps = events(trained, "step")
    assert len(steps) == 3
    for step in steps:
        assert step["phase_s"].keys() == set(PHASES) == {"sync", "rollout", "target", "pack", "learn"}
        assert step["phase_s"]["rollout"] > 0
        assert sum(step["phase_s"].values()) <= step["step_s"] + 0.01
        assert step["rollout_s_by_rank"] == [step["phase_s"]["rollout"]]
        assert step["rollout_tok_s"] == pytest.approx(step["rollout_tokens"] / step["phase_s"]["rollout"], rel=0.01)


def warnings_of(fills, flat=()):
    """``flat``: of each step, the share of groups whose rewards are equal."""
    printed, fence = io.StringIO(), SimpleNamespace(backend=SimpleNamespace(policy_version=0))
    watcher = RunWatcher(StepConsole(100, printed), min_fill=0.65)
    source = SimpleNamespace(fence=fence, journal=SimpleNamespace(write=lambda _, **fields: fields))
    watcher.trainer = SimpleNamespace(source=source)
    for step, (fill, rate) in enumerate(zip_longest(fills, flat, fillvalue=0), 1):
        logs = {"loss": 0.5, "fill": fill, "flat_group_rate": rate, "reward": 0.0}
        watcher.on_log(None, SimpleNamespace(global_step=step), None, logs)
    return "".join(line for line in printed.getvalue().splitlines(keepends=True) if line.startswith("warning"))


@pytest.fixture
def heard():
    """No signal is ignored, as ``nohup`` has it."""
    before = {number: signal.signal(number, signal.SIG_DFL) for number in STOPPING if number != signal.SIGINT}
    yield
    for number, handler in before.items():
        signal.signal(number, handler)


@pytest.mark.parametrize("number", [None, *STOPPING])
def test_a_signal_to_one_rank_ends_the_run_after_the_step_with_a_checkpoint(number, heard):
    output, control, before = io.StringIO(), TrainerControl(), [signal.getsignal(each) for each in STOPPING]
    hit, other = RunWatcher(StepConsole(100, output), min_fill=None), RunWatcher(None, min_fill=None)
    with hit.listening():
        if number is not None:
            signal.raise_signal(number)
            assert signal.getsignal(number) == {signal.SIGINT: signal.default_int_handler}.get(number, signal.SIG_DFL)
    assert [signal.getsignal(each) for each in STOPPING] == before, "a notebook continues after its run"
    ranks = SimpleNamespace(gather=lambda own: [own, own if own is True else hit.stop_signal])
    other.trainer = SimpleNamespace(source=SimpleNamespace(ranks=ranks), report=SimpleNamespace(is_finite=True))
    other.on_step_end(None, SimpleNamespace(global_step=1), control)
    is_stopped = number is not None
    assert (control.should_save, control.should_training_stop, other.stop_signal) == (is_stopped, is_stopped, number)
    deadline = time.monotonic() + (10 if is_stopped else 0.1)  # a thread writes it
    while "with a checkpoint" not in output.getvalue() and time.monotonic() < deadline:
        time.sleep(0.01)
    assert ("with a checkpoint" in output.getvalue()) == is_stopped


def test_under_nohup_the_end_of_a_terminal_stops_no_learner():
    watcher, before = RunWatcher(None, min_fill=None), signal.signal(signal.SIGHUP, signal.SIG_IGN)
    try:
        with watcher.listening():
            signal.raise_signal(signal.SIGHUP)
        assert watcher.stop_signal is None
    finally:
        signal.signal(signal.SIGHUP, before)


@pytest.mark.scenario(
    "observability/a-poorly-filled-row-warns",
    "observability/a-well-filled-row-does-not-warn",
    clauses=["observability/quality-is-measured-by-counts#6", "packing/the-waiting-list-is-bounded#3"],
)
def test_poorly_filled_rows_warn_and_well_filled_ones_do_not():
    row = type(make_row())(segments=make_row(*plain_segments(6)).segments, capacity=10)
    assert row.fill == 0.6
    warning = warnings_of([row.fill] * 10)
    assert warning.count("65%") == 1
    assert "10 steps" in warning
    assert warnings_of([0.6] * 9 + [0.7]) == warnings_of([0.6] * 9 + [0.7, 0.6]) == ""


def test_groups_that_teach_nothing_three_times_in_a_row_are_named_once():
    assert warnings_of([1.0] * 5, [1, 1, 0.9, 1, 1]) == ""
    assert warnings_of([1.0] * 6, [0.9, 1, 1, 1, 1, 1]).count("for 3 steps") == 1


@pytest.mark.scenario("observability/the-servers-are-written-down", clauses=["observability/rollouts-can-be-audited#3"])
def test_the_servers_are_written_down():
    urls = ["http://127.0.0.1:8000", "http://127.0.0.1:8001"]
    server = "custom.extra.rollout_matching.vllm.server"
    mode = "custom.extra.rollout_matching.vllm.mode=server"
    overrides = (mode, f"{server}.base_url=[{', '.join(urls)}]", f"{server}.group_port=51216")
    assert describe(load_digits(*overrides), nn.Linear(2, 2), Ranks())["servers"] == urls
    assert describe(load_digits(), nn.Linear(2, 2), Ranks())["servers"] == []


class OfTwo(Ranks):
    """Rank 0 beside one that waited for its rollouts for 2.5 s."""

    def gather(self, item):
        return [item, 2.5]

    def sum(self, numbers):
        return list(numbers)


@pytest.mark.scenario(clauses=["observability/time-is-measured-by-phase#3"])
def test_a_step_records_how_long_each_rank_waited_for_its_rollouts(tmp_path):
    trainer = make_trainer(tmp_path)
    object.__setattr__(trainer.source, "ranks", OfTwo(rank=0, learner_world_size=2))
    trainer.report.phase_s["rollout"] = 1.25
    logs = {"loss": 0.5}
    trainer.log(logs)
    assert make_step_fields(logs, step=1, step_s=4.0)["rollout_s_by_rank"] == [1.25, 2.5]


def test_the_groups_of_a_step_are_written_to_four_decimals():
    logs = {"loss": 0.123456, "drop/bad": 2.0, "drop/none": 0.0, "time/learn_s": 1.23456, "staleness/1": 3.0}
    logs |= {"time/rollout_s/rank0": 2.00004, "overlap/efficiency": 0.98765}
    assert make_step_fields(logs, step=7, step_s=4.00006) == {
        "loss": 0.123456, "drops": {"bad": 2}, "phase_s": {"learn": 1.2346}, "rollout_s_by_rank": [2.0],
        "overlap": {"efficiency": 0.9877}, "staleness": {"1": 3}, "step": 7, "step_s": 4.0001,
    }  # fmt: skip


@pytest.mark.scenario(clauses=["observability/a-run-keeps-a-journal#4"])
@pytest.mark.parametrize("resumed", [False, True])
def test_the_resolved_config_is_kept_in_the_run_directory(tmp_path, resumed, capsys, monkeypatch):
    def fill(path, text, **_):
        path.write_bytes(text[:9].encode())
        raise OSError("full")

    config = load_digits(f"training.output_dir={tmp_path}", "training.learning_rate=0.5")
    (tmp_path / RESOLVED).write_text("training: {learning_rate: 0.25}\n")
    counts = {"limit": 90, "num_skipped": 0, "num_truncated": 0}
    prompts = {"whole": counts, "train": counts | {"num_skipped": 3}, "val": counts | {"num_truncated": 2}}
    samples = {"num_train_samples": 20, "num_val_samples": 8, "data": {"train": "1f", "val": "2e"}}
    event = {"event": "run", "prompts": prompts} | samples | describe(config, nn.Linear(2, 2), Ranks())
    journal = Journal(tmp_path / JOURNAL)
    journal.write("tensors", number=1)
    journal.write("run", **samples | {"num_train_samples": 40, "data": {"train": "1f", "val": "3d"}})
    with monkeypatch.context() as patch:
        patch.setattr(Path, "write_text", fill)
        with pytest.raises(OSError, match="full"):
            _announce(event, config, resumed=resumed)
    assert (tmp_path / RESOLVED).read_text() == "training: {learning_rate: 0.25}\n"
    capsys.readouterr()
    _announce(event, config, resumed=resumed)
    assert load_config(tmp_path / RESOLVED) == config
    assert (tmp_path / RESOLVED).stat().st_mode & 0o777 == 0o600  # arguments of other libraries may be secrets
    out = capsys.readouterr().out
    changes = ["learning_rate", "training samples: 40 -> 20", "validation samples: as many, with other content"]
    assert [change in out for change in changes] == [resumed] * 3
    assert [line for line in out.splitlines() if "prompts of more" in line] == [
        "  train prompts of more than 90 tokens: 3 skipped, 0 truncated",
        "  val prompts of more than 90 tokens: 0 skipped, 2 truncated",
    ]


@pytest.mark.scenario(
    "observability/the-age-of-carried-segments-is-seen", clauses=["observability/quality-is-measured-by-counts#5"]
)
def test_the_age_of_carried_segments_is_seen(tmp_path):
    trainer = make_trainer(tmp_path, "training.packing=true")
    samples = trainer.train_dataset[:2]
    template = trainer.source.template
    prompts = [template.expand(template.prompt_token_ids(s), template.image_features(s)) for s in samples]
    rollouts = [
        make_rollout((), request_id=str(v), prompt_token_ids=prompt, policy_version=v)
        for v, prompt in zip((3, 5), prompts, strict=True)
    ]
    segments, _ = trainer.learner.objective.target.make_segments(samples, rollouts)
    window = Window(epoch=0, first_step=0, parts=((0, 1),), num_iterations=1)
    trainer.learn(WindowTargets(window=window, parts=(tuple(segments),)), trainer.report)
    (packed,) = events(trainer, "packed")
    assert (packed["segments"], packed["oldest_policy_version"]) == (2, 3)
