"""A class among tools: its methods are called with a state for each episode, as TRL's environment_factory does."""

import gc
import pickle
import random
from dataclasses import replace

import pytest

from conformance.doubles.configs import GRPO, config_with
from conformance.doubles.ladders import TurnSide, climbing, grouped, world
from conformance.doubles.locks import VOCABULARY, sample_of
from conformance.doubles.records import make_reply
from conformance.doubles.refusals import refused
from conformance.doubles.tool_classes import Counter, counts
from conformance.doubles.tool_functions import call
from rollmatch.environments.environment import begin, generator_of, take_step
from rollmatch.environments.limits import EnvironmentLimits
from rollmatch.environments.loading import load_tool_environment
from rollmatch.environments.tools import load_class, load_tools
from rollmatch.objectives.grpo.reward import Reward
from rollmatch.objectives.vineppo.single_turn import RewardRules
from rollmatch.rewards.environments import get_reward
from rollmatch.rollout.backend import Decoding
from rollmatch.run.plugins import load_rewards, with_first_observations

CLASSES = "conformance.doubles.tool_classes"
COUNTER = f"{CLASSES}:Counter"
TOOLS = "custom.extra.environment.tools"
LIMITS = EnvironmentLimits()
LONG = (*GRPO, "global_max_length=2048")


def begun(name=COUNTER, sample=None):
    return begin(load_tool_environment((name,), limits=LIMITS), sample or sample_of(), run_seed=1)


def reply_to(environment, action):
    return take_step(environment, action, key="x:1").observation


@pytest.mark.scenario(
    "environments/two-episodes-of-one-prompt", clauses=["environments/a-class-among-tools-has-a-state#1,2,3,4"]
)
def test_episodes_of_one_prompt_begin_alike_and_keep_a_state_each():
    assert list(load_tools((COUNTER,))) == ["add", "shout"]
    (first, shown), (second, again) = begun(), begun()
    assert shown == again
    start = int(shown.removeprefix("count="))
    before = random.getstate()
    assert f"count={start + 1}" in reply_to(first, call("add", number=1))
    assert f"count={start + 10}" in reply_to(second, call("add", number=10))
    assert f"count={start + 3}" in reply_to(first, call("add", number=2))
    assert random.getstate() == before, "generators of the process are as they were"
    assert [one.instance().count - start for one in (first, second)] == [3, 10]
    assert "JA" in reply_to(first, call("shout", text="ja"))
    assert "there is no tool get_reward; there are add, shout" in reply_to(first, call("get_reward"))
    assert "number: Input should be a valid integer" in reply_to(first, call("add", number="one"))
    assert begun(sample=replace(sample_of(), origin="x:2", sample_id=2))[1] != shown
    assert begun(f"{CLASSES}:Silent")[1] == ""


@pytest.mark.scenario(clauses=["environments/a-class-among-tools-has-a-state#4"])
def test_reset_gets_the_columns_of_the_sample():
    sample = replace(sample_of(), origin="x:7", messages=(("user", "Count!"),), metadata={"answer": 12})
    made, shown = begun(sample=sample)
    asked = replace(sample, messages=(("user", f"Count!\n{shown}"),))  # as a run's samples are once they were shown
    later, _ = begun(sample=asked)
    for each in (made, later):
        assert each.instance().answer == 12
        assert each.instance().resets[-1] == [{"role": "user", "content": "Count!"}]


@pytest.mark.scenario(clauses=["environments/a-class-among-tools-has-a-state#5,6"])
def test_a_clone_replays_the_calls():
    made, shown = begun()
    start = int(shown.removeprefix("count="))
    reply_to(made, call("add", number=1))
    for twin in (made.clone(generator_of(1)), pickle.loads(pickle.dumps(made))):
        assert f"count={start + 6}" in reply_to(twin, call("add", number=5))
    assert made.instance().count == start + 1
    dice, _ = begun(f"{CLASSES}:Dice")
    reply_to(dice, call("roll"))
    with refused("replay-differs", TOOLS, remedy="grpo replays none"):
        reply_to(dice.clone(generator_of(1)), call("roll"))


