"""A run's directory is not written over by accident, and a resumed run goes on from its last whole checkpoint."""

import json

import pytest

from rollmatch.cli.run_directory import RunDirectoryTaken, last_checkpoint, open_run_directory


@pytest.fixture
def directory(tmp_path):
    return tmp_path / "runs/digits"


def write(directory, *names):
    for name in names:
        path = directory / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(json.dumps({"file": name}))


def checkpoint(directory, name, state='{"global_step": 1}'):
    write(directory, f"{name}/model.safetensors")
    if state is not None:
        (directory / name / "trainer_state.json").write_text(state)


def left_in(directory):
    return {str(path.relative_to(directory)) for path in directory.rglob("*") if not path.is_dir()}


@pytest.mark.parametrize("overwrite", [False, True])
def test_a_new_directory_is_made_and_the_run_begins_at_the_beginning(directory, overwrite):
    assert open_run_directory(directory, resume=False, overwrite=overwrite) is None
    assert directory.is_dir()


def test_a_directory_that_holds_a_run_is_refused_unless_told_what_to_do(directory):
    write(directory, "journal.jsonl")
    with pytest.raises(RunDirectoryTaken) as caught:
        open_run_directory(directory, resume=False, overwrite=False)
    assert (caught.value.code, caught.value.key) == ("run-directory-taken", "training.output_dir")
    assert "--resume" in caught.value.remedy
    assert "--overwrite" in caught.value.remedy
    assert left_in(directory) == {"journal.jsonl"}
    assert open_run_directory(directory, resume=True, overwrite=False) is None
    assert open_run_directory(directory, resume=False, overwrite=True) is None


def test_a_directory_that_holds_something_else_is_no_run(directory):
    write(directory, "notes.txt")
    assert open_run_directory(directory, resume=False, overwrite=False) is None
    assert left_in(directory) == {"notes.txt"}


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
    assert open_run_directory(directory, resume=False, overwrite=True) is None
    assert left_in(directory) == set(theirs)
    assert not (directory / "checkpoint-20").exists()


def test_overwrite_leaves_alone_what_a_link_leads_to(directory, tmp_path):
    write(tmp_path, "large/model.safetensors", "kept.jsonl")
    directory.mkdir(parents=True)
    (directory / "checkpoint-1").symlink_to(tmp_path / "large")
    (directory / "journal.jsonl").symlink_to(tmp_path / "kept.jsonl")
    open_run_directory(directory, resume=False, overwrite=True)
    assert list(directory.iterdir()) == []
    assert {"large/model.safetensors", "kept.jsonl"} <= left_in(tmp_path)


def test_resume_outweighs_overwrite(directory):
    write(directory, "journal.jsonl")
    checkpoint(directory, "checkpoint-2")
    assert open_run_directory(directory, resume=True, overwrite=True) == directory / "checkpoint-2"
    assert "journal.jsonl" in left_in(directory)


def test_a_resumed_run_goes_on_from_the_checkpoint_of_the_highest_step(directory):
    for name in ("checkpoint-9", "checkpoint-100", "checkpoint-20"):
        checkpoint(directory, name)
    assert open_run_directory(directory, resume=True, overwrite=False) == directory / "checkpoint-100"


@pytest.mark.parametrize("state", [None, "", '{"global_step": 1'])
def test_a_half_written_checkpoint_is_passed_over(directory, state):
    checkpoint(directory, "checkpoint-20")
    checkpoint(directory, "checkpoint-40", state=state)
    assert last_checkpoint(directory) == directory / "checkpoint-20"
    checkpoint(directory, "checkpoint-40")
    assert last_checkpoint(directory) == directory / "checkpoint-40"


def test_a_checkpoint_under_another_name_is_not_the_runs(directory):
    for name in ("checkpoint-best", "checkpoint-20-copy", "checkpoint-"):
        checkpoint(directory, name)
    assert last_checkpoint(directory) is None
    checkpoint(directory, "checkpoint-1")
    assert last_checkpoint(directory) == directory / "checkpoint-1"


def test_nothing_to_go_on_from_is_a_beginning(directory):
    assert last_checkpoint(directory) is None
    assert open_run_directory(directory, resume=True, overwrite=False) is None
    assert directory.is_dir()
