"""What ``rollmatch up`` does when commands and actors end: without a cluster, by actors that end as they are asked to.

``lives``: of each part, one list per start: lines that it prints, then its exit code, minus the signal that ends it, or
``GONE`` for an actor that is lost. A command whose list is empty runs until it is signalled.
"""

import os
import signal
from collections import deque
from functools import partial
from itertools import count
from types import MappingProxyType, SimpleNamespace

import pytest
from ray.exceptions import RayActorError, RayError

from conformance.doubles.refusals import refused
from rollmatch.journal import Journal
from rollmatch.launch import ray_run
from rollmatch.launch.layout import Need
from rollmatch.launch.ray_command import ActorSite, CommandReport
from rollmatch.run.directory import JOURNAL

GONE = RayActorError()
LEARNERS = ("learner-0", "learner-1")


class Call:
    def __init__(self, answer=None):
        self.answer = answer


class Actor:
    """One actor; ``calls`` is what all have been called with, in order."""

    def __init__(self, ray, name):
        self.ray, self.name, self.life, self.waiting = ray, name, deque(), None
        for method in ("site", "start", "report", "signal", "kill"):
            setattr(self, method, SimpleNamespace(remote=partial(getattr(self, f"_{method}"))))

    def _site(self):
        hosts = self.ray.hosts.get(self.name, ["10.0.0.1"])
        host = hosts.pop(0) if len(hosts) > 1 else hosts[0]
        return Call(
            ActorSite(host=host, node="0123456789", gpus=("4",), port=next(self.ray.ports))
            if isinstance(host, str)
            else host
        )

    def _start(self, words, environment, directory):
        assert (environment, directory) == ({"KEY": "k"}, os.getcwd())
        self.ray.calls.append((self.name, *words))
        lives = self.ray.lives.get(self.name, [])
        self.life = deque(lives.pop(0) if lives else ())
        return Call(7)

    def _report(self):
        event = self.life.popleft() if self.life else None
        self.waiting = Call()
        if isinstance(event, signal.Signals):
            os.kill(os.getpid(), event)
        else:
            self._say(event)
        return self.waiting

    def _say(self, event):
        if isinstance(event, str):
            event = CommandReport(lines=(event,), code=None)
        self.waiting.answer = CommandReport(lines=(), code=event) if isinstance(event, int) else event

    def _signal(self, number):
        self.ray.calls.append((self.name, signal.Signals(number).name))
        end = self.ray.last_words.get(self.name, -number)
        if self.name in self.ray.deaf:
            self.ray.is_kept_waiting = True
        else:
            self._say(end)

    def _kill(self):
        self.ray.calls.append((self.name, "killed"))
        self._say(-signal.SIGKILL)


class RayDouble:
    """In place of the module ``ray``."""

    def __init__(self, needs, lives, hosts=None, deaf=(), last_words=MappingProxyType({})):
        self.names, self.lives, self.deaf = [need.name for need in needs], lives, deaf
        self.last_words = last_words
        self.hosts, self.calls, self.ports, self.is_kept_waiting = hosts or {}, [], count(1), False

    def place(self, _group, index):
        return Actor(self, self.names[index])

    def wait(self, calls, **_):
        if self.is_kept_waiting:
            os.kill(os.getpid(), signal.SIGTERM)
        return [call for call in reversed(calls) if call.answer is not None], []

    def get(self, call):
        if isinstance(call.answer, Exception):
            raise call.answer
        return call.answer

    def kill(self, actor):
        self.calls.append((actor.name, "ended"))


class Words:
    """Command lines that say what they were made of."""

    environment, hosts = {"KEY": "k"}, ()

    def __init__(self, out, num_learners):
        self.config = SimpleNamespace(training=SimpleNamespace(output_dir=str(out)))
        self.layout = SimpleNamespace(num_learner_nodes=num_learners)

    def settle(self, hosts):
        self.hosts = hosts

    def url(self, index):
        return f"http://{self.hosts[index]}:{8000 + index}"

    def server(self, index, gpus):
        return ["serve", index, *gpus]

    def learner(self, gpus, *, resume, node, endpoint):
        return ["resume" if resume else "train", node, *gpus, endpoint]


@pytest.fixture
def run(monkeypatch, tmp_path):
    """Lives -> exit code; ``run.calls`` is what Ray and its actors were called with."""

    def start(lives, *, learners=("learner",), servers=1, max_restarts=3, **how):
        needs = [Need(name=name, gpus=1) for name in (*learners, *(f"server-{index}" for index in range(servers)))]
        double = RayDouble(needs, {name: list(each) for name, each in lives.items()}, **how)
        monkeypatch.setattr(ray_run, "ray", double)
        monkeypatch.setattr(ray_run, "place", double.place)
        for name in ("_POLL_S", "_END_S"):
            monkeypatch.setattr(ray_run, name, 0)
        started = ray_run.RayRun(Words(tmp_path / "runs/one", len(learners)), None, needs, max_restarts=max_restarts)
        start.calls = double.calls
        return started.run()

    return start


SERVED = ("server-0", "serve", 0, "4")
TRAINED = ("learner", "train", 0, "4", "10.0.0.1:1")
RESUMED = ("learner", "resume", 0, "4", "10.0.0.1:3")
AGAIN = ("learner", "resume", 0, "4", "10.0.0.1:4")
ENDED = [("server-0", "SIGTERM"), ("server-0", "ended")]


