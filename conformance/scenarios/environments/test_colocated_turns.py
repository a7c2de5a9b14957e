"""Episodes at their own pace on an engine in the learner's process, which runs a step at a time."""

import threading
from concurrent.futures import CancelledError
from dataclasses import replace

import pytest

from conformance.doubles.digits import GREEDY, load_model, scenes, template_of
from conformance.doubles.ladders import Ladder, TurnSide, world
from conformance.doubles.locks import requests_of, sample_of
from conformance.doubles.ranks import alone
from conformance.doubles.refusals import refused
from rollmatch.errors import RolloutError
from rollmatch.model.checkpoint import merged_weights
from rollmatch.rollout.backend import Decoding, make_requests
from rollmatch.rollout.engine_turns import EngineTurns
from rollmatch.rollout.episodes import EpisodeRunner, begin_all, play_apart, play_in_waves

SAMPLES = [sample_of(number) for number in range(8)]
WAIT_S = 60.0


class Slots(TurnSide):
    """An engine of three slots; a turn takes three steps. ``ids``: of the threads that called it."""

    fails_at = None

    def __init__(self):
        super().__init__()
        self.waiting, self.left, self.ids, self.num_steps, self.aborted = {}, {}, set(), 0, []

    def add(self, request):
        self.ids.add(threading.get_ident())
        if request.request_id == self.fails_at:
            raise RolloutError("is too long", code="prompt-too-long", key="here")
        self.waiting[request.request_id], self.left[request.request_id] = request, 3
        return request.request_id

    def step(self):
        self.ids.add(threading.get_ident())
        self.num_steps += 1
        under_way = list(self.waiting)[:3]
        for name in under_way:
            self.left[name] -= 1
        ended = [name for name in under_way if self.left[name] == 0]
        return {name: self.write(self.waiting.pop(name), self.decoding) for name in ended}

    def abort(self, names):
        self.aborted += names


def played(engine, in_world=None):
    episodes = begin_all(in_world or world(), requests_of(SAMPLES, num=2), engine.decoding)
    turns = EngineTurns(engine)
    play_apart(episodes, turns.write, drive=turns.drive)
    return [episode.rollout() for episode in episodes]


@pytest.mark.scenario(clauses=["environments/episodes-go-at-their-own-pace#2"])
def test_a_stepped_engine_writes_what_waves_write_and_belongs_to_one_thread():
    engine, waves = Slots(), TurnSide()
    episodes = begin_all(world(), requests_of(SAMPLES, num=2), waves.decoding)
    play_in_waves(episodes, waves.decoding, generate=waves.generate, ranks=alone())
    assert played(engine) == [episode.rollout() for episode in episodes]
    assert engine.ids == {threading.get_ident()}
    assert engine.aborted == []


def test_a_turn_that_does_not_fit_ends_the_run_and_leaves_no_thread_waiting():
    engine = Slots()
    engine.fails_at = "5.1"
    others = set(threading.enumerate())
    with refused("prompt-too-long", "here"):
        played(engine, world(lambda: Ladder(slip=0.0)))
    for thread in set(threading.enumerate()) - others:
        thread.join(WAIT_S)
        assert not thread.is_alive()
    late = EngineTurns(Slots())
    late.drive([])
    with pytest.raises(CancelledError):
        late.write(0, requests_of(SAMPLES, num=1)[0])


class Counted:
    """Says how much was written; the first sample's environment replies when all others have ended."""

    num_turns, others = 3, threading.Semaphore(0)

    def __init__(self):
        self.turn = 0

    def reset(self, sample, rng):
        self.is_slow = sample.sample_id == scenes()[0].sample_id
        return "begin"

    def clone(self, rng):
        twin = Counted()
        twin.turn, twin.is_slow = self.turn, self.is_slow
        return twin

    def step(self, action):
        if self.is_slow and self.turn == 0:
            for _ in range(5):
                assert self.others.acquire(timeout=WAIT_S), "the others wait for this environment"
        self.turn += 1
        if self.turn == self.num_turns and not self.is_slow:
            self.others.release()
        return f"{len(action)} {action[-3:]}", float(action.count(",")), self.turn == self.num_turns, False

    def fingerprint(self):
        return self.turn


class Quick(Counted):
    """The same without waiting."""

    def clone(self, rng):
        twin = Quick()
        twin.turn, twin.is_slow = self.turn, False
        return twin


@pytest.mark.engine
@pytest.mark.scenario(
    "environments/a-colocated-engine-writes-while-environments-are-at-work",
    clauses=["environments/episodes-go-at-their-own-pace#1,2"],
)
@pytest.mark.parametrize(
    "decoding", [replace(GREEDY, max_new_tokens=7), Decoding(max_new_tokens=7, temperature=1.0, logprobs=True)]
)
def test_a_colocated_engine_writes_while_environments_are_at_work(engine_backend, decoding):
    engine, template = engine_backend, template_of()
    engine.push(merged_weights(load_model()), version=engine.policy_version + 1)
    requests = make_requests(scenes()[:6], prompt_of=template.prompt_token_ids, run_seed=7, step=0, rank=0)
    runner = EpisodeRunner(
        make=Counted, vocabulary=template.vocabulary, reply=template.reply_token_ids,
        max_turns=3, max_response_tokens=200, run_seed=1,
    )  # fmt: skip
    apart, waves = begin_all(runner, requests, decoding), begin_all(replace(runner, make=Quick), requests, decoding)
    turns = engine.open_turns(len(apart), decoding)
    play_apart(apart, turns.write, drive=turns.drive)
    play_in_waves(waves, decoding, generate=engine.generate, ranks=alone())
    found, expected = ([one.rollout() for one in episodes] for episodes in (apart, waves))
    assert [one.response_token_ids for one in found] == [one.response_token_ids for one in expected]
    assert [one.trajectory.rewards for one in found] == [one.trajectory.rewards for one in expected]
    assert [len(one.trajectory.turns) for one in found] == [3] * 6
    for one, other in zip(found, expected, strict=True):
        assert one.response_logprobs == pytest.approx(other.response_logprobs, abs=1e-4)
    assert engine.generate(requests[:1], decoding), "the engine continues"
