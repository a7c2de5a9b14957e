"""A small correct trainer, with one switch per mistake that the checks must find; it runs in a thread.

It asks for rollouts, moves every weight a little and sends the weights, by the senders with which servers are judged.
"""

import time
from collections.abc import Callable
from concurrent.futures import TimeoutError as StillRunning
from contextlib import suppress
from typing import Any

import requests
import torch
from torch import Tensor

from conformance.judge.servers.bounded import in_thread
from conformance.judge.servers.broken.switches import Switches
from conformance.judge.servers.dialects import DIALECTS
from conformance.judge.servers.question import Question
from conformance.judge.servers.senders import PEERS
from conformance.judge.servers.subject import Subject
from conformance.judge.servers.talk import Stopped, Talk
from conformance.judge.trainers.runs import TrainerEnding, Values

NUM_CALLS, NUM_PROMPTS, NUM_TOKENS = 2, 2, 1
TURN_S, PATIENCE_S = 0.02, 20.0


class TrainingFailed(RuntimeError):
    """A trainer that cannot continue ends with an error."""


class SmallTrainer:
    """One run; ``held`` says whether the server is holding an answer back."""

    def __init__(
        self, values: Values, weights: dict[str, Tensor], dialect: str, broken: Switches, held: Callable[[], bool]
    ) -> None:
        self.values, self.broken, self.held, self.url = values, broken, held, values["url"]
        self.weights = {name: tensor.detach().clone() for name, tensor in weights.items()}
        subject = Subject(
            name="", version="", url=self.url, dialect=DIALECTS[dialect](), transport="gloo", group_host="127.0.0.1"
        )
        self.dialect, self.talk = subject.dialect, Talk(subject)
        self.peer: Any = PEERS[dialect](self.talk)
        self.num_calls = 0

    def train(self) -> int:
        """Exit code."""
        try:
            self._train()
        except (TrainingFailed, Stopped, requests.RequestException):
            return 1
        return 1 if self.broken("the run ends with 1") else 0

    def _train(self) -> None:
        self._open()
        for step in range(int(self.values["steps"]) - self.broken("the last step is left out")):
            self._sync(step)
            for place in range(NUM_CALLS):
                self._roll_out(step, place)
            if not (step == 1 and self.broken("the second step learns nothing")):
                for tensor in self.weights.values():
                    tensor.add_(0.01)
        if not self.broken("the group is left open"):
            self._close()

    def _open(self) -> None:
        self.peer.open()
        if self.broken("every rank opens a group"):
            self.peer.talk.post("second", "/init_communicator/", self._opening(2))
        if self.broken("the world size leaves out the learner"):
            self._close()
            self.talk.post("wrong", "/init_communicator/", self._opening(1))
            self._close()
            self.peer.open()

    def _opening(self, size: int) -> dict[str, Any]:
        port = int(self.values["group_port"])
        return {"host": "127.0.0.1", "port": port, "world_size": size}

    def _close(self) -> None:
        with suppress(Stopped):
            self.peer.close()

    def _sync(self, step: int) -> None:
        if step == 0 and self.broken("the first update is left out"):
            return
        if step == 1 and self.broken("the second update is left out"):
            return
        tensors = self._spoilt(dict(self.weights), step)
        if step == 1 and self.broken("rollouts are requested during an update"):
            self._send_around(tensors)
        else:
            self.peer.send(tensors)
            if step == 1 and self.broken("one tensor is sent twice"):
                self.peer.send(dict(list(tensors.items())[:1]))
        self.peer.finish()

    def _send_around(self, tensors: dict[str, Tensor]) -> None:
        names = list(tensors)
        self.peer.send({name: tensors[name] for name in names[:3]})
        self._post(self._body(["0"], seed=77 + self.num_calls))
        self.peer.send({name: tensors[name] for name in names[3:]})

    def _spoilt(self, tensors: dict[str, Tensor], step: int) -> dict[str, Tensor]:
        first, *_, last = tensors
        if step == 1 and self.broken("one tensor is left out"):
            del tensors[last]
        if step == 1 and self.broken("one tensor has another name"):
            tensors[f"base_model.{last}"] = tensors[last]
        if step == 1 and self.broken("one tensor is transposed"):
            tensors[first] = tensors[first].T.contiguous()
        if step == 1 and self.broken("one tensor is rounded"):
            tensors[last] = tensors[last].bfloat16()
        if step == 0 and self.broken("training begins with other weights"):
            tensors[first] = tensors[first] + 1
        return tensors

    def _roll_out(self, step: int, place: int) -> None:
        prompts = [f"{step} {place} {number}" for number in range(NUM_PROMPTS)]
        if self.broken("prompts are shuffled without a seed"):
            prompts = [f"{prompt} {time.monotonic_ns()}" for prompt in prompts]
        self._settle(self._body(prompts, seed=self._seed(step, place)), len(prompts))

    def _seed(self, step: int, place: int) -> int | None:
        self.num_calls += 1
        if step == 2 and self.broken("one call has no seed"):
            return None
        if self.broken("every call has the same seed"):
            return 5
        if self.broken("seeds come from the clock"):
            return time.monotonic_ns() % 2**31
        return 1000 * step + 10 * place + 1

    def _body(self, prompts: list[str], *, seed: int | None) -> dict[str, Any]:
        questions = [Question(text=text, ids=list(text.encode())) for text in prompts]
        return self.dialect.body(questions, max_tokens=NUM_TOKENS, seed=seed, temperature=1.0)

    def _settle(self, body: dict[str, Any], num_prompts: int) -> None:
        """The rollouts of one call; what goes wrong is asked again."""
        deadline = time.monotonic() + PATIENCE_S
        while time.monotonic() < deadline:
            try:
                answer = self._post(body)
            except requests.ConnectionError:
                self._start_over()
                continue
            if answer is None:
                raise TrainingFailed("no patience")
            if answer.status_code in (429, 503):
                if self._goes_on_after(answer.status_code):
                    return
                continue
            if len(self._read(answer)) == num_prompts or self.broken("a short answer is enough"):
                return
        raise TrainingFailed("no rollouts")

    def _goes_on_after(self, status: int) -> bool:
        if self.broken(f"a {status} is no rollouts"):
            return True
        if self.broken(f"a {status} ends the run"):
            raise TrainingFailed(str(status))
        time.sleep(TURN_S)
        return False

    def _post(self, body: dict[str, Any]) -> requests.Response | None:
        """None where patience is over."""
        url = self.url + self.dialect.generate_path
        pending = in_thread(requests.post, url, json=body, timeout=60)
        while not pending.done():
            with suppress(StillRunning):
                pending.exception(timeout=TURN_S)
            if self.held() and self.broken("a late answer is given up"):
                return None
        return pending.result()

    def _read(self, answer: requests.Response) -> list[Any]:
        answer.raise_for_status()
        body = answer.json()
        if isinstance(body, list):
            return body
        return list(body.get("completion_ids") or body.get("choices") or body.get("responses") or ())

    def _start_over(self) -> None:
        """The server has died: wait for the next one, and send it the weights."""
        if self.broken("a restart ends the run"):
            raise TrainingFailed("the server is gone")
        deadline = time.monotonic() + PATIENCE_S
        while time.monotonic() < deadline:
            with suppress(requests.ConnectionError):
                requests.get(self.url + self.dialect.health_path, timeout=5)
                break
            time.sleep(TURN_S)
        if self.broken("a restart goes unnoticed"):
            return
        self.peer = PEERS[self.dialect.name](self.talk)
        self.peer.open()
        self.peer.send(dict(self.weights))
        self.peer.finish()


def launch_of(
    weights: dict[str, Tensor], dialect: str, broken: Switches, held: Callable[[], bool]
) -> Callable[[Values, float], TrainerEnding]:
    """As ``runs`` starts a trainer."""

    def launch(values: Values, _: float) -> TrainerEnding:
        with torch.no_grad():
            return TrainerEnding(code=SmallTrainer(values, weights, dialect, broken, held).train())

    return launch
