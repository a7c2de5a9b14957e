"""``docs/servers.md``: columns, what differs between versions, and what is missed for which reason."""

from dataclasses import replace as with_

import pytest
from msgspec.structs import replace as changed

from conformance.judge.servers import gaps
from conformance.judge.servers.checks import BY_ID
from conformance.judge.servers.page import page_text
from conformance.judge.servers.recording import path_of, read_recording
from rollmatch import __version__

HEALTH, ROUTES = BY_ID["health-with-and-without-slash"], BY_ID["routes-are-listed"]
GAPS = """
server: trl>=1
gaps:
- {check: %(gone)s, reason: slow, seen: ., link: 'at/v{version}', versions: '<2', lines: {'1.0': 7}}
- {check: %(both)s, reason: mute, seen: ., link: 'at/v{version}', finding: docs/findings/mute.md}
changes: [{version: '2.0', text: Something else is new.}]
"""


@pytest.fixture
def text(tmp_path, monkeypatch):
    """Of our server as TRL 1.0 and 2.0: 1.0 misses two checks, 2.0 one of them."""
    (tmp_path / "trl.yaml").write_text(GAPS % {"gone": HEALTH.check_id, "both": ROUTES.check_id})
    monkeypatch.setattr(gaps, "FOLDER", tmp_path)
    own = read_recording(path_of(f"rollmatch-trl-{__version__}"))
    mute, slow = (
        {
            check.check_id: changed(
                own.exchanges[check.check_id],
                calls=[changed(call, status=500, reply={}) for call in own.exchanges[check.check_id].calls],
            )
        }
        for check in (ROUTES, HEALTH)
    )
    outside = {"outside": ["vllm 9 is outside the range that the server declares: <9"]}
    newer = with_(own, server="trl-2.0", exchanges=own.exchanges | mute)
    older = with_(own, server="trl-1.0", exchanges=own.exchanges | mute | slow, facts=own.facts | outside)
    return page_text([newer, own, older])


def test_columns_are_ordered_by_name_and_version_and_say_what_they_ran_with(text):
    assert f"| Check | TRL 1.0 | TRL 2.0 | ours, trl {__version__} |" in text
    assert f"| {HEALTH.sentence} | no | yes | yes |" in text
    [row] = [line for line in text.splitlines() if line.startswith("| TRL 1.0 | 2")]
    assert "**vllm 9 is outside the range that the server declares: <9**" in row
    assert "2 known-gap | `python -m conformance.judge.servers.judge rollmatch-trl` |" in row


def test_what_differs_between_versions_stands_on_top(text):
    part = text.partition("## From TRL 1.0 to 2.0")[2].partition("##")[0].strip().splitlines()
    assert len(part) == 2
    assert part[0].startswith(f"- {HEALTH.sentence} 1.0: no, 2.0: yes. slow")
    assert part[1] == "- Something else is new."


def test_what_several_versions_miss_for_one_reason_is_said_once(text):
    lines = [line for line in text.splitlines() if line.startswith("- `")]
    assert len(lines) == 2
    gone, both = sorted(lines, key=lambda line: "mute" in line)
    assert gone.startswith(f"- `{HEALTH.check_id}` (MUST): 1.0 alone: slow (")
    assert gone.endswith(" ([1.0](at/v1.0#L7))")
    assert both.startswith(f"- `{ROUTES.check_id}` (MUST): mute (")
    assert both.endswith(" ([finding](findings/mute.md), [1.0](at/v1.0), [2.0](at/v2.0))")


def test_versions_without_a_server_of_their_own_are_named(text):
    assert "From TRL 1.11 on, its command starts vLLM's server: it is judged as vLLM is." in text
