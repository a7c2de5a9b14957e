"""A run's directory is not written over by accident, and a resumed run continues from its last whole checkpoint."""

import errno
import json
import os
import shutil
import signal
import subprocess
import sys
from pathlib import Path

import pytest

from conformance.doubles.refusals import refused
from rollmatch.errors import LaunchError
from rollmatch.model.source import MANIFEST
from rollmatch.run import directory as run_directory
from rollmatch.run.directory import holds_run, last_checkpoint, open_run_directory, probe_output_dir
from rollmatch.training.checkpoint import ranks_without_rng_state, remove_old_checkpoints, write_manifest

STEP = '{"event": "step", "step": 1, "rank": 0}'
FILES = ("model.safetensors", "optimizer.pt", "scheduler.pt", "rng_state.pth", "trainer_state.json", "shards/0.distcp")


@pytest.fixture
def directory(tmp_path):
    return tmp_path / "runs/digits"


def write(directory, *names):
    for name in names:
        path = directory / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(json.dumps({"file": name}))


def checkpoint(directory, name, *, leave_out=(), manifest=True):
    write(directory, *(f"{name}/{file}" for file in FILES if file not in leave_out))
    if manifest:
        write_manifest(directory / name)
    return directory / name


def opened(directory, *, resume=False, overwrite=False):
    """The checkpoint to continue from; the directory is closed again."""
    with open_run_directory(directory, resume=resume, overwrite=overwrite) as run:
        return run.checkpoint


def with_run(directory):
    directory.mkdir(parents=True, exist_ok=True)
    (directory / "journal.jsonl").write_text(STEP + "\n")


def left_in(directory):
    return {str(path.relative_to(directory)) for path in directory.rglob("*") if not path.is_dir()}


@pytest.mark.parametrize("overwrite", [False, True])
def test_a_new_directory_is_made_and_the_run_begins_at_the_beginning(directory, overwrite):
    with open_run_directory(directory, resume=False, overwrite=overwrite) as run:
        assert directory.is_dir()
        assert run.checkpoint is None


def test_a_directory_that_holds_a_run_is_refused_unless_resumed_or_overwritten(directory):
    with_run(directory)
    with refused("run-directory-taken", "training.output_dir", remedy="--resume") as caught:
        opened(directory)
    assert "--overwrite" in caught.value.remedy
    assert left_in(directory) == {"journal.jsonl"}
    assert opened(directory, resume=True) is None
    assert opened(directory, overwrite=True) is None


def test_a_directory_that_holds_something_else_is_no_run(directory):
    write(directory, "notes.txt")
    assert opened(directory) is None
    assert left_in(directory) == {"notes.txt"}
    (directory / "journal.jsonl").write_text('{"event": "run", "rank": 0}\n')
    assert opened(directory) is None, "a start that was killed before its first step"


@pytest.mark.parametrize("resume", [False, True])
def test_files_of_others_are_not_deleted_for_their_names(directory, resume):
    write(directory, "evaluations/mine.csv", "tensorboard/other")
    with refused("run-directory-taken", "training.output_dir", remedy="Name another directory") as caught:
        opened(directory, resume=resume)
    assert "holds evaluations, tensorboard and" in caught.value.problem
    assert left_in(directory) == {"evaluations/mine.csv", "tensorboard/other"}


def test_a_resumed_run_continues_the_whole_checkpoint_of_the_highest_step(directory):
    for name in ("checkpoint-best", "checkpoint-20-copy", "checkpoint-"):
        checkpoint(directory, name)
    assert last_checkpoint(directory) is None, "other names are not the run's"
    assert opened(directory, resume=True) is None, "nothing to continue is a beginning"
    for name in ("checkpoint-9", "checkpoint-100", "checkpoint-20"):
        checkpoint(directory, name)
    with_run(directory)
    assert opened(directory, resume=True, overwrite=True) == directory / "checkpoint-100"
    assert "journal.jsonl" in left_in(directory)


def test_overwrite_removes_what_a_run_writes_and_only_that(directory):
    ours = [
        *("journal.jsonl", "journal-rank3.jsonl", "resolved.yaml", "run.html", "events.out.tfevents.1.host"),
        *("evaluations/step-000000.json", "tensorboard/events", "checkpoint-20/model.safetensors"),
    ]
    theirs = [
        *("notes.txt", "my.jsonl", "checkpoint-best/model.safetensors", "checkpoint-20-copy/x", "checkpoints.md"),
        *("runs/another/journal.jsonl", "data/journal.jsonl", "data/checkpoint-7/x"),
    ]
    write(directory, *ours, *theirs)
    assert opened(directory, overwrite=True) is None
    assert left_in(directory) == set(theirs)
    assert not (directory / "checkpoint-20").exists()


def test_overwrite_leaves_alone_what_a_link_leads_to(directory, tmp_path):
    write(tmp_path, "large/model.safetensors", "kept.jsonl")
    directory.mkdir(parents=True)
    (directory / "checkpoint-1").symlink_to(tmp_path / "large")
    (directory / "journal.jsonl").symlink_to(tmp_path / "kept.jsonl")
    opened(directory, overwrite=True)
    assert list(directory.iterdir()) == []
    assert {"large/model.safetensors", "kept.jsonl"} <= left_in(tmp_path)