@pytest.mark.parametrize(
    ("lives", "code", "calls"),
    [
        ({"learner": [["a line", 0]]}, 0, [SERVED, TRAINED, *ENDED]),
        ({"learner": [[3]]}, 3, [SERVED, TRAINED, *ENDED]),
        ({"learner": [[128]]}, 128, [SERVED, TRAINED, *ENDED]),
        ({"learner": [[129], [0]]}, 0, [SERVED, TRAINED, RESUMED, *ENDED]),
        ({"learner": [[-9], [-9], [4]]}, 4, [SERVED, TRAINED, RESUMED, AGAIN, *ENDED]),
        ({"learner": [[GONE], [0]]}, 0, [SERVED, TRAINED, ("learner", "ended"), RESUMED, *ENDED]),
        ({"server-0": [[0]], "learner": [["a", "b", 0]]}, 0, [SERVED, TRAINED, SERVED, *ENDED]),
        ({"server-0": [[GONE]], "learner": [["a", "b", "c", 0]]}, 0, [SERVED, TRAINED, ENDED[1], SERVED, *ENDED]),
    ],
)
def test_what_is_started_again_and_what_ends_the_run(run, lives, code, calls):
    assert run(lives) == code
    assert [each for each in run.calls if each != ("learner", "ended") or each in calls] == calls


def test_lines_are_printed_with_their_part_and_written_to_its_file(run, capsys, tmp_path):
    assert run({"learner": [["one", -9], ["two", 0]]}) == 0
    lines = [
        *("rollmatch up: learner is process 7 on node 01234567", "one"),
        *("rollmatch up: learner was ended by signal 9; restart 1 of 3",),
        *("rollmatch up: learner is process 7 on node 01234567", "two"),
    ]
    shown = capsys.readouterr().out.splitlines()
    assert [line for line in shown if line.startswith("[learner]")] == [f"[learner] {line}" for line in lines]
    assert (tmp_path / "runs/one/logs/learner.txt").read_text().splitlines() == lines
    assert "[server-0] rollmatch up: server-0 at http://10.0.0.1:8000 is process 7 on node 01234567" in shown


@pytest.mark.parametrize("end", [-9, GONE])
def test_all_nodes_of_the_learner_end_and_start_together(run, end):
    """What is left on the other one waits for ranks that are gone, and is killed. They join at the first one's port."""
    assert run({"learner-0": [["a", end], [0]], "learner-1": [[], [0]]}, learners=LEARNERS) == 0
    commands = [each for each in run.calls if each[0] in LEARNERS and each[1] != "ended"]
    assert commands == [
        *((name, "train", node, "4", "10.0.0.1:1") for node, name in enumerate(LEARNERS)),
        ("learner-1", "killed"),
        *((name, "resume", node, "4", "10.0.0.1:4") for node, name in enumerate(LEARNERS)),
    ]


def test_one_node_that_fails_for_good_ends_the_run_with_its_code(run):
    assert run({"learner-0": [["a", "b", 1]], "learner-1": [[5]]}, learners=LEARNERS) == 5
    assert not any("resume" in each for each in run.calls)


@pytest.mark.parametrize(("event", "code"), [("evaluated", 0), ("run", 1)])
def test_an_error_of_a_run_that_has_begun_is_resumed(run, tmp_path, event, code):
    """Where nothing was computed yet, the same start would end in the same error."""
    (tmp_path / "runs/one").mkdir(parents=True)
    Journal(tmp_path / "runs/one" / JOURNAL).write(event)
    assert run({"learner": [[1], [0]]}) == code
    assert (RESUMED in run.calls) == (code == 0)


@pytest.mark.parametrize(("end", "code"), [(-signal.SIGINT, 130), (5, 5), (0, 0), (GONE, 130)])
def test_a_signal_ends_the_run_when_the_learner_has_ended(run, end, code):
    before = signal.getsignal(signal.SIGINT)
    assert run({"learner": [["a", signal.SIGINT]]}, last_words={"learner": end}) == code
    asked = [SERVED, TRAINED, ("learner", "SIGINT")]
    assert [each for each in run.calls if each != ("learner", "ended")] == [*asked, *ENDED]
    assert signal.getsignal(signal.SIGINT) is before


def test_a_second_signal_ends_a_learner_that_stays(run):
    assert run({"learner": [[signal.SIGTERM]]}, deaf=("learner",)) == 128 + signal.SIGTERM
    assert [each for each in run.calls if each[0] == "learner"] == [
        TRAINED, ("learner", "SIGTERM"), ("learner", "ended")
    ]  # fmt: skip


@pytest.mark.parametrize(
    ("lives", "how", "code", "problem"),
    [
        ({"learner": [[-9]] * 3}, {"max_restarts": 2}, "lost-too-often", "learner was ended by signal 9"),
        ({"server-0": [[2]]}, {"max_restarts": 0}, "lost-too-often", "server-0 has ended with 2"),
        ({"server-0": [[GONE]]}, {"hosts": {"server-0": ["a", "b"]}}, "server-moved", "was at a, and Ray now offers b"),
        ({"server-0": [[RayError("x\nOSError: no")]]}, {}, "command-not-started", "server-0: OSError: no"),
        ({}, {"hosts": {"server-0": [GONE]}}, "command-not-started", "server-0: Ray cannot start its actor"),
    ],
)
def test_what_cannot_go_on_is_an_error_and_nothing_is_left(run, lives, how, code, problem):
    with refused(code, problem=problem):
        run(lives, **how)
    started = {each[0] for each in run.calls if each[1] in ("train", "serve")}
    assert started - {"server-0"} <= {each[0] for each in run.calls if each[1] in ("SIGTERM", "ended")} | {"learner"}


def test_an_actor_that_is_lost_with_its_node_may_be_lost_again_until_the_node_is_known_to_be(run):
    hosts = {"server-0": ["10.0.0.1", GONE, GONE, "10.0.0.1"]}
    assert run({"server-0": [[GONE]], "learner": [["a"] * 9 + [0]]}, hosts=hosts) == 0
    assert run.calls.count(SERVED) == 2
