"""Random faults on real processes: rollout servers with vLLM on a CPU, and ``rollmatch train``.

A story is one run that is struck, recovers, and is struck again. Servers run what ``rollmatch serve`` becomes, learner
ranks what torchrun starts. The journal, exit codes and outputs are judged, and health is requested all the time.
"""

import os
import random
import shutil
import signal
import tempfile
import time
from collections import Counter
from pathlib import Path

import psutil

from conformance.doubles.digits import absolute, write_cut
from conformance.doubles.division import MATCHING, SMALL, VLLM, named, typed
from conformance.doubles.instance import free_port
from conformance.doubles.memory_limit import NEEDS, can_limit_memory, limited_memory
from conformance.doubles.processes import stopped
from conformance.doubles.started import Started, journals_of, rank_variables
from conformance.tools.campaign.observe import JournalTail, judge_story, name_of_end
from rollmatch.config import load_config
from rollmatch.data import load_samples
from rollmatch.launch.rollout_server import make_command
from rollmatch.model.source import checkpoints_in

STEPS, SAVE_STEPS, ACCUMULATION, BOUND_S = 100_000, 3, 3, 150.0
STORIES = (("off", 1), ("ahead", 1), ("off", 2), ("ahead", 2))
"""(mode of overlap, learner ranks), by turns."""
PLACES = {"generation": "requested", "learning": "packed", "sync": "step", "checkpoint": "step", "resume": "run"}
"""Place -> the event of the journal with which it begins."""
NEVER = ("group-port-in-use",)
"""Codes with which no learner may end here: nobody else takes its port."""
ANNOUNCED = "announcement"
"""Of a sync, before its bytes: workers wait for them."""
OUT_OF_MEMORY = "worker out of memory"
"""The kernel kills the worker at a limit."""
FAULTS = (
    *(("server killed", place) for place in ("generation", "generation", "learning", "sync", "sync", "resume")),
    *(("worker killed", place) for place in ("generation", "learning")),
    *((OUT_OF_MEMORY, place) for place in ("generation", "sync")),
    *(("server stopped", place) for place in ("generation", "generation", "sync", "sync", "learning", "resume")),
    *(("learner killed", place) for place in (*PLACES, ANNOUNCED, ANNOUNCED)),
    *(("learner stopped", place) for place in ("generation", "learning", "sync", "checkpoint")),
    *(("learner interrupted", place) for place in ("generation", "sync", "checkpoint")),
    *(("journal cut", place) for place in ("generation", "checkpoint")),
    *(("checkpoint damaged", place) for place in ("learning", "checkpoint")),
    *(("disk full", "checkpoint"),) * 2,
)
"""(kind, place); of a checkpoint or a journal: after the learner was killed there."""


