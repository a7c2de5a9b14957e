"""The campaign finds breaks that were mended, on real servers from which one mend is taken out again."""

import os
import random
import shutil
import subprocess
import sys
from dataclasses import dataclass

import pytest

from conformance.tools.campaign.attack import ATTACKS, KEYS, attack
from conformance.tools.campaign.observe import HealthLooks
from conformance.tools.trial import IMPL, ROOT

SEED = 20261128


@dataclass(frozen=True, slots=True, kw_only=True)
class Mend:
    """What was mended: texts of one module, and what stood there before."""

    file: str
    """Below ``impl/rollmatch``."""
    changes: tuple[tuple[str, str], ...]
    kind: str
    """Of the attack or fault that finds it."""
    finding: str
    """What the campaign prints without the mend."""

    def taken_out(self) -> str:
        source = (IMPL / "rollmatch" / self.file).read_text(encoding="utf-8")
        for there, before in self.changes:
            assert source.count(there) == 1, f"{self.file}: adapt {there!r}"
            source = source.replace(there, before)
        return source


MENDS = {
    "limits of what frames a body": Mend(
        file="server/http_protocol.py",
        changes=(("if framing > MAX_HEAD_BYTES + FRAMING_PER_BYTE * self._num_body_bytes:", "if False:"),),
        kind="frames",
        finding="frames:",
    ),
    "counts before validation": Mend(
        file="server/reading.py",
        changes=(("    _count(fields)\n", ""), ("if len(raw) <= SMALL_BYTES:", "if raw:")),
        kind="counts_and_depths",
        finding="memory:",
    ),
    "turns of the event loop": Mend(
        file="dialects/openai/answers.py",
        changes=(
            ("lambda: call.is_written", "lambda: False"),
            ("await asyncio.to_thread(_fields_of, reply, call)", "_fields_of(reply, call)"),
        ),
        kind="wide",
        finding="turns of the event loop",
    ),
    "weights that are not finite": Mend(
        file="weights/finite.py",
        changes=(("        if not is_finite:\n", "        if False:\n"),),
        kind="not_finite",
        finding="weights that are not finite were committed",
    ),
    "images that leave with their call": Mend(
        file="dialects/openai/routes.py",
        changes=(('Image.new("RGB", (1, 1)) for _ in images', "images"),),
        kind="images",
        finding="memory:",
    ),
    "one version of a stream": Mend(
        file="server/engine_pool.py",
        changes=(("                if has_begun:\n", "                if False:\n"),),
        kind="streams",
        finding="mixed:",
    ),
    "the wait for a left group's port": Mend(
        file="dialects/native/group.py",
        changes=(("rendezvous.port_held_s if is_held else GRACE_S", "GRACE_S"),),
        kind="announcement",
        finding="group-port-in-use",
    ),
}


@pytest.mark.parametrize("name", MENDS)
def test_a_mend_can_be_taken_out(name):
    compile(MENDS[name].taken_out(), name, "exec")


TOGETHER = (
    ("limits of what frames a body", "counts before validation", "weights that are not finite"),
    ("turns of the event loop",),
    ("images that leave with their call", "one version of a stream"),
)
"""Those that one server may lack: none hides another one's finding. Wide calls may take memory, which counts show, and
their long turns are few beside streams."""
MOST_ATTACKS = 20


def without(mends, folder, monkeypatch):
    """Processes that are started from now on lack these mends."""
    shutil.copytree(IMPL / "rollmatch", folder / "impl/rollmatch")
    for mend in mends:
        (folder / "impl/rollmatch" / mend.file).write_text(mend.taken_out(), encoding="utf-8")
    monkeypatch.setenv("PYTHONPATH", f"{folder / 'impl'}{os.pathsep}{ROOT}")


@pytest.mark.engine
@pytest.mark.wide
@pytest.mark.parametrize("names", TOGETHER, ids=", ".join)
def test_attacks_find_what_was_mended(names, tmp_path, monkeypatch):
    mends, shown = [MENDS[name] for name in names], []
    without(mends, tmp_path, monkeypatch)
    words = {"minutes": 4, "looks": HealthLooks(), "chance": random.Random(SEED), "key": KEYS[1], "fork": False}
    sought = {mend.kind: mend.finding for mend in mends}
    _, wrong = attack(SEED, num=MOST_ATTACKS, sought=sought, show=shown.append, **words)
    for mend in mends:
        assert any(mend.finding in problem for problem in wrong), "\n".join(shown)


@pytest.mark.engine
@pytest.mark.wide
def test_a_fault_of_real_processes_finds_what_was_mended(tmp_path, monkeypatch):
    mend = MENDS["the wait for a left group's port"]
    without([mend], tmp_path, monkeypatch)
    command = [sys.executable, "-m", "conformance.tools.campaign", "--faults", "0", "--seed", str(SEED)]
    ended = subprocess.run(
        [*command, "--real", "1", "--only", mend.kind],
        cwd=ROOT,
        capture_output=True,
        text=True,
        timeout=400,
        check=False,
    )
    assert ended.returncode == 1, ended.stdout + ended.stderr
    assert mend.finding in ended.stdout, ended.stdout


@pytest.mark.engine
@pytest.mark.wide
def test_all_kinds_of_attacks_at_once_delay_no_health_and_leave_no_memory():
    """Without a key; the campaign's ``--together`` does it with one, too."""
    shown, words = [], {"minutes": 4, "looks": HealthLooks(), "chance": random.Random(SEED), "key": None}
    num, wrong = attack(SEED, num=1, together=True, show=shown.append, **words)
    assert wrong == [], "\n".join(shown)
    assert num >= len(set(ATTACKS)) - 1  # one of those that are a learner's is left out
