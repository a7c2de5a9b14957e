"""The real OpenSpec judges our tree, and its merge is ours. Fails where the tool is not installed."""

import json
import shutil

import pytest
from hypothesis import given, settings

from conformance.harness import openspec_tool
from conformance.harness.merge import merge
from conformance.harness.openspec_tool import MergeBridge, OpenspecMissing, call, call_all, package_folder
from conformance.harness.replay import OPENSPEC, archived_changes, spec_files
from conformance.harness.spec_error import MergeRefused, PurposeUnclear
from conformance.spec.deltas import edits
from conformance.spec.test_merge import ACCEPTED, ALPHA, BASE, LOOSE_HEADER, REFUSED, TWICE

CHANGE = "2020-01-01-begin"
VALIDATE = ("validate", "--strict", "--no-interactive", "--json")


def judged(arguments, cwd):
    done = call([*arguments, "--json"], cwd=cwd)
    return done.returncode, json.loads(done.stdout)


@pytest.fixture(scope="module")
def bridge():
    with MergeBridge(capability="lamp", change=CHANGE) as made:
        yield made


@pytest.mark.openspec
def test_the_tool_is_of_the_pinned_version(tmp_path):
    assert call(["--version"], cwd=tmp_path).stdout.strip() == openspec_tool.VERSION == "1.13.2"


@pytest.mark.openspec
def test_archiving_all_changes_with_the_tool_gives_the_committed_files_byte_for_byte(tmp_path):
    (tmp_path / "openspec" / "specs").mkdir(parents=True)
    names = [change.name for change in archived_changes()]
    for change in archived_changes():
        shutil.copytree(change, tmp_path / "openspec" / "changes" / change.name)
    ways = [(VALIDATE[0], name, "--type", "change", *VALIDATE[1:]) for name in names]
    archives = [("archive", name, "--yes", "--json") for name in names]
    told = call_all([each for pair in zip(ways, archives, strict=True) for each in pair], cwd=tmp_path)
    assert [code for code, _ in told] == [0] * 2 * len(names), told
    for name, (_, valid), (_, archived) in zip(names, told[::2], told[1::2], strict=True):
        assert "Archive would refuse" not in valid
        assert json.loads(valid)["summary"]["totals"]["passed"] == 1
        archive = json.loads(archived)["archive"]
        assert (archive["archivedAs"], archive.get("warnings") or []) == (name, [])
    made = {capability: path.read_bytes() for capability, path in spec_files(tmp_path / "openspec").items()}
    assert made == {capability: path.read_bytes() for capability, path in spec_files(OPENSPEC).items()}


@pytest.mark.openspec
def test_the_committed_tree_passes_strict_validation(tmp_path):
    shutil.copytree(OPENSPEC, tmp_path / "openspec")
    status, told = judged(["validate", "--all", "--strict", "--no-interactive"], tmp_path)
    assert status == 0, told
    assert told["summary"]["totals"] == {
        "items": len(spec_files(OPENSPEC)),
        "passed": len(spec_files(OPENSPEC)),
        "failed": 0,
    }
    levels = {issue["level"] for item in told["items"] for issue in item["issues"]}
    assert levels <= {"INFO"}


@pytest.mark.openspec
def test_strict_validation_can_fail(tmp_path):
    shutil.copytree(OPENSPEC, tmp_path / "openspec")
    path = tmp_path / "openspec" / "specs" / "packing" / "spec.md"
    path.write_text(path.read_text(encoding="utf-8").replace("## Purpose", "## Aim"), encoding="utf-8")
    assert judged(["validate", "--all", "--strict", "--no-interactive"], tmp_path)[0] == 1


@pytest.mark.openspec
@pytest.mark.parametrize("name", REFUSED)
def test_the_tool_refuses_what_ours_refuses(bridge, name):
    assert "refused" in bridge.merge(BASE, REFUSED[name][0])


@pytest.mark.openspec
@pytest.mark.parametrize("name", ACCEPTED)
def test_the_tool_accepts_what_ours_accepts(bridge, name):
    text = merge(BASE, ACCEPTED[name], capability="lamp", change=CHANGE)
    assert bridge.merge(BASE, ACCEPTED[name]) == {"text": text}


@pytest.mark.openspec
def test_the_tool_agrees_about_odd_bases(bridge):
    assert "refused" in bridge.merge(TWICE, f"## MODIFIED Requirements\n\n{ALPHA}\n")
    delta = "## REMOVED Requirements\n### Requirement: Alpha\n"
    text = merge(LOOSE_HEADER, delta, capability="lamp", change=CHANGE)
    assert bridge.merge(LOOSE_HEADER, delta) == {"text": text}


@pytest.mark.openspec
@settings(max_examples=3 * settings.default.max_examples, deadline=None)
@given(edit=edits())
def test_both_merges_agree_on_any_specification_and_delta(bridge, edit):
    base, delta = edit
    theirs = bridge.merge(base, delta)
    try:
        ours = {"text": merge(base, delta, capability="lamp", change=CHANGE)}
    except PurposeUnclear:
        return
    except MergeRefused:
        ours = {"refused": theirs.get("refused")}
    assert theirs == ours


def test_a_missing_tool_is_an_error_that_names_its_installation(monkeypatch, tmp_path):
    monkeypatch.setenv("ROLLMATCH_CACHE", str(tmp_path))
    with pytest.raises(OpenspecMissing) as caught:
        package_folder()
    assert (caught.value.code, caught.value.key) == ("openspec-missing", str(tmp_path / "openspec-1.13.2"))
    assert "conformance.harness.openspec_tool" in caught.value.remedy


def test_a_tool_of_another_version_is_missing(monkeypatch, tmp_path):
    monkeypatch.setenv("ROLLMATCH_CACHE", str(tmp_path))
    folder = tmp_path / "openspec-1.13.2" / "node_modules" / "@fission-ai" / "openspec"
    folder.mkdir(parents=True)
    (folder / "package.json").write_text('{"version": "1.13.1"}', encoding="utf-8")
    with pytest.raises(OpenspecMissing) as caught:
        package_folder()
    assert "1.13.1" in caught.value.problem
    (folder / "package.json").write_text('{"version": "1.13.2"}', encoding="utf-8")
    assert package_folder() == folder
