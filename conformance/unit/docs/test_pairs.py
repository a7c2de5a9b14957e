"""The page of trainers and servers is what its source says, has a verdict in each cell, and names tests that exist."""

import yaml

from conformance.judge.servers.pairs import PAGE, ROOT, SOURCE, named_tests, page

READ = yaml.load(SOURCE.read_text(encoding="utf-8"), yaml.BaseLoader)


def test_the_page_is_generated_from_its_source():
    assert PAGE.read_text(encoding="utf-8") == page(READ), "run python -m conformance.judge.servers.pairs"


def test_each_pair_has_one_verdict_and_each_no_a_line_of_the_peer():
    for trainer in READ["trainers"].values():
        assert set(trainer) == {"title", *READ["servers"]}
        for name in READ["servers"]:
            cell = trainer[name]
            assert set(cell) <= {"cpu", "gpu", "seen", "note"} or set(cell) == {"no"}, cell
            assert ".py" in cell.get("no", ".py"), cell


def test_tests_that_are_named_exist():
    names = list(named_tests(READ))
    assert names
    assert [name for name in names if not (ROOT / name).is_file()] == []
