"""The page in a real browser: its script runs without an error."""

import re

import pytest

from conformance.doubles.browser import USE, WATCH, dump_dom
from conformance.doubles.runs import write_run
from rollmatch.report import write_page


@pytest.mark.browser
def test_the_script_runs_and_every_control_works(tmp_path):
    path = write_page(write_run(tmp_path / "run", num_scenes=8))
    text = path.read_text(encoding="utf-8")
    path.write_text(text.replace("<style>", WATCH + "<style>", 1).replace("</body>", USE), encoding="utf-8")
    dom = dump_dom(path, tmp_path / "profile")
    body = re.search(r"<body([^>]*)>", dom).group(1)
    assert 'data-problems="[]"' in body
    assert 'data-ready="yes"' in dom
    assert 'data-theme="' in dom
    assert 'data-shown="8"' in body, "the last button shows all scenes"
    assert "step 59total" in body
    assert "learn 2.40 s" in body
    assert 'class="gallery hide-truth hide-matched hide-unmatched hide-labels"' in dom
