"""Adapters travel alone until that fails once; then all weights do, for good, and one warning says so."""

import logging
from dataclasses import dataclass, field

import pytest

from conformance.doubles.refusals import refused
from rollmatch.errors import SyncError
from rollmatch.ranks import Ranks
from rollmatch.rollout.backend import RolloutBackend
from rollmatch.rollout.fence import SyncMode


class Unproven(SyncError):
    code = "digest-mismatch"


@dataclass
class Weights:
    def adapter(self):
        return "adapter"


@dataclass
class ModeBackend(RolloutBackend):
    """Fails adapter pushes by number, from 1; ``committed`` is what a failed one leaves behind."""

    takes_adapters = True
    failing: tuple = ()
    committed: bool = False
    policy_version: int = 0
    took: list = field(default_factory=list)
    num_adapters: int = 0

    def push(self, weights, *, version):
        self.took.append(("full", version))
        self.policy_version = version

    def generate(self, requests, decoding):
        raise NotImplementedError

    def push_adapter(self, adapter, *, version):
        assert adapter == "adapter"
        self.num_adapters += 1
        if self.num_adapters in self.failing:
            self.policy_version = version if self.committed else self.policy_version
            raise Unproven("merged otherwise", key="a")
        self.took.append(("adapter", version))
        self.policy_version = version


def push_steps(mode, backend, num_steps):
    return [mode.push(backend, Weights(), Ranks(), version=backend.policy_version + 1) for _ in range(num_steps)]


def test_full_is_the_default():
    backend = ModeBackend()
    assert push_steps(SyncMode(), backend, 2) == ["full", "full"]
    assert backend.took == [("full", 1), ("full", 2)]


def test_an_adapter_travels_alone():
    backend = ModeBackend()
    assert push_steps(SyncMode("adapter"), backend, 2) == ["adapter", "adapter"]
    assert backend.took == [("adapter", 1), ("adapter", 2)]


@pytest.mark.scenario(
    "weight-sync/the-fallback-stays", clauses=["weight-sync/a-failed-adapter-sync-falls-back-once-and-for-all#2,3,4"]
)
def test_the_first_failure_is_followed_by_a_full_sync_at_once_and_for_good(caplog):
    backend, mode = ModeBackend(failing=(2,)), SyncMode("adapter")
    with caplog.at_level(logging.WARNING):
        assert push_steps(mode, backend, 4) == ["adapter", "full", "full", "full"]
    assert backend.took == [("adapter", 1), ("full", 2), ("full", 3), ("full", 4)]
    (record,) = caplog.records
    assert "digest-mismatch" in record.getMessage()
    assert "merged otherwise" in record.getMessage()


def test_a_full_sync_after_a_half_committed_adapter_is_newer_than_both():
    backend = ModeBackend(failing=(1,), committed=True)
    push_steps(SyncMode("adapter"), backend, 1)
    assert backend.took == [("full", 2)]


@pytest.mark.scenario(
    "weight-sync/no-fallback-means-a-stop", clauses=["weight-sync/a-failed-adapter-sync-falls-back-once-and-for-all#5"]
)
def test_without_fallback_the_run_stops():
    backend, mode = ModeBackend(failing=(1,)), SyncMode("adapter", fallback_to_full=False)
    with refused("adapter-sync-failed", "custom.extra.rollout_matching.vllm.sync.mode", remedy="sync.mode: full"):
        mode.push(backend, Weights(), Ranks(), version=1)
    assert backend.took == []
    assert SyncMode("adapter").push(ModeBackend(failing=(1,)), Weights(), Ranks(), version=1) == "full"


def test_a_backend_that_takes_no_adapters_gets_all_weights():
    @dataclass
    class Colocated(RolloutBackend):
        policy_version: int = 0

        def push(self, weights, *, version):
            self.policy_version = version

        def generate(self, requests, decoding):
            raise NotImplementedError

    backend = Colocated()
    assert SyncMode("adapter").push(backend, Weights(), Ranks(), version=1) == "full"
    assert backend.policy_version == 1


@pytest.mark.scenario(clauses=["weight-sync/a-failed-adapter-sync-falls-back-once-and-for-all#7"])
def test_all_ranks_fall_back_where_one_fails():
    """Ranks that share an engine would else load different weights into its parts."""

    class OneOfTwo(Ranks):
        def gather(self, item):
            return [item, "Unproven: on the other rank"]

    backend, mode = ModeBackend(), SyncMode("adapter")
    assert mode.push(backend, Weights(), OneOfTwo(learner_world_size=2), version=1) == "full"
    assert backend.took == [("adapter", 1), ("full", 2)]


@pytest.mark.scenario(clauses=["weight-sync/a-failed-adapter-sync-falls-back-once-and-for-all#8"])
@pytest.mark.parametrize("has_fallback", [True, False])
def test_a_trial_before_training_that_fails_is_a_failed_sync(has_fallback):
    def trial():
        raise Unproven("merged otherwise", key="a")

    backend, mode = ModeBackend(), SyncMode("adapter", fallback_to_full=has_fallback)
    if has_fallback:
        assert not mode.attempt(trial, Ranks())
        assert push_steps(mode, backend, 2) == ["full", "full"]
    else:
        with refused("adapter-sync-failed", problem="merged otherwise"):
            mode.attempt(trial, Ranks())


def test_a_bug_is_no_reason_to_send_all_weights():
    def broken():
        raise TypeError("a bug")

    with pytest.raises(TypeError, match="a bug"):
        SyncMode("adapter").attempt(broken, Ranks())
