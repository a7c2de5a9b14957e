"""Scenes: which are shown, what is drawn where, and their images as data URLs."""

import base64
import io
import os
import re
from collections import Counter
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st
from PIL import Image
from pydantic import TypeAdapter

from conformance.doubles.page_outline import visible
from conformance.doubles.runs import box, found, scene, write_image
from rollmatch.report.detection import worst_cards, write_detection_page
from rollmatch.report.evaluations import Evaluation
from rollmatch.report.scenes import embed, image_path, make_cards, to_pixels

NOWHERE = Path("no-such-run")


def evaluation(*scenes, step=0):
    return TypeAdapter(Evaluation).validate_python({"step": step, "scenes": scenes})


def marks(**changes):
    (card,) = make_cards(evaluation(scene(**changes)), None, run_dir=NOWHERE)
    return card.panels[0].marks


def scored(sample_id, found_share):
    """A scene of ten true objects of which the share is found, and nothing else claimed."""
    num_found = round(10 * found_share)
    return scene(sample_id, truth=[box()] * 10, predicted=[found(partner=place) for place in range(num_found)])


@given(st.lists(st.integers(0, 999), min_size=2, max_size=12).filter(lambda bins: len(bins) % 2 == 0),
       st.integers(1, 4000), st.integers(1, 4000))  # fmt: skip
def test_bins_become_pixels_of_the_canvas(bins, width, height):
    for (x, y), bin_x, bin_y in zip(to_pixels(bins, width=width, height=height), bins[::2], bins[1::2], strict=True):
        assert x == pytest.approx(bin_x / 999 * (width - 1), abs=0.006)
        assert y == pytest.approx(bin_y / 999 * (height - 1), abs=0.006)


@pytest.mark.parametrize(
    ("shape", "points", "places"),
    [
        (box(bins=(0, 111, 222, 999)), "0,111 222,111 222,999 0,999", (0.05, 11.15, 99.95)),
        (box(bins=(500, 0, 999, 500, 100, 900), geometry="poly"), "500,0 999,500 100,900", (10.05, 0.05, 90.05)),
    ],
)
def test_a_shape_is_drawn_by_its_corners(shape, points, places):
    (mark,) = marks(width=1000, height=1000, truth=[shape])
    assert mark.points == points
    assert (mark.left_percent, mark.top_percent, mark.bottom_percent) == places


def test_every_mark_says_what_it_is():
    drawn = marks(
        truth=[box("seven"), box("two"), box("four")],
        predicted=[
            found("seven", iou=0.876, score=0.5),
            found("nine", partner=1, iou=None),
            box("one", partner=None, iou=None, score=0.25),
        ],
    )
    assert [(mark.role, mark.label, mark.title) for mark in drawn] == [
        ("found", "", "truth: seven"),
        ("found", "", "truth: two"),
        ("missed", "four", "missed: four"),
        ("matched", "seven 0.88", "matched: seven 0.88, score 0.50"),
        ("matched", "nine (is two)", "matched: nine (is two)"),
        ("unmatched", "one", "no true object: one, score 0.25"),
    ]
    (card,) = make_cards(
        evaluation(scene(truth=[box()] * 2, predicted=[found(), found(partner=None)])), None, run_dir=NOWHERE
    )
    assert [(panel.when, panel.summary) for panel in card.panels] == [("Answer", "1 of 2 found, 1 wrong")]


def test_the_largest_improvement_comes_first_and_the_worst_is_ranked():
    before = evaluation(scored(0, 0.5), scored(1, 0.0), scored(2, 1.0), step=0)
    after = evaluation(scored(2, 0.2), scored(1, 1.0), scored(0, 0.5), step=9)
    cards = make_cards(before, after, run_dir=NOWHERE)
    assert [(card.sample_id, card.worst, card.gain_class) for card in cards] == [
        ("1", 2, "better"),
        ("0", 1, "same"),
        ("2", 0, "worse"),
    ]
    assert [(panel.when, panel.step) for panel in cards[0].panels] == [("Before", 0), ("After", 9)]
    assert [panel.summary for panel in cards[0].panels] == ["0 of 10 found", "10 of 10 found"]


def test_many_scenes_are_cut_down_with_the_worst_among_them():
    gains = [place / 100 for place in range(100)]
    before = evaluation(*(scored(place, 0.0) for place in range(100)))
    after = evaluation(*(scored(place, gain) for place, gain in enumerate(gains)), step=9)
    cards = make_cards(before, after, run_dir=NOWHERE)
    num_found = Counter(int(card.panels[-1].summary.partition(" ")[0]) for card in cards)
    assert num_found == {10: 5, 9: 9, 8: 2, 1: 2, 0: 6}, "the 16 most improved and the 8 worst"
    assert cards[0].scores[-1] == 1.0
    assert list(cards) == sorted(cards, key=lambda card: -(card.gain or 0))


