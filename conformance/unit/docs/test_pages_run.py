"""Configurations and commands of all pages work as they are printed, in a directory that holds what they name."""

import json
import math
import re
import shlex
import shutil
import tomllib

import pytest
from datasets import Dataset, Features, Image, List, Value

from conformance.doubles.digits import ROOT
from conformance.judge.servers import command as judge
from conformance.judge.trainers import command as judge_trainer
from conformance.judge.vectors import command as vectors
from rollmatch.cli.main import main, make_parser
from rollmatch.journal import read_journal

PAGES = sorted([*(ROOT / "docs").rglob("*.md"), ROOT / "README.md", ROOT / "CONTRIBUTING.md"])
MODELS = {
    "arithmetic": ("path/to/your-model", "Qwen/Qwen3-0.6B", "organization/larger"),
    "digits": ("models/qwen3-vl-coords", "runs/stage1"),
}
"""Model of the fixtures -> names in the pages that stand for it."""
MODEL = """
global_max_length: 4096
training: {{output_dir: runs/other}}
model: {{model: {name}}}
"""
DATA = "custom: {{trainer_variant: {variant}, train_jsonl: {folder}train.jsonl, val_jsonl: {folder}val.jsonl}}\n"
TEXT = MODEL.format(name="path/to/your-model") + DATA.format(variant="grpo", folder="")
REWARDED = TEXT + 'grpo: {rewards: [{function: "my_rewards:correct"}]}\n'
IMAGES = MODEL.format(name="models/qwen3-vl-coords")
SCENES = IMAGES + DATA.format(variant="rollout_matching_sft", folder="data/")
BASES = {
    "concepts/overlap.md": (REWARDED, TEXT),
    "guides/detector.md": (IMAGES + "custom: {trainer_variant: sft}\n", None, None, SCENES),
    "guides/distill.md": (TEXT,),
    "guides/grpo.md": (TEXT,),
    "guides/large-models.md": (REWARDED, REWARDED),
    "guides/machines.md": (REWARDED,),
    "guides/servers.md": (REWARDED, REWARDED),
    "guides/vineppo.md": (TEXT, TEXT),
}
"""Page -> what its configurations extend, in their order; None: nothing, as in all other pages."""
TOOL_TEMPLATE = """{%- if tools %}<|im_start|>system
{{ tools | tojson }}<|im_end|>
{% endif %}{%- for message in messages %}<|im_start|>{{ message.role }}
{{ message.content }}{% for call in message.tool_calls or [] %}<tool_call>
{{ call.function | tojson }}
</tool_call>{% endfor %}<|im_end|>
{% endfor %}{%- if add_generation_prompt %}<|im_start|>assistant
{% endif %}"""
MAZE = """
class Maze:
    def __init__(self, size=2):
        self.size, self.cell = size, 0

    def reset(self, sample, rng):
        self.cell = 0
        return "cell 0"

    def step(self, action):
        self.cell += 1
        return f"cell {self.cell}", 0.0, self.cell == self.size, False

    def clone(self, rng):
        return copy.copy(self)

    def fingerprint(self):
        return self.cell
"""
SHORT = "\n\ndef short(answer, sample):\n    return float(len(answer) < 8)\n"


def blocks_of(page, language=""):
    """The code blocks of a page that are marked with this language."""
    text = (ROOT / page).read_text(encoding="utf-8")
    found = re.findall(r"^```(\w*)\n(.*?)^```$", text, re.DOTALL | re.MULTILINE)
    return [block for marked, block in found if marked == language]


def python_of(page, first):
    [found] = [block for block in blocks_of(page, "python") if block.startswith(first)]
    return found


def write_models(place):
    for model, names in MODELS.items():
        for name in names:
            shutil.copytree(ROOT / "fixtures/models" / model, place / name)
            described = json.loads((place / name / "config.json").read_text())
            described.get("text_config", described)["max_position_embeddings"] = 32768
            (place / name / "config.json").write_text(json.dumps(described))
    (place / "Qwen/Qwen3-0.6B/chat_template.jinja").write_text(TOOL_TEMPLATE)


