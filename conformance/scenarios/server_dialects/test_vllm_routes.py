"""vLLM's routes for weights and pauses, over pretending workers: what is refused, and what is left as it was."""

import asyncio

import httpx
import pytest
from starlette.testclient import TestClient

from conformance.doubles.stand_in import make_stand_in
from rollmatch.server.announced import specs_of
from rollmatch.weights.transfer_plan import TransferPlan, from_wire

GROUP = {"master_address": "127.0.0.1", "master_port": 23000, "rank_offset": 1, "world_size": 3}
DONE = (200, None)


class Trainer:
    """Calls of one that speaks to a stock server."""

    def __init__(self, parts, client):
        self.parts, self.client = parts, client
        self.held = list(parts.model.tensors.values())

    def post(self, route, body=None):
        reply = self.client.post(route, json={} if body is None else body)
        return reply.status_code, reply.json().get("code")

    def join(self, **fields):
        return self.post("/init_weight_transfer_engine", {"init_info": GROUP | fields})

    def start(self):
        return self.post("/start_weight_update")

    def send(self, specs, **fields):
        """The workers have received them when they are asked."""
        digests = {spec.name: "0" * 32 for spec in specs}
        for replica in self.parts.pool.replicas:
            replica.answers["rollmatch_poll"] = {"state": "idle", "digests": digests}
        rows = {"names": [spec.name for spec in specs], "dtype_names": [spec.dtype for spec in specs]}
        shapes = {"shapes": [list(spec.shape) for spec in specs]}
        return self.post("/update_weights", {"update_info": rows | shapes | fields})

    def finish(self, **fields):
        return self.post("/finish_weight_update", fields)

    def get(self, route):
        return self.client.get(route).json()

    @property
    def version(self):
        return self.get("/health")["policy_version"]

    def plans(self):
        """What the first worker was to receive, in order."""
        calls = self.parts.pool.replicas[0].calls
        return [from_wire(call[1], TransferPlan) for call in calls if call[0] == "rollmatch_receive"]


@pytest.fixture
def trainer():
    parts, app = make_stand_in()
    with TestClient(app, base_url="http://testserver") as client:
        yield Trainer(parts, client)


@pytest.mark.scenario(clauses=["server-dialects/our-server-serves-trainers-of-stock-vllm-servers#1,2,4"])
def test_an_update_in_several_calls_is_served_at_its_end(trainer):
    assert trainer.get("/server_info?config_format=json")["vllm_config"]["weight_transfer_config"] is not None
    assert trainer.get("/get_world_size") == {"world_size": 2}
    assert (trainer.join(), trainer.start()) == (DONE, DONE)
    for specs in (trainer.held[:3], trainer.held[3:]):
        assert trainer.version == 0
        assert trainer.send(specs) == DONE
    assert trainer.finish(weight_version="step 7") == DONE
    assert (trainer.version, trainer.get("/weight_info")) == (1, {"weight_version": "step 7"})
    opened = [call for call in trainer.parts.pool.replicas[1].calls if call[0] == "rollmatch_open"]
    assert len(opened) == 1
    assert trainer.post("/reset_prefix_cache") == DONE


@pytest.mark.scenario(clauses=["server-dialects/our-server-serves-trainers-of-stock-vllm-servers#1,10"])
def test_weights_have_the_name_that_the_learner_gave_them_until_others_come(trainer):
    trainer.join()
    for name, expected in (("first", "first"), (None, "2")):
        trainer.start()
        trainer.send(trainer.held)
        trainer.finish(**({"weight_version": name} if name else {}))
        assert trainer.get("/weight_info") == {"weight_version": expected}
        body = {"token_ids": [5], "sampling_params": {"max_tokens": 3}}
        (choice,) = trainer.client.post("/inference/v1/generate", json=body).json()["choices"]
        assert choice["weight_versions"] == [{"start": 0, "end": 3, "version": expected}]
    assert trainer.post("/update_weight_version", {"new_version": "later"}) == DONE
    assert trainer.get("/weight_info") == {"weight_version": "later"}


@pytest.mark.scenario(clauses=["server-dialects/our-server-serves-trainers-of-stock-vllm-servers#3"])
@pytest.mark.parametrize("where", ["group", "update"])
def test_tensors_come_one_by_one_or_in_buffers(trainer, where):
    packing = {"packed": True, "packed_buffer_size_bytes": specs_of(trainer.held)[0].num_bytes}
    trainer.join(**(packing if where == "group" else {}))
    trainer.start()
    trainer.send(trainer.held[:3], **(packing if where == "update" else {}))
    trainer.send(trainer.held[3:6], packed=False)
    trainer.send(trainer.held[6:9], packed=True)
    assert [plan.buckets for plan in trainer.plans()] == [(2, 1), (1, 1, 1), (3,)]


@pytest.mark.scenario(
    "server-dialects/half-an-update-is-dropped",
    clauses=["server-dialects/our-server-serves-trainers-of-stock-vllm-servers#4"],
)
def test_half_an_update_is_dropped(trainer):
    trainer.join()
    trainer.start()
    *most, last = sorted(trainer.held, key=lambda spec: spec.name)
    trainer.send(most)
    reply = trainer.client.post("/finish_weight_update", json={})
    assert (reply.status_code, reply.json()["code"], reply.json()["key"]) == (400, "tensor-missing", last.name)
    assert trainer.version == 0
    assert [trainer.start(), trainer.send(trainer.held), trainer.finish()] == [DONE] * 3
    assert trainer.version == 1


