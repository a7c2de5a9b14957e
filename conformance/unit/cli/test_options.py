"""What is typed for a command is what happens: options whose values are no defaults."""

import json
import subprocess
import time
from argparse import Namespace

import pytest
from PIL import Image

from conformance.doubles.digits import load_digits
from conformance.judge.ports import free_port
from rollmatch.cli.main import main
from rollmatch.launch.run_commands import RunWords
from rollmatch.plan.layout import Layout

CONFIG = "fixtures/digits/digits.yaml"
VLLM = "custom.extra.rollout_matching.vllm"


def printed(capsys, *words, code=0):
    assert main([*words]) == code, capsys.readouterr().err
    output = capsys.readouterr()
    return output.err if code else output.out


def served(*urls):
    named = [{"base_url": url, "group_port": 7000 + place} for place, url in enumerate(urls)]
    return f"--set={VLLM}.mode=server", f"--set={VLLM}.server.servers={json.dumps(named)}"


@pytest.mark.parametrize(
    ("words", "expected"),
    [
        ("--overwrite", ["--overwrite"]),
        ("--use_vllm_server --vllm_host h7", [f"{VLLM}.server.base_url=http://h7:8000"]),
        ("--use_vllm_server --vllm_server_port 8123", [f"{VLLM}.server.base_url=http://127.0.0.1:8123"]),
        ("--use_vllm_server --vllm_connection_timeout 7", [f"{VLLM}.server.timeout_s=7.0"]),
    ],
)
def test_train_passes_on_what_is_typed(words, expected, capsys):
    shown = printed(capsys, "train", CONFIG, *words.split(), "--gpus", "0,1", "--dry-run")
    assert [each for each in expected if each not in shown] == []


@pytest.mark.parametrize("gpus", [(), ("--gpus", "0,1")], ids=["one rank", "torchrun"])
@pytest.mark.parametrize("is_ended", [False, True], ids=["after seconds", "with a process"])
def test_train_waits_for_servers_as_long_as_is_typed(is_ended, gpus, capsys, tmp_path):
    words = ("--wait-timeout", "0.3")
    if is_ended:
        (ended := subprocess.Popen(["true"])).wait()
        words = ("--server-pid", str(ended.pid))
    away = (*served(f"http://127.0.0.1:{free_port()}"), f"--set={VLLM}.server.timeout_s=30")
    begin = time.monotonic()
    printed(capsys, "train", CONFIG, *away, f"--set=training.output_dir={tmp_path / 'run'}", *words, *gpus, code=1)
    assert time.monotonic() - begin < 20, "the configuration waits for 30 s"


def test_serve_starts_the_server_of_the_typed_index(capsys):
    shown = printed(capsys, "serve", CONFIG, *served("http://a:8001", "http://b:8002"), "--server", "1", "--dry-run")
    assert '"port":8002' in shown


def test_up_starts_what_is_typed(capsys):
    words = ("--servers", "2", "--learners", "4", "--learner-nodes", "2", "--overwrite", "--dry-run")
    shown = printed(capsys, "up", CONFIG, *served("http://127.0.0.1:8000"), *words)
    learners = [line for line in shown.splitlines() if " train " in line]
    assert len(learners) == 2, shown
    assert all("--gpus 0,1 " in line and "--nnodes 2" in line and "--overwrite" in line for line in learners), shown
    again = printed(capsys, "up", CONFIG, *served("http://127.0.0.1:8000"), "--resume", "--dry-run")
    assert "--resume" in again


def test_up_names_hosts_in_place_of_a_url_of_the_configuration(capsys):
    keys = ("rlhf.use_vllm=true", "rlhf.vllm_mode=server", "rlhf.vllm_server_base_url=http://127.0.0.1:8000")
    words = (*(f"--set={key}" for key in keys), "--servers", "2", "--dry-run")
    shown = printed(capsys, "up", "fixtures/arithmetic/grpo.yaml", *words)
    (learner,) = [line for line in shown.splitlines() if " train " in line]
    assert "rlhf.vllm_server_base_url=null" in learner
    assert "rlhf.vllm_server_port=[" in learner


def test_each_server_is_shown_with_as_many_gpus_as_the_layout_gives_it():
    keys = [word.removeprefix("--set=") for word in served("http://127.0.0.1:8000")]
    options = Namespace(config=CONFIG, overrides=keys, resume=False, overwrite=False)
    layout = Layout(num_learner_nodes=1, ranks_per_node=1, servers=(2, 1))
    run = RunWords(config=load_digits(*keys), options=options, layout=layout)
    run.settle(["127.0.0.1", "127.0.0.1"])
    assert [run.server(index, [])[-1] for index in (0, 1)] == ["0,1", "0"]


def test_plan_counts_with_the_typed_lengths(capsys):
    options = ("--gpus", "4", "--prompt-tokens", "101", "--response-tokens", "53", "--json")
    planned = json.loads(printed(capsys, "plan", CONFIG, *options))
    assert "a rollout: 101 tokens of prompt, 53 of response" in " ".join(planned["assumptions"])


def test_convert_reads_the_typed_split_and_writes_the_typed_question(capsys, tmp_path):
    for split, number in (("train", 0), ("val", 1)):
        (tmp_path / split).mkdir()
        Image.new("RGB", (200, 100)).save(tmp_path / split / "a.png")
        (tmp_path / split / "a.txt").write_text(f"{number} 0.5 0.5 0.2 0.4")
    (tmp_path / "data.yaml").write_text("train: train\nval: val\nnames: [cat, dog]\n")
    options = ("--from", "yolo", "--split", "val", "--to", "swift", "--prompt", "Where?")
    printed(capsys, "data", "convert", str(tmp_path / "data.yaml"), str(tmp_path / "out.jsonl"), *options)
    line = json.loads((tmp_path / "out.jsonl").read_text())
    assert "Where?" in line["messages"][-2]["content"]
    assert line["objects"]["ref"] == ["dog"]