def test_instances_are_used_again():
    gc.collect()
    before, num_made = load_class((COUNTER,)), Counter.num_made
    for _ in range(5):
        made, _ = begun()
        reply_to(made, call("add", number=1))
        del made
    assert load_class((COUNTER,)) is before
    assert Counter.num_made <= num_made + 1


@pytest.mark.scenario(clauses=["environments/a-class-among-tools-has-a-state#6"])
def test_a_reset_that_shows_something_else_each_time_is_refused():
    with refused("replay-differs", TOOLS, problem="reset showed", remedy="random"):
        with_first_observations(config_with(*LONG, f"{TOOLS}=[{CLASSES}:Chance]"), [sample_of()])


@pytest.mark.scenario(clauses=["environments/a-class-among-tools-has-a-state#8"])
@pytest.mark.parametrize(
    ("names", "processes", "key", "problem"),
    [
        ((f"{CLASSES}:Nothing",), 0, f"{TOOLS}.0", "no method reset"),
        ((COUNTER, f"{CLASSES}:Silent"), 0, f"{TOOLS}.1", "second class"),
        (("builtins:range",), 0, f"{TOOLS}.0", "TypeError"),
        ((COUNTER,), 2, "custom.extra.environment.processes", "kept in this process"),
    ],
)
def test_a_class_that_cannot_be_played_is_refused(names, processes, key, problem):
    with refused("tool-class-misfit", key, problem=problem):
        load_tool_environment(names, limits=EnvironmentLimits(processes=processes))


class Adding(TurnSide):
    """Adds its prompt's number of calls in the first turn, and says so in the second one."""

    def write(self, request, decoding):
        text = "done" if request.prefix_token_ids else call("add", number=7)
        return make_reply(request, VOCABULARY.encode(text), version=self.version, finish_reason="stop")


@pytest.mark.scenario(
    "environments/two-episodes-of-one-prompt", clauses=["environments/a-class-among-tools-has-a-state#7"]
)
@pytest.mark.parametrize("make", [grouped, climbing])
@pytest.mark.parametrize("paid", [counts, get_reward])
def test_reward_functions_get_the_instances(make, paid):
    side = Adding(decoding=Decoding(max_new_tokens=80, temperature=1.0))
    in_world = world(load_tool_environment((COUNTER,), limits=LIMITS), max_response_tokens=300)
    starts = [int(begun(sample=sample_of(place))[1].removeprefix("count=")) for place in range(2)]
    wanted = [start + 7 if paid is counts else (start + 7) % 10 for start in starts]
    rewards = (Reward.of(paid, name="paid"),)
    if make is not grouped:
        rewards = RewardRules(rewards=rewards, vocabulary=VOCABULARY, unfinished_return=None)
    made = replace(make(), world=in_world, rewards=rewards)
    samples = [sample_of(0), sample_of(1)]
    targets = made.make_segments(samples, side.answer(samples, in_world=in_world), side.context())
    assert made.summarize(targets.reports)["reward"] == pytest.approx(sum(wanted) / 2)
    evaluated = made.evaluate(samples, side.answer(samples, num=1, in_world=in_world), side.context())
    assert evaluated.metrics["reward"] == pytest.approx(sum(wanted) / 2)


def test_a_coroutine_may_judge_an_episode():
    made, _ = begun(f"{CLASSES}:Silent")
    reply_to(made, call("say", text="four"))
    reward = Reward.of(get_reward)
    assert reward.call(["done"], [sample_of()], {"environments": [made.instance()]}) == [4.0]
    assert reward.call(["done"], [sample_of()], {"environments": [object()]}) == [None]


@pytest.mark.scenario(clauses=["environments/a-class-among-tools-has-a-state#9"])
@pytest.mark.parametrize(("tools", "processes"), [((), 0), ((COUNTER,), 1)])
def test_a_function_that_needs_instances_is_refused_where_there_are_none(tools, processes):
    rewards = f"custom.extra.grpo.rewards=[{{function: '{CLASSES}:counts', processes: {processes}}}]"
    config = config_with(*LONG, rewards, f"{TOOLS}=[{','.join(tools)}]")
    with refused("reward-signature", "custom.extra.grpo.rewards.0.function", problem="needs environments"):
        load_rewards(config)
