"""SFT on chats: labels are those of TRL's SFTTrainer (``fixtures/trl/record_sft.py``), losses those of transformers."""

import json
from functools import cache

import pytest
import torch

from conformance.doubles.configs import config_with, refusal_of
from conformance.doubles.digits import ROOT
from conformance.doubles.refusals import refused
from conformance.doubles.small_run import KeepsNothing, assembled
from conformance.tools.tokenizers import fetch_tokenizer
from rollmatch.config import load_config
from rollmatch.data import load_samples
from rollmatch.data.jsonl import SystemMessages
from rollmatch.data.splits import load_split
from rollmatch.model.template import Template, TemplateOptions
from rollmatch.records import Rollout
from rollmatch.run.objectives import make_objective

RECORDED = json.loads((ROOT / "fixtures/trl/sft.json").read_text())["tokenizers"]
ANSWERED = SystemMessages(chats="", answered=True)
MODEL = ROOT / "fixtures/models/arithmetic"
SUMS = (("17 + 4 =", "88"), ("3 + 3 =", "51"), ("20 + 22 =", "7"), ("1 + 1 =", "90"), ("5 + 9 =", "33"))
"""With other answers than the model gives."""


@cache
def template(name, **chat):
    options = TemplateOptions(chat=chat, coordinates=False, images=False)
    return Template(fetch_tokenizer(name), system="", user="?", any_chat=True, options=options)


def samples_of(folder, records):
    path = folder / "chats.jsonl"
    path.write_text("".join(json.dumps(record) + "\n" for record in records))
    return load_samples(path, systems=ANSWERED)


def labelled(used, sample):
    """Ids and labels of the sample's segment."""
    objective = make_objective(config_with("custom.trainer_variant=sft", "~.answer_format=text"), used)
    prompt = used.prompt_token_ids(sample)
    nothing = Rollout(
        request_id="", prompt_token_ids=prompt, response_token_ids=(), stop_id=used.vocabulary.stop_id, policy_version=0
    )
    ((segment,),) = objective.make_segments([sample], [nothing], None).segments
    supervision = objective.supervise([segment], starts=[0], num_tokens=segment.encoded_len)
    return list(segment.token_ids), list(supervision.labels)


@pytest.mark.scenario(
    "target/the-labels-of-a-chat-are-trl-s", clauses=["target/chats-are-taught-by-the-turns-of-the-assistant#1,2"]
)
def test_labels_are_those_of_trl(tmp_path):
    rows = RECORDED["smollm2"]
    samples = samples_of(tmp_path, [{"messages": chat} for chat in rows["chats"]])
    for place, (sample, row) in enumerate(zip(samples, rows["assistant"], strict=True)):
        ids, labels = labelled(template("smollm2"), sample)
        if place == 1:  # the answer begins with spaces, which TRL merges with the prompt's last token
            assert tuple(ids[: len(template("smollm2").prompt_token_ids(sample))]) == (
                template("smollm2").prompt_token_ids(sample)
            )
            continue
        assert ids == row["ids"][: len(ids)]
        assert labels == row["labels"][: len(ids)]
        assert set(row["labels"][len(ids) :]) <= {-100}


@pytest.mark.parametrize("name", ["smollm2", "qwen3"])
def test_labels_of_prompt_and_completion_are_those_of_trl_up_to_the_stop_token(tmp_path, name):
    """TRL labels what the template writes behind the stop token, too, which no response holds."""
    rows = RECORDED[name]
    records = [{"prompt": chat[:-1], "completion": chat[-1:]} for chat in rows["chats"]]
    for place, sample in enumerate(samples_of(tmp_path, records)):
        used, row = template(name), rows["completion"][place]
        ids, labels = labelled(used, sample)
        last = max(at for at, label in enumerate(labels) if label == -100)
        assert ids[-1] == labels[-1] == used.vocabulary.stop_id
        if place != 1 or name == "qwen3":
            assert ids[last + 1 :] == row["ids"][last + 1 : len(ids)]
            assert next(at for at, label in enumerate(row["labels"]) if label != -100) == last + 1


def test_texts_and_chats_say_the_same(tmp_path):
    records = [
        {"prompt": "2 + 2?", "completion": "4"},
        {"prompt": [{"role": "user", "content": "2 + 2?"}], "completion": [{"role": "assistant", "content": "4"}]},
        {"messages": [{"role": "user", "content": "2 + 2?"}, {"role": "assistant", "content": "4"}]},
    ]
    first, *others = [labelled(template("smollm2"), sample) for sample in samples_of(tmp_path, records)]
    assert others == [first, first]


def test_behind_a_prompt_that_is_cut_the_last_turn_is_taught_with_its_end(tmp_path):
    chat = [("user", f"{SUMS[0][0]} " * 5), ("assistant", "21"), ("user", "3 + 3 ="), ("assistant", "6")]
    (sample,) = samples_of(tmp_path, [{"messages": [{"role": role, "content": text} for role, text in chat]}])

    def cut_at(limit):
        options = TemplateOptions(coordinates=False, images=False, max_prompt_len=limit)
        return labelled(Template(MODEL, system="", user="?", any_chat=True, options=options), sample)

    whole, labels = cut_at(None)
    start = max(place for place, label in enumerate(labels) if label == -100) + 1
    for limit in (start - 1, start - 9):
        ids, found = cut_at(limit)
        assert (ids[limit:], found) == (whole[start:], [-100] * limit + whole[start:])


