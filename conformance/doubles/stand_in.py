"""The server's application over engines that only pretend: for everything but engines, in milliseconds."""

import asyncio
import copy
from dataclasses import replace
from types import SimpleNamespace

from conformance.doubles.digits import MODEL, ROOT
from rollmatch.serve.app import make_app
from rollmatch.serve.serving import vocabulary_size
from rollmatch.server.communicator import Communicator
from rollmatch.server.engine_pool import EnginePool
from rollmatch.server.failures import Refusal
from rollmatch.server.identity import Model, load_model_identity
from rollmatch.server.images import ImageReader
from rollmatch.server.payloads import Sampling
from rollmatch.server.prompts import EnginePrompt, GenerateRequest, PromptMaker
from rollmatch.server.replica import EngineOutput, dead
from rollmatch.server.settings import ServerSettings
from rollmatch.server.state import assemble
from rollmatch.server.update import Event
from rollmatch.weights.group_address import GroupAddress
from rollmatch.weights.transfer_plan import TransferPlan, from_wire

WORLD_SIZE = 2
STOP = 410


class PretendingReplica:
    """Answers each prompt with its own last id, up to ``max_tokens`` times; remembers what it was asked."""

    engine = None

    def __init__(self, index, *, delay_s=0.0):
        self.index, self.delay_s = index, delay_s
        self.is_gone = False
        self.is_writing = asyncio.Event()
        self.is_writing.set()
        self.generated, self.calls, self.ended = [], [], 0
        self.unfinished = {}
        self.plans, self.answers = {}, {}
        """Method -> what a worker answers in place of the usual, or a coroutine function that gives it."""

    def params_of(self, request, *, seed):
        further = {"seed": seed, "stop": request.stop, "regex": request.regex, "num_top": request.num_top}
        return SimpleNamespace(**request.sampling.model_dump(), **further)

    async def generate(self, prompt, params, request_id):
        if self.is_gone:
            raise dead()
        self.generated.append(SimpleNamespace(prompt=prompt, params=params))
        try:
            await asyncio.sleep(self.delay_s)
            await self.is_writing.wait()
        except asyncio.CancelledError:
            self.ended += 1
            raise
        last = prompt.token_ids[-1]
        if last == 7:
            raise Refusal("does not like 7", code="engine-refused", key="requests")
        ids = [last] * (params.max_tokens - 1) + [STOP]
        logprobs = b"\x00\x00\x80\xbf" * len(ids) if params.logprobs else None
        return EngineOutput(
            prompt_token_ids=prompt.token_ids, response_token_ids=ids, finish_reason="stop", stop_token_id=STOP,
            logprobs=logprobs, top=[{last: SimpleNamespace(logprob=-1.0, rank=1)}] * len(ids) if params.num_top else (),
        )  # fmt: skip

    async def call(self, method, *arguments):
        self.calls.append((method, *arguments))
        if self.is_gone:
            await asyncio.Event().wait()
        if method in self.answers:
            answer = self.answers[method]
            return [await answer() if callable(answer) else answer]
        if method == "rollmatch_receive":
            self.receive(from_wire(arguments[0], TransferPlan))
        if method == "rollmatch_receive_again":
            sync_id, like = arguments
            self.receive(replace(self.plans[like], sync_id=sync_id))
        if method == "rollmatch_drop":
            self.digests = {}
        usual = {
            "rollmatch_open": {"rank": from_wire(arguments[0], GroupAddress).rank}
            if method == "rollmatch_open"
            else {},
            "rollmatch_poll": {"state": "idle", "digests": getattr(self, "digests", {})},
            "rollmatch_merge": {"digests": {}},
            "rollmatch_whole": {"whole": True},
        }
        return [usual.get(method, {})]

    def receive(self, plan):
        self.plans[plan.sync_id] = plan
        names = [spec.name for spec in plan.tensors]
        self.digests = dict(zip(names, plan.digests or ["0" * 32] * len(names), strict=True))

    async def reset_caches(self):
        return True

    async def empty_caches(self):
        return True

    async def pause(self):
        self.is_writing.clear()

    async def resume(self):
        self.is_writing.set()

    def unfinished_tokens(self):
        return self.unfinished

    def is_dead(self):
        return self.is_gone

    def close(self):
        self.is_gone = True


_maker = {}


def make_parts(*, kind=PretendingReplica, delay_s=0.0, weights_set=True, **fields):
    """A server of two pretending replicas on the digits model."""
    defaults = {"model": str(MODEL), "dtype": "float32", "max_model_len": 64, "port": 8000}
    defaults["data_parallel_size"] = WORLD_SIZE
    defaults["allowed_hosts"] = ("testserver",)  # as starlette's test client calls it
    settings = ServerSettings(**(defaults | {"image_roots": (str(ROOT / "fixtures/digits/val"),)} | fields))
    maker = _maker.get(settings.image_roots) or PromptMaker(
        settings.model, vocabulary_size=vocabulary_size(settings.model), reader=ImageReader(settings.image_roots)
    )
    _maker[settings.image_roots] = maker
    prompts = copy.copy(maker)
    domains = settings.allowed_media_domains
    prompts.reader = ImageReader(settings.image_roots, settings.limits, domains=domains)
    replicas = [kind(index, delay_s=delay_s) for index in range(WORLD_SIZE)]
    model = load_model_identity(settings.model, dtype=settings.dtype)
    pool = EnginePool(replicas, weights_set=weights_set)
    return assemble(settings, model=model, prompts=prompts, pool=pool)


def make_communicator(pool, *, drain_s):
    """Of a pool by itself; its workers load whatever version it commits."""
    return Communicator(pool, Model(directory="", tensors={}, aliases={}), num_workers=WORLD_SIZE, drain_s=drain_s)


async def commit(pool, version, *, drain_s):
    """Serve another version, as a sync's end does; how many responses are begun again."""
    pool.update.fire(Event.ANNOUNCED_CHUNK)
    return await make_communicator(pool, drain_s=drain_s).swap(version)


def make_stand_in(**fields):
    """The parts, and the application over them."""
    parts = make_parts(**fields)
    return parts, make_app(parts)


def refusal(reply, *names):
    """Of a reply (status, body): the status, and fields of the body, by default code and key."""
    status, body = reply
    return status, *(body.get(name) for name in names or ("code", "key"))


def requests_for_ids(*ids):
    params = PretendingReplica(0).params_of(GenerateRequest(sampling=Sampling(max_tokens=2)), seed=None)
    return [(EnginePrompt(token_ids=[i], images=[], expanded_len=1), params) for i in ids]


def pool_of(num_replicas=2, **fields):
    return EnginePool([PretendingReplica(index, **fields) for index in range(num_replicas)])
