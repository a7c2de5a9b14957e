"""Chromium without a window: what a page holds once its scripts have run."""

import os
import subprocess

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
