"""All that a server is made of, put together once and handed to every route."""

import uuid
from dataclasses import dataclass, field

from rollmatch.server.communicator import Communicator
from rollmatch.server.front import Front
from rollmatch.server.generation import Generation
from rollmatch.server.identity import Model
from rollmatch.server.metrics import Metrics
from rollmatch.server.prompts import PromptMaker
from rollmatch.server.queued import QueuedUpdate
from rollmatch.server.settings import ServerSettings
from rollmatch.server.update import Update


@dataclass(frozen=True, slots=True, kw_only=True)
class Parts:
    """One server."""

    settings: ServerSettings
    model: Model
    prompts: PromptMaker
    front: Front
    communicator: Communicator
    update: Update
    queued: QueuedUpdate
    generation: Generation
    metrics: Metrics
    instance: str = field(default_factory=lambda: uuid.uuid4().hex)
    """New at every start."""


def assemble(settings: ServerSettings, *, model: Model, prompts: PromptMaker, front: Front) -> Parts:
    """The parts of a server, ready for ``make_app``."""
    communicator = Communicator(front, num_workers=settings.world_size)
    update = Update(front, communicator, model, drain_s=settings.drain_s)
    return Parts(
        settings=settings,
        model=model,
        prompts=prompts,
        front=front,
        communicator=communicator,
        update=update,
        queued=QueuedUpdate(front, communicator, update, model),
        generation=Generation(front, prompts, max_model_len=settings.max_model_len),
        metrics=Metrics(front, communicator),
    )
