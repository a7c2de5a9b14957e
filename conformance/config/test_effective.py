import pytest

from rollmatch.config.effective import (
    TensorParallelMismatch,
    chunked_prefill,
    enforce_eager,
    kv_cache_memory_mib,
    max_model_len,
    rollout_threads,
    tensor_parallel_rule,
    tensor_parallel_size,
)

TP_KEY = "custom.extra.rollout_matching.vllm.tensor_parallel_size"


@pytest.mark.scenario(
    "rollout-backends/four-ranks-share-one-engine",
    "rollout-backends/two-ranks-have-an-engine-each",
    clauses=["rollout-backends/a-colocated-engine-leaves-room-for-training#1,2"],
)
@pytest.mark.parametrize(("told", "world_size", "size"), [("null", 4, 4), ("null", 8, 1), ("null", 1, 1), ("2", 4, 2)])
def test_tensor_parallel_size_follows_the_learner(make_with, told, world_size, size):
    config = make_with(f"~.vllm.tensor_parallel_size={told}")
    assert tensor_parallel_size(config, learner_world_size=world_size) == size


@pytest.mark.scenario(
    "rollout-backends/six-ranks-cannot-form-groups-of-four",
    clauses=["rollout-backends/a-colocated-engine-leaves-room-for-training#3"],
)
@pytest.mark.parametrize(("told", "world_size"), [("3", 4), ("2", 1), ("4", 6)])
def test_ranks_that_do_not_divide_are_refused(make_with, told, world_size):
    with pytest.raises(TensorParallelMismatch) as caught:
        tensor_parallel_size(make_with(f"~.vllm.tensor_parallel_size={told}"), learner_world_size=world_size)
    assert (caught.value.code, caught.value.key) == ("tensor-parallel-mismatch", TP_KEY)
    fitting = tensor_parallel_size(make_with(f"~.vllm.tensor_parallel_size={told}"), learner_world_size=12)
    assert fitting == int(told)


def test_the_rule_is_told_in_words(make_with):
    assert tensor_parallel_rule(make_with()) == "4 with 4 learner ranks, else 1"
    assert tensor_parallel_rule(make_with("~.vllm.tensor_parallel_size=2")) == "2, as set"


@pytest.mark.parametrize(
    ("told", "on_cpu", "on_gpu"), [("null", True, False), ("true", True, True), ("false", False, False)]
)
def test_eager_running(make_with, told, on_cpu, on_gpu):
    config = make_with(f"~.vllm.enforce_eager={told}")
    assert (enforce_eager(config, on_gpu=False), enforce_eager(config, on_gpu=True)) == (on_cpu, on_gpu)


@pytest.mark.parametrize(
    ("told", "on_cpu", "on_gpu"),
    [
        ("enable_chunked_prefill=null", False, None),
        ("enable_chunked_prefill=true", True, True),
        ("enable_chunked_prefill=false", False, False),
        ("max_num_batched_tokens=1024", False, None),
        ("max_num_batched_tokens=1023", None, None),
    ],
)
def test_prompts_are_not_split_on_a_cpu_where_a_step_can_hold_a_sequence(make_with, told, on_cpu, on_gpu):
    config = make_with(f"~.vllm.{told}")
    found = [chunked_prefill(config, on_gpu=where, max_model_len=1024) for where in (False, True)]
    assert found == [on_cpu, on_gpu]


def test_lengths_threads_and_cache_have_a_meaning_when_null(make_with):
    config = make_with()
    assert max_model_len(config) == 1024
    assert (kv_cache_memory_mib(config, on_gpu=False), kv_cache_memory_mib(config, on_gpu=True)) == (512, None)
    assert (rollout_threads(config, on_gpu=False), rollout_threads(config, on_gpu=True)) == (1, None)


def test_lengths_threads_and_cache_are_taken_as_told(make_with):
    config = make_with("~.vllm.max_model_len=600", "~.vllm.kv_cache_memory_mib=64", "training.rollout_threads=3")
    assert max_model_len(config) == 600
    assert (kv_cache_memory_mib(config, on_gpu=False), kv_cache_memory_mib(config, on_gpu=True)) == (64, 64)
    assert (rollout_threads(config, on_gpu=False), rollout_threads(config, on_gpu=True)) == (3, 3)
