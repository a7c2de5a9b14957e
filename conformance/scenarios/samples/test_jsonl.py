import json
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from conformance.doubles.refusals import refused
from rollmatch.data import BadSamples, jsonl, load_samples
from rollmatch.data.jsonl import SystemMessages, top_left
from rollmatch.records import Geometry, GroundTruth

DIGITS = Path(__file__).parents[3] / "fixtures" / "digits"


@pytest.mark.parametrize("line", ["{", "{} {}", '{"a": NaN}', '{"width": 8, "width": 9}', "{'a': 1}", "[" * 100_000])
def test_a_line_is_one_json_value(problems_in, record, line):
    assert problems_in(record, line, record) == [("line-not-json", 2)]


@pytest.mark.scenario(clauses=["samples/bad-records-stop-a-run-before-training#4"])
@pytest.mark.parametrize("blank", ["", " ", "\t"])
@pytest.mark.parametrize("is_lazy", [False, True])
def test_blank_lines_are_passed_over_and_others_keep_their_numbers(write, record, blank, is_lazy, monkeypatch):
    monkeypatch.setattr(jsonl, "LAZY_ABOVE", 0 if is_lazy else 100)
    samples = load_samples(write(record, blank, record, blank))
    assert [sample.origin.rpartition(":")[2] for sample in samples] == ["1", "3"]
    with refused("line-not-json", problem="the line is not JSON: "):
        load_samples(write(record, blank, "{"))


def test_bytes_that_are_not_utf_8_are_refused(write, record):
    path = write(record, record)
    path.write_bytes(path.read_bytes().replace(b"seven", b"sev\xe9n", 1))
    with refused("line-not-json", f"{path}:1"):
        load_samples(path)


def test_lines_end_at_line_feeds_only(write, record):
    text = json.dumps({**record, "metadata": {"note": "a\u2028b\u0085c"}}, ensure_ascii=False)
    first, second = load_samples(write(text.replace(", ", ",\r ", 1), text + "\r"))
    assert first.metadata == {"note": "a\u2028b\u0085c"}
    assert (first.sample_id, second.sample_id) == (0, 1)
    path = write(record, record)
    path.write_bytes(path.read_bytes().rstrip(b"\n"))
    assert len(load_samples(path)) == 2


def test_an_image_is_found_where_the_disk_finds_it(write, record):
    """``sub/..`` is not the file's directory where ``sub`` is a link."""
    path = write({**record, "images": ["sub/../imgs/a.png"]})
    (path.parent / "elsewhere/deep").mkdir(parents=True)
    (path.parent / "elsewhere/imgs").mkdir()
    (path.parent / record["images"][0]).rename(path.parent / "elsewhere/imgs/a.png")
    (path.parent / "sub").symlink_to(path.parent / "elsewhere/deep")
    (sample,) = load_samples(path)
    assert sample.images == (str(path.parent / "elsewhere/imgs/a.png"),)


@pytest.mark.scenario("samples/an-empty-file-is-refused", clauses=["samples/bad-records-stop-a-run-before-training#5"])
@pytest.mark.parametrize("content", [b"", b"\n", b" \n\n"])
def test_an_empty_file_is_refused(tmp_path, content):
    path = tmp_path / "train.jsonl"
    path.write_bytes(content)
    with refused("dataset-empty", str(path)):
        load_samples(path)


def test_a_missing_file_is_refused(tmp_path):
    with refused("dataset-unreadable", str(tmp_path / "gone.jsonl")):
        load_samples(tmp_path / "gone.jsonl")


