"""Segments that wait for a row: each is learnt from once, and one that fits no row stops the run."""

import shutil
from dataclasses import replace
from itertools import chain

import pytest

from conformance.doubles.digits import scenes
from conformance.doubles.refusals import refused
from conformance.doubles.small_run import KEPT, events, make_trainer, step_between, trained, weights_of
from rollmatch.dialects.watch import ServerDied
from rollmatch.ranks import Ranks
from rollmatch.records import Segment
from rollmatch.rollout.open_groups import OpenGroups
from rollmatch.training.packer_state import forget_versions

BRIEF = "custom.extra.rollout_matching.max_new_tokens=8"
NARROW = ("training.packing=true", "training.packing_drop_last=true", "global_max_length=330", "training.max_steps=3")
NARROW += (BRIEF, KEPT)
"""Rows of two or three segments, four new ones a step: some wait, also after the last step."""


@pytest.fixture(scope="module")
def narrow(tmp_path_factory):
    """The trainer after its three steps."""
    folder = tmp_path_factory.mktemp("narrow")
    return trained(folder, *NARROW, samples=scenes("train")[:12], is_shallow=True)[0]


@pytest.mark.scenario("packing/more-segments-than-rows-take", clauses=["packing/the-waiting-list-is-bounded#7"])
def test_a_step_makes_more_rows_rather_than_let_segments_pile_up(tmp_path):
    """Eight segments come into one row of two; 6 more would wait after each step, and end the run after 85 of them."""
    crowded = ("training.per_device_train_batch_size=8", "training.max_steps=5", "training.learning_rate=1e-4")
    trainer, change = trained(tmp_path, *NARROW, *crowded, samples=scenes("train")[:40], is_shallow=True)
    packed = events(trainer, "packed")
    learnt = list(chain(*chain(*(event["sample_ids"] for event in packed))))
    waiting = [segment.sample.sample_id for segment in trainer.learner.batcher.packer.state()]
    assert sorted([*learnt, *waiting]) == list(range(40))
    assert 0 < max(event["carried"] for event in packed) <= 8
    assert max(event["rows"] for event in packed) > 1
    assert change.any()
    assert trainer.state.global_step == 5


@pytest.mark.scenario("packing/the-last-step-takes-all-that-waits", clauses=["packing/the-waiting-list-is-bounded#4,8"])
def test_the_last_step_takes_all_that_waits_unless_they_are_to_be_dropped(tmp_path, narrow):
    """Three steps of one row of two or three segments do not hold twelve."""
    flushed, _ = trained(
        tmp_path, *NARROW, "training.packing_drop_last=false", samples=scenes("train")[:12], is_shallow=True
    )
    learnt = {
        name: [sorted(chain(*event["sample_ids"])) for event in events(trainer, "packed")]
        for name, trainer in (("dropped", narrow), ("flushed", flushed))
    }
    waiting = [segment.sample.sample_id for segment in narrow.learner.batcher.packer.state()]
    assert learnt["flushed"][:2] == learnt["dropped"][:2]
    assert learnt["flushed"][2] == sorted([*learnt["dropped"][2], *waiting])
    assert (len(waiting) > 0, flushed.learner.batcher.packer.state()) == (True, [])
    assert events(flushed, "packed")[2]["carried"] == 0
    assert flushed.state.global_step == 3


def test_rows_beyond_the_micro_batches_are_learnt_from(tmp_path):
    """The last step takes all that waits, in more than its one row: it learns what a padded batch does."""
    settings = (BRIEF, "global_max_length=330")
    (trainer, step), (_, whole) = (
        trained(tmp_path / packing, *settings, f"training.packing={packing}", is_shallow=True)
        for packing in ("true", "false")
    )
    assert events(trainer, "packed")[0]["rows"] > 1
    assert (step - whole).norm() < 1e-4 * whole.norm()


def longest_segment(folder):
    trainer, _ = trained(folder, "training.packing=true", BRIEF, is_shallow=True)
    return max(segment.encoded_len for batch in trainer.report.batches for segment in batch.segments)


def test_a_segment_longer_than_a_row_stops_the_run_and_leaves_the_buffer_as_it_was(tmp_path):
    longest = longest_segment(tmp_path / "free")
    overrides = ("training.packing=true", BRIEF)
    trainer = make_trainer(tmp_path / "tight", *overrides, f"global_max_length={longest - 1}", is_shallow=True)
    waiting = replace(a_segment(trainer), sample=scenes("train")[7])
    trainer.learner.batcher.packer.add([waiting])
    before = weights_of(trainer.model)
    with refused("segment-too-long") as caught:
        trainer.train()
    assert caught.value.key in {sample.origin for sample in trainer.train_dataset}
    for name in ("global_max_length", "max_new_tokens", "overlong"):
        assert name in caught.value.remedy
    assert trainer.learner.batcher.packer.state() == [waiting]
    assert not step_between(before, weights_of(trainer.model)).any()
    fitting, _ = trained(tmp_path / "fitting", *overrides, f"global_max_length={longest}", is_shallow=True)
    assert fitting.state.global_step == 1


