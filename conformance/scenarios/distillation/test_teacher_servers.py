"""Teachers by URL: a server that judges tokens, and servers that cannot."""

import copy
import json
import logging
import math
import time
from types import SimpleNamespace

import pytest
import torch
from transformers import TrainerCallback

from conformance.doubles.digits import ROOT
from conformance.doubles.distilled import (
    DIVERGENCE,
    MODEL,
    PROMPTED,
    asked,
    checked,
    logprobs_of,
    make_trainer,
    samples,
    steps_of,
)
from conformance.doubles.http_server import http_server, read_body, send
from conformance.doubles.instance import free_port
from conformance.doubles.overlapped import attach_servers, note_what_is_learnt
from conformance.doubles.ranks import together
from conformance.doubles.refusals import refused
from conformance.doubles.small_run import weights_of
from conformance.doubles.teacher_server import MAX_LOGPROBS, MAX_MODEL_LEN, TeacherDouble, serving
from rollmatch.dialects.http import ServerRefused
from rollmatch.dialects.vllm.teacher import TeacherServer
from rollmatch.errors import RolloutError
from rollmatch.objectives.distill.teacher import ServerAnswers
from rollmatch.ranks import Ranks
from rollmatch.records import Segment
from rollmatch.rollout.retry import FIRST_WAIT_S

TEACHERS = "custom.extra.distill.teachers="
KEY = "custom.extra.distill.teachers.0.base_url"


def served(url, prompt="{question} {sum}", **more):
    fields = "".join(f", {name}: {value}" for name, value in more.items())
    return f'{TEACHERS}[{{base_url: "{url}", prompt: "{prompt}"{fields}}}]'


def answers_by(url, *, timeout_s):
    return ServerAnswers(server=TeacherServer(url), unexpanded=lambda _, token_ids: token_ids, timeout_s=timeout_s)


@pytest.mark.scenario(
    "distillation/a-server-teaches-what-the-same-model-teaches-here",
    clauses=["distillation/a-teacher-may-be-a-server#1,2"],
)
@pytest.mark.parametrize("loss", [(), DIVERGENCE], ids=["sampled", "divergence"])
def test_a_server_teaches_what_the_same_model_teaches_here(tmp_path, loss):
    two = ("training.max_steps=2", "training.learning_rate=0.001", *loss)
    here = make_trainer(tmp_path / "here", PROMPTED, *two)
    here.train()
    with serving(TeacherDouble(MODEL)) as url:
        there = make_trainer(tmp_path / "there", served(url), *two)
        there.train()
    for name in ("loss", "teacher_kl", "divergence"):
        ours, theirs = ([step[name] for step in steps_of(trainer)] for trainer in (here, there))
        assert theirs == pytest.approx(ours, rel=1e-4, abs=1e-6)
    assert steps_of(here)[0]["teacher_kl"] != 0


@pytest.mark.scenario(clauses=["distillation/a-teacher-may-be-a-server#3"])
def test_a_busy_server_is_asked_again_and_nothing_is_lost(tmp_path, caplog):
    teacher = TeacherDouble(MODEL)
    with serving(teacher) as url, caplog.at_level(logging.WARNING):
        trainer = make_trainer(tmp_path, served(url), *DIVERGENCE)
        teacher.faults = [503, 429]
        trainer.train()
    assert len(teacher.judged) == 16
    assert len([record for record in caplog.records if record.name == "rollmatch.teacher"]) == 2


@pytest.mark.scenario(clauses=["distillation/a-teacher-may-be-a-server#3,4"])
def test_a_server_that_stays_away_ends_the_run_by_name(tmp_path):
    with serving(TeacherDouble(MODEL)) as url:
        trainer = make_trainer(tmp_path, served(url, timeout_s=0.5), *DIVERGENCE)
    with refused("transport-failed", url):
        trainer.train()


def ran_ahead(folder, mode, *overrides, teacher=None):
    """Three steps beside servers that copy the policy; a step ends when ``teacher`` has judged the next window, too."""
    trainer = make_trainer(folder, *DIVERGENCE, "training.max_steps=3", "training.learning_rate=0.001", *overrides)
    attach_servers(trainer, mode)

    class Waits(TrainerCallback):
        def on_pre_optimizer_step(self, args, state, control, **_):
            end = time.monotonic() + 30
            while len(teacher.judged) < 16 * min(3, state.global_step + 2):
                assert time.monotonic() < end, f"{len(teacher.judged)} completions are judged"
                time.sleep(0.01)

    if teacher is not None and mode == "ahead":
        trainer.add_callback(Waits())
    trainer.train()
    if trainer.overlap.prefetch is not None:
        trainer.overlap.prefetch.close()
    return trainer


