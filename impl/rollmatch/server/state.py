"""Everything that one server consists of, made once and given to every route."""

import uuid
from collections.abc import Sequence
from dataclasses import dataclass, field

from starlette.responses import Response

from rollmatch.server.chunked_update import ChunkedUpdate
from rollmatch.server.communicator import Communicator
from rollmatch.server.engine_pool import EnginePool
from rollmatch.server.generation import ResponseGenerator
from rollmatch.server.identity import Model
from rollmatch.server.metrics import Metrics
from rollmatch.server.prompts import PromptMaker
from rollmatch.server.replica import EngineOutput
from rollmatch.server.settings import ServerSettings
from rollmatch.server.update import UpdateState

VERSION_HEADER = "x-policy-version"


@dataclass(frozen=True, slots=True, kw_only=True)
class ServerState:
    """One server."""

    settings: ServerSettings
    model: Model
    prompts: PromptMaker
    pool: EnginePool
    communicator: Communicator
    chunked: ChunkedUpdate
    generator: ResponseGenerator
    metrics: Metrics
    instance: str = field(default_factory=lambda: uuid.uuid4().hex)
    """New at every start."""

    @property
    def update(self) -> UpdateState:
        """What is served, and what is on its way."""
        return self.pool.update

    def with_version(self, reply: Response, outputs: Sequence[tuple[EngineOutput, int]]) -> Response:
        """The reply with the oldest policy version of its responses in a header; swift and trl have no field for it."""
        oldest = min((version for _, version in outputs), default=self.update.policy_version)
        reply.headers[VERSION_HEADER] = str(oldest)
        return reply


def assemble(settings: ServerSettings, *, model: Model, prompts: PromptMaker, pool: EnginePool) -> ServerState:
    """The server of a server, ready for ``make_app``."""
    communicator = Communicator(pool, model, num_workers=settings.world_size, drain_s=settings.drain_s)
    return ServerState(
        settings=settings,
        model=model,
        prompts=prompts,
        pool=pool,
        communicator=communicator,
        chunked=ChunkedUpdate(pool, communicator, model),
        generator=ResponseGenerator(pool, prompts, max_model_len=settings.max_model_len),
        metrics=Metrics(pool, communicator),
    )
