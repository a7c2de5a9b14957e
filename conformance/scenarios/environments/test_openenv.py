"""A server of an unmodified openenv-core, played over its WebSocket."""

import os

import pytest

from conformance.doubles.digits import ROOT
from conformance.doubles.ladders import TurnSide, world
from conformance.doubles.locks import VOCABULARY, sample_of
from conformance.doubles.refusals import refused
from conformance.doubles.started import started
from conformance.judge.ports import free_port
from conformance.tools.outside_tools import python_of
from rollmatch.environments.environment import begin, generator_of, take_step
from rollmatch.environments.limits import EpisodeFailed
from rollmatch.environments.loading import load_environment
from rollmatch.rollout.backend import Decoding

pytestmark = pytest.mark.openenv


@pytest.fixture(scope="module")
def url(tmp_path_factory):
    port, log = free_port(), tmp_path_factory.mktemp("openenv") / "log"
    command = [python_of("openenv"), "-m", "conformance.doubles.openenv_server", str(port)]
    with started(command, log, PYTHONPATH=str(ROOT), PATH=os.environ["PATH"]) as running:
        running.wait_until(lambda: "Uvicorn running" in running.output())
        yield f"http://127.0.0.1:{port}"


def loaded(url, **options):
    return load_environment(
        "rollmatch.environments.openenv:OpenEnv", {"url": url, "observation": "text", **options}, key="k"
    )


@pytest.mark.scenario(clauses=["environments/an-environment-is-a-class-that-answers-the-policy#13"])
def test_an_episode_is_a_session_and_a_clone_replays_it(url):
    made, shown = begin(loaded(url), sample_of(), run_seed=1)
    assert shown == "guess"
    assert take_step(made, "3", key="x:1")[:4] == ("no (1)", 0.0, False, False)
    twin = made.clone(generator_of(1))
    assert twin.fingerprint() == made.fingerprint()
    assert take_step(twin, "7", key="x:1")[:4] == ("right", 1.0, True, False)
    assert take_step(made, "4", key="x:1")[:4] == ("no (2)", 0.0, False, False)
    with refused("action-unparsable"):
        take_step(made, "many", key="x:1")
    with pytest.raises(EpisodeFailed, match=r"x:1.*the table fell over"):
        take_step(made, "13", key="x:1")


def test_a_whole_observation_is_shown_as_json(url):
    made, shown = begin(loaded(url, observation=None), sample_of(), run_seed=1)
    assert shown == '{"text": "guess"}'
    assert take_step(made, "7", key="x:1").observation == '{"text": "right"}'


def test_episodes_are_played(url):
    side = TurnSide(letters=VOCABULARY.encode("7"), decoding=Decoding(max_new_tokens=4, temperature=1.0))
    samples = [sample_of(number) for number in range(3)]
    made = side.answer(samples, num=1, in_world=world(loaded(url)))
    assert [(one.trajectory.total_return, one.trajectory.is_finished) for one in made] == [(1.0, True)] * 3


def test_a_server_that_is_not_there_costs_the_episode():
    with pytest.raises(EpisodeFailed, match="x:1: reset"):
        begin(loaded("http://127.0.0.1:9"), sample_of(), run_seed=1)