def write_data(place):
    [sample] = set(re.findall(r'# (\{"prompt": "2 \+ 2.*\})', (ROOT / "README.md").read_text(encoding="utf-8")))
    boxes = {"bbox": List(List(Value("int64"))), "category": List(Value("string"))}
    features = Features({"image": Image(), "objects": boxes})
    (place / "cppe-5").mkdir()
    (place / "data").mkdir()
    for split, as_table in (("train", "train"), ("val", "test")):
        (place / f"{split}.jsonl").write_text(f"{sample}\n")
        digits = ROOT / "fixtures/digits"
        scene = json.loads((digits / f"{split}.jsonl").read_text().splitlines()[0])
        scene["images"] = [str(digits / scene["images"][0])]
        (place / f"data/{split}.jsonl").write_text(f"{json.dumps(scene)}\n")
        row = {"image": scene["images"][0], "objects": {"bbox": [[10, 20, 30, 40]], "category": ["mask"]}}
        Dataset.from_list([row], features=features).to_parquet(place / f"cppe-5/{as_table}.parquet")


@pytest.fixture(scope="module")
def place(tmp_path_factory):
    """A directory with the models, data and functions that the pages name."""
    place = tmp_path_factory.mktemp("reader")
    write_models(place)
    write_data(place)
    (place / "my_rewards.py").write_text(python_of("docs/guides/grpo.md", "# my_rewards.py") + SHORT)
    (place / "my_tools.py").write_text(python_of("docs/guides/agents.md", "# my_tools.py"))
    (place / "my_callbacks.py").write_text("from transformers import TrainerCallback as Notify\n")
    (place / "my_package").mkdir()
    for name in ("my_envs.py", "my_package/mazes.py"):
        (place / name).write_text(f"import copy\n{MAZE}")
    return place


@pytest.fixture
def here(place, monkeypatch):
    monkeypatch.chdir(place)
    monkeypatch.syspath_prepend(str(place))
    monkeypatch.setenv("WANDB_MODE", "offline")
    return place


def configurations():
    for page in PAGES:
        name = page.relative_to(ROOT / "docs").as_posix() if page.is_relative_to(ROOT / "docs") else page.name
        blocks = blocks_of(page, "yaml")
        yield from (
            pytest.param(*each, id=f"{name}-{index}")
            for index, each in enumerate(zip(blocks, BASES.get(name, [None] * len(blocks)), strict=True))
        )


def write_configuration(here, block, base):
    """The name of its file, beside the files that it names."""
    [name, *_] = [*re.findall(r"^# (\S+\.yaml)$", block, re.MULTILINE), "my.yaml"]
    (here / "base.yaml").write_text(base or "")
    (here / "servers.json").write_text("".join(blocks_of("docs/guides/servers.md", "json")))
    block = block.replace("/shared/servers.json", "servers.json")
    (here / name).write_text(block if base is None else f"extends: base.yaml\n{block}")
    return name


@pytest.mark.parametrize(("block", "base"), [*configurations()])
def test_each_configuration_passes_the_check(here, capsys, block, base):
    name = write_configuration(here, block, base)
    quick = ["--set", "environment.processes=0"] if "processes:" in block else []  # each would load torch
    assert main(["check", name, *quick]) == 0, capsys.readouterr().err


def typed(page):
    """(command line, whether it stands in a block) of a page: lines of unmarked blocks, and what is set as code."""
    for block in blocks_of(page):
        yield from ((line.strip(), True) for line in block.replace("\\\n", " ").splitlines())
    text = re.sub(r"^```.*?^```$", "", page.read_text(encoding="utf-8"), flags=re.DOTALL | re.MULTILINE)
    yield from ((code, False) for code in re.findall(r"`([^`\n]+)`", text))


COMMANDS = sorted({(page.name, *command) for page in PAGES for command in typed(page)})
OURS = re.compile(r"(?:^|[\s'/])(?<!from )(?<!import )rollmatch ([a-z].*)")
REST = (
    "",
    "A",
    "A B",
    "A --gpus 1",
    "--model A",
    "add-coords A B",
    "convert A B --from coco",
    "A B --from coco",
    "run A",
    "--dialect trl --model A",
)
"""What follows where the text names a command, or a command with one of its options."""


def words_of(text):
    """What the shell hands to a command; a variable stands for 1."""
    if text.count("'") % 2:  # the end of what another command is handed
        text = text.replace("'", "")
    words = shlex.split(re.sub(r"\$\w+", "1", text), comments=True)
    ends = [place for place, word in enumerate(words) if word in ("--", "...") or word.strip("<>&|") == ""]
    return words[: min(ends, default=len(words))]


