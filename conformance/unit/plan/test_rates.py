"""Rates as measured, between measured points and of one's own; ``rollmatch plan`` as it is typed."""

import json

import pytest
from hypothesis import given
from hypothesis import strategies as st

from conformance.doubles.digits import ROOT
from conformance.doubles.refusals import refused
from rollmatch.cli.main import main
from rollmatch.plan.rates import MEASURED, Rates, decode_source, decode_tok_s, gpu_of, load_rates


@given(st.integers(1, 400))
def test_more_requests_are_never_slower_together_nor_faster_each(number):
    rates = load_rates()
    some, more = (decode_tok_s(rates, "H100", num_requests=one) for one in (number, number + 1))
    assert some <= more * (1 + 1e-9)
    assert more / (number + 1) <= some / number * (1 + 1e-9)


def test_measured_points_are_met_and_a_gpu_that_was_not_measured_goes_by_memory_speed(tmp_path):
    rates = load_rates()
    for number, speed in gpu_of(rates, "H100").decode_tok_s.items():
        assert decode_tok_s(rates, "H100", num_requests=number) == pytest.approx(speed)
    file = tmp_path / "rates.yaml"
    text = MEASURED.read_text()
    file.write_text(text.replace("memory_bytes: 150.7e9", "memory_bytes: 150.7e9\n    decode_tok_s: null", 1))
    lines = [line for line in text.splitlines() if not line.strip().startswith("decode_tok_s: {1: 1") or "145" in line]
    file.write_text("\n".join(lines))
    rates = load_rates(file)
    if gpu_of(rates, "H200").decode_tok_s is None:
        ratio = gpu_of(rates, "H200").copy_bytes_s / gpu_of(rates, "H100").copy_bytes_s
        ours, theirs = (decode_tok_s(rates, name, num_requests=32) for name in ("H200", "H100"))
        assert ours == pytest.approx(ratio * theirs)
        assert decode_source(rates, "H200") == "H100"
    assert decode_source(rates, "H100") == "H100"


def rates_of(**speeds):
    """One GPU per name, each twice as fast in memory as the one before."""
    gpus = {
        name: {"memory_bytes": 1.0, "copy_bytes_s": 2.0**place, "matmul_flops_s": 1.0, "decode_tok_s": speed}
        for place, (name, speed) in enumerate(speeds.items())
    }
    return Rates.model_validate(load_rates().model_dump() | {"gpus": gpus})


def test_speeds_go_along_powers_between_points_in_proportion_below_and_stay_above():
    rates = rates_of(first=None, second={64: 800.0, 4: 100.0, 16: 400.0}, third={1: 7.0})
    expected = {1: 25.0, 2: 50.0, 4: 100.0, 8: 200.0, 16: 400.0, 32: 400 * 2**0.5, 64: 800.0, 99: 800.0}
    for number, speed in expected.items():
        assert decode_tok_s(rates, "second", num_requests=number) == pytest.approx(speed)
        assert decode_tok_s(rates, "first", num_requests=number) == pytest.approx(speed / 2)
    assert [decode_source(rates, name) for name in rates.gpus] == ["second", "second", "third"], "the first measured"
    with refused("rates-invalid", "gpus"):
        decode_source(rates_of(first=None), "first")


@pytest.mark.parametrize(
    ("old", "new", "where"),
    [
        ("learn_share: 0.5", "learn_share: 1.5", "learn_share"),
        ("copy_bytes_s: 3.0e12", "copy_bytes_s: fast", "gpus.H100.copy_bytes_s"),
        ("links:", "ways:", "links"),
        ("gpus:", "gpus: [", ""),
    ],
)
def test_a_malformed_file_is_refused_with_its_place(old, new, where, tmp_path):
    file = tmp_path / "rates.yaml"
    assert old in MEASURED.read_text()
    file.write_text(MEASURED.read_text().replace(old, new, 1))
    with refused("rates-invalid", f"{file}:{where}" if where else str(file)):
        load_rates(file)
    file.write_text(MEASURED.read_text())
    assert load_rates(file) == load_rates()


def test_a_file_that_is_not_there_and_a_gpu_that_is_not_known_are_refused(tmp_path):
    with refused("rates-invalid", str(tmp_path / "none.yaml")):
        load_rates(tmp_path / "none.yaml")
    with refused("rates-invalid", "--gpu", problem="B200"):
        gpu_of(load_rates(), "B200")
    assert gpu_of(load_rates(), "H200").memory_bytes > 1e11


CONFIG = str(ROOT / "fixtures/digits/3v1.yaml")


def test_a_plan_is_a_table_a_choice_and_its_assumptions(capsys):
    assert main(["plan", CONFIG, "--gpus", "4"]) == 0
    shown = capsys.readouterr().out
    assert all(name in shown for name in ("1v3", "2v2", "3v1", "best: ", "assumed:"))
    assert "| 131 of 150 GB | 64       | 3 of 150 GB | 0.4 s   | 0.0 s |" in shown.replace("\u2502", "|")
    assert "learner: weights 0.0 GB, learning 0.1 GB, activations 0.1 GB, head 0.5 GB, overhead 2.5 GB\n" in shown
    assert main(["plan", CONFIG, "--gpus", "2", "--nodes", "2", "--gpu", "H100", "--json"]) == 0
    shown = json.loads(capsys.readouterr().out)
    assert [one["name"] for one in shown["forecasts"]] == ["1v3", "2v2", "3v1"]
    assert shown["best"] in ("1v3", "2v2", "3v1")
    assert {"rollout_s", "learn_s", "sync_s", "step_s", "learner", "server"} <= set(shown["forecasts"][0])


@pytest.mark.parametrize(
    ("arguments", "shown"),
    [
        (["--gpus", "1"], "[too-few-gpus] --gpus"),
        (["--gpus", "4", "--gpu", "B200"], "[rates-invalid] --gpu"),
        (["--gpus", "4", "--rates", "/none.yaml"], "[rates-invalid] /none.yaml"),
        (["--gpus", "4", "--set", "model.model=/none"], "[shape-unknown] model.model"),
    ],
)
def test_what_is_wrong_is_shown_with_its_key_and_exit_1(arguments, shown, capsys):
    assert main(["plan", CONFIG, *arguments]) == 1
    assert shown in capsys.readouterr().err


@pytest.mark.parametrize("wrong", [[], ["--gpus", "0"], ["--gpus", "4", "--nodes", "-1"]])
def test_wrong_usage_is_exit_2(wrong, capsys):
    with pytest.raises(SystemExit) as caught:
        main(["plan", CONFIG, *wrong])
    assert caught.value.code == 2


def test_shares_that_a_file_leaves_out_cost_nothing_and_learning_reaches_half():
    known = load_rates().model_dump(exclude={"learn_share", "dora_share", "merge_share"})
    assert Rates.model_validate(known).model_dump() == known | {
        "learn_share": 0.5,
        "dora_share": 1.0,
        "merge_share": 1.0,
    }