@pytest.mark.parametrize(
    ("damage", "problem"),
    [
        (lambda path: (path / MANIFEST).unlink(), "no manifest.json"),
        (lambda path: (path / MANIFEST).write_text('{"files": {'), "manifest.json is not readable"),
        (lambda path: (path / "optimizer.pt").unlink(), "optimizer.pt is missing"),
        (lambda path: (path / "model.safetensors").write_text("{"), "model.safetensors has 1 bytes"),
        (lambda path: flip(path / "model.safetensors"), "content of model.safetensors has changed"),
    ],
)
def test_a_damaged_checkpoint_is_passed_over_and_named(directory, capsys, damage, problem):
    checkpoint(directory, "checkpoint-20")
    newest = checkpoint(directory, "checkpoint-40")
    assert last_checkpoint(directory) == newest
    damage(newest)
    assert last_checkpoint(directory) == directory / "checkpoint-20"
    error = capsys.readouterr().err
    assert "checkpoint-40" in error
    assert problem in error


def flip(path):
    """One bit, at the same size."""
    content = bytearray(path.read_bytes())
    content[3] ^= 1
    path.write_bytes(content)


@pytest.mark.parametrize("file", ["optimizer.pt", "scheduler.pt", "rng_state.pth"])
def test_a_checkpoint_without_a_state_is_never_resumed_in_silence(directory, file):
    checkpoint(directory, "checkpoint-20", leave_out=(file,))
    with refused("checkpoint-damaged", problem="saved without the"):
        opened(directory, resume=True)
    assert (directory / "checkpoint-20" / "model.safetensors").exists()


@pytest.mark.parametrize(("num_ranks", "fresh"), [(1, [0]), (2, [1]), (3, [1, 2])])
def test_ranks_whose_random_state_was_not_saved_are_known(tmp_path, num_ranks, fresh):
    (tmp_path / "rng_state_0.pth").touch()
    assert ranks_without_rng_state(tmp_path, learner_world_size=num_ranks) == fresh
    (tmp_path / "rng_state.pth").touch()
    assert ranks_without_rng_state(tmp_path, learner_world_size=1) == []


def test_old_checkpoints_go_and_those_of_an_undone_part_do_not_count(directory):
    for step in (10, 20, 30, 90):
        checkpoint(directory, f"checkpoint-{step}")
    remove_old_checkpoints(directory, newest=directory / "checkpoint-30", limit=2)
    assert sorted(path.name for path in directory.iterdir()) == ["checkpoint-20", "checkpoint-30", "checkpoint-90"]


HOLDER = """
import sys, time
from pathlib import Path
from rollmatch.run.directory import open_run_directory
with open_run_directory(Path(sys.argv[1]), resume=False, overwrite=False):
    (Path(sys.argv[1]) / "journal.jsonl").write_text(sys.argv[2])
    print("held", flush=True)
    time.sleep(600)
"""


@pytest.fixture
def live_run(directory):
    """Another process that trains in the directory."""
    with subprocess.Popen([sys.executable, "-c", HOLDER, directory, STEP], stdout=subprocess.PIPE, text=True) as holder:
        assert holder.stdout.readline() == "held\n"
        yield holder
        holder.kill()


@pytest.mark.parametrize("mode", [{}, {"resume": True}, {"overwrite": True}])
def test_a_directory_in_which_a_run_is_live_is_refused_with_its_owner(directory, live_run, mode):
    with refused("run-directory-taken") as caught:
        opened(directory, **mode)
    assert f"process {live_run.pid} on " in caught.value.problem
    assert (directory / "journal.jsonl").read_text() == STEP
    live_run.send_signal(signal.SIGKILL)
    live_run.wait()
    assert opened(directory, overwrite=True) is None, "a killed run lets go of its directory"


def fail_after(start, directory):
    with open_run_directory(directory, resume=False, overwrite=False):
        start(directory)
        raise ZeroDivisionError


def test_a_file_system_without_locks_is_named_and_used(directory, monkeypatch, capsys):
    def refuse(file, operation):
        raise OSError(errno.ENOSYS, os.strerror(errno.ENOSYS))

    monkeypatch.setattr(run_directory.fcntl, "flock", refuse)
    assert opened(directory) is None
    assert "cannot be locked (Function not implemented)" in capsys.readouterr().err


def test_a_directory_that_is_removed_during_a_run_does_not_end_it(directory):
    with open_run_directory(directory, resume=False, overwrite=False):
        shutil.rmtree(directory)
    assert not directory.exists()


def test_a_start_that_failed_leaves_no_directory(directory, tmp_path):
    with pytest.raises(ZeroDivisionError):
        fail_after(lambda path: write(path, "journal.jsonl", "resolved.yaml"), directory)
    assert list(tmp_path.iterdir()) == []
    with pytest.raises(ZeroDivisionError):
        fail_after(with_run, directory)
    assert holds_run(directory), "after its first step it is kept"
    with refused("run-directory-taken"):
        opened(directory)


@pytest.mark.parametrize("name", ["file/below", "x" * 300, "nul\0byte"])
def test_an_impossible_directory_is_an_error_before_anything_starts(tmp_path, name):
    (tmp_path / "file").write_text("")
    problem = probe_output_dir(tmp_path / name)
    assert problem is not None
    assert (problem.code, problem.key) == ("output-dir-not-writable", "training.output_dir")
    with pytest.raises(LaunchError, match="output-dir-not-writable"):
        opened(tmp_path / name)
    (tmp_path / "other" / run_directory.LOCK).mkdir(parents=True)
    with pytest.raises(LaunchError, match="output-dir-not-writable"):
        opened(tmp_path / "other")


def test_a_full_disk_is_found_by_writing(tmp_path, monkeypatch):
    assert probe_output_dir(tmp_path / "runs" / "first") is None
    assert list(tmp_path.iterdir()) == [], "probing leaves nothing"
    with Path("/dev/full").open("wb", buffering=0) as full:
        monkeypatch.setattr(run_directory.tempfile, "TemporaryFile", lambda dir: full)
        problem = probe_output_dir(tmp_path / "run")
    assert problem is not None
    assert os.strerror(28) in problem.problem
