"""Large data sets: samples are read when they are used, and a quick check finds what the full one finds."""

import json
import os

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from conformance.doubles.refusals import refused
from rollmatch.data import LazySamples, load_samples, spread
from rollmatch.data.checked import CHECKED_FILES, as_variables
from rollmatch.data.jsonl import LAZY_ABOVE, BadSamples
from rollmatch.data.lazy import LineIndex, samples_by_id
from rollmatch.data.place import Place
from rollmatch.data.quick import parse_json, quick_record
from rollmatch.data.record import check_record


@pytest.fixture
def write_many(write, record):
    """A large file: these lines, and as many good ones behind them."""
    return lambda *lines: write(*lines, *[record] * LAZY_ABOVE)


def spoil(path, *places):
    """Make these lines no records, in a file that looks as it did."""
    written, lines = os.stat(path), path.read_bytes().splitlines(keepends=True)
    for place in places:
        lines[place] = b"x" * (len(lines[place]) - 1) + b"\n"
    path.write_bytes(b"".join(lines))
    os.utime(path, ns=(written.st_atime_ns, written.st_mtime_ns))


@pytest.mark.scenario(
    "samples/many-lines-are-read-when-they-are-used",
    clauses=["samples/memory-does-not-grow-with-the-number-of-lines#1"],
)
@pytest.mark.parametrize("ordering", ["as_given", "sorted"])
def test_lazy_samples_are_the_same_samples(write, write_many, record, ordering):
    boxes = [{"desc": "b", "bbox_2d": [5, 9, 30, 40]}, {"desc": "a", "bbox_2d": [5, 2, 30, 40]}]
    some = record, {**record, "objects": boxes}, {**record, "metadata": {"images": [1]}}
    eager = load_samples(write(*some), ordering=ordering)
    lazy = load_samples(write_many(*some), ordering=ordering)
    assert isinstance(lazy, LazySamples)
    assert (list(lazy[:3]), list(lazy[1:3]), lazy[1 - len(lazy)]) == (eager, eager[1:], eager[1])
    others = LAZY_ABOVE * len(record["objects"])
    assert lazy.num_objects == sum(len(sample.objects) for sample in eager) + others


@pytest.mark.scenario(clauses=["samples/memory-does-not-grow-with-the-number-of-lines#2"])
def test_bad_lines_are_found_before_any_is_used(write_many, record):
    path = write_many(record, {**record, "width": 0}, record, {**record, "images": ["gone.png"]}, "{}")
    with pytest.raises(BadSamples) as caught:
        load_samples(path)
    assert {error.key for error in caught.value.errors} == {f"{path}:{line}" for line in (2, 4, 5)}
    skipped = []
    assert [sample.sample_id for sample in load_samples(path, skipped=skipped)[:3]] == [0, 2, 5]
    assert len(skipped) == len(caught.value.errors)


def test_only_the_lines_of_the_wanted_samples_are_read(write_many, record):
    """A resumed run looks for the samples of what waited, among millions."""
    path = write_many(*[record] * 4)
    samples = load_samples(path)
    expected = {3: samples[3], 1: samples[1]}
    spoil(path, 0, 2, 4)
    assert samples_by_id(samples[1:], [0, 1, 3, 3, 10**9]) == expected
    assert samples_by_id(list(expected.values()), [0, 1, 3, 9]) == expected
    with pytest.raises(BadSamples):
        samples_by_id(samples, [2])


def test_a_rank_looks_at_no_line_that_its_launcher_has_found_to_be_right(write_many, record, monkeypatch):
    path = write_many({**record, "metadata": {"images": [1]}})
    whole = load_samples(path)
    first = whole[0]
    for name, value in as_variables([whole]).items():
        monkeypatch.setenv(name, value)
    spoil(path, 1)
    again = load_samples(path)
    assert (again[0], len(again), again.num_objects) == (first, len(whole), whole.num_objects)
    os.utime(path)
    with pytest.raises(BadSamples):
        load_samples(path)


def test_what_was_checked_by_other_rules_or_has_a_bad_line_is_looked_at(write_many, record, monkeypatch):
    path = write_many(record, {**record, "width": 0})
    assert as_variables([load_samples(path, skipped=[])]) == as_variables([[]]) == {}
    path = write_many(record)
    (known,) = as_variables([load_samples(path, ordering="sorted")]).values()
    monkeypatch.setenv(CHECKED_FILES, known)
    spoil(path, 1)
    assert len(load_samples(path, ordering="sorted")) == LAZY_ABOVE + 1
    with pytest.raises(BadSamples):
        load_samples(path)


def test_an_image_of_another_size_is_found_when_it_is_used(write_many, record):
    path = write_many(record, {**record, "width": record["width"] + 1})
    samples = load_samples(path)
    assert samples[0].width == record["width"]
    with refused("image-size-mismatch", f"{path}:2"):
        samples[1]


values = st.sampled_from([0, 1, 5, 998, 999, 1000, -1, 5.0, True, None, "5", "<|coord_7|>", [1], float("nan")])
boxes = st.lists(values, min_size=3, max_size=5) | st.just([1, 2, 30, 40])
descs = st.sampled_from(["cat", "", " x", "a  b", "<|a|>", "\n", "desc", 5])
records = st.fixed_dictionaries(
    {
        "images": st.sampled_from([["a.png"], [], [""], "a.png", [5]]) | st.just(["a.png"]),
        "width": values | st.just(8),
        "height": values | st.just(8),
        "objects": st.lists(
            st.fixed_dictionaries({"desc": descs, "bbox_2d": boxes}, optional={"score": st.just(1)}), max_size=2
        )
        | st.none(),
    },
    optional={"metadata": st.sampled_from([{}, {"crowd": [{"desc": "a", "bbox_2d": [1]}]}, 5]), "extra": st.just(1)},
)


@given(records, st.sampled_from([None, '"width": 8, ', '"desc": "cat", ', '"metadata": {"a": 1, "a": 2}, ']))
def test_what_the_quick_check_accepts_the_full_one_accepts(tmp_path_factory, record, twin):
    line = json.dumps(record)
    line = line if twin is None else line.replace("{", "{" + twin, 1)
    if quick_record(line.encode()) is None:
        return
    place = Place(sample_id=0, key="x:1", image_root=tmp_path_factory.getbasetemp())
    assert {error.code for error in check_record(parse_json(line), place)} <= {"image-missing"}


def test_a_record_with_metadata_needs_no_full_check():
    objects = [{"desc": "cat", "bbox_2d": [1, 2, 30, 40]}]
    record = {"images": ["a.png"], "width": 8, "height": 8, "objects": objects, "metadata": {"a": 1}}
    assert quick_record(json.dumps(record).encode()) is not None


@given(st.lists(st.binary(max_size=9).filter(lambda line: b"\n" not in line), min_size=1), st.booleans())
def test_the_index_finds_every_line(tmp_path_factory, lines, ends):
    path = tmp_path_factory.mktemp("index") / "a.jsonl"
    path.write_bytes(b"\n".join(lines) + b"\n" * ends)
    index = LineIndex(path)
    expected = path.read_bytes().removesuffix(b"\n").split(b"\n") if path.read_bytes() else []
    assert [index.line(place) for place in range(len(index))] == list(index) == expected


def test_a_spread_of_lazy_samples_goes_from_first_to_last():
    places = spread(LazySamples(lambda place: place, np.arange(10_000), num_objects=0))
    assert (len(places), places[0], places[-1]) == (2_000, 0, 9_999)
    assert spread([1, 2]) == [1, 2]
