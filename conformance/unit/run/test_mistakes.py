"""Mistakes of newcomers: each is refused with a code, a key and something to do, and none ends in a traceback."""

import json
import re
import shutil
from collections.abc import Callable, Mapping
from pathlib import Path
from types import MappingProxyType
from typing import NamedTuple

import pytest

from conformance.doubles import wrong_rewards
from conformance.doubles.digits import ROOT
from rollmatch.cli.main import main

CONFIG = """
model: {model: m}
global_max_length: 64
custom: {trainer_variant: grpo, train_jsonl: train.jsonl}
grpo: {rewards: [{function: "newcomer_rewards:right"}], num_generations: 2}
rollout: {max_new_tokens: 8, rollout_backend: hf}
training: {output_dir: out, max_steps: 2, per_device_train_batch_size: 2, report_to: none}
"""
ROW = json.dumps({"prompt": "1 + 1 =", "metadata": {"answer": "2"}}) + "\n"
GRPO, ROLLOUT, SERVER = "grpo", "rollout", "rollout.vllm.server"
"""Sections as the configuration names them."""


Content = str | bytes | Callable[[bytes], bytes] | None
"""What a file holds, or how it is changed; None: it is deleted."""


class Mistake(NamedTuple):
    """What somebody does, and what is answered: ``code``, ``key``, and a part of the remedy."""

    code: str
    key: str
    remedy: str
    setting: tuple[str, ...] = ()
    files: Mapping[str, Content] = MappingProxyType({})
    command: str = "check run.yaml"


def row(**fields: object) -> dict[str, Content]:
    return {"train.jsonl": json.dumps(fields) + "\n"}


def one_reward(function: str) -> tuple[str, ...]:
    return (f"grpo.rewards=[{{function: '{function}'}}]",)


def served(url: str, port: str) -> tuple[str, ...]:
    server = f"{{base_url: {url}, group_port: {port}}}"
    return ("rollout.rollout_backend=vllm", "rollout.vllm.mode=server", f"rollout.vllm.server={server}")


