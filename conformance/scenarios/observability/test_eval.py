"""``rollmatch eval``: a split through the configured backend, its figures and its page."""

import io
import json
import re
from contextlib import redirect_stdout
from html import escape

import pytest

from conformance.doubles.browser import USE, WATCH, dump_dom
from conformance.doubles.digits import ROOT, absolute, write_cut
from conformance.doubles.page_outline import read
from conformance.doubles.started import HF, train_command
from rollmatch.cli.main import main
from rollmatch.objectives.rollout_matching.answer_format import DropReason
from rollmatch.run.directory import RESOLVED

SMALL = (
    *HF,
    "custom.extra.rollout_matching.max_new_tokens=96",
    "training.max_steps=1",
    "training.save_steps=1",
    "training.eval_scenes=1",
)

SPLITS = ("train", "val")
JUDGED = ("reward", "loss", "exact", "truncated_rate")


def sets(*overrides):
    return [part for override in absolute(*SMALL, *overrides) for part in ("--set", override)]


def run_eval(subject, out, *arguments, overrides=()):
    return main(["eval", str(subject), "--out", str(out), *sets(*overrides), *arguments])


@pytest.fixture(scope="module")
def evaluated(tmp_path_factory):
    """The digits model of stage 1 on six validation scenes."""
    out = tmp_path_factory.mktemp("eval") / "new" / "folder"
    with redirect_stdout(io.StringIO()) as printed:
        assert run_eval(ROOT / "fixtures/digits/digits.yaml", out, "--limit", "6") == 0
    (out / "printed.txt").write_text(printed.getvalue())
    return out


def test_figures_classes_and_scenes_are_written(evaluated):
    record = json.loads((evaluated / "eval.json").read_text())
    assert record["metrics"]["num_images"] == len(record["scenes"]) == 6
    assert 0 < record["metrics"]["AP50"] <= 1
    assert record["metrics"]["AP50"] != record["metrics"]["AP50_constant_score"]
    printed = (evaluated / "printed.txt").read_text()
    assert f"AP50           {record['metrics']['AP50']:.3f}\n" in printed
    assert "invalid_rate   0.000\ntruncated_rate 0.000\nnum_images     6\n" in printed, (
        "why AP may be 0, and of how many"
    )
    scores = [one["score"] for scene in record["scenes"] for one in scene["predicted"]]
    assert len(set(scores)) > 1
    assert all(0 < score < 1 for score in scores)
    curve = record["precision_by_recall"]
    assert len(curve) == 101
    assert sum(curve) / 101 == pytest.approx(record["metrics"]["AP50"], abs=1e-3)
    assert set(record["drops"]) <= set(DropReason)
    assert "Precision by recall" in (evaluated / "eval.html").read_text()
    assert {"AP", "AP50", "AR_100", "F1"} <= next(iter(record["by_desc"].values())).keys()


def test_the_page_shows_the_worst_image_first(evaluated):
    text = (evaluated / "eval.html").read_text()
    read(text)
    scores = [float(value) for value in re.findall(r'class="score">F1 <b>([0-9.]+)', text)]
    assert scores == sorted(scores)
    assert len(scores) == 6
    assert "data:image" in text


@pytest.mark.browser
def test_the_page_works_in_a_browser(evaluated, tmp_path):
    text = (evaluated / "eval.html").read_text()
    page = tmp_path / "page.html"
    page.write_text(text.replace("<style>", WATCH + "<style>", 1).replace("</body>", USE))
    body = re.search(r"<body([^>]*)>", dump_dom(page, tmp_path / "profile")).group(1)
    assert 'data-problems="[]"' in body
    assert 'data-shown="6"' in body


def test_a_run_is_evaluated_by_its_newest_checkpoint(tmp_path, capsys):
    write_cut(tmp_path / "model")
    model, run = f"model.model={tmp_path / 'model'}", tmp_path / "run"
    command = train_command(
        *SMALL, model, f"training.output_dir={run}", "custom.extra.rollout_matching.max_new_tokens=8"
    )
    assert main(command[command.index("train") :]) == 0
    run = run.rename(tmp_path / "moved")
    assert main(["eval", str(run), "--split", "train", "--limit", "2"]) == 0
    record = json.loads((run / "eval-train-000001" / "eval.json").read_text())
    assert (record["step"], record["split"], len(record["scenes"])) == (1, "train", 2)
    capsys.readouterr()
    assert main(["eval", str(run), "--limit", "2", "--set", "custom.trainer_variant=sft"]) == 0
    loss = json.loads((run / "eval-val-000001" / "eval.json").read_text())["metrics"]["loss"]
    assert f"loss           {loss:.3f}\n" in capsys.readouterr().out
    assert loss > 0, "of the true answers"


