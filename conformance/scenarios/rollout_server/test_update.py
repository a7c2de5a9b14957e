"""The state of a server's weights: its table through the public routes."""

import asyncio
import json
from contextlib import asynccontextmanager

import pytest

from conformance.doubles.stand_in import make_stand_in
from rollmatch.server.update import TRANSITIONS, Event, Group, Incoming, Served

FAILURE = {"code": "digest-mismatch", "key": "w", "problem": "other bytes", "remedy": "again", "status": 409}
LONG_S = 0.05
"""What a response takes; the server drains for much longer."""


class Call:
    """One call of an application on this event loop; its caller may hang up."""

    def __init__(self, app, route, body):
        raw = json.dumps(body or {}).encode()
        method = "GET" if body is None else "POST"
        headers = {"host": "testserver", "content-type": "application/json", "content-length": str(len(raw))}
        self.scope = {
            "type": "http", "asgi": {"version": "3.0"}, "http_version": "1.1", "method": method, "scheme": "http",
            "path": route, "raw_path": route.encode(), "query_string": b"", "root_path": "",
            "headers": [(name.encode(), value.encode()) for name, value in headers.items()],
            "client": ("127.0.0.1", 1), "server": ("testserver", 80),
        }  # fmt: skip
        self.unread, self.gone, self.status, self.reply = [raw], asyncio.Event(), 0, b""
        self.task = asyncio.create_task(app(self.scope, self.receive, self.send))

    async def receive(self):
        if self.unread:
            return {"type": "http.request", "body": self.unread.pop(), "more_body": False}
        await self.gone.wait()
        return {"type": "http.disconnect"}

    async def send(self, message):
        self.status = message.get("status", self.status)
        self.reply += message.get("body", b"")

    async def end(self):
        await asyncio.wait_for(self.task, 20)
        return self.status, json.loads(self.reply or b"{}")


class Bench:
    """A server over pretending workers, and the calls and answers by which it comes into each state."""

    def __init__(self):
        self.parts, self.app = make_stand_in(drain_s=10.0, delay_s=LONG_S)
        self.update, self.release = self.parts.update, asyncio.Event()
        self.version, self.pending, self.held = 0, [], {}
        self.tensors = [spec.model_dump(mode="json") for spec in self.parts.model.tensors.values()]

    def begin(self, route, body=None):
        self.pending.append(Call(self.app, route, {} if body is None else body))
        return self.pending[-1]

    async def post(self, route, body=None):
        return await Call(self.app, route, {} if body is None else body).end()

    async def get(self, route):
        return await Call(self.app, route, None).end()

    def answer(self, method, answer):
        for replica in self.parts.pool.replicas:
            replica.answers[method] = answer

    async def begin_infer(self):
        """A call whose response takes longer than the test, unless it ends first."""
        for replica in self.parts.pool.replicas:
            replica.delay_s = 1.0
        call = self.begin("/native/infer/", {"requests": [{"request_id": "0", "prompt_token_ids": [5]}],
                                             "sampling": {"max_tokens": 2}})  # fmt: skip
        while not any(replica.generated for replica in self.parts.pool.replicas):
            await asyncio.sleep(0.001)
        return call

    def hold(self, method):
        """The workers answer when ``release`` is set, by what ``held`` is then."""

        async def wait():
            await self.release.wait()
            return self.held

        self.answer(method, wait)

    async def until(self, *states):
        while self.update.incoming not in states:
            await asyncio.sleep(0.001)

    async def open(self, transport="gloo", client="me"):
        body = {"client": client, "host": "127.0.0.1", "port": 23000, "world_size": 3, "secret": "of this test's group"}
        return await self.post("/native/communicator/", body | {"transport": transport})

    async def open_anonymous(self):
        return await self.post("/init_communicator/", {"host": "127.0.0.1", "port": 23000, "world_size": 3})

    async def close(self):
        return await self.post("/native/communicator/close/", {"force": True})

    def sync_body(self, client="me", **fields):
        self.version += 1
        body = {"client": client, "sync_id": str(self.version), "version": self.version, "tensors": self.tensors}
        return body | {"buckets": [len(self.tensors)], "digests": None, "commit": False} | fields

    @property
    def client(self):
        return self.update.attached.client if self.update.attached else "me"

    async def infer(self):
        body = {"requests": [{"request_id": "0", "prompt_token_ids": [5]}], "sampling": {"max_tokens": 2}}
        return await self.post("/native/infer/", body)

    # What brings the server into a state; each begins with a closed group and no update.

    async def reach(self, state):
        if state is Incoming.NONE:
            await self.open()
        elif state in (Incoming.RECEIVING, Incoming.DROPPING):
            await self.open()
            self.answer("rollmatch_poll", {"state": "busy", "share": 0.5})
            self.begin("/native/sync/", self.sync_body())
            await self.until(Incoming.RECEIVING)
            if state is Incoming.DROPPING:
                assert await self.post("/native/sync/drop/", {"client": "me"}) == (200, {"dropped": True})
        elif state is Incoming.GATHERING:
            await self.open_anonymous()
            assert (await self.post("/update_named_param/", self.tensors[0]))[0] == 200
        elif state in (Incoming.STAGED, Incoming.COMMITTING):
            await self.open()
            assert (await self.post("/native/sync/", self.sync_body()))[0] == 200
            if state is Incoming.COMMITTING:
                self.hold("rollmatch_load")
                self.begin("/native/sync/commit/", {"client": "me"})
        else:
            await self.open("direct")
            self.answer("rollmatch_poll", {"state": "busy", "share": 0.5})
            if state is Incoming.DRAINING:
                await self.begin_infer()
            self.begin("/native/sync/", self.sync_body(commit=True))
        await self.until(state)