def is_parsed(words):
    """Whether the command's own parser accepts them."""
    name, *further = words
    own = {"judge": judge, "judge-trainer": judge_trainer, "vectors": vectors}.get(name)
    try:
        if own is None or further == ["answer"]:
            make_parser().parse_args(words)
        else:
            own.make_parser(name).parse_args(further)
    except SystemExit:
        return False
    return True


def test_each_command_of_ours_has_the_arguments_that_pages_type():
    ours = [(page, words_of(found[1]), is_whole) for page, line, is_whole in COMMANDS if (found := OURS.search(line))]
    assert len(ours) > 100
    wrong = [
        (page, words)
        for page, words, is_whole in ours
        if not any(is_parsed([*words, *rest.split()]) for rest in (REST[:1] if is_whole else REST))
    ]
    assert wrong == []


THEIRS = (
    "verifiers/inference/vllm_serve.py", "vllm.entrypoints.openai.api_server", "prime_rl.entrypoints.inference",
    "scripts/grpo_rollout_server.sh", "scripts/grpo_train_server_mode.sh", "answers.py", "src.sft",
)  # fmt: skip
"""Scripts and modules of others, and one that its page prints."""
OTHER = re.compile(r"^(?:\w+=\S+ )*(?:\.venv/bin/)?(?=(?:make|pip|python|pytest|bash) )")


def faults_of_script(words):
    """What the files of a script, module or test lack: themselves, or an option."""
    name = words[1] if words[0] == "-m" else next(word for word in words if not word.startswith("-"))
    path = ROOT / (name.replace(".", "/") if words[0] == "-m" else name)
    path = path if path.suffix in (".py", ".sh") else path.with_suffix(".py")
    if name in THEIRS or name == "rollmatch":
        return
    if not path.is_file():
        yield name
    else:
        source = path.read_text(encoding="utf-8")
        yield from (word for word in words if re.match("--[a-z]", word) and f'"{word}"' not in source)


def test_other_commands_name_what_is_in_the_repository():
    targets = re.findall(r"^([a-z]+):", (ROOT / "Makefile").read_text(), re.MULTILINE)
    extras = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]["optional-dependencies"]
    wrong, num = [], 0
    for page, line, _ in COMMANDS:
        if (started := OTHER.match(line)) is None:
            continue
        match words_of(line[started.end() :]):
            case ["make", *named]:
                faults = [name for name in named if "=" not in name and name not in targets]
            case ["pip", "install", *named]:
                found = re.findall(r"(?:^| )(?:\.|rollmatch)\[(\S+?)\]", " ".join(named))
                faults = [name for names in found for name in names.split(",") if name not in extras]
            case ["pytest", *named]:
                faults = [name for name in named if "/" in name and not (ROOT / name).exists() and "build/" not in name]
            case ["python" | "bash", *words] if words:
                faults = faults_of_script(words)
            case _:
                faults = []
        num += 1
        wrong += [(page, line, fault) for fault in faults]
    assert wrong == []
    assert num > 60


SMALL = [
    *("--set", "rollout.rollout_backend=hf", "--set", "rollout.max_new_tokens=8", "--set", "training.max_steps=1"),
    *("--set", "training.per_device_train_batch_size=1", "--set", "training.bf16=false"),
    *("--set", "training.report_to=none", "--set", "training.eval_scenes=1"),
]


TRAINED = ("guides/grpo.md", "guides/vineppo.md", "guides/distill.md", "guides/large-models.md")
"""Guides whose configurations need neither servers nor more machines; detector.md and agents.md have their tests."""


@pytest.mark.wide
@pytest.mark.parametrize(
    ("block", "base"), [one for one in configurations() if str(one.id).rpartition("-")[0] in TRAINED]
)
def test_each_configuration_of_a_guide_trains(here, tmp_path, block, base):
    name = write_configuration(here, block, base)
    assert main(["train", name, *SMALL, "--set", f"training.output_dir={tmp_path}/run"]) == 0
    events = [event for event in read_journal(tmp_path / "run/journal.jsonl") if event["event"] == "step"]
    assert [event["step"] for event in events] == [1]
    assert math.isfinite(events[0]["loss"])