@pytest.mark.scenario(
    "observability/a-bad-sample-ends-an-evaluation", clauses=["observability/detection-is-judged-as-coco-does#3"]
)
@pytest.mark.parametrize(
    ("change", "words"),
    [
        (lambda r: r.update(images=["gone.png"]), ["image-missing", "gone.png"]),
        (lambda r: r["objects"][0].update(bbox_2d=[5, 5, 5, 9]), ["box-without-area", "objects[0]"]),
        (lambda r: r["objects"][0].update(bbox_2d=[5, 5, 1005, 9]), ["bin-invalid", "1005"]),
    ],
)
def test_a_bad_sample_is_named_and_left_out_only_on_request(tmp_path, capsys, change, words):
    digits = ROOT / "fixtures/digits"
    records = [json.loads(line) for line in (digits / "val.jsonl").read_text().splitlines()[:2]]
    change(records[0])
    path = tmp_path / "val.jsonl"
    path.write_text("".join(json.dumps(record) + "\n" for record in records))
    data = (f"custom.val_jsonl={path}", f"custom.image_root={digits}", "custom.extra.rollout_matching.max_new_tokens=4")
    subject = digits / "digits.yaml"
    assert run_eval(subject, tmp_path / "out", overrides=data) == 1
    message = capsys.readouterr().err
    assert all(word in message for word in [f"{path}:1", *words])
    assert not (tmp_path / "out").exists()
    assert run_eval(subject, tmp_path / "out", "--skip-bad", overrides=data) == 0
    assert f"{path}:1" in capsys.readouterr().err
    assert len(json.loads((tmp_path / "out" / "eval.json").read_text())["scenes"]) == 1


ARITHMETIC = (
    "rollout.rollout_backend=hf",
    "rollout.rollout_generate_batch_size=8",
    "training.eval_scenes=8",
    "training.report_to=none",
    "training.max_steps=1",
    "training.per_device_train_batch_size=2",
    "training.learner_threads=1",
    "grpo.num_generations=2",
    "grpo.eval_temperature=0",
)


@pytest.mark.scenario(
    "observability/a-run-of-grpo-is-evaluated-again", clauses=["observability/detection-is-judged-as-coco-does#4"]
)
@pytest.mark.parametrize(
    "variant",
    [
        ("custom.trainer_variant=grpo",),
        ("custom.trainer_variant=vineppo", "vineppo.num_continuations=1"),
        ("custom.trainer_variant=distill", "distill.teachers=[{self: true, prompt: '{question} '}]"),
        ("custom.trainer_variant=sft", "rollout.answer_format=text", "grpo.rewards=[]"),
    ],
    ids=lambda variant: variant[0].rpartition("=")[2],
)
def test_a_run_without_boxes_is_judged_as_it_judges_itself(tmp_path, monkeypatch, capsys, variant):
    monkeypatch.chdir(ROOT)
    data = ROOT / "fixtures/arithmetic/val.jsonl"
    if "custom.trainer_variant=sft" in variant:
        records = [json.loads(line) for line in data.read_text().splitlines()]
        data = tmp_path / "val.jsonl"
        pairs = [{"prompt": one["prompt"], "completion": str(one["metadata"]["sum"])} for one in records]
        data.write_text("".join(json.dumps(pair) + "\n" for pair in pairs))
    given = (
        *ARITHMETIC,
        *variant,
        f"training.output_dir={tmp_path}/run",
        *(f"custom.{s}_jsonl={data}" for s in SPLITS),
    )
    overrides = [part for override in given for part in ("--set", override)]
    assert main(["train", "fixtures/arithmetic/grpo.yaml", *overrides]) == 0
    assert main(["eval", str(tmp_path / "run"), "--limit", "8"]) == 0
    own = json.loads((tmp_path / "run/evaluations/step-000001.json").read_text())
    again = json.loads((tmp_path / "run/eval-val-000001/eval.json").read_text())
    assert again["answers"] == own["answers"]
    measured = [{name: value for name, value in one["metrics"].items() if name in JUDGED} for one in (own, again)]
    assert measured[0] == pytest.approx(measured[1])
    shown = next(iter(measured[1].items()))
    assert [shown[0], f"{shown[1]:.3f}"] in map(str.split, capsys.readouterr().out.splitlines())
    page = (tmp_path / "run/eval-val-000001/eval.html").read_text()
    read(page)
    assert own["answers"][0]["question"] in page
    assert escape(own["answers"][0]["expected"]).replace("&quot;", "&#34;") in page


def test_beams_are_rejected_before_a_model_is_loaded(tmp_path, capsys):
    beams = [f"custom.extra.rollout_matching.{override}" for override in ("num_beams=2", "decode_mode=beam")]
    assert run_eval(ROOT / "fixtures/digits/digits.yaml", tmp_path / "out", overrides=beams) == 1
    assert "eval-beams" in capsys.readouterr().err


def test_a_directory_without_a_run_or_a_checkpoint_is_rejected(tmp_path, capsys):
    assert main(["eval", str(tmp_path)]) == 1
    assert "not-a-run" in capsys.readouterr().err
    assert main(["eval", str(tmp_path / "none")]) == 1
    assert "none does not exist\n     Name a YAML, or the training.output_dir of a run." in capsys.readouterr().err
    config = ROOT / "fixtures/digits/digits.yaml"
    assert main(["eval", str(config), "--checkpoint", str(tmp_path)]) == 1
    assert "checkpoint-missing" in capsys.readouterr().err
    (tmp_path / RESOLVED).touch()
    assert main(["eval", str(tmp_path), "--checkpoint", str(tmp_path)]) == 1
    assert "does not end with a step" in capsys.readouterr().err