def test_the_24_worst_scenes_of_an_evaluation_are_drawn_worst_first():
    cards = worst_cards(evaluation(*(scored(place, (29 - place) // 3 / 10) for place in range(30))), NOWHERE)
    assert [card.scores[-1] for card in cards] == sorted(card.scores[-1] for card in cards)
    assert {int(card.sample_id) for card in cards} == set(range(6, 30))


def test_the_page_of_an_evaluation_has_its_figures_bars_and_classes(tmp_path):
    metrics = {"num_images": 1200.0, "AP": 0.5, "AR_100": None, "f1@0.5": 1.0, "duplicate_rate": 1.0, "low": -0.5}
    by_desc = {"dog": {"AP": 0.75, "num": 1200}, "owl": {"AP": 0.25, "num": 2}, "cat": {"AP": None, "num": 3}}
    figures = {"by_desc": by_desc, "precision_by_recall": [1.0, 0.5, 0.0], "drops": {"bad_box": 1200}}
    path = write_detection_page(
        tmp_path, title="val", metrics=metrics, figures=figures, evaluation=evaluation(scene(7), scene(8))
    )
    text = path.read_text()
    shown, bars = visible(text), re.findall(r'style="left:([^"]*)%', text)
    assert path == tmp_path / "eval.html"
    assert "Value AP 0.500 AR_100 - f1@0.5 1.000 Precision by recall" in shown
    assert "num_images 1,200 duplicate_rate 1.000 low -0.500" in shown
    assert "AP num cat - 3 owl 0.250 2 dog 0.750 1,200" in shown
    assert [float(width) for width in bars] == [50.0, 0.0, 100.0]
    assert 'points="0,0.0 1,50.0 2,100.0"' in text
    assert "bad_box 1,200" in shown


def test_a_sample_without_a_second_answer_is_left_out():
    cards = make_cards(evaluation(scene(1), scene(2)), evaluation(scene(2), step=9), run_dir=NOWHERE)
    assert [card.sample_id for card in cards] == ["2"]


def test_images_are_found_inside_a_run_directory_that_was_moved(tmp_path):
    write_image(tmp_path / "images/a.png")
    (there,) = make_cards(evaluation(scene(image="images/a.png")), None, run_dir=tmp_path)
    (gone,) = make_cards(evaluation(scene(image="images/b.png")), None, run_dir=tmp_path)
    assert there.image_url.startswith("data:image/png;base64,")
    assert gone.image_url is None


@pytest.mark.parametrize(("side", "pixelated"), [(320, True), (321, False)])
def test_only_small_images_keep_hard_pixel_edges(side, pixelated):
    (card,) = make_cards(evaluation(scene(width=side, height=9)), None, run_dir=NOWHERE)
    assert card.pixelated is pixelated


def decoded(url):
    return base64.b64decode(url.partition(",")[2])


def test_a_small_image_is_embedded_byte_for_byte(tmp_path):
    path = write_image(tmp_path / "small.png")
    url = embed(path)
    assert url.startswith("data:image/png;base64,")
    assert decoded(url) == path.read_bytes()


@pytest.mark.parametrize(("name", "size"), [("large.png", (2000, 500)), ("small.bmp", (40, 10))])
def test_large_or_unusual_images_become_a_jpeg_of_the_same_shape(tmp_path, name, size):
    url = embed(write_image(tmp_path / name, size=size))
    assert url.startswith("data:image/jpeg;base64,")
    image = Image.open(io.BytesIO(decoded(url)))
    assert image.size == ((640, 160) if size[0] > 640 else size)


@pytest.mark.parametrize(
    ("num_bytes", "side", "kind"), [(100_000, 640, "png"), (100_001, 9, "jpeg"), (900, 641, "jpeg")]
)
def test_a_file_of_many_bytes_or_pixels_is_made_smaller(tmp_path, num_bytes, side, kind):
    path = write_image(tmp_path / "a.png", size=(side, 4))
    path.write_bytes(path.read_bytes().ljust(num_bytes, b" "))
    assert embed(path).startswith(f"data:image/{kind};")


def test_what_is_no_image_is_none(tmp_path):
    path = write_image(tmp_path / "whole.png", size=(300, 300))
    cut = tmp_path / "cut.png"
    cut.write_bytes(path.read_bytes()[:-60])
    text = tmp_path / "text.png"
    text.write_text("no image", encoding="utf-8")
    os.mkfifo(pipe := tmp_path / "pipe.png")
    others = (tmp_path / "none.png", tmp_path, pipe, Path("/dev/zero"), image_path("x" * 5000, tmp_path))
    assert [embed(one) for one in (cut, text, *others)] == [None] * 7
    assert embed(path) is not None