@pytest.mark.scenario(
    "distillation/a-server-judges-the-next-window-while-the-learner-learns",
    clauses=["distillation/a-teacher-may-be-a-server#6"],
)
def test_a_server_judges_the_next_window_while_the_learner_learns(tmp_path):
    alike = ("training.optim=sgd", "custom.extra.rollout_matching.decoding.top_k=1")  # rounding stays rounding
    here = ran_ahead(tmp_path / "here", "ahead", PROMPTED, *alike)
    teacher, own = TeacherDouble(MODEL), f"{{sum: {samples()[0].metadata['sum']}}}"
    with serving(teacher) as url:
        entries = [served(url, **of).removeprefix(TEACHERS).strip("[]") for of in ({"when": own}, {})]
        there = ran_ahead(tmp_path / "there", "ahead", f"{TEACHERS}[{', '.join(entries)}]", *alike, teacher=teacher)
    assert len(teacher.judged) == 3 * 16, "each completion by the entry that teaches its sample"
    ours, theirs = weights_of(here.model), weights_of(there.model)
    assert all(torch.allclose(theirs[name], weight, atol=1e-5) for name, weight in ours.items())
    for name in ("teacher_kl", "divergence"):
        assert [one[name] for one in steps_of(there)] == pytest.approx([one[name] for one in steps_of(here)], rel=1e-4)


@pytest.mark.scenario(clauses=["distillation/a-teacher-may-be-a-server#6"])
def test_what_is_judged_ahead_is_what_is_judged_in_lockstep(tmp_path):
    """With weights that stay as they are, both ways sample the same completions."""
    found, stays = {}, ("training.learning_rate=0", "custom.extra.rollout_matching.decoding.top_k=1")
    for mode in ("off", "ahead"):
        teacher = TeacherDouble(MODEL)
        with serving(teacher) as url:
            trainer = ran_ahead(tmp_path / mode, mode, served(url), *stays, teacher=teacher)
        shown = ("loss", "teacher_kl", "divergence", "teacher_logprob", "teacher_agree")
        found[mode] = [[one[name] for name in shown] for one in steps_of(trainer)], sorted(teacher.judged)
    assert found["ahead"] == found["off"]


@pytest.mark.scenario(clauses=["distillation/a-teacher-may-be-a-server#7"])
def test_present_weights_teach_when_targets_are_made(tmp_path):
    """By weights of the step that learns, though the completions were written by older ones."""
    itself = PROMPTED.replace(f"model: {MODEL}", "self: true")
    trainer = make_trainer(tmp_path, itself, *DIVERGENCE, "training.max_steps=2", "training.learning_rate=0.001")
    attach_servers(trainer, "ahead")
    note_what_is_learnt(trainer)
    before = []

    class Keeps(TrainerCallback):
        def on_step_begin(self, *_, **__):
            before.append(copy.deepcopy(trainer.model))

    trainer.add_callback(Keeps())
    trainer.train()
    trainer.overlap.prefetch.close()
    assert trainer.ages == [0, 1]
    found = []
    for segment in trainer.learnt[1][1]:
        prompt = asked(trainer.source.template, segment.sample, "{question} {sum}")
        response = segment.token_ids[segment.prompt_len :]
        with torch.no_grad():
            rows = logprobs_of(before[-1].eval(), prompt, response)
        found.append(rows.gather(-1, torch.tensor(response)[:, None]))
    assert steps_of(trainer)[1]["teacher_logprob"] == pytest.approx(torch.cat(found).mean().item(), rel=1e-5)


def without_the_last(body):
    body["choices"][0]["prompt_logprobs"].pop()
    return body


def of_other_tokens(body):
    rows = body["choices"][0]["prompt_logprobs"]
    rows[1:] = [dict(list(row.items())[1:]) for row in rows[1:]]
    return body


def of_a_number_beyond_floats(body):
    next(iter(body["choices"][0]["prompt_logprobs"][-1].values()))["logprob"] = -(10**400)
    return json.dumps(body)


def of_no_number(body):
    next(iter(body["choices"][0]["prompt_logprobs"][-1].values()))["logprob"] = math.nan
    return json.dumps(body)  # as Python's servers write it


