"""What may overlap, and how old it may be."""

import pytest

from conformance.doubles import configs
from conformance.doubles.configs import config_with, problems_of, refusal_of
from rollmatch.config.effective import calls_together, num_windows_ahead

LONG = "custom.extra.rollout_matching"
AHEAD = ("~.overlap=ahead", "~.vllm.mode=server", "~.vllm.server.base_url=http://127.0.0.1:8000")
SERVED = (*AHEAD, "~.vllm.server.group_port=51216")
ALONE, GRPO = configs.GRPO, (*configs.GRPO, *SERVED)
WORLD = ("custom.extra.environment.name=a:World", "custom.extra.environment.max_response_tokens=600")
SHARE_OF_32 = ("training.per_device_train_batch_size=8", "training.gradient_accumulation_steps=8")
"""Of two servers."""
TWO_PROMPTS = ("training.per_device_train_batch_size=2", "training.gradient_accumulation_steps=1")
SEVERAL = ("custom.extra.grpo.steps_per_generation=2", "custom.extra.grpo.num_iterations=2")


def test_servers_named_under_rlhf_may_overlap():
    named = ("rlhf.use_vllm=true", "rlhf.vllm_mode=server", "rlhf.vllm_server_host=[a]", "rlhf.vllm_server_port=[8080]")
    assert config_with(*ALONE, "~.overlap=ahead", *named).custom.extra.rollout_matching.overlap == "ahead"
    colocated = ("rlhf.use_vllm=true", "rlhf.vllm_mode=colocate")
    found = [(each.code, each.key) for each in problems_of(*ALONE, "~.overlap=ahead", *colocated)]
    assert ("overlap-needs-servers", f"{LONG}.overlap") in found
    assert config_with(*GRPO).custom.extra.rollout_matching.overlap == "ahead"


@pytest.mark.scenario(
    "prefetch/vineppo-with-weights-in-flight-is-refused",
    "prefetch/vineppo-one-window-ahead-is-accepted",
    clauses=["prefetch/values-are-sampled-before-weights-change#4"],
)
@pytest.mark.parametrize("variant", ["vineppo", "vineppo_mcts"])
@pytest.mark.parametrize(
    ("added", "key", "good"),
    [
        (["~.vllm.sync.in_flight=keep"], "vllm.sync.in_flight", []),
        (["~.max_staleness=2"], "max_staleness", ["~.max_staleness=1"]),
        ([*SEVERAL, "~.max_staleness=11"], "max_staleness", [*SEVERAL, "~.max_staleness=7"]),
        ([*SEVERAL, "~.max_staleness=11"], "max_staleness", [*SEVERAL, "~.max_staleness=10"]),
    ],
)
def test_values_are_sampled_one_window_ahead(variant, added, key, good):
    ahead = (f"custom.trainer_variant={variant}", *GRPO[1:])
    assert refusal_of(*ahead, *added) == ("values-of-other-weights", f"{LONG}.{key}")
    assert config_with(*ahead, *good).custom.extra.rollout_matching.overlap == "ahead"


@pytest.mark.scenario(clauses=["prefetch/a-sync-comes-in-the-midst-of-episodes#5"])
@pytest.mark.parametrize("in_flight", ["keep", "restart"])
def test_a_sync_meets_episodes_only_where_some_are_under_way(in_flight):
    played, set_to = (*GRPO, "custom.extra.grpo.rewards=[]", *WORLD), f"~.vllm.sync.in_flight={in_flight}"
    assert config_with(*played, set_to).custom.extra.rollout_matching.vllm.sync.in_flight == in_flight
    assert config_with(*played).custom.extra.rollout_matching.vllm.sync.in_flight == "wait"
    alone = (*GRPO, set_to)
    for unused in ((*played, set_to, "~.overlap=off"), (*alone, "~.overlap=off"), *([alone][: in_flight == "restart"])):
        assert refusal_of(*unused) == ("in-flight-unused", f"{LONG}.vllm.sync.in_flight")
    if in_flight == "keep":
        assert config_with(*alone).custom.extra.rollout_matching.vllm.sync.in_flight == "keep"


@pytest.mark.scenario(
    "prefetch/late-windows-beside-a-sync-that-waits-are-refused",
    "prefetch/late-windows-beside-a-sync-that-keeps-are-accepted",
    clauses=["prefetch/a-step-takes-the-first-complete-groups#8"],
)
def test_groups_are_late_only_where_no_sync_waits_for_them():
    played, keeps = (*GRPO, "custom.extra.grpo.rewards=[]", *WORLD), "~.vllm.sync.in_flight=keep"
    late = (*played, "~.max_staleness=3", "~.late_windows=2")
    assert num_windows_ahead(config_with(*late, keeps)) == 1
    assert num_windows_ahead(config_with(*late, keeps, *SEVERAL, "~.max_staleness=15")) == 1
    assert num_windows_ahead(config_with(*played, "~.max_staleness=3")) == 3
    for bad in (
        late,
        (*late, "~.vllm.sync.in_flight=restart"),
        (*late, keeps, "~.max_staleness=2"),
        (*late, keeps, "~.pieces_per_server=2"),
        (*late, keeps, *SEVERAL, "~.max_staleness=14"),
        (*GRPO, "~.max_staleness=3", "~.late_windows=2"),
    ):
        assert refusal_of(*bad) == ("late-windows-undefined", f"{LONG}.late_windows"), bad
    found = [(each.code, each.key) for each in problems_of(*late, "~.overlap=off")]
    assert ("late-windows-undefined", f"{LONG}.late_windows") in found