def test_no_page_or_remedy_installs_rollmatch_from_an_index():
    """It is installed from its clone."""
    texts = [path.read_text(encoding="utf-8") for path in (*PAGES, *(ROOT / "impl").rglob("*.py"))]
    assert not [found for text in texts for found in re.findall(r"pip install (?:-\S+ )*['\"]?rollmatch.*", text)]


def run(command, *here):
    """A command that pages print, with what is here in place of the words in capitals, and further words."""
    assert any(command in line for _, line, _ in COMMANDS)
    names = iter(here)
    words = [next(names) if word.isupper() else word for word in shlex.split(command)]
    return main([*words[1:], *names])


def test_the_first_run_is_trained_shown_compared_measured_and_exported(here, capsys):
    (here / "my.yaml").write_text(blocks_of("README.md", "yaml")[0])
    assert run("rollmatch train my.yaml", *SMALL) == 0
    assert run("rollmatch page RUN", "runs/first") == 0
    assert run("rollmatch compare RUN RUN", "runs/first", "runs/first", "--out", "compared.html") == 0
    assert run("rollmatch eval runs/first --split val", "--limit", "1") == 0
    assert run("rollmatch export RUN OUT", "runs/first", "exported") == 0
    assert run("rollmatch plan my.yaml --gpus 8", "--gpu", "H100") == 0
    assert run("rollmatch plan my.yaml --gpus 4") == 0
    assert run("rollmatch plan my.yaml --gpus 2 --prompt-tokens 24000 --response-tokens 8000") == 0
    assert run("rollmatch train my.yaml --gpus 6,7", "--dry-run") == 0
    assert run("rollmatch schema") == 0


def test_the_data_of_the_detector_are_converted_and_its_model_gets_coordinates(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    photo = ROOT / "fixtures/digits/train/00000.png"
    coco = {
        "images": [{"id": 1, "file_name": "a.png", "width": 128, "height": 128}],
        "annotations": [{"id": 1, "image_id": 1, "category_id": 1, "bbox": [10, 20, 30, 40]}],
        "categories": [{"id": 1, "name": "cat"}],
    }
    for name, folder in (("train", "images"), ("val", "images"), ("train2017", "train2017")):
        (tmp_path / f"instances_{name}.json").write_text(json.dumps(coco))
        (tmp_path / folder).mkdir(exist_ok=True)
        shutil.copy(photo, tmp_path / folder / "a.png")
    shutil.copytree(tmp_path / "images", tmp_path / "yolo/images/train")
    (tmp_path / "yolo/labels/train").mkdir(parents=True)
    (tmp_path / "yolo/labels/train/a.txt").write_text("0 0.5 0.5 0.2 0.2\n")
    (tmp_path / "data.yaml").write_text("path: yolo\ntrain: images/train\nnames: [cat]\n")
    grounding = {
        "messages": [{"role": "user", "content": "<image>find"}, {"role": "assistant", "content": "<ref-object><bbox>"}]
    }
    grounding |= {"images": [str(photo)], "objects": {"ref": ["cat"], "bbox": [[10, 20, 40, 60]]}}
    (tmp_path / "grounding.jsonl").write_text(f"{json.dumps(grounding)}\n")
    shutil.copytree(ROOT / "fixtures/models/arithmetic", tmp_path / "Qwen/Qwen3-VL-8B-Instruct")
    (tmp_path / "data").mkdir()
    convert, written = "rollmatch data convert", {}
    for command, out in (
        (f"{convert} instances_train.json data/train.jsonl --from coco --images images", "data/train.jsonl"),
        (f"{convert} instances_val.json data/val.jsonl --from coco --images images", "data/val.jsonl"),
        (f"{convert} instances_train2017.json train.jsonl --from coco --images train2017", "train.jsonl"),
        (f"{convert} data.yaml train.jsonl --from yolo --split train", "train.jsonl"),
        (f"{convert} grounding.jsonl train.jsonl --from swift", "train.jsonl"),
    ):
        assert run(command) == 0
        [written[command]] = (tmp_path / out).read_text().splitlines()
        (tmp_path / out).unlink()
    assert {json.loads(line)["objects"][0]["desc"] for line in written.values()} == {"cat"}
    assert (
        run(
            "rollmatch model add-coords Qwen/Qwen3-VL-8B-Instruct models/qwen3-vl-coords",
        )
        == 0
    )
