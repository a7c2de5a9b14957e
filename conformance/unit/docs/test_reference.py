"""Documentation follows the code: generated blocks, paths, links, and the length of the front page."""

import re
from pathlib import Path

import pytest

from rollmatch.config.schema import fields, section_of
from scripts import reference

ROOT = Path(__file__).parents[3]
PAGES = sorted([*(ROOT / "docs").rglob("*.md"), ROOT / "README.md", ROOT / "CONTRIBUTING.md"])


def test_the_generated_blocks_are_fresh(capsys):
    assert reference.main("check") == 0, capsys.readouterr().out


@pytest.mark.parametrize("page", ["configuration.md", "cli.md", "errors.md", "protocols.md"])
def test_a_stale_block_is_noticed(page, tmp_path, monkeypatch):
    text = (reference.PAGES / page).read_text()
    generated = text[: text.rindex("<!-- end -->")]
    last_row = [line for line in generated.splitlines() if line.startswith("| `")][-1]
    (tmp_path / page).write_text(text.replace(last_row + "\n", ""))
    monkeypatch.setattr(reference, "PAGES", tmp_path)
    monkeypatch.setattr(reference, "ROOT", tmp_path)
    assert reference.main("check") == 1
    reference.main("write")
    assert (tmp_path / page).read_text() == text


def test_every_key_has_a_row_in_the_table_of_its_section():
    page = (reference.PAGES / "configuration.md").read_text()
    tables = dict(re.findall(r"^## (\S.*?)\n(.*?)(?=^## |\Z)", page, re.DOTALL | re.MULTILINE))
    for key, field in fields().items():
        section, _, name = key.rpartition(".")
        if section_of(field) is None:
            assert f"\n| `{name}` | " in tables[f"`{section}`" if section else "Top level"], key


def test_every_error_code_has_one_row():
    code = "".join(path.read_text() for path in sorted(reference.PACKAGE.rglob("*.py")))
    codes = re.findall(r'\bcode ?= ?"([a-z-]+)"', code)
    rows = re.findall(r"^\| `([a-z-]+)` \|", (reference.PAGES / "errors.md").read_text(), re.MULTILINE)
    branches = {"rollmatch-error", *(f"{kind}-error" for kind in ("config", "data", "rollout", "target", "learn"))}
    assert set(codes) - set(rows) <= branches | {"sync-error", "launch-error", "several-errors"}
    assert len(codes) > 100


@pytest.mark.parametrize("page", PAGES, ids=lambda page: page.name)
def test_paths_and_links_lead_somewhere(page):
    text = page.read_text()
    paths = re.findall(
        r"`((?:impl|conformance|fixtures|benchmarks|scripts|spec|docs|learn|objectives|rollout|data|model)/[\w./-]+)`",
        text,
    )
    links = [link.partition("#")[0] for link in re.findall(r"\]\((?!https?:)([^)\s]+)\)", text)]
    missing = [path for path in paths if not (ROOT / path).exists() and not (reference.PACKAGE / path).exists()]
    missing += [link for link in links if link and not (page.parent / link).exists()]
    assert missing == []


def test_the_front_page_has_less_than_700_words():
    assert len((ROOT / "README.md").read_text().split()) < 700