@pytest.mark.scenario(clauses=["prefetch/grpo-requests-completions-a-window-ahead#5"])
def test_completions_that_wait_for_a_row_could_not_be_asked_for_again():
    packed = (*GRPO, "training.packing=true", "~.max_staleness=2")
    assert refusal_of(*packed) == ("ahead-needs-padded-batches", f"{LONG}.overlap")
    config_with(*packed, "training.packing=false")
    config_with(*packed, "~.overlap=off")


@pytest.mark.scenario(
    "prefetch/staleness-without-a-correction-is-refused",
    "prefetch/staleness-with-the-server-s-log-probabilities-is-accepted",
    clauses=["prefetch/grpo-requests-completions-a-window-ahead#4"],
)
def test_staleness_is_corrected_for():
    plain = (*GRPO, "custom.extra.grpo.correction_cap=null")
    assert refusal_of(*plain) == ("staleness-uncorrected", "custom.extra.grpo.correction_cap")
    config_with(*plain, "custom.extra.grpo.old_logprobs=server")
    config_with(*plain, "~.overlap=off")
    config_with(*SERVED, "custom.extra.grpo.correction_cap=null")


@pytest.mark.scenario(clauses=["prefetch/grpo-requests-completions-a-window-ahead#3"])
def test_a_window_of_several_steps_needs_as_much_staleness():
    for staleness in (1, 6):
        refusal = refusal_of(*GRPO, *SEVERAL, f"~.max_staleness={staleness}")
        assert refusal == ("window-needs-staleness", f"{LONG}.max_staleness")
    config_with(*GRPO, *SEVERAL, "~.max_staleness=7")
    config_with(*SERVED, *SEVERAL)


@pytest.mark.parametrize(
    ("overrides", "expected"),
    [
        ((*GRPO,), 1),
        ((*GRPO, "~.max_staleness=3"), 3),
        ((*GRPO, *SEVERAL, "~.max_staleness=7"), 1),
        ((*GRPO, *SEVERAL, "~.max_staleness=10"), 1),
        ((*GRPO, *SEVERAL, "~.max_staleness=11"), 2),
        ((*SERVED, *SEVERAL), 1),
        ((*SERVED, "training.packing=true", "~.max_staleness=2"), 1),
    ],
)
def test_windows_in_advance_keep_the_last_step_of_each_within_the_staleness(overrides, expected):
    assert num_windows_ahead(config_with(*overrides)) == expected


@pytest.mark.scenario(
    "request-distribution/pieces-without-overlap-are-refused",
    "request-distribution/pieces-with-overlap-are-accepted",
    clauses=["request-distribution/late-work-moves-only-where-it-may#1,8"],
)
def test_shares_are_cut_in_pieces_where_calls_are_made_beside_learning():
    cut = (*SERVED, "~.pieces_per_server=4")
    assert refusal_of(*cut, "~.overlap=off") == ("late-work-needs-overlap", f"{LONG}.pieces_per_server")
    config_with(*cut)
    assert config_with(*SERVED, "~.overlap=off").custom.extra.rollout_matching.pieces_per_server == 1
    for value, code in (("0", "out-of-range"), ("1.5", "wrong-type")):
        assert refusal_of(*SERVED, f"~.pieces_per_server={value}") == (code, f"{LONG}.pieces_per_server")


LAUNCHED = "custom.extra.rollout_server"
ENGINES = (f"{LAUNCHED}.vllm_data_parallel_size=2", "~.vllm.max_num_seqs=4")


@pytest.mark.parametrize(
    ("overrides", "expected"),
    [
        ((), 1),  # half of a share that may move
        (("~.pieces_per_server=2",), 1),
        (("~.pieces_per_server=5",), 3),
        (("~.pieces_per_server=99",), 16),
        ((*ENGINES, "~.pieces_per_server=32"), 8 + 1),  # as many as fill the engines, and one more
        ((*ENGINES, "~.pieces_per_server=16"), 4 + 1),
        ((*ENGINES, "~.pieces_per_server=8"), 2 + 1),
        ((*ENGINES, "~.pieces_per_server=2"), 1),
        ((*ENGINES, "~.pieces_per_server=32", "~.vllm.max_num_seqs=64"), 16),
        ((*ENGINES, "~.pieces_per_server=32", f"{LAUNCHED}.vllm_engine_kwargs={{max_num_seqs: 1}}"), 2 + 1),
    ],
)
def test_calls_under_way_are_half_of_a_share_or_what_fills_the_engines(overrides, expected):
    config = config_with(*SERVED, *SHARE_OF_32, *overrides)
    assert calls_together(config, num_servers=2) == expected


def test_ranks_fill_the_engines_together_and_a_share_counts_completions():
    config = config_with(*SERVED, *SHARE_OF_32, *ENGINES, "~.pieces_per_server=32")
    assert calls_together(config, num_servers=2, learner_world_size=4) == 2 + 1
    groups = ("custom.extra.grpo.num_generations=16", "~.pieces_per_server=64", *TWO_PROMPTS)
    config = config_with(*GRPO, *ENGINES, *groups)
    assert [calls_together(config, num_servers=number) for number in (1, 2)] == [8 + 1, 8]  # half of 16
