"""Episodes of several turns on a real server, a picture in each prompt: equal to those of generate()."""

from dataclasses import dataclass, replace
from functools import partial

import pytest

from conformance.doubles.digits import load_model, scenes, template_of
from conformance.doubles.locks import objective, segments_of
from conformance.doubles.ranks import alone
from rollmatch.model.checkpoint import merged_weights
from rollmatch.objectives.protocol import ObjectiveContext
from rollmatch.objectives.vineppo.objective import TrajectoryReport
from rollmatch.objectives.vineppo.split import Turns
from rollmatch.rollout.backend import Decoding, make_requests
from rollmatch.rollout.episodes import EpisodeRunner, begin_all, play_apart, play_in_waves
from rollmatch.rollout.hf import HfBackend

pytestmark = pytest.mark.engine

NUM_TURNS, NUM_TOKENS = 3, 7
GREEDY = Decoding(max_new_tokens=NUM_TOKENS)


class Count:
    """Says how much was written and what it ended with; pays for commas."""

    def __init__(self):
        self.turn = 0

    def reset(self, sample, rng):
        return "begin"

    def clone(self, rng):
        twin = Count()
        twin.turn = self.turn
        return twin

    def step(self, action):
        self.turn += 1
        return f"{len(action)} {action[-3:]}", float(action.count(",")), self.turn == NUM_TURNS, False

    def fingerprint(self):
        return self.turn


def world_of(template):
    return EpisodeRunner(
        make=Count, vocabulary=template.vocabulary, reply=template.reply_token_ids,
        max_turns=NUM_TURNS, max_response_tokens=200, run_seed=1,
    )  # fmt: skip


@dataclass
class Side:
    """A backend, as objectives use it; remembers what it was asked for."""

    backend: object
    decoding: Decoding = GREEDY

    def __post_init__(self):
        self.asked, self.samples = [], list(scenes()[:2])

    def ask(self, requests, decoding):
        self.asked += requests
        return self.backend.generate(requests, decoding)

    def episodes(self, *, num):
        samples = [sample for sample in self.samples for _ in range(num)]
        requests = make_requests(samples, prompt_of=template_of().prompt_token_ids, run_seed=7, step=0, rank=0)
        episodes = begin_all(world_of(template_of()), requests, self.decoding)
        self.context().play(episodes, self.decoding)
        return [episode.rollout() for episode in episodes]

    def context(self):
        nothing = dict.fromkeys(("score", "teach", "further", "log"), lambda *_, **__: None)
        play = partial(play_in_waves, generate=self.ask, ranks=alone())
        return ObjectiveContext(step=5, ranks=alone(), decoding=self.decoding, generate=self.ask, play=play, **nothing)

    def play(self):
        return [one.trajectory for one in self.episodes(num=1)]

    def targets(self, **fields):
        template = template_of()
        made = objective(num_continuations=2)
        made = replace(
            made, world=world_of(template), splitter=Turns(), vocabulary=template.vocabulary,
            prompt_of=template.prompt_token_ids, **fields,
        )  # fmt: skip
        made = replace(made, logprob_rules=replace(made.logprob_rules, old="current"))
        return made.make_segments(self.samples, self.episodes(num=2), self.context())


@pytest.fixture
def served(backend):
    backend.push(merged_weights(load_model()), version=backend.policy_version + 1)
    return backend


@pytest.mark.scenario(clauses=["environments/episodes-can-be-played-again#4"])
def test_an_episode_on_a_server_is_the_one_of_generate(served):
    local = HfBackend(load_model(), template_of(), batch_size=8)
    expected = Side(local).play()
    found = Side(served).play()
    assert [replace(one, policy_version=0, logprobs=None) for one in found] == [
        replace(one, policy_version=0, logprobs=None) for one in expected
    ]
    assert [len(one.turns) for one in found] == [NUM_TURNS] * 2
    assert {one.policy_version for one in found} == {served.policy_version}


def test_greedy_continuations_of_any_turn_return_what_the_episode_was_paid(served):
    """Two continuations of each state give its return to come, exactly: they continued the same ids."""
    side = Side(served)
    targets = side.targets()
    reports = [report for report in targets.reports if isinstance(report, TrajectoryReport)]
    assert {report.num_turns for report in reports} == {NUM_TURNS}
    assert sum(report.total_return for report in reports) > 0
    for report in reports:
        assert report.values[0] == report.total_return
        assert report.step_advantages == (0.0,) * NUM_TURNS
    targets = {segment.token_ids[segment.prompt_len :] for segment in segments_of(targets)}
    for prefix in {request.prefix_token_ids for request in side.asked}:
        assert any(target[: len(prefix)] == prefix for target in targets)


def test_episodes_at_their_own_pace_on_a_server_are_those_of_waves(served):
    side = Side(served)
    samples = [sample for sample in side.samples for _ in range(3)]
    requests = make_requests(samples, prompt_of=template_of().prompt_token_ids, run_seed=7, step=0, rank=0)
    apart = begin_all(world_of(template_of()), requests, GREEDY)
    play_apart(apart, served.open_turns(len(apart), GREEDY).write)
    assert [episode.rollout() for episode in apart] == side.episodes(num=3)