@asynccontextmanager
async def bench_in(state):
    """A bench in this state; at the end everything that waits is let go."""
    bench = Bench()
    await bench.reach(state)
    try:
        yield bench
    finally:
        bench.release.set()
        for replica in bench.parts.pool.replicas:
            replica.answers = {"rollmatch_whole": {"whole": True}}
        for call in bench.pending:
            await call.end()


async def cause(bench, event):
    """The event, by a call of the learner that is attached: status and code of the reply."""
    client = bench.client
    if event is Event.OPENED:
        reply = await bench.open(client="another")
    elif event is Event.CLOSED:
        reply = await bench.close()
    elif event is Event.DROPPED:
        reply = await bench.post("/native/sync/drop/", {"client": client})
    elif event is Event.ANNOUNCED_CHUNK:
        if client:  # only trainers that name no client announce chunks
            await bench.close()
            await bench.open_anonymous()
        reply = await bench.post("/update_named_param/", bench.tensors[-1])
    elif event is Event.COMMIT:
        reply = await bench.post("/native/sync/commit/", {"client": client})
    else:
        reply = await bench.post("/native/sync/", bench.sync_body(client, commit=event is Event.ANNOUNCED_IN_PLACE))
    return reply[0], reply[1].get("code")


BUSY = (409, "update-in-progress")
NOTHING = (409, "nothing-staged")
DONE = (200, None)
WORDS = {
    Incoming.COMMITTING: "updating",
    Incoming.DRAINING: "updating",
    Incoming.WRITING: "update-in-progress",
}


@pytest.mark.parametrize("state", Incoming, ids=lambda state: state.name)
@pytest.mark.parametrize("event", [Event.ANNOUNCED, Event.ANNOUNCED_CHUNK, Event.COMMIT, Event.DROPPED, Event.CLOSED,
                                   Event.OPENED], ids=lambda event: event.name)  # fmt: skip
def test_what_a_learner_may_do_in_each_state_is_what_the_table_says(state, event):
    row = TRANSITIONS[Incoming][state]

    async def run():
        async with bench_in(state) as bench:
            assert (await bench.get("/health/"))[1]["state"] == WORDS.get(state, "serving")
            found = await cause(bench, event)
            if event is Event.OPENED:  # a group is open in every state
                assert found == (409, "client-already-attached")
            elif event is Event.DROPPED:
                assert found == DONE
            elif event is Event.COMMIT and state is Incoming.GATHERING:
                assert found == NOTHING  # it is the server that commits chunks, when all are there
            elif event is Event.ANNOUNCED_CHUNK and state in (Incoming.STAGED, Incoming.GATHERING):
                assert found == DONE  # the group of what was staged had to be closed
            elif event in row:
                assert found == DONE
            else:
                assert found == (NOTHING if event is Event.COMMIT else BUSY)
            served, committed = bench.update.served, event is Event.COMMIT and state is Incoming.STAGED
            expected = {
                (Incoming.NONE, Event.ANNOUNCED): Incoming.STAGED,  # pretending workers have received at once
                (Incoming.STAGED, Event.COMMIT): Incoming.NONE,
                (Incoming.STAGED, Event.ANNOUNCED_CHUNK): Incoming.GATHERING,
                (Incoming.RECEIVING, Event.ANNOUNCED_CHUNK): Incoming.DROPPING,
                (Incoming.GATHERING, Event.COMMIT): Incoming.GATHERING,
            }.get((state, event), row.get(event, state))
            assert bench.update.incoming is expected
            assert (served, bench.update.policy_version > 0) == (Served.SERVING, committed)

    asyncio.run(run())