@pytest.mark.parametrize(
    ("record", "problem"),
    [
        ({"prompt": "2 + 2?"}, "there is no answer"),
        ({"messages": [{"role": "user", "content": "2 + 2?"}]}, "the last message is of role user"),
        ({"messages": [{"role": "assistant", "content": "4"}]}, "no message is the user's"),
        ({"prompt": "2 + 2?", "completion": 4}, "messages[1].content is no text"),
    ],
)
def test_a_record_without_an_answer_is_refused(tmp_path, record, problem):
    with refused("chat-malformed", f"{tmp_path}/chats.jsonl:1", problem=problem):
        samples_of(tmp_path, [record])


@pytest.mark.parametrize("column", ["answer", "output"])
def test_an_answer_by_another_name_is_named(tmp_path, column):
    with refused("chat-malformed", problem="there is no answer", remedy=f"Rename {column} to completion."):
        samples_of(tmp_path, [{"prompt": "2 + 2?", column: "4"}])


@pytest.mark.scenario(
    "target/an-earlier-turn-that-is-rendered-otherwise-is-refused",
    clauses=["target/chats-are-taught-by-the-turns-of-the-assistant#3"],
)
def test_a_template_that_writes_an_earlier_turn_otherwise_is_refused(tmp_path):
    rows = RECORDED["qwen3"]["chats"]
    one, two = samples_of(tmp_path, [{"messages": rows[0]}, {"messages": rows[2]}])
    used = template("qwen3", enable_thinking=False)
    assert used.answered_chat(one).turns
    with refused("answer-not-rendered", f"{tmp_path}/chats.jsonl:2", problem="messages[1]"):
        used.answered_chat(two)


@pytest.mark.scenario(clauses=["target/chats-are-taught-by-the-turns-of-the-assistant#5"])
def test_the_format_is_refused_for_other_variants():
    key = "custom.extra.rollout_matching.answer_format"
    assert refusal_of("rollout.answer_format=text") == ("answer-format-unused", key)


@pytest.fixture(scope="module")
def taught(tmp_path_factory):
    """A trainer of 16 steps on five sums, which it evaluates before and after."""
    folder = tmp_path_factory.mktemp("chats")
    path = folder / "sums.jsonl"
    path.write_text("".join(json.dumps({"prompt": asked, "completion": said}) + "\n" for asked, said in SUMS))
    sets = [
        *(f"model.model={MODEL}", f"training.output_dir={folder}/run", "custom.trainer_variant=sft"),
        *(f"custom.{name}_jsonl={path}" for name in ("train", "val")),
        *("rollout.answer_format=text", "rollout.rollout_backend=hf", "rollout.rollout_generate_batch_size=5"),
        *("rollout.decoding.temperature=0.5", "training.max_steps=16", "training.per_device_train_batch_size=5"),
        *("training.learning_rate=3e-3", "training.report_to=none", "grpo.rewards=[]", "training.learner_threads=1"),
    ]
    config = load_config(ROOT / "fixtures/arithmetic/grpo.yaml", sets)
    samples = load_split(config.custom, "train")
    trainer = assembled(config, samples, samples, callbacks=[KeepsNothing()])
    return trainer, samples


@pytest.mark.scenario(
    "target/the-loss-of-held-out-answers", clauses=["target/chats-are-taught-by-the-turns-of-the-assistant#4"]
)
def test_the_loss_of_held_out_answers_is_that_of_transformers_and_falls(taught):
    trainer, samples = taught
    used = trainer.source.template
    total, count = 0.0, 0
    for sample in samples:
        ids, labels = labelled(used, sample)
        with torch.no_grad():
            loss = trainer.model(input_ids=torch.tensor([ids]), labels=torch.tensor([labels])).loss
        num = sum(label != -100 for label in labels)
        total, count = total + float(loss) * num, count + num
    before = trainer.evaluate()
    assert before["eval_loss"] == pytest.approx(total / count, rel=1e-5)
    trainer.train()
    after = trainer.evaluate()
    assert after["eval_loss"] < 0.2 * before["eval_loss"]
    assert (before["eval_exact"], after["eval_exact"]) == (0.0, 1.0)


@pytest.mark.parametrize("columns", ["{messages: messages}", "{prompt: prompt, completion: completion}"])
def test_chats_of_a_data_set_are_those_of_a_file(tmp_path, columns):
    """Arrow fills what a message lacks with null."""
    datasets = pytest.importorskip("datasets")
    chats = [chat for chat in RECORDED["smollm2"]["chats"] if len(chat) < 4]
    chats[0] = [*chats[0][:-1], chats[0][-1] | {"name": "adder"}]
    rows = [{"messages": chat, "prompt": chat[:-1], "completion": chat[-1:]} for chat in chats]
    datasets.Dataset.from_list(rows).to_parquet(str(tmp_path / "chats.parquet"))
    config = config_with(
        *(
            "custom.trainer_variant=sft",
            "rollout.answer_format=text",
            "custom.train_jsonl=null",
            "custom.val_jsonl=null",
        ),
        f"custom.dataset={{source: parquet, train: {tmp_path}/chats.parquet, val: null, columns: {columns}}}",
    )
    found = [labelled(template("smollm2"), sample) for sample in load_split(config.custom, "train")]
    written = samples_of(tmp_path, [{"messages": chat} for chat in chats])
    assert found == [labelled(template("smollm2"), sample) for sample in written]