@pytest.mark.scenario(clauses=["distillation/a-teacher-may-be-a-server#4"])
@pytest.mark.parametrize(
    "mend",
    [
        without_the_last,
        of_other_tokens,
        of_no_number,
        of_a_number_beyond_floats,
        *(lambda body, answer=answer: answer for answer in ({"choices": []}, [], {"choices": [{}]})),
    ],
)
def test_an_answer_about_other_tokens_ends_the_run(tmp_path, mend):
    teacher = TeacherDouble(MODEL)
    with serving(teacher) as url:
        trainer = make_trainer(tmp_path, served(url), *DIVERGENCE[:2], "custom.extra.distill.top_k=1")
        teacher.mend = mend
        with refused("reply-malformed", url):
            trainer.train()


class Hangs(TeacherDouble):
    """Answers nothing while ``hangs`` is set, or breaks its answer off."""

    hangs = breaks = False

    def answer(self, handler):
        if self.breaks and handler.command == "POST":
            handler.send_response(200)
            handler.send_header("Content-Length", "1000")
            handler.end_headers()
            handler.wfile.write(b"{")
            return
        while self.hangs:
            time.sleep(0.05)
        super().answer(handler)


@pytest.mark.scenario(clauses=["distillation/a-teacher-may-be-a-server#5"])
@pytest.mark.parametrize(
    ("kind", "code"),
    [
        ("hangs", "call-timeout"),
        pytest.param("breaks", "transport-failed", marks=pytest.mark.wide),
        pytest.param("faults", "server-refused", marks=pytest.mark.wide),
    ],
)
def test_a_teacher_that_fails_between_two_steps_leaves_a_checkpoint(tmp_path, kind, code):
    """Resumed, the run continues as if nothing had been."""
    three = (*DIVERGENCE, "training.max_steps=3", "training.learning_rate=0.001")
    teacher = Hangs(MODEL)
    with serving(teacher) as url:
        whole = make_trainer(tmp_path / "whole", served(url), *three)
        whole.train()
        trainer = make_trainer(tmp_path / "cut", served(url, timeout_s=1), *three)

        class Fails(TrainerCallback):
            def on_step_end(self, args, state, control, **_):
                setattr(teacher, kind, [500] * 99 if kind == "faults" else True)
                control.should_save = False

        trainer.add_callback(Fails())
        with refused(code, url):
            trainer.train()
        teacher.hangs = teacher.breaks = False
        teacher.faults = []
        again = make_trainer(tmp_path / "cut", served(url), *three)
        again.train(resume_from_checkpoint=str(tmp_path / "cut/checkpoint-1"))
    ours, theirs = weights_of(whole.model), weights_of(again.model)
    assert all(torch.equal(theirs[name], weight) for name, weight in ours.items())


@pytest.mark.scenario(clauses=["distillation/a-teacher-may-be-a-server#5"])
def test_all_ranks_end_where_the_teacher_of_one_fails():
    teacher = TeacherDouble(MODEL)
    segment = Segment(sample=samples()[0], policy_version=1, token_ids=(1, 2, 3), prompt_len=1, prefix_len=2)
    with serving(teacher) as url:
        answers = answers_by(url, timeout_s=0.2)
        away = answers_by(f"http://127.0.0.1:{free_port()}", timeout_s=0.2)

        def ended(ranks):
            context = SimpleNamespace(step=0, ranks=ranks)
            with pytest.raises(RolloutError) as ended:
                (answers, away)[ranks.rank]([segment], context, top_k=1)
            return ended.value.code, ended.value.is_shared

        assert together(2, ended) == [("rank-failed", True), ("transport-failed", True)]


@pytest.mark.scenario(clauses=["distillation/a-teacher-may-be-a-server#5"])
def test_no_call_is_repeated_once_another_has_failed_for_good():
    teacher = TeacherDouble(MODEL)
    asked = []

    def answer(handler):
        asked.append(handler.path)
        teacher.answer(handler)

    teacher.faults = [400] + 99 * [503]
    sample = samples()[0]
    segments = [
        Segment(sample=sample, policy_version=1, token_ids=(1, 2, last), prompt_len=1, prefix_len=2) for last in (3, 4)
    ]
    with http_server(answer) as server:
        answers = answers_by(server.url, timeout_s=30)
        with pytest.raises(ServerRefused) as refusal:
            answers(segments, SimpleNamespace(step=0, ranks=Ranks()), top_k=1)
        assert refusal.value.status == 400
        time.sleep(4 * FIRST_WAIT_S)
        num_asked = len(asked)
        time.sleep(8 * FIRST_WAIT_S)
        assert len(asked) == num_asked