FAILED = {"failure": FAILURE}


@pytest.mark.scenario(clauses=["rollout-server/every-rollout-names-the-weights-that-made-it#3"])
@pytest.mark.parametrize(
    ("state", "answer", "whole", "word"),
    [
        (Incoming.RECEIVING, FAILED, True, "serving"),
        (Incoming.DROPPING, {"state": "idle", "digests": {}}, True, "serving"),
        (Incoming.COMMITTING, {}, True, "serving"),
        (Incoming.COMMITTING, FAILED, True, "weights-broken"),
        (Incoming.WRITING, FAILED, True, "serving"),
        (Incoming.WRITING, FAILED, False, "weights-broken"),
        (Incoming.DRAINING, FAILED, True, "serving"),
    ],
)
def test_what_the_workers_say_ends_an_update(state, answer, whole, word):
    async def run():
        async with bench_in(state) as bench:
            bench.answer("rollmatch_whole", {"whole": whole})
            if state is Incoming.COMMITTING:
                bench.held = answer
            else:
                bench.answer("rollmatch_poll", answer)
            bench.release.set()
            status, body = await bench.pending[-1].end()
            codes = {Incoming.DROPPING: "sync-dropped", Incoming.COMMITTING: "digest-mismatch" if answer else None}
            assert (status, body.get("code")) == (
                409 if answer else 200, codes.get(state, "digest-mismatch"),
            )  # fmt: skip
            health = (await bench.get("/health/"))[1]
            assert (health["state"], health["policy_version"]) == (word, 0 if answer else 1)
            assert bench.update.incoming is Incoming.NONE
            status, body = await bench.infer()
            assert (status, body.get("code")) == ((200, None) if word == "serving" else (409, "weights-broken"))
            for replica in bench.parts.pool.replicas:  # what failed may be sent again
                replica.answers = {}
            assert (await bench.post("/native/sync/", bench.sync_body(commit=True)))[0] == 200
            assert (await bench.infer())[1]["policy_version"] == bench.version

    asyncio.run(run())


@pytest.mark.scenario(clauses=["weight-sync/a-sync-may-keep-responses-under-way#5,6"])
@pytest.mark.parametrize(
    ("transport", "failing", "whole", "ended"),
    [
        ("gloo", "", True, (200, None, 1)),
        ("gloo", "rollmatch_load", True, (409, "weights-broken", None)),
        ("direct", "", True, (200, None, 1)),
        ("direct", "rollmatch_poll", True, (200, None, 0)),
        ("direct", "rollmatch_poll", False, (409, "weights-broken", None)),
    ],
)
def test_a_kept_response_is_written_on_by_what_is_served_or_ends(transport, failing, whole, ended):
    """Its engine stands still until the commit has ended; nothing is begun again."""

    async def run():
        bench = Bench()
        await bench.open(transport)
        call = await bench.begin_infer()
        bench.answer("rollmatch_whole", {"whole": whole})
        if failing:
            bench.answer(failing, FAILED)
        status, body = await bench.post("/native/sync/", bench.sync_body(commit=True, keep=True))
        assert (status, body.get("code")) == ((409, FAILURE["code"]) if failing else (200, None))
        status, body = await call.end()
        assert (status, body.get("code"), body.get("policy_version")) == ended
        assert bench.parts.pool.num_restarted == (ended[0] != 200)
        assert all(replica.is_writing.is_set() for replica in bench.parts.pool.replicas)

    asyncio.run(run())


def test_a_worker_that_dies_while_it_loads_leaves_no_pause():
    async def run():
        async with bench_in(Incoming.COMMITTING) as bench:
            bench.parts.pool.replicas[1].is_gone = True
            assert (await bench.pending[-1].end())[1]["code"] == "worker-dead"
            assert (bench.update.word, bench.update.resumed.is_set()) == ("serving", True)
            assert (await bench.get("/health/"))[1]["status"] == "dead"
            bench.parts.pool.replicas[1].is_gone = False

    asyncio.run(run())


