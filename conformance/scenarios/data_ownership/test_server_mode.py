"""One configuration with the engine in the learner's process, and with a server: the same samples, ids and targets.

Both engines are transformers, so that both write the same ids and whatever else differs is the mode's.
"""

from contextlib import ExitStack
from itertools import chain

import pytest

from conformance.doubles.answering_server import AnsweringServer
from conformance.doubles.digits import cut, load_model, template_of
from conformance.doubles.engine import install
from conformance.doubles.instance import free_port
from conformance.doubles.native_double import serving
from conformance.doubles.small_run import events, make_trainer
from rollmatch.rollout.servers import VllmServerBackend

VLLM = "custom.extra.rollout_matching.vllm"
STEPS = 4
SHORT = (
    "custom.extra.rollout_matching.rollout_backend=vllm",
    f"{VLLM}.max_model_len=512",
    "custom.extra.rollout_matching.max_new_tokens=8",
    "training.per_device_train_batch_size=2",
    f"training.max_steps={STEPS}",
    "training.packing=true",
)


def server_overrides(url):
    return (f"{VLLM}.mode=server", f"{VLLM}.server.base_url={url}", f"{VLLM}.server.group_port={free_port()}")


def make(folder, *overrides):
    return make_trainer(folder, *SHORT, *overrides, is_shallow=True)


@pytest.fixture(scope="module")
def runs(tmp_path_factory):
    """Trainers of both modes after four steps, the server, and the rollouts that the second was given."""
    given = []
    with ExitStack() as stack, pytest.MonkeyPatch.context() as monkeypatch:
        engine = cut(load_model())
        install(engine, template_of(), monkeypatch)
        server = AnsweringServer(engine, template_of())
        (url,) = stack.enter_context(serving(server))
        colocate = make(tmp_path_factory.mktemp("colocate"), f"{VLLM}.mode=colocate")
        served = make(tmp_path_factory.mktemp("served"), *server_overrides(url))
        generate = served.source.fence.backend.generate
        monkeypatch.setattr(
            served.source.fence.backend, "generate", lambda *each: given.append(generate(*each)) or given[-1]
        )
        colocate.train()
        served.train()
        served.close()
        yield colocate, served, server, given


def found(trainer, event, *fields):
    return [tuple(each[field] for field in fields) for each in events(trainer, event)]


@pytest.mark.scenario(
    "data-ownership/both-modes-see-the-same-samples",
    clauses=["data-ownership/the-learner-owns-the-order-of-the-data#3"],
)
def test_both_modes_see_the_same_samples(runs):
    colocate, served, *_ = runs
    requested = found(served, "requested", "step", "sample_ids", "seeds", "decoding")
    assert requested == found(colocate, "requested", "step", "sample_ids", "seeds", "decoding")
    assert [step for step, *_ in requested] == list(range(STEPS))
    learnt = found(served, "packed", "step", "sample_ids")
    assert learnt == found(colocate, "packed", "step", "sample_ids")
    assert [sorted(chain(*rows)) for _, rows in learnt] == [sorted(ids) for _, ids, *_ in requested]
    arguments = colocate.source.fence.backend._engine.arguments
    assert (arguments["seed"], arguments["kv_cache_memory_bytes"]) == (42, 128 * 2**20)
    assert None not in arguments.values()


@pytest.mark.scenario("rollout-backends/server-mode-hands-on-what-the-servers-said")
def test_what_the_server_answered_is_what_is_learnt_from_as_in_colocate_mode(runs, monkeypatch):
    colocate, served, server, given = runs
    stop_id = served.source.template.vocabulary.stop_id
    for rollout in (rollout for step in given for rollout in step):
        prompt, written = server.answered[rollout.request_id]
        assert rollout.prompt_token_ids == tuple(prompt)
        assert rollout.response_token_ids == tuple(token_id for token_id in written if token_id != stop_id)
    assert [len(step) for step in given] == [2] * STEPS
    fields = ("step", "rows", "segments", "tokens", "fill", "carried", "oldest_policy_version")
    assert found(served, "packed", *fields) == found(colocate, "packed", *fields)
    assert found(served, "generated", "num_tokens", "policy_version") == found(
        colocate, "generated", "num_tokens", "policy_version"
    )
    assert served.state.log_history[-1]["train_loss"] == pytest.approx(colocate.state.log_history[-1]["train_loss"])
    assert isinstance(served.source.fence.backend, VllmServerBackend)
