"""Teachers with real engines: an unmodified ``vllm serve``, and our own server."""

import os
import sys
from contextlib import contextmanager

import pytest
import torch

from conformance.doubles.digits import MODEL as DIGITS
from conformance.doubles.digits import load_digits, load_model, scenes, template_of
from conformance.doubles.distilled import DIVERGENCE, MODEL, PROMPTED, checked, make_trainer, steps_of
from conformance.doubles.instance import ENGINE, ENVIRONMENT, free_port, running
from conformance.doubles.pictured import PICTURED, forward, served
from conformance.doubles.processes import Running, start
from conformance.doubles.refusals import refused
from rollmatch.dialects.vllm.teacher import TeacherServer
from rollmatch.objectives.distill.teacher import judged_tokens
from rollmatch.run.teachers import check_teachers

pytestmark = pytest.mark.engine


@contextmanager
def stock(model, tmp_path_factory, *words):
    port, log = free_port(), tmp_path_factory.mktemp("teacher") / "log"
    command = [sys.executable, "-m", "vllm.entrypoints.openai.api_server", "--enforce-eager", *words]
    options = {
        "model": model, "host": "127.0.0.1", "port": port, "dtype": "float32", "max-model-len": 512,
        "max-num-seqs": 16, "kv-cache-memory-bytes": 128 << 20, "max-logprobs": 8,
    }  # fmt: skip
    command += [word for name, value in options.items() for word in (f"--{name}", str(value))]
    server = Running(start(command, log, environment=os.environ | ENVIRONMENT), log)
    try:
        server.wait_healthy(f"http://127.0.0.1:{port}")
        yield f"http://127.0.0.1:{port}"
    finally:
        server.end()


@contextmanager
def ours(model, tmp_path_factory, *_):
    log = tmp_path_factory.mktemp("ours") / "log"
    with running(log, model=str(model), engine_arguments=ENGINE | {"max_logprobs": 8}) as instance:
        yield instance.url


SERVERS = [pytest.param(stock, id="vllm serve", marks=pytest.mark.wide), pytest.param(ours, id="rollmatch serve")]


@pytest.fixture(scope="module", params=SERVERS)
def url(request, tmp_path_factory):
    with request.param(MODEL, tmp_path_factory) as found:
        yield found


@pytest.fixture(scope="module", params=SERVERS)
def url_that_sees(request, tmp_path_factory):
    with request.param(DIGITS, tmp_path_factory, "--enable-scale-out") as found:
        yield found


@pytest.mark.scenario(clauses=["distillation/a-teacher-may-be-a-server#1,2,8"])
def test_a_server_teaches_what_the_same_model_teaches_here(tmp_path, url):
    teachers = f'custom.extra.distill.teachers=[{{base_url: "{url}", prompt: "{{question}} {{sum}}"}}]'
    assert checked(teachers, *DIVERGENCE) == []
    (error,) = checked(teachers, *DIVERGENCE, "custom.extra.distill.top_k=9")
    assert error.code == "teacher-without-logprobs"
    figures = []
    for name, entry in (("here", PROMPTED), ("there", teachers)):
        trainer = make_trainer(tmp_path / name, entry, *DIVERGENCE)
        trainer.train()
        figures.append([steps_of(trainer)[0][figure] for figure in ("teacher_kl", "divergence")])
    assert figures[1] == pytest.approx(figures[0], rel=1e-4)


@pytest.mark.scenario(
    "distillation/a-server-teaches-behind-images-what-the-same-model-teaches-here",
    clauses=[
        "distillation/a-teacher-may-be-a-server#12,13",
        "server-dialects/the-openai-dialect-serves-openai-clients#14",
    ],
)
def test_a_server_judges_behind_images_as_the_same_model_here(url_that_sees):
    """Tokens of true answers, which the model has learnt, behind each of four images."""
    template, model = template_of(), load_model()
    check_teachers(load_digits(*PICTURED, served(url_that_sees)), template, scenes()[:4])
    server = TeacherServer(url_that_sees, excluded_ids=template.banned_ids)
    for sample in scenes()[:4]:
        target = template.vocabulary.encode(f"The digits are {[one.desc for one in sample.objects]}")
        rows = forward(model, template, sample, target)
        prompt = template.expand(template.prompt_token_ids(sample), template.image_features(sample))
        judged = judged_tokens(sample, (*prompt, *target), len(prompt), unexpanded=template.unexpanded)
        found = server.teach(judged, top_k=4, timeout_s=60)
        assert found.logprobs == pytest.approx(rows.gather(-1, torch.tensor(target)[:, None])[:, 0].tolist(), abs=1e-4)
        likeliest = [[value for _, value in top] for top in found.top]
        assert likeliest == [pytest.approx(row.topk(4).values.tolist(), abs=1e-4) for row in rows]


@pytest.mark.wide
@pytest.mark.scenario(clauses=["distillation/a-teacher-may-be-a-server#13"])
def test_a_vllm_serve_without_its_route_of_images_is_refused(tmp_path_factory):
    with stock(DIGITS, tmp_path_factory) as url, refused("teacher-without-images", problem="--enable-scale-out"):
        check_teachers(load_digits(*PICTURED, served(url)), template_of(), scenes()[:1])