@pytest.mark.scenario(clauses=["distillation/a-teacher-may-be-a-server#9"])
def test_a_server_that_wants_another_key_is_refused():
    def answer(handler):
        read_body(handler)
        send(handler, 401, {"error": "Unauthorized"})

    with http_server(answer) as server:
        (error,) = checked(served(server.url), *DIVERGENCE)
    assert (error.code, error.key) == ("teacher-refused", KEY)
    assert "ROLLMATCH_API_KEY" in error.remedy


@pytest.mark.scenario(clauses=["distillation/a-teacher-may-be-a-server#10"])
@pytest.mark.parametrize(("status", "body"), [(404, {"detail": "Not Found"}), (200, {"text": "x"})])
def test_a_server_that_shows_no_vocabulary_is_refused(status, body):
    teacher = TeacherDouble(MODEL)

    def answer(handler):
        if handler.path != "/detokenize":
            return teacher.answer(handler)
        read_body(handler)
        return send(handler, status, body)

    with http_server(answer) as server:
        (error,) = checked(served(server.url), *DIVERGENCE)
    assert (error.code, error.key) == ("teacher-vocabulary", KEY)
    assert error.remedy


def without_logprobs(body):
    body["choices"][0]["prompt_logprobs"] = None
    return body


@pytest.mark.scenario(
    "distillation/a-server-that-cannot-teach-is-refused-before-a-model-is-loaded",
    clauses=["distillation/a-teacher-may-be-a-server#8,10,11"],
)
def test_a_server_that_cannot_teach_is_refused_before_a_model_is_loaded():
    with serving(TeacherDouble(MODEL)) as url:
        assert checked(served(url), *DIVERGENCE) == []
        many = (*DIVERGENCE, f"custom.extra.distill.top_k={MAX_LOGPROBS + 1}")
        (error,) = checked(served(url), *many)
        assert (error.code, error.key) == ("teacher-without-logprobs", KEY)
        assert f"--max-logprobs {MAX_LOGPROBS + 1}" in error.remedy
        (error,) = checked(served(url, prompt="long " * (MAX_MODEL_LEN // 2)), *DIVERGENCE)
        assert error.code == "teacher-too-short"
        same = (served(url, prompt="x"), *DIVERGENCE, f"global_max_length={2 * MAX_MODEL_LEN}")
        named = "custom.extra.rollout_matching.max_new_tokens"
        (error,) = checked(*same, f"{named}={MAX_MODEL_LEN}")
        room = MAX_MODEL_LEN - 1 - int(error.problem.partition("a prompt of ")[2].split()[0])  # 1 is written there
        assert checked(*same, f"{named}={room}") == []
        (error,) = checked(*same, f"{named}={room + 1}")
        assert error.code == "teacher-too-short"
        (error,) = checked(served(url), "custom.extra.rollout_matching.decoding.temperature=0.7")
        assert (error.code, error.key) == ("teacher-temperature", KEY)
    with serving(TeacherDouble(MODEL, mend=without_logprobs)) as url:
        (error,) = checked(served(url), *DIVERGENCE)
        assert (error.code, error.key) == ("teacher-without-logprobs", KEY)


@pytest.mark.scenario(clauses=["distillation/a-teacher-may-be-a-server#14"])
def test_a_server_that_is_away_is_refused_with_its_key():
    (error,) = checked(served(f"http://127.0.0.1:{free_port()}"), *DIVERGENCE)
    assert (error.code, error.key) == ("teacher-unreachable", KEY)
    assert "resume" not in error.remedy


@pytest.mark.scenario(clauses=["distillation/a-teacher-may-be-a-server#10"])
def test_a_server_with_another_tokenizer_is_refused_as_a_directory_with_it_is():
    other = ROOT / "fixtures/models/digits"
    (here,) = checked(f"{TEACHERS}[{{model: {other}}}]")
    with serving(TeacherDouble(MODEL, tokenizer=other)) as url:
        (there,) = checked(served(url), *DIVERGENCE)
    assert (there.code, there.key) == ("teacher-vocabulary", KEY)
    assert there.problem.removeprefix(url) == here.problem.removeprefix(str(other))