@pytest.mark.scenario(clauses=["weight-sync/no-request-sees-two-versions#3"])
@pytest.mark.parametrize("state", [Incoming.COMMITTING, Incoming.DRAINING, Incoming.WRITING])
def test_calls_wait_for_a_pause_and_are_refused_while_weights_are_written(state):
    async def run():
        async with bench_in(state) as bench:
            call = bench.begin("/native/infer/", {"requests": [{"request_id": "0", "prompt_token_ids": [5]}],
                                                  "sampling": {"max_tokens": 2}})  # fmt: skip
            await asyncio.wait([call.task], timeout=2 * LONG_S)
            if state is Incoming.WRITING:
                assert (await call.end())[1]["code"] == "update-in-progress"
                while not _polls(bench)[-1][1]:  # workers wait, for they generate nothing
                    await asyncio.sleep(0.001)
                return
            assert not call.task.done()
            bench.answer("rollmatch_poll", FAILED)
            bench.release.set()
            status, body = await call.end()
            if state is Incoming.COMMITTING:
                assert (status, body["policy_version"]) == (200, 1)
            else:  # it may have come again while weights were written
                assert status in (200, 409)

    asyncio.run(run())


def _polls(bench):
    return [call for replica in bench.parts.pool.replicas for call in replica.calls if call[0] == "rollmatch_poll"]


@pytest.mark.parametrize("state", [Incoming.RECEIVING, Incoming.WRITING, Incoming.COMMITTING], ids=lambda one: one.name)
def test_a_caller_that_hangs_up_leaves_its_group_and_what_is_written_is_served(state):
    async def run():
        async with bench_in(state) as bench:
            bench.pending[-1].gone.set()
            assert (await bench.pending[-1].end())[0] == 499 if state is not Incoming.COMMITTING else True
            if state is Incoming.RECEIVING:
                await bench.until(Incoming.NONE)
            for replica in bench.parts.pool.replicas:
                replica.answers.pop("rollmatch_poll", None)
            bench.release.set()
            await bench.until(Incoming.NONE)
            while bench.update.group is Group.OPEN and state is not Incoming.COMMITTING:
                await asyncio.sleep(0.001)
            assert bench.update.policy_version == (0 if state is Incoming.RECEIVING else 1)

    asyncio.run(run())


def test_a_learner_that_hangs_up_before_all_have_joined_leaves_the_group():
    async def run():
        bench = Bench()
        bench.answer("rollmatch_poll", {"state": "busy", "share": 0.0})
        joining = asyncio.create_task(bench.open())
        while not _polls(bench):
            await asyncio.sleep(0.001)
        assert (await bench.open(client="next"))[1]["code"] == "client-already-attached"
        joining.cancel()
        await asyncio.wait([joining])
        bench.answer("rollmatch_poll", {"state": "idle", "digests": {}})
        assert (await bench.open(client="next"))[0] == 200

    asyncio.run(run())


@pytest.mark.scenario("server-dialects/a-communicator-can-be-opened-again-after-closing")
def test_workers_hear_of_a_groups_end_before_they_hear_of_the_next():
    async def run():
        bench = Bench()
        await bench.open()
        bench.hold("rollmatch_close")
        closing = bench.begin("/native/communicator/close/", {"client": "me"})
        while bench.update.group is Group.OPEN:
            await asyncio.sleep(0)
        opening = asyncio.create_task(bench.open(client="next"))
        done, _ = await asyncio.wait([opening], timeout=0.2)
        assert not done, "the workers still leave the group before"
        bench.release.set()
        assert (await opening)[0] == 200
        assert await closing.end() == (200, {"closed": True, "leaving": False})
        for replica in bench.parts.pool.replicas:
            heard = [call[0] for call in replica.calls if call[0] in ("rollmatch_open", "rollmatch_close")]
            assert heard == ["rollmatch_open", "rollmatch_close", "rollmatch_open"]
        assert bench.update.attached.client == "next"

    asyncio.run(run())


def test_chunks_of_a_group_that_was_closed_by_force_complete_no_later_update():
    async def run():
        bench = Bench()
        half = len(bench.tensors) // 2
        await bench.open_anonymous()
        for tensor in bench.tensors[:half]:
            assert (await bench.post("/update_named_param/", tensor))[0] == 200
        assert await bench.close() == (200, {"closed": True, "leaving": False})
        await bench.open_anonymous()
        for tensor in bench.tensors[half:]:
            assert (await bench.post("/update_named_param/", tensor))[0] == 200
        status, body = await bench.post("/reset_prefix_cache/")
        assert (status, body["code"], body["key"]) == (
            400,
            "tensor-missing",
            min(t["name"] for t in bench.tensors[:half]),
        )
        assert bench.update.policy_version == 0

    asyncio.run(run())


def test_a_staged_update_of_a_group_that_a_trainer_closed_is_in_nobodys_way():
    async def run():
        async with bench_in(Incoming.STAGED) as bench:
            assert (await bench.post("/close_communicator/"))[0] == 200
            assert (await bench.open(client="next"))[0] == 200
            assert (await bench.post("/native/sync/", bench.sync_body("next")))[0] == 200

    asyncio.run(run())