@pytest.mark.parametrize("packing", ["true", "false"])
@pytest.mark.scenario(clauses=["packing/one-key-decides-about-what-is-too-long#3,4,5,6,7"])
def test_segments_that_are_too_long_are_left_out_or_cut_and_counted(tmp_path, packing):
    settings, every = (f"training.packing={packing}", BRIEF, "training.packing_buffer=8"), {}
    free, _ = trained(tmp_path / "free", *settings, is_shallow=True)
    lengths = [segment.encoded_len for batch in free.report.batches for segment in batch.segments]
    limit = f"global_max_length={max(lengths) - 1}"
    num_long = sum(length == max(lengths) for length in lengths)
    with refused("segment-too-long"):
        trained(tmp_path / "error", *settings, limit, is_shallow=True)
    for overlong in ("skip", "truncate_left"):
        trainer, _ = trained(tmp_path / overlong, *settings, limit, f"overlong={overlong}", is_shallow=True)
        every[overlong] = trainer.state.log_history[-2]
    for name, skipped in (("skip", num_long), ("truncate_left", 0)):
        assert every[name]["overlong/segments_skipped"] == skipped
        assert every[name]["overlong/segments_truncated"] == num_long - skipped
        assert every[name]["overlong/prompts_truncated"] == 0
        assert every[name]["loss_ce"] > 0


def test_a_step_of_skipped_segments_alone_changes_nothing(tmp_path):
    template, samples = make_trainer(tmp_path / "any", is_shallow=True).source.template, scenes("train")[:4]
    limit = f"global_max_length={max(map(template.prompt_length, samples)) + 1}"
    for packing in ("true", "false"):
        settings = (f"training.packing={packing}", limit, BRIEF, "overlong=skip")
        trainer = make_trainer(tmp_path / packing, *settings, samples=samples, is_shallow=True)
        before = weights_of(trainer.model)
        trainer.train()
        assert trainer.state.log_history[-2]["overlong/segments_skipped"] == 4
        assert not step_between(before, weights_of(trainer.model)).any()


def a_segment(trainer):
    """Of a few tokens."""
    sample = scenes("train")[0]
    features = trainer.source.template.image_features(sample)
    prompt = trainer.source.template.expand(trainer.source.template.prompt_token_ids(sample), features)
    stop_id = trainer.source.template.vocabulary.stop_id
    return Segment(sample=sample, policy_version=1, token_ids=(*prompt, stop_id), prompt_len=len(prompt), prefix_len=0)


@pytest.fixture
def checkpoint_of(narrow, tmp_path):
    """A copy of the checkpoint at the end of the run."""
    return shutil.copytree(f"{narrow.args.output_dir}/checkpoint-3", tmp_path / "checkpoint-3")


@pytest.mark.scenario("packing/a-resumed-run-packs-on", clauses=["packing/the-waiting-list-is-bounded#6"])
def test_a_checkpoint_brings_the_waiting_segments_back(narrow, checkpoint_of, tmp_path):
    trainer = make_trainer(tmp_path, *NARROW, samples=scenes("train")[:12])
    trainer.checkpointer.restore(checkpoint_of)
    packer, waiting = trainer.learner.batcher.packer, forget_versions(narrow.learner.batcher.packer.state())
    assert packer.state() == list(waiting) != []
    assert packer.pop_row().segments[0] == waiting[0]


def test_each_rank_gets_back_what_was_left_on_it(narrow, tmp_path):
    """Segments that wait for a row, and groups that no step has taken."""
    trainer = make_trainer(tmp_path, *NARROW, samples=scenes("train")[:12])
    packer, waiting = trainer.learner.batcher.packer, forget_versions(narrow.learner.batcher.packer.state())

    def part_of(rank, groups):
        source = replace(trainer.source, ranks=Ranks(rank=rank))
        return replace(trainer.checkpointer, source=source, groups=groups)

    for rank in (1, 0):  # rank 0 ends a checkpoint
        groups = OpenGroups(lead=1, max_staleness=2)
        groups.open(3, rank + 1)
        with part_of(rank, groups).saving(3, waiting[rank:], None):
            pass
    for rank in (0, 1):
        groups = OpenGroups(lead=1, max_staleness=2)
        part_of(rank, groups).restore(tmp_path / "checkpoint-3")
        assert packer.state() == list(waiting[rank:]) != []
        assert groups.left == {3: [*range(rank + 1)]}


def test_a_step_that_fails_half_way_leaves_what_waited_before_it(tmp_path, monkeypatch):
    """Calls beside learning fail between two micro-batches: what their step had taken is still to be learnt from."""
    broken = make_trainer(tmp_path, *NARROW, samples=scenes("train")[:12], is_shallow=True)

    def fail():
        if broken.report.step == 2:
            raise ServerDied("is gone", key="http://server")

    monkeypatch.setattr(broken, "check", fail)
    with pytest.raises(ServerDied):
        broken.train()
    asked, taken = (
        list(chain(*(event["sample_ids"] for event in events(broken, name)[:2]))) for name in ("requested", "packed")
    )
    resumed = make_trainer(tmp_path, *NARROW, samples=scenes("train")[:12], is_shallow=True)
    resumed.checkpointer.restore(tmp_path / "checkpoint-2")
    waiting = [segment.sample.sample_id for segment in resumed.learner.batcher.packer.state()]
    assert sorted([*chain(*taken), *waiting]) == sorted(asked)
    assert waiting


@pytest.mark.parametrize("wrong", ["missing", "cut", "of another data set"])
def test_a_carry_that_does_not_fit_is_refused(wrong, narrow, checkpoint_of, tmp_path):
    """Segments that waited are part of the run: without them it does not continue."""
    file = checkpoint_of / "packer-rank0.json"
    if wrong == "missing":
        file.unlink()
    if wrong == "cut":
        file.write_text(file.read_text()[:-9])
    waiting = {segment.sample.sample_id for segment in narrow.learner.batcher.packer.state()}
    others = [sample for sample in scenes("train")[:12] if sample.sample_id not in waiting]
    trainer = make_trainer(tmp_path, *NARROW, samples=others if wrong == "of another data set" else None)
    with refused("carry-unfit", str(file)):
        trainer.checkpointer.restore(checkpoint_of)
    assert trainer.learner.batcher.packer.state() == []
