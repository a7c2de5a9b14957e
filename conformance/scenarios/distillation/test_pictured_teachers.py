"""Teachers by URL that see images: what is sent, what comes back, and servers that cannot."""

from types import SimpleNamespace

import pytest
import torch

from conformance.doubles.digits import MODEL, load_digits, load_model, scenes, template_of, unseen
from conformance.doubles.distilled import steps_of
from conformance.doubles.pictured import PICTURED, forward, served, taught_here
from conformance.doubles.refusals import refused
from conformance.doubles.small_run import make_trainer
from conformance.doubles.teacher_server import MAX_LOGPROBS, TeacherDouble, serving
from rollmatch.dialects.vllm.teacher import JudgedTokens, TeacherServer
from rollmatch.objectives.distill.teacher import ServerAnswers
from rollmatch.ranks import Ranks
from rollmatch.records import Segment
from rollmatch.run.teachers import check_teachers

KEY = "custom.extra.distill.teachers.0.base_url"


def check(url, *overrides, samples=None):
    """What ``rollmatch check`` tries of teachers, on two scenes."""
    check_teachers(load_digits(*PICTURED, served(url), *overrides), template_of(), samples or scenes()[:2])


@pytest.mark.scenario(
    "distillation/a-server-teaches-behind-images-what-the-same-model-teaches-here",
    clauses=["distillation/a-teacher-may-be-a-server#12"],
)
def test_a_server_teaches_behind_images_what_the_same_model_teaches_here(tmp_path):
    teacher = TeacherDouble(MODEL)
    with serving(teacher) as url:
        check(url)
        figures = []
        for name, entry in (("here", taught_here()), ("there", served(url))):
            trainer = make_trainer(tmp_path / name, *PICTURED, entry)
            trainer.train()
            figures.append([steps_of(trainer)[0][figure] for figure in ("loss", "teacher_kl", "divergence")])
    pictured = [ids for ids in teacher.judged if template_of().image_id in ids]
    assert len(pictured) == 1 + 8, "one token by the check, then each completion"
    assert figures[1] == pytest.approx(figures[0], rel=1e-4)
    assert all(figures[0])


@pytest.mark.scenario(clauses=["distillation/a-teacher-may-be-a-server#6,12"])
def test_the_same_tokens_behind_other_images_are_judged_by_their_own():
    """Ahead, too, where an answer waits for the completion that it is about."""
    template, pair, target = template_of(), scenes()[:2], (5, 6, 7)
    prompts = [template.expand(template.prompt_token_ids(one), template.image_features(one)) for one in pair]
    assert prompts[0] == prompts[1]
    segments = [
        Segment(
            sample=one, policy_version=1, token_ids=(*prompt, *target), prompt_len=len(prompt), prefix_len=len(target)
        )
        for one, prompt in zip(pair, prompts, strict=True)
    ]
    with serving(TeacherDouble(MODEL)) as url:
        answers = ServerAnswers(server=TeacherServer(url), unexpanded=template.unexpanded, timeout_s=10)
        answers.begin(0, segments, top_k=1)
        found = answers(segments, SimpleNamespace(step=0, ranks=Ranks()), top_k=1)
    rows = [forward(load_model(), template, one, target) for one in pair]
    expected = [row.gather(-1, torch.tensor(target)[:, None])[:, 0].tolist() for row in rows]
    assert [list(one.logprobs) for one in found] == [pytest.approx(values, abs=1e-4) for values in expected]
    assert expected[0] != pytest.approx(expected[1], abs=1e-2)


class WantsImages(TeacherDouble):
    """Would write a placeholder of an image or a video next, whatever stands before."""

    def distribution(self, logits):
        logits[:, list(template_of().banned_ids)] = logits.max(-1, keepdim=True).values + 2
        return super().distribution(logits)


@pytest.mark.scenario(clauses=["distillation/a-teacher-judges-the-policy-s-own-completions#8"])
def test_what_no_response_contains_is_in_no_distribution_of_a_server():
    template, target = template_of(), (5, 6, 7)
    ids = (8, 9, *target)
    with serving(WantsImages(MODEL)) as url:
        server = TeacherServer(url, excluded_ids=template.banned_ids)
        found = server.teach(JudgedTokens(token_ids=ids, prompt_len=2), top_k=3, timeout_s=10)
    with torch.no_grad():
        logits = load_model()(torch.tensor([ids])).logits[0, 1:-1]
    logits[:, list(template.banned_ids)] = -torch.inf
    rows = logits.log_softmax(-1)
    assert found.logprobs == pytest.approx(rows.gather(-1, torch.tensor(target)[:, None])[:, 0].tolist(), abs=1e-4)
    for top, row in zip(found.top, rows, strict=True):
        values, best = row.topk(3)
        assert [token_id for token_id, _ in top] == best.tolist()
        assert [value for _, value in top] == pytest.approx(values.tolist(), abs=1e-4)


@pytest.mark.scenario(clauses=["distillation/a-teacher-may-be-a-server#8"])
def test_a_server_must_list_as_many_more_tokens_as_no_response_contains():
    num, top_k = len(template_of().banned_ids), "custom.extra.distill.top_k"
    with serving(TeacherDouble(MODEL)) as url:
        check(url, f"{top_k}={MAX_LOGPROBS - num}")
        with refused("teacher-without-logprobs", KEY) as refusal:
            check(url, f"{top_k}={MAX_LOGPROBS - num + 1}")
    assert f"--max-logprobs {MAX_LOGPROBS + 1} " in refusal.value.remedy


class SeesLess(TeacherDouble):
    """Makes a token less of each image."""

    def logprobs_of(self, prompt, num_top, features=None):
        return super().logprobs_of(prompt, num_top, features)[bool(features) :]


@pytest.mark.scenario(
    "distillation/a-server-that-sees-no-images-is-refused-before-a-model-is-loaded",
    clauses=["distillation/a-teacher-may-be-a-server#13"],
)
@pytest.mark.parametrize("teacher", [lambda: TeacherDouble(MODEL, sees=False), lambda: SeesLess(MODEL)])
def test_a_server_that_does_not_judge_behind_images_is_refused(teacher):
    with serving(teacher()) as url:
        with refused("teacher-without-images", KEY) as refusal:
            check(url)
        assert scenes()[0].origin in refusal.value.problem
        assert "--enable-scale-out" in refusal.value.remedy


@pytest.mark.scenario(clauses=["distillation/a-teacher-may-be-a-server#13"])
def test_a_server_that_teaches_no_images_need_not_see_any():
    with serving(TeacherDouble(MODEL, sees=False)) as url:
        check(url, samples=unseen(scenes()[:2]))
