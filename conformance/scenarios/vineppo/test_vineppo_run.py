"""VinePPO as people start it: two training processes, one server, the five arguments of the guide."""

import re
import sys
import time

import pytest
import requests

from conformance.doubles.digits import ROOT
from conformance.doubles.instance import free_port
from conformance.doubles.started import in_time, journal_of, journals_of, started
from conformance.tools.judge import judge

pytestmark = pytest.mark.engine

CONFIG = ROOT / "fixtures/tasks/lock.yaml"
LAUNCHERS = {
    "torchrun": ("-m", "torch.distributed.run", "--standalone", "--nproc_per_node", "2"),
    "accelerate": (
        *("-m", "accelerate.commands.launch", "--multi_gpu"),
        *("--num_processes", "2", "--main_process_port", "0"),
    ),
}


def overrides_for(out, variant, overlap):
    overrides = {
        "custom.trainer_variant": variant,
        "custom.extra.rollout_matching.overlap": overlap,
        "custom.extra.rollout_matching.max_staleness": 7,
        "custom.extra.rollout_matching.rollout_backend": "vllm",
        "custom.extra.grpo.num_generations": 3,
        "custom.extra.grpo.old_logprobs": "server",
        "custom.extra.vineppo.num_continuations": 2,
        "custom.extra.vineppo.step_tokens": 4,
        "custom.extra.vineppo.search.num_rounds": 1,
        "custom.extra.vineppo.search.num_per_round": 2,
        "custom.extra.vineppo.search.num_least": 1,
        "training.output_dir": out,
        "training.per_device_train_batch_size": 1,
        "training.max_steps": 12,
        "training.report_to": "none",
    }
    return [part for key, value in overrides.items() for part in ("--set", f"{key}={value}")]


@pytest.mark.wide
@pytest.mark.scenario(
    "vineppo/two-processes-do-not-wait-for-each-other-at-the-rendezvous",
    "vineppo/a-sync-in-the-middle-of-two-processes",
    clauses=[
        "vineppo/every-process-generates-and-one-process-sends-weights#1,2,3,4,5",
        "vineppo/vineppo-trainers-use-a-rollout-server-by-five-arguments#1",
    ],
)
def test_two_processes_generate_and_one_sends_weights(tmp_path):
    http, group = free_port(), free_port()
    serve = [sys.executable, "-m", "rollmatch", "vllm-serve", "--model", "fixtures/models/tasks"]
    serve += ["--port", str(http), "--dtype", "float32", "--max_model_len", "64", "--enable_prefix_caching", "True"]
    five = ["--use_vllm_server", "--vllm_host", "localhost", "--vllm_server_port", str(http)]
    five += ["--vllm_group_port", str(group), "--vllm_connection_timeout", "60"]
    with started(serve, tmp_path / "server.txt") as server:
        members = Members(f"http://127.0.0.1:{http}")
        for launcher, variant, overlap in (("torchrun", "vineppo", "off"), ("accelerate", "vineppo_mcts", "ahead")):
            out = tmp_path / launcher
            train = [sys.executable, *LAUNCHERS[launcher], "-m", "rollmatch", "train", str(CONFIG)]
            train += [*overrides_for(out, variant, overlap), *five]
            with started(train, tmp_path / f"{launcher}.txt") as learner:
                code = members.watch(learner, out)
            assert code == 0, learner.output()[-3000:] + server.output()[-2000:]
            assert members.seen == {2}
            assert members.opened_s < 60
            check_run(out, is_ahead=overlap == "ahead")


class Members:
    """How large the server's group is while a learner runs, and how long it took to open from when training began."""

    def __init__(self, url):
        self.url = url
        self.seen, self.opened_s = set(), 0.0

    def watch(self, learner, out):
        """Until the learner ends; its exit code."""
        self.seen.clear()
        began = None
        while learner.process.poll() is None:
            began = began or (time.monotonic() if journal_of(out, "run") else None)
            if reply := self._ask():
                self.opened_s = self.opened_s if self.seen else time.monotonic() - (began or time.monotonic())
                self.seen.add(reply)
            time.sleep(0.1)
        return learner.wait()

    def _ask(self):
        try:
            text = requests.get(f"{self.url}/metrics/", timeout=5).text
        except requests.RequestException:  # not up yet
            return 0
        found = re.search(r"^rollmatch_group_members (\S+)$", text, re.MULTILINE)
        return int(float(found[1])) if found else 0


def check_run(out, *, is_ahead):
    """The run ahead is the server's second one."""
    journals = journals_of(out, num_ranks=2)
    if not is_ahead:  # the judge wants versions to begin at 1, a later learner continues from what the server holds
        assert judge(in_time(journals)) == []
    primary, other = journals
    synced = [event for event in primary if event["event"] == "synced"]
    assert len(synced) >= 2
    assert min(event["num_tensors"] for event in synced) > 0
    assert {event["num_tensors"] for event in other if event["event"] == "synced"} == {0}
    generated = [[e for e in part if e["event"] == "generated" and e["purpose"] == "train"] for part in journals]
    versions = [[event["policy_version"] for event in part] for part in generated]
    assert versions[0] == versions[1]
    assert len(set(versions[0])) == len(versions[0]) - is_ahead, "ahead, the first two windows are written at once"
    for events in journals:
        check_replies(events)
    valued = [[event for event in part if event["event"] == "valued"] for part in journals]
    assert all(event["num_continuations"] > 0 for part in valued for event in part)


def check_replies(events):
    """Every reply, those to continuations too, names the version of the sync before it."""
    version, named = 0, []
    for event in events:
        if event["event"] == "synced":
            version = event["version"]
        if event["event"] == "called":
            assert event["policy_versions"] == [version]
            named.append(version)
    assert named.count(named[0]) >= 2
    assert named.count(named[0] + 1) >= 2, "rollouts, and continuations after them"