LORA = "tuner.train_type=lora"
MISTAKES = {
    # the file
    "no such file": Mistake("config-file-missing", "rnu.yaml", "Name a YAML file", command="check rnu.yaml"),
    "a directory": Mistake("config-file-missing", "m", "Name a YAML file", command="check m"),
    "an empty file": Mistake("not-a-mapping", "run.yaml", "key: value", files={"run.yaml": ""}),
    "a tab": Mistake("yaml-malformed", "run.yaml", "Correct the YAML", files={"run.yaml": "model:\n\tmodel: m\n"}),
    "another encoding": Mistake("config-file-missing", "run.yaml", "UTF-8", files={"run.yaml": b"model: {m: \xe9}"}),
    # keys and values
    "a typo in a key": Mistake("unknown-key", "training.max_step", "training.max_steps", ("training.max_step=3",)),
    "a key without its section": Mistake("unknown-key", "max_steps", "training.max_steps", ("max_steps=3",)),
    "TRL's group size": Mistake("unknown-key", f"{GRPO}.group_size", "num_generations", ("grpo.group_size=4",)),
    "TRL's weight of KL": Mistake("unknown-key", f"{GRPO}.kl_coef", "grpo.beta", ("grpo.kl_coef=0.1",)),
    "a key of transformers": Mistake("unknown-key", "training.do_eval", "Remove it", ("training.do_eval=true",)),
    "no = in --set": Mistake("override-malformed", "training.seed", "a.b.c=value", ("training.seed",)),
    "a model as a text": Mistake("wrong-type", "model", "model: {model: m}", ("model=m",)),
    "a text for a number": Mistake("wrong-type", "training.max_steps", "of that type", ("training.max_steps=many",)),
    "a variant's typo": Mistake("not-a-choice", "custom.trainer_variant", "one of", ("custom.trainer_variant=gropo",)),
    "a backend's typo": Mistake("not-a-choice", f"{ROLLOUT}.rollout_backend", "one", ("rollout.rollout_backend=vlm",)),
    "an optimizer's typo": Mistake("not-a-choice", "training.optim", "adamw_torch?", ("training.optim=adamw",)),
    "a schedule's typo": Mistake(
        "not-a-choice", "training.lr_scheduler_type", "cosine?", ("training.lr_scheduler_type=cosin",)
    ),
    "a reporter's typo": Mistake("not-a-choice", "training.report_to.0", "one of", ("training.report_to=wanbd",)),
    "a dtype's short name": Mistake("not-a-choice", "model.torch_dtype", "one of", ("model.torch_dtype=bf16",)),
    "two precisions": Mistake(
        "two-precisions",
        "training.bf16",
        "Keep one",
        ("training.bf16=true", "training.extra_arguments.fp16=true"),
    ),
    "a rate below 0": Mistake("out-of-range", "training.learning_rate", "range", ("training.learning_rate=-1",)),
    "saving every 0 steps": Mistake("out-of-range", "training.save_steps", "range", ("training.save_steps=0",)),
    "a strategy's typo": Mistake(
        "strategy-unknown", "training.strategy", "deepspeed_zero3", ("training.strategy=zero3",)
    ),
    # the model
    "no such model": Mistake("model-directory-missing", "model.model", "hub", ("model.model=mm",)),
    "a model that was not downloaded": Mistake(
        "model-directory-missing", "model.model", "download the model", ("model.model=who/none",)
    ),
    "no config.json": Mistake("model-file-missing", "model.model", "Save the model", files={"m/config.json": None}),
    "config.json cut": Mistake("model-file-missing", "model.model", "Save the model", files={"m/config.json": "{"}),
    "no tokenizer": Mistake("model-file-missing", "model.model", "tokenizer", files={"m/tokenizer.json": None}),
    "no weights": Mistake("weights-missing", "model.model", "Save the model", files={"m/model.safetensors": None}),
    "weights cut": Mistake(
        "weights-damaged", "model.model", "Download", files={"m/model.safetensors": lambda whole: whole[:9000]}
    ),
    "no chat template": Mistake(
        "prompt-not-rendered", "train.jsonl:1", "another template", files={"m/chat_template.jinja": None}
    ),
    "attention that is not installed": Mistake(
        "attention-missing", "model.attn_impl", "sdpa", ("model.attn_impl=flash_attention_2",)
    ),
    "a model that is too short": Mistake("model-too-short", "global_max_length", "Lower", ("global_max_length=9999",)),
    # adapters
    "a pattern without a match": Mistake(
        "adapter-targets-nothing", "tuner.target_regex", "q_proj", (LORA, "tuner.target_regex=q_prj")
    ),
    "a rank of 0": Mistake("out-of-range", "tuner.lora_rank", "range", (LORA, "tuner.lora_rank=0")),
    "qlora": Mistake("not-a-choice", "tuner.train_type", "one of", ("tuner.train_type=qlora",)),
    "no such adapter": Mistake("model-directory-missing", "model.adapter", "adapter", (LORA, "model.adapter=a")),
    "a frozen tower of a text model": Mistake(
        "nothing-frozen", "tuner.freeze_vit", "false", ("tuner.freeze_vit=true",)
    ),
    # the data
    "no such data": Mistake("data-file-missing", "custom.train_jsonl", "JSONL", files={"train.jsonl": None}),
    "a directory of data": Mistake("data-file-missing", "custom.train_jsonl", "JSONL", ("custom.train_jsonl=m",)),
    "no such evaluation data": Mistake("data-file-missing", "custom.val_jsonl", "JSONL", ("custom.val_jsonl=v.jsonl",)),
    "no data": Mistake("dataset-empty", "train.jsonl", "one per line", files={"train.jsonl": ""}),
    "blank lines alone": Mistake("dataset-empty", "train.jsonl", "one per line", files={"train.jsonl": "\n\n"}),
    "a line cut off": Mistake("line-not-json", "train.jsonl:2", "per line", files={"train.jsonl": f"{ROW}{ROW[:9]}\n"}),
    "a list": Mistake("field-type", "train.jsonl:1", "object per line", files={"train.jsonl": "[1]\n"}),
    "another name of the prompt": Mistake(
        "field-missing", "train.jsonl:1", "Rename question to prompt", files=row(question="1 + 1?", answer="2")
    ),
    "one image": Mistake("field-unknown", "train.jsonl:1", "Rename it to images", files=row(prompt="a", image="a.png")),
    "no such image": Mistake("image-missing", "train.jsonl:1", "", files=row(prompt="a", images=["a.png"])),
    "an empty prompt": Mistake("field-type", "train.jsonl:1", "Correct the value", files=row(prompt="")),
    "a role's typo": Mistake(
        "chat-malformed", "train.jsonl:1", '"role": "user"', files=row(messages=[{"role": "usr", "content": "a"}])
    ),
    "the answer within the chat": Mistake(
        "chat-malformed",
        "train.jsonl:1",
        "below metadata",
        files=row(messages=[{"role": "user", "content": "a"}, {"role": "assistant", "content": "b"}]),
    ),
    "two data sets": Mistake(
        "two-data-sets", "custom.train_jsonl", "Keep one", ("custom.dataset={source: who/any, columns: {prompt: q}}",)
    ),
    # rewards
    "a bare name": Mistake("wrong-type", f"{GRPO}.rewards.0", "{function: a:b}", ("grpo.rewards=['a:b']",)),
    "no such module": Mistake("reward-unknown", f"{GRPO}.rewards.0.function", "directory", one_reward("nowhere:right")),
    "a function's typo": Mistake(
        "reward-unknown", f"{GRPO}.rewards.0.function", "newcomer_rewards:right?", one_reward("newcomer_rewards:wright")
    ),
    "a dot for the colon": Mistake("reward-malformed", f"{GRPO}.rewards.0.function", "module:fun", one_reward("a.b")),
    "a syntax error": Mistake(
        "reward-unknown",
        f"{GRPO}.rewards.0.function",
        "import newcomer_broken",
        one_reward("newcomer_broken:f"),
        {"newcomer_broken.py": "def f(:\n"},
    ),
    "a package that is not there": Mistake(
        "reward-unknown", f"{GRPO}.rewards.0.function", "pip install trl", one_reward("trl.rewards:accuracy_reward")
    ),
    "no rewards": Mistake("rewards-missing", f"{GRPO}.rewards", "package.module:function", ("grpo.rewards=[]",)),
    "a reward that raises": Mistake(
        "reward-fails", f"{GRPO}.rewards", "has answer", one_reward("newcomer_rewards:needs_key")
    ),
    "a reward that returns None": Mistake(
        "reward-fails", f"{GRPO}.rewards", "Correct the function", one_reward("newcomer_rewards:forgets")
    ),
    "a reward that misses a column": Mistake(
        "reward-fails", f"{GRPO}.rewards", "has answer", one_reward("newcomer_rewards:needs_column")
    ),
    "one completion": Mistake("group-too-small", f"{GRPO}.num_generations", "2 or more", ("grpo.num_generations=1",)),
    "greedy completions": Mistake(
        "group-not-sampled", f"{ROLLOUT}.decoding.temperature", "Set it to 1", ("rollout.decoding.temperature=0",)
    ),
    "no such callback": Mistake(
        "callback-unknown", "training.callbacks.0", "directory", ("training.callbacks=['a:b']",)
    ),
    # lengths and packages
    "answers longer than all": Mistake(
        "response-too-long", "global_max_length", "lower max_new_tokens", ("rollout.max_new_tokens=100",)
    ),
    "prompts longer than all": Mistake(
        "prompt-too-long", "global_max_length", "overlong", files=row(prompt="1" * 90, metadata={"answer": "2"})
    ),
    "wandb without a key": Mistake(
        "reporter-without-key", "training.report_to", "wandb login", ("training.report_to=wandb",)
    ),
    **{
        f"{name}, which is not installed": Mistake(
            "optimizer-refused", "training.optim", said, (f"training.optim={name}",)
        )
        for name, said in {
            "adamw_8bit": "adamw_torch",
            "adamw_torch_4bit": "pip install torchao",
            "grokadamw": "pip install grokadamw",
            "adamw_torch_npu_fused": "adamw_torch",
        }.items()
    },
    # servers
    "no server named": Mistake(
        "connection-form-missing", SERVER, "base_url", ("rollout.rollout_backend=vllm", "rollout.vllm.mode=server")
    ),
    "no scheme": Mistake("base-url-invalid", f"{SERVER}.base_url", "http://", served("'h:8000'", "51216")),
    "a route of the server": Mistake(
        "base-url-invalid", f"{SERVER}.base_url", "routes are added", served("http://h:8000/v1", "51216")
    ),
    "one port for both": Mistake(
        "group-port-shared", f"{SERVER}.group_port", "another free port", served("http://127.0.0.1:8000", "8000")
    ),
    "a server twice": Mistake(
        "server-named-twice", f"{SERVER}.base_url", "once", served("[http://h:8000, http://h:8000]", "51216")
    ),
    "fewer ports than servers": Mistake(
        "pairing-length-mismatch", f"{SERVER}.group_port", "one port", served("[http://h:1, http://h:2]", "[51216]")
    ),
    # runs
    "another path": Mistake(
        "resume-of-path", "--resume", "Leave out/checkpoint-3 out", command="train run.yaml --resume out/checkpoint-3"
    ),
    "a file in the directory's place": Mistake(
        "output-dir-not-writable", "training.output_dir", "directory", files={"out": ""}, command="train run.yaml"
    ),
    "no run to evaluate": Mistake("not-a-run", "CONFIG|RUN", "training.output_dir", command="eval out"),
    "no run to export": Mistake("not-a-run", "RUN", "training.output_dir", command="export out model"),
    "no run to show": Mistake("journal-missing", "out/journal.jsonl", "directory of a run", command="page out"),
    "no run to compare": Mistake("journal-missing", "a/journal.jsonl", "directory of a run", command="compare a b"),
    "GPUs in words": Mistake("gpu-list-invalid", "--gpus", "0,1,2", command="check run.yaml --gpus two"),
    "no such COCO file": Mistake(
        "file-missing", "INPUT", "instances JSON", command="data convert none.json out.jsonl --from coco"
    ),
}


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return Path(shutil.copytree(ROOT / "fixtures/models/arithmetic", tmp_path_factory.mktemp("newcomer") / "m"))


