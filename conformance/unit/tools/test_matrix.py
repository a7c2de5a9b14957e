"""The living matrix, as data and in a real browser."""

import json
import re
import shutil

import pytest

from conformance.doubles.browser import dump_dom
from conformance.tools.evidence import Evidence
from conformance.tools.matrix import write_matrix
from conformance.tools.specification import read_specification

PACKED = "packing/a-gap-is-filled-exactly"
USE = """<script>
const type = (id, value) => {
  const box = document.getElementById(id);
  box.value = value;
  box.dispatchEvent(new Event("input"));
};
const counted = () => document.getElementById("shown").textContent;
type("words", "gap filled"); document.body.dataset.words = counted();
type("words", ""); type("verdict", "passed"); document.body.dataset.passed = counted();
type("verdict", ""); document.querySelectorAll("thead button").forEach((button) => button.click());
document.body.dataset.first = document.querySelector("tbody tr td").textContent;
</script></body>"""


@pytest.fixture(scope="module")
def written(tmp_path_factory):
    """Shared: not to be changed."""
    tmp_path = tmp_path_factory.mktemp("matrix")
    evidence = Evidence(outcomes={PACKED: {"t.py::test_a": "passed"}}, seconds={"t.py::test_a": 0.5})
    write_matrix(tmp_path, evidence, subject="reference")
    return tmp_path


def test_it_holds_every_scenario_with_verdict_sentence_faults_and_place(written):
    rows = {row["id"]: row for row in json.loads((written / "matrix.json").read_text())["rows"]}
    assert rows.keys() == read_specification().scenarios.keys()
    row = rows[PACKED]
    assert row["cells"]["reference"]["verdict"] == "passed"
    assert row["cells"]["reference"]["evidence"] == ["passed t.py::test_a"]
    assert any(row["faults"] for row in rows.values())
    assert row["place"].startswith("spec/openspec/specs/packing/spec.md:")
    assert "6, 3, 2 and 2 tokens" in row["sentence"]
    badge = json.loads((written / "badge.json").read_text())
    assert (badge["message"], badge["color"]) == (f"1 of {len(rows)} scenarios", "yellow")


def test_what_a_test_wrote_is_text_and_no_part_of_the_page(tmp_path):
    write_matrix(tmp_path, Evidence(outcomes={PACKED: {"t.py::test_a[<img>]": "passed"}}), subject="<b>")
    page = (tmp_path / "matrix.html").read_text()
    assert "test_a[&lt;img&gt;]" in page
    assert "<img>" not in page
    assert "<b>" not in page


def test_a_second_subject_stands_beside_the_first(written, tmp_path):
    shutil.copy(written / "matrix.json", tmp_path)
    failed = Evidence(outcomes={PACKED: {"t.py::test_a": "failed"}})
    write_matrix(tmp_path, failed, subject="http://10.0.0.1:8000")
    rows = {row["id"]: row["cells"] for row in json.loads((tmp_path / "matrix.json").read_text())["rows"]}
    assert {name: cell["verdict"] for name, cell in rows[PACKED].items()} == {
        "reference": "passed",
        "http://10.0.0.1:8000": "failed",
    }
    assert json.loads((tmp_path / "badge.json").read_text())["color"] == "red"


def test_the_page_fetches_nothing(written):
    text = (written / "matrix.html").read_text()
    assert not re.findall(r'(?:src|href)="|url\(|@import|fetch\(', text)
    assert text.count("<tr data-capability") == len(read_specification().scenarios)


@pytest.mark.browser
def test_the_page_filters_and_sorts_in_a_browser(written, tmp_path):
    path = tmp_path / "matrix.html"
    path.write_text((written / "matrix.html").read_text().replace("</body>", USE))
    dom = dump_dom(path, tmp_path / "profile")
    assert 'data-ready="yes"' in dom
    assert 'data-words="1 shown"' in dom
    assert 'data-passed="1 shown"' in dom
    assert 'data-first="' in dom
