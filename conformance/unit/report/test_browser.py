"""The page in a real browser: its script runs without an error."""

import os
import re
import subprocess

import pytest

from conformance.doubles.runs import write_run
from rollmatch.report import write_page

CHROMIUM = os.environ.get("CHROMIUM", "chromium")
FLAGS = [
    "--headless", "--no-sandbox", "--disable-gpu", "--disable-quic", "--no-first-run", "--disable-sync",
    "--disable-background-networking", "--disable-component-update", "--window-size=1200,1600",
]  # fmt: skip
WATCH = """<script>
window.problems = [];
window.addEventListener("error", (event) => window.problems.push(event.message));
document.addEventListener("securitypolicyviolation", (event) => window.problems.push(event.violatedDirective));
</script>"""
USE = """<script>
const press = (key) => document.querySelectorAll(".plot > svg").forEach(
  (svg) => svg.dispatchEvent(new KeyboardEvent("keydown", { key })));
press("ArrowLeft"); press("ArrowLeft");
document.querySelectorAll("button").forEach((button) => button.click());
document.querySelectorAll("[data-layer]").forEach((box) => box.click());
document.body.dataset.problems = JSON.stringify(window.problems);
document.body.dataset.shown = document.querySelectorAll(".scene:not([hidden])").length;
document.body.dataset.tips = [...document.querySelectorAll(".tip")].map((tip) => tip.textContent).join("|");
</script></body>"""


def dump_dom(path, profile):
    command = [CHROMIUM, *FLAGS, f"--user-data-dir={profile}", "--dump-dom", f"file://{path}"]
    return subprocess.run(command, capture_output=True, text=True, timeout=60, check=True).stdout


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