@pytest.fixture
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, model: Path) -> Path:
    monkeypatch.chdir(tmp_path)
    monkeypatch.syspath_prepend(tmp_path)
    monkeypatch.setenv("HF_HUB_OFFLINE", "1")
    monkeypatch.setenv("NETRC", str(tmp_path / "none"))
    for name in ("WANDB_API_KEY", "WANDB_MODE", "WANDB_DISABLED"):
        monkeypatch.delenv(name, raising=False)
    shutil.copytree(model, "m")
    shutil.copy(wrong_rewards.__file__, "newcomer_rewards.py")
    for name, text in {"run.yaml": CONFIG, "train.jsonl": ROW}.items():
        (tmp_path / name).write_text(text)
    return tmp_path


@pytest.mark.scenario(clauses=["configuration/check-refuses-what-must-fail#3"])
@pytest.mark.parametrize("mistake", MISTAKES.values(), ids=MISTAKES.keys())
def test_a_mistake_is_named_with_what_to_do(folder: Path, capsys: pytest.CaptureFixture[str], mistake: Mistake) -> None:
    for name, content in mistake.files.items():
        path = folder / name
        if content is None:
            path.unlink()
        elif callable(content):
            path.write_bytes(content(path.read_bytes()))
        else:
            path.write_bytes(content.encode() if isinstance(content, str) else content)
    words = mistake.command.split()
    status = main([*words, *(word for one in mistake.setting for word in ("--set", one))])
    said = capsys.readouterr().err
    assert status == 1, said
    assert "Traceback" not in said
    (code, key, problem, remedy), *others = re.findall(
        r"^  \d+\. \[([\w-]+)\] (\S+): (.+)\n +(.+)$", said, re.MULTILINE
    )
    assert not others, said
    assert (code, key) == (mistake.code, mistake.key), said
    assert mistake.remedy in f"{problem} {remedy}"
    assert not (folder / "out").is_dir(), "nothing begins"


def test_a_run_is_continued_or_begun_again(folder: Path, capsys: pytest.CaptureFixture[str]) -> None:
    for command in ("train", "up"):
        with pytest.raises(SystemExit, match="2"):
            main([command, "run.yaml", "--resume", "--overwrite"])
        assert "--overwrite: not allowed with argument --resume" in capsys.readouterr().err