@pytest.mark.scenario(clauses=["server-dialects/our-server-serves-trainers-of-stock-vllm-servers#5"])
def test_calls_out_of_order_are_refused(trainer):
    missing, early = (409, "communicator-missing"), (409, "update-not-started")
    assert [trainer.start(), trainer.send(trainer.held), trainer.finish()] == [missing] * 3
    trainer.join()
    assert [trainer.send(trainer.held), trainer.finish()] == [early] * 2
    assert [trainer.start(), trainer.start()] == [DONE, (409, "update-in-progress")]
    assert [trainer.send(trainer.held), trainer.finish(), trainer.finish()] == [DONE, DONE, early]


@pytest.mark.scenario(clauses=["server-dialects/our-server-serves-trainers-of-stock-vllm-servers#6"])
@pytest.mark.parametrize(
    ("change", "code"),
    [
        ({"name": "model.none"}, "tensor-unknown"),
        ({"shape": (1, 2)}, "tensor-shape-mismatch"),
        ({"dtype": "int32"}, "tensor-dtype-mismatch"),
        ({}, "tensor-repeated"),
    ],
)
def test_a_wrong_tensor_is_refused_before_it_is_received(trainer, change, code):
    trainer.join()
    trainer.start()
    first, second, *others = trainer.held
    trainer.send([first])
    status, found = trainer.send([second, first.model_copy(update=change)])
    assert (status in (400, 409), found) == (True, code)
    assert len(trainer.plans()) == 1
    assert [trainer.send([second, *others]), trainer.finish()] == [DONE, DONE]


@pytest.mark.parametrize(
    ("route", "body"),
    [
        ("/init_weight_transfer_engine", {"init_info": GROUP | {"rank_offset": 0}}),
        ("/init_weight_transfer_engine", {"init_info": GROUP | {"nccl_unique_id_b64": "AA=="}}),
        ("/init_weight_transfer_engine", {"init_info": GROUP | {"unknown": 1}}),
        ("/init_weight_transfer_engine", {"init_info": {}}),
        ("/start_weight_update", {"is_checkpoint_format": False}),
    ],
)
def test_bodies_that_promise_what_is_not_served_are_refused(trainer, route, body):
    assert trainer.post(route, body) == (422, "body-invalid")


@pytest.mark.parametrize(("names", "shapes"), [(["a"], []), ([], [])])
def test_an_announcement_has_one_entry_per_tensor(trainer, names, shapes):
    trainer.join()
    trainer.start()
    body = {"update_info": {"names": names, "dtype_names": ["float32"] * len(names), "shapes": shapes}}
    assert trainer.post("/update_weights", body) == (400, "announcement-invalid")


def test_a_group_without_room_for_the_learner_is_refused(trainer):
    assert trainer.join(world_size=2) == (400, "world-size-mismatch")


def test_trainers_of_other_dialects_have_no_part_in_its_update(trainer):
    trainer.join()
    trainer.start()
    (first, *_) = trainer.held
    body = {"name": first.name, "dtype": f"torch.{first.dtype}", "shape": list(first.shape)}
    assert trainer.post("/update_named_param", body) == (409, "client-already-attached")
    assert trainer.post("/reset_prefix_cache") == DONE
    assert [trainer.send(trainer.held), trainer.finish()] == [DONE, DONE]


@pytest.mark.scenario(clauses=["server-dialects/our-server-serves-trainers-of-stock-vllm-servers#9"])
@pytest.mark.parametrize(("is_lost", "expected"), [(True, DONE), (False, (409, "communicator-already-open"))])
def test_a_trainer_that_died_leaves_its_place_and_its_pause(trainer, is_lost, expected):
    trainer.join()
    trainer.start()
    trainer.post("/pause?mode=keep")
    for replica in trainer.parts.pool.replicas:
        replica.answers["rollmatch_members"] = {"lost": is_lost}
    assert trainer.join(master_port=23001) == expected
    assert trainer.get("/is_paused") == {"is_paused": not is_lost}
    assert trainer.start() == (DONE if is_lost else (409, "update-in-progress"))


async def _calls(parts, app, mode):
    """Send a prompt, pause while it is answered, and send another one."""
    async with httpx.AsyncClient(transport=httpx.ASGITransport(app), base_url="http://testserver") as client:

        def ask(token_id):
            return asyncio.create_task(client.post("/generate/", json={"prompts": [[token_id]], "max_tokens": 2}))

        running = ask(5)
        while not parts.pool.replicas[0].generated:
            await asyncio.sleep(0.001)
        assert (await client.post(f"/pause?mode={mode}")).status_code == 200
        late = ask(6)
        await asyncio.sleep(0.05)
        was_done = running.done()
        assert (await client.get("/is_paused")).json() == {"is_paused": True}
        held = not late.done()
        assert (await client.post("/resume")).status_code == 200
        return was_done, held, (await running).json(), (await late).json()


@pytest.mark.scenario(
    "server-dialects/a-pause-holds-what-begins",
    clauses=["server-dialects/our-server-serves-trainers-of-stock-vllm-servers#7,8"],
)
@pytest.mark.parametrize("mode", ["wait", "keep", "abort"])
def test_a_pause_holds_what_begins_and_treats_what_runs_as_its_mode_says(mode):
    parts, app = make_stand_in(delay_s=0.2)
    was_done, held, running, late = asyncio.run(_calls(parts, app, mode))
    assert held
    assert late["completion_ids"] == [[6, 410]]
    if mode == "abort":
        assert running["code"] == "generation-aborted"
    else:
        assert running["completion_ids"] == [[5, 410]]
    assert was_done == (mode != "keep")
    assert parts.pool.num_restarted == (mode == "keep")
