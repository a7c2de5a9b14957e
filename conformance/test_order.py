"""The order of tests, and which of them share a worker."""

from pathlib import Path
from types import SimpleNamespace

import pytest

from conformance.order import SHARING, WAITING, pytest_collection_modifyitems, pytest_xdist_make_scheduler


def item(path, *fixtures, marker=None):
    return SimpleNamespace(
        nodeid=f"{path}::test_one",
        path=Path(path),
        fixturenames=fixtures,
        get_closest_marker=lambda name: name == marker,
    )


QUICK, PROCESSES = item("conformance/learn/test_pack.py"), item("conformance/cli/test_train_resume.py")
SHARER = item("conformance/server/test_engine_sync.py", "instance", marker="engine")
WAITS = item("conformance/dialects/test_client_scenarios.py")
OWN = item("conformance/server/test_engine_stock.py", marker="engine")
WHOLE, SLOW = item("conformance/cli/test_run.py", marker="engine"), item("conformance/test_it.py", marker="slow")


@pytest.mark.parametrize("worker", [None, "gw0"])
def test_quick_tests_come_first_alone_and_last_among_workers(monkeypatch, worker):
    monkeypatch.delenv("PYTEST_XDIST_WORKER", raising=False)
    if worker:
        monkeypatch.setenv("PYTEST_XDIST_WORKER", worker)
    items = [WHOLE, SHARER, QUICK, OWN, SLOW, PROCESSES, WAITS]
    pytest_collection_modifyitems(items)
    expected = [*(WHOLE, SLOW), SHARER, OWN, PROCESSES, WAITS, QUICK]
    assert items == (expected if worker else [QUICK, PROCESSES, WAITS, OWN, SHARER, WHOLE, SLOW])


def test_a_file_that_shares_an_engine_and_does_not_say_so_is_refused():
    with pytest.raises(pytest.UsageError, match=r"test_new\.py shares an engine"):
        pytest_collection_modifyitems([item("conformance/server/test_new.py", "instance")])
    pytest_collection_modifyitems([item(path, "instance") for path in SHARING])


def test_files_that_share_an_engine_have_one_worker():
    told = {"dist": "loadfile", "tx": ["2*popen"]}
    config = SimpleNamespace(getvalue=told.get, option=SimpleNamespace(loadscopereorder=True))
    scheduler = pytest_xdist_make_scheduler(config, None)
    assert not config.option.loadscopereorder  # the order of files is ours
    assert {scheduler._split_scope(f"{path}::test_one") for path in SHARING} == {"engines"}
    assert scheduler._split_scope(QUICK.nodeid) == "conformance/learn/test_pack.py"
    assert all(Path(path).exists() for path in SHARING | WAITING)
    assert pytest_xdist_make_scheduler(SimpleNamespace(getvalue={"dist": "load"}.get), None) is None