@pytest.mark.scenario(
    "samples/two-bad-lines-are-reported-together", clauses=["samples/bad-records-stop-a-run-before-training#1,2,3"]
)
@pytest.mark.parametrize(("num_bad", "num_hidden"), [(20, 0), (21, 1), (50, 30)])
def test_all_bad_records_are_found_twenty_are_shown_the_rest_is_counted(write, record, num_bad, num_hidden):
    path = write(record, *({**record, "width": -1 - place} for place in range(num_bad)), record)
    with pytest.raises(BadSamples) as caught:
        load_samples(path)
    error = caught.value
    assert [single.key for single in error.errors] == [f"{path}:{line}" for line in range(2, num_bad + 2)]
    assert error.num_hidden == num_hidden
    lines = str(error).splitlines()
    assert len(lines) == 20 + (num_hidden > 0)
    assert not num_hidden or lines[-1] == f"... and {num_hidden} more problems"


def test_what_many_records_have_alike_is_one_problem_with_their_lines(write, record):
    path = write(record, *[{"question": "1 + 1?", "answer": "2"}] * 30, {**record, "width": -1})
    with pytest.raises(BadSamples) as caught:
        load_samples(path)
    assert len(caught.value.errors) == 31
    first, last = str(caught.value).splitlines()
    assert first.startswith(f"[field-missing] {path}:2: there is no prompt")
    assert "(and 29 more: 3, 4, 5, 6, 7, ...)" in first
    assert f"{path}:32: " in last


@pytest.mark.parametrize("text", ['[{"prompt": "1 + 1?"}]', '[\n  {"prompt": "1 + 1?"},\n  {"prompt": "2"}\n]\n'])
def test_an_array_is_told_to_be_lines_once(tmp_path, text):
    path = tmp_path / "rows.json"
    path.write_text(text)
    with pytest.raises(BadSamples) as caught:
        load_samples(path, systems=SystemMessages(chats=""))
    (error,) = caught.value.errors
    assert error.key == f"{path}:1"
    assert error.remedy.endswith("rite one JSON object per line.")


def test_sorting_is_by_top_and_then_left_edge_and_keeps_ties(write, record):
    shapes = [
        {"desc": "d", "bbox_2d": [5, 50, 9, 60]},
        {"desc": "c", "poly": [400, 30, 450, 20, 500, 30]},
        {"desc": "b", "bbox_2d": [300, 20, 310, 30]},
        {"desc": "a", "bbox_2d": [700, 10, 710, 900]},
        {"desc": "e", "bbox_2d": [5, 50, 8, 70]},
    ]
    path = write({**record, "objects": shapes})

    def descs(ordering):
        return "".join(truth.desc for truth in load_samples(path, ordering=ordering)[0].objects)

    assert (descs("as_given"), descs("sorted")) == ("dcbae", "abcde")


@given(
    bins=st.lists(st.tuples(st.integers(0, 999), st.integers(0, 999)), min_size=3, max_size=6), shift=st.integers(0, 5)
)
def test_the_top_left_of_a_polygon_does_not_depend_on_its_first_point(bins, shift):
    def truth(points):
        return GroundTruth(desc="a", geometry=Geometry.POLY, bins=tuple(value for point in points for value in point))

    shift %= len(bins)
    assert top_left(truth(bins)) == top_left(truth(bins[shift:] + bins[:shift]))


@pytest.mark.parametrize("name", ["train", "val"])
def test_the_shipped_digits_are_good_and_stand_sorted(name):
    given_order = load_samples(DIGITS / f"{name}.jsonl")
    assert given_order == load_samples(DIGITS / f"{name}.jsonl", ordering="sorted")
    assert [sample.sample_id for sample in given_order] == list(range(len(given_order)))
    assert sum(len(sample.objects) for sample in given_order) > len(given_order)


def test_a_byte_order_mark_at_the_beginning_is_no_part_of_the_first_record(tmp_path):
    path = tmp_path / "train.jsonl"
    line = b'{"prompt": "1 + 1?"}\n'
    path.write_bytes(b"\xef\xbb\xbf" + line + line)
    samples = load_samples(path, systems=SystemMessages(chats=""))
    assert [sample.messages for sample in samples] == [(("user", "1 + 1?"),)] * 2
    path.write_bytes(line + b"\xef\xbb\xbf" + line)
    with pytest.raises(BadSamples):
        load_samples(path, systems=SystemMessages(chats=""))
