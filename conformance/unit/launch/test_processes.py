"""Children of a launcher: how long they are waited for, who is signalled, and what one types to start them."""

import signal
import subprocess
from types import SimpleNamespace
from unittest.mock import Mock

import psutil
import pytest

from rollmatch.launch import processes

LATE = subprocess.TimeoutExpired("x", 1)


@pytest.mark.parametrize("late", [LATE, psutil.TimeoutExpired(1)])
@pytest.mark.parametrize(
    ("signalled_at", "ends_at", "code", "num_waits", "num_checks"),
    [(None, 9, 3, 10, 9), (0, 1, 3, 2, 0), (0, None, -9, 2, 0), (4, None, -9, 6, 4), (4, 5, 3, 6, 4)],
)
def test_a_child_has_its_grace_from_the_signal_on(late, signalled_at, ends_at, code, num_waits, num_checks):
    """Each wait is a second; the child here has two, and a check is called until it is signalled."""
    received, waits, check = [], [], Mock()

    def wait(timeout):
        waits.append(timeout)
        if len(waits) - 1 == signalled_at:
            received.append(signal.SIGTERM)
        if len(waits) - 1 == ends_at:
            return 3
        raise late

    assert processes._wait(SimpleNamespace(wait=wait), received, 2.0, check) == code
    assert (waits, check.call_count) == ([1.0] * num_waits, num_checks)


@pytest.mark.parametrize(
    ("is_running", "status", "ended"),
    [
        *((True, psutil.STATUS_RUNNING, False), (True, psutil.STATUS_ZOMBIE, True), (False, "", True)),
        (True, psutil.NoSuchProcess(1), True),
    ],
)
def test_a_process_has_ended_when_it_is_gone_or_a_zombie(is_running, status, ended):
    process = Mock()
    process.is_running.return_value = is_running
    process.status.side_effect = [status]
    assert processes._has_ended(process) is ended


def test_signals_go_to_the_ranks_or_else_to_the_child():
    rank, helper, hidden, child = Mock(), Mock(), Mock(), Mock()
    rank.environ.return_value, helper.environ.return_value, child.environ.return_value = {"LOCAL_RANK": "0"}, {}, {}
    hidden.environ.side_effect = psutil.AccessDenied(1)
    child.children.return_value = [helper, hidden, rank]
    assert processes._addressees(child) == [rank]
    child.children.assert_called_once_with(recursive=True)
    child.children.return_value = [helper]
    assert processes._addressees(child) == [child]
    child.children.side_effect = psutil.NoSuchProcess(1)
    assert processes._addressees(child) == []


def test_a_command_is_shown_as_it_is_typed_with_its_variables_in_order():
    command = processes.Command(words=("a b", "c"), environment={"Z": "1", "A": "x y"})
    assert str(command) == "A='x y' Z=1 'a b' c"


@pytest.mark.parametrize(("handler", "last"), [(signal.SIG_IGN, signal.SIGTERM), (signal.SIG_DFL, signal.SIGHUP)])
def test_the_end_of_a_terminal_is_passed_on_unless_it_is_ignored(monkeypatch, handler, last):
    monkeypatch.setattr(signal, "getsignal", lambda number: handler)
    assert processes.forwarded()[:2] == (signal.SIGINT, signal.SIGTERM)
    assert processes.forwarded()[-1] == last