class StruckRun:
    """A run, its server, and what happens to them."""

    def __init__(self, folder, mode, num_ranks, chance, looks):
        self.folder, self.num_ranks, self.chance, self.looks = folder, num_ranks, chance, looks
        self.http, self.out, self.num_started = free_port(), folder / "run", 0
        self.tail, self.ranks, self.server = JournalTail(self.out / "journal.jsonl"), [], None
        self.wrong, self.ends, self.restart_s, self.struck_at = [], Counter(), 0.0, 0.0
        self.overrides = (
            *named(MATCHING, self.http, free_port()),
            *(each for each in SMALL if not each.startswith("training.save_steps")),
            *(f"training.output_dir={self.out}", f"training.max_steps={STEPS}", f"training.save_steps={SAVE_STEPS}"),
            *(f"model.model={folder}/model", "training.eval_steps=1000000", "training.eval_scenes=2"),
            *("training.per_device_train_batch_size=1", f"training.gradient_accumulation_steps={ACCUMULATION}"),
            *("training.packing=false", "training.save_total_limit=4", f"{VLLM.removesuffix('.vllm')}.overlap={mode}"),
            *(f"{VLLM}.server.retry_budget_s=60", f"{VLLM}.server.timeout_s=60"),
            "custom.extra.rollout_server.vllm_data_parallel_size=1",
        )

    def start_server(self):
        """Run what ``rollmatch serve`` becomes, until it is well."""
        config = load_config(MATCHING, absolute(*self.overrides))
        command = make_command(config, gpus=("0",), server_index=None, on_gpu=False)
        began, self.num_started = time.monotonic(), self.num_started + 1
        self.server = Started([*command.words], self.folder / f"{self.num_started}-server.txt", **command.environment)
        self.server.wait_healthy(f"http://127.0.0.1:{self.http}")
        self.restart_s += time.monotonic() - began
        self.looks.watch(self.http)

    def start_learner(self):
        """Run what torchrun starts; a rank's output is a file of its own."""
        resume, self.num_started = ("--resume",) if self.ranks else (), self.num_started + 1
        command = typed("train", MATCHING, "2", self.overrides, *resume)
        places = rank_variables(self.num_ranks) if self.num_ranks > 1 else [{}]
        self.ranks = [
            Started(command, self.folder / f"{self.num_started}-learner{rank}.txt", **place)
            for rank, place in enumerate(places)
        ]

    def strike(self, kind, place):
        """Whether the fault has struck; it does not where the learner ends first."""
        self.restart_s = 0.0
        if place == "resume":
            self.end_learner(signal.SIGKILL)
            self.start_learner()
        if kind == "disk full":
            return self.fill_disk()
        if (kind, place) == ("server killed", "sync"):
            return self.kill_in_sync(self.kill_server)
        if (kind, place) == (OUT_OF_MEMORY, "sync"):
            with limited_memory() as limit:
                return self.kill_in_sync(lambda: self.starve_worker(limit)) and self.replace_ended_server(limit)
        if place == ANNOUNCED:
            return self.kill_in_sync(lambda: self.end_learner(signal.SIGKILL))
        if not self.tail.wait_for(lambda event: begins(place, event), self.is_running, BOUND_S):
            return False
        time.sleep(self.chance.choice((0.0, 0.02, 0.1, 0.25)))
        self.struck_at = time.monotonic()
        if kind == "server stopped":
            self.stop(self.server.members())
        elif kind == "learner stopped":
            self.stop([psutil.Process(rank.process.pid) for rank in self.ranks])
        elif kind == "server killed":
            self.replace_server()
        elif kind == "worker killed":
            self.kill_worker()
        elif kind == OUT_OF_MEMORY:
            with limited_memory() as limit:
                self.starve_worker(limit)
                self.replace_ended_server(limit)
        elif kind == "learner interrupted":
            self.end_learner(signal.SIGINT)
        else:
            self.end_learner(signal.SIGKILL)
            self.damage(kind)
        return True

    def stop(self, members):
        """SIGSTOP for less time than anybody's patience."""
        self.looks.watch(None)
        with stopped(*members):
            time.sleep(self.chance.uniform(0.3, 5.0))
        self.looks.watch(self.http)

    def replace_server(self):
        self.looks.watch(None)
        self.server.process.kill()
        self.server.end(grace_s=0)
        self.start_server()

    def kill_in_sync(self, kill):
        """Workers stand still, so that the sync that has begun cannot end before somebody is killed."""
        if not self.tail.wait_for(lambda event: event["event"] == "packed", self.is_running, BOUND_S):
            return False
        self.looks.watch(None)
        with stopped(*self.server.workers()):
            self.tail.wait_for(lambda event: event["event"] == "step", self.is_running, BOUND_S)
            time.sleep(0.7)
            self.struck_at = time.monotonic()
            kill()
        if self.server.process.poll() is not None:
            self.replace_server()
        self.looks.watch(self.http)
        return True

    def kill_server(self):
        self.server.process.kill()
        self.server.process.wait()

    def kill_worker(self):
        self.looks.watch(None)
        for worker in self.server.workers()[:1]:
            worker.kill()
        self.replace_ended_server()

    def starve_worker(self, limit):
        self.looks.watch(None)
        for worker in self.server.workers()[:1]:
            limit.add(worker)

    def replace_ended_server(self, limit=None):
        """A server without its engine ends by itself, says why, and not with success; its health is red meanwhile."""
        self.looks.watch(None)
        if self.server.wait(BOUND_S) == 0 or "[worker-dead]" not in self.server.output():
            self.wrong.append(f"a server without its engine ended with {self.server.output()[-500:]}")
        if limit and not limit.num_killed():
            self.wrong.append("the worker did not die of its limit of memory")
        self.replace_server()
        return True

    def damage(self, kind):
        """Cut the journal's last line, or cut or change a file of the newest checkpoint of several."""
        if kind == "journal cut":
            with (self.out / "journal.jsonl").open("rb+") as file:
                file.truncate(file.seek(0, os.SEEK_END) - self.chance.randint(1, 40))
        checkpoints = checkpoints_in(self.out) if kind == "checkpoint damaged" else []
        files = [path for each in checkpoints[:1] for path in sorted(each.iterdir()) if path.stat().st_size > 100]
        if len(checkpoints) > 1 and files:  # one that was being written when the learner was killed may hold none yet
            file = self.chance.choice(files)
            content = bytearray(file.read_bytes())
            content[len(content) // 2] ^= 1
            file.write_bytes(content if self.chance.random() < 0.5 else content[: len(content) // 2])

    def fill_disk(self):
        """One file of a checkpoint that comes lies on a full disk; later there is space again."""
        self.tail.read()
        step = self.tail.last_step + 2 * SAVE_STEPS - self.tail.last_step % SAVE_STEPS
        name = self.chance.choice(("optimizer.pt", "scheduler.pt", "trainer_state.json"))
        file = self.out / f"checkpoint-{step}" / name
        file.parent.mkdir(exist_ok=True)
        file.unlink(missing_ok=True)
        file.symlink_to("/dev/full")
        self.tail.wait_for(lambda event: event.get("step", 0) > step, self.is_running, BOUND_S)
        self.struck_at = time.monotonic()
        has_struck = not self.is_running()
        file.unlink(missing_ok=True)
        return has_struck

    def is_running(self):
        return all(rank.process.poll() is None for rank in self.ranks)

    def end_learner(self, number):
        """A signal for all ranks, which ends them in time."""
        for rank in self.ranks:
            rank.process.send_signal(number)
        for rank in self.ranks:
            rank.wait(BOUND_S)
        self.note_ends()

    def note_ends(self):
        """How the ranks ended; as with torchrun, the end of one is that of the others, which need no name for it."""
        names = [name_of_end(rank.process.poll(), rank.output()) for rank in self.ranks]
        first = next((name for name in names if "UNNAMED" not in name and name != "killed"), names[0])
        self.ends[first.partition(":")[0]] += 1
        self.wrong += [first] if "UNNAMED" in first or first in NEVER else []
        for rank in self.ranks:
            rank.end(grace_s=0)

    def recover(self):
        """Wait for the next optimizer step, and resume a learner that ended; returns seconds since the strike."""
        self.tail.read()
        before, deadline, num_resumed = self.tail.num_steps, time.monotonic() + BOUND_S, 0
        while self.tail.num_steps == before:
            if not self.is_running():
                self.note_ends()
                self.start_learner()
                num_resumed += 1
            if self.server.process.poll() is not None:
                self.wrong.append(f"the server ended with {self.server.process.poll()}: {self.server.output()[-300:]}")
                self.replace_server()
            if time.monotonic() > deadline or num_resumed > 3:
                raise AssertionError(f"hang: no step within {BOUND_S:g} s, {num_resumed} resumptions, {self.ends}")
            time.sleep(0.02)
            self.tail.read()
        return time.monotonic() - self.struck_at - self.restart_s


def possible(faults, show):
    """Those that this machine allows; what is left out is said."""
    if any(kind == OUT_OF_MEMORY for kind, _ in faults) and not can_limit_memory():
        show(f"  NOT TRIED: {OUT_OF_MEMORY}, which needs {NEEDS}")
        return [fault for fault in faults if fault[0] != OUT_OF_MEMORY]
    return faults


def begins(place, event):
    """Whether an event of the journal is the beginning of a part of a step."""
    if event["event"] != PLACES[place] or event.get("purpose") == "eval":
        return False
    return event["event"] != "step" or (event["step"] % SAVE_STEPS == 0) == (place == "checkpoint")


def faults_of(words):
    """Faults whose kind or place is one of these words, by commas; all without any.

    >>> set(faults_of("learner interrupted, disk full")) - {("disk full", "checkpoint")} == {
    ...     ("learner interrupted", place) for place in ("generation", "sync", "checkpoint")
    ... }
    True
    """
    wanted = {word.strip() for word in words.split(",")}
    return [fault for fault in FAULTS if not words or wanted & set(fault)]


def story(number, seed, num_faults, looks, show, faults=FAULTS):
    """One run: faults that struck, with the seconds that each cost; ends of processes; what is wrong."""
    chance, struck = random.Random(f"{seed}-{number}"), []
    mode, num_ranks = STORIES[number % len(STORIES)]
    with tempfile.TemporaryDirectory(ignore_cleanup_errors=True) as name:
        write_cut(Path(name) / "model")
        run = StruckRun(Path(name), mode, num_ranks, chance, looks)
        try:
            run.start_server()
            run.start_learner()
            run.recover()
            run.tail.wait_for(lambda event: event["event"] == "saved", run.is_running, BOUND_S)
            while len(struck) < num_faults:
                kind, place = chance.choice(faults)
                if run.strike(kind, place):
                    struck.append((kind, place, run.recover()))
                    show(f"  {mode}, {num_ranks} ranks: {kind}, {place}: {struck[-1][2]:.1f} s; {len(run.wrong)} wrong")
                else:
                    run.recover()
            run.end_learner(signal.SIGINT)
        except AssertionError as error:  # a process that hangs or does not start ends the story
            logs = "".join(rank.output()[-1500:] for rank in run.ranks) + run.server.output()[-1500:]
            run.wrong.append(f"{error}\n{logs}")
        finally:
            looks.watch(None)
            for process in (*run.ranks, run.server):
                process.end(grace_s=0)
        num_samples = len(load_samples(str(MATCHING.parent / "train.jsonl")))
        journals = journals_of(run.out, num_ranks=num_ranks)
        run.wrong += judge_story(journals, mode=mode, num_samples=num_samples, accumulation=ACCUMULATION)
        if run.wrong:
            kept = Path(tempfile.mkdtemp()) / "run"
            shutil.copytree(name, kept, symlinks=True)
            show(f"  kept: {kept}")
    return struck, run.ends, run.wrong
