"""What a server that dies costs a run beyond its restart: a real server and a real learner, on a CPU.

The cost is the time of the step in which the server died, less that of a calm step, less the time from the kill until
another server was ready::

    PYTHONPATH=impl:. python benchmarks/rollout/server_restart.py
"""

import statistics
import sys
import tempfile
import time
from contextlib import ExitStack
from pathlib import Path

import psutil
import requests

from conformance.doubles.division import MATCHING, typed
from conformance.doubles.killed_server import make_run, parts_of, server_of, wait_for_sync
from conformance.doubles.processes import stopped
from conformance.doubles.started import journal_of, started

BAR_S = 10.0
STEPS, IN_GENERATION, IN_SYNC = 8, 3, 5
"""Steps of the run, and how many had ended when the server died."""
FIELDS = (
    "custom.extra.rollout_matching.vllm.server.retry_budget_s=900",
    f"training.max_steps={STEPS}",
    "custom.extra.rollout_matching.max_new_tokens=96",
)


def training(story, name: str) -> list[dict]:
    """Events of training, by step."""
    return [event for event in journal_of(story.out, name) if event.get("purpose") == "train"]


def restart(story, learner) -> float:
    """Kill every process of the server; returns the seconds until another is ready."""
    began = time.monotonic()
    members = story.server.members()
    for process in members:
        process.kill()
    psutil.wait_procs(members, timeout=60)  # until then the port is taken
    story.server.process.wait(timeout=60)
    story.server = story.stack.enter_context(server_of(story))
    assert learner.process.poll() is None, learner.output()[-3000:]
    return time.monotonic() - began


def kill_in_generation(story, learner) -> float:
    learner.wait_until(lambda: IN_GENERATION in [event["step"] for event in training(story, "requested")])
    learner.wait_until(lambda: requests.get(f"{story.url}/health/", timeout=30).json()["running"] > 0)
    with stopped(*parts_of(story.server)[1]):
        assert requests.get(f"{story.url}/health/", timeout=30).json()["running"] > 0
        return restart(story, learner)


def kill_in_sync(story, learner) -> float:
    learner.wait_until(lambda: len(journal_of(story.out, "packed")) >= IN_SYNC)
    with stopped(*parts_of(story.server)[1]):
        wait_for_sync(story, learner, IN_SYNC)
        return restart(story, learner)


def main(folder: Path) -> int:
    """Prints the cost of both restarts; returns the number of missed bars."""
    with ExitStack() as stack:
        story = make_run(folder, stack, *FIELDS)
        story.server = stack.enter_context(server_of(story))
        with started(typed("train", MATCHING, "2", story.overrides), folder / "learner.txt") as learner:
            restarts = {
                IN_GENERATION: ("generation", kill_in_generation(story, learner)),
                IN_SYNC: ("sync", kill_in_sync(story, learner)),
            }
            assert learner.wait() == 0, learner.output()[-3000:]
    written = [event["time"] for event in training(story, "generated")]
    lasted = {step: written[step] - written[step - 1] for step in range(1, len(written))}
    calm = statistics.median(seconds for step, seconds in lasted.items() if step not in restarts)
    num_missed = 0
    sys.stdout.write(f"seconds of each step: {', '.join(f'{seconds:.1f}' for seconds in lasted.values())}\n")
    for step, (where, restart_s) in restarts.items():
        cost_s = lasted[step] - calm - restart_s
        num_missed += cost_s >= BAR_S
        sys.stdout.write(f"restart in {where}: {cost_s:.1f} s beyond its {restart_s:.1f} s (bar {BAR_S:g} s)\n")
    return num_missed


if __name__ == "__main__":
    with tempfile.TemporaryDirectory() as made:
        sys.exit(main(Path(made)))
