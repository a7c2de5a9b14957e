"""The state of a server's weights: which ones are served, what is on its way, and whose group it comes through.

Every transition is in this file. The form is h11's (``_state.py``): four machines see the same events, and one table
says where each event leads. A machine sees the events that its part of the table names; one that it sees and does not
expect is refused, and then no machine moves::

    Group      CLOSED <-> OPEN

    Hold       FREE <-> HELD

    Served     NOT_SET -> SERVING <-> BROKEN

    Incoming   NONE -> RECEIVING -> STAGED -> COMMITTING -> NONE    native, beside the served weights
               NONE -> GATHERING -----------> COMMITTING -> NONE    swift, trl and vllm, announced in chunks
               NONE -> DRAINING --> WRITING --------------> NONE    native, over the served weights

An update is over where ``LOADED`` comes. That its bytes are all there is known elsewhere: ``chunked_update`` counts the
tensors of swift and trl; vllm's learner calls ``finish``, a native one ``commit``.

What an update carries (names, digests) is kept beside the states and forgotten when ``Incoming`` is back at ``NONE``.
"""

import asyncio
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from enum import Enum
from types import MappingProxyType

from rollmatch.errors import SyncError
from rollmatch.server.failures import Refusal
from rollmatch.weights.transfer_plan import MergePlan


class Group(Enum):
    """The group that transfers weights."""

    CLOSED = "closed"
    OPEN = "open"


class Hold(Enum):
    """Whether a learner keeps the server from generating between two calls of its own."""

    FREE = "free"
    HELD = "held"


class Served(Enum):
    """The weights in the engines; values are those of ``state`` in ``/health/``."""

    NOT_SET = "weights-not-set"
    SERVING = "serving"
    BROKEN = "weights-broken"


class Incoming(Enum):
    """The update that is on its way."""

    NONE = "none"
    RECEIVING = "receiving"
    """Beside generation."""
    DROPPING = "dropping"
    """It was dropped, or its group was closed, and the workers have not ended it yet."""
    GATHERING = "gathering"
    """An update was begun, or some tensors were announced; any number may follow."""
    STAGED = "staged"
    COMMITTING = "committing"
    """Generation pauses, and what the workers hold is loaded."""
    DRAINING = "draining"
    """Generation pauses before weights are written in place."""
    WRITING = "writing"


class Event(Enum):
    """What happens to a server's weights."""

    OPENED = "a group was opened"
    CLOSED = "the group was closed"
    HELD = "a learner paused generation"
    RELEASED = "a learner resumed generation"
    ANNOUNCED = "all tensors of an update were announced, to be staged"
    ANNOUNCED_CHUNK = "some tensors were announced"
    ANNOUNCED_IN_PLACE = "all tensors of an update were announced, to be written in place"
    RECEIVED = "every worker holds the whole update"
    FAILED = "the update cannot be received"
    DROPPED = "the learner dropped the update"
    COMMIT = "what the workers hold is to be served"
    WRITE = "no response is being written, the first byte may come"
    LOADED = "the engines hold the new weights"
    KEPT = "the engines hold the old weights"
    SPOILT = "the engines hold parts of both"


State = Group | Hold | Served | Incoming

TRANSITIONS: Mapping[type[Enum], Mapping[State, Mapping[Event, State]]] = MappingProxyType(
    {
        Group: {
            Group.CLOSED: {Event.OPENED: Group.OPEN, Event.CLOSED: Group.CLOSED},
            Group.OPEN: {Event.CLOSED: Group.CLOSED},
        },
        Hold: {
            Hold.FREE: {Event.HELD: Hold.HELD, Event.RELEASED: Hold.FREE, Event.CLOSED: Hold.FREE},
            Hold.HELD: {Event.HELD: Hold.HELD, Event.RELEASED: Hold.FREE, Event.CLOSED: Hold.FREE},
        },
        Served: {
            Served.NOT_SET: {Event.LOADED: Served.SERVING, Event.SPOILT: Served.BROKEN},
            Served.SERVING: {Event.LOADED: Served.SERVING, Event.SPOILT: Served.BROKEN},
            Served.BROKEN: {Event.LOADED: Served.SERVING, Event.SPOILT: Served.BROKEN},
        },
        Incoming: {
            Incoming.NONE: {
                Event.ANNOUNCED: Incoming.RECEIVING,
                Event.ANNOUNCED_CHUNK: Incoming.GATHERING,
                Event.ANNOUNCED_IN_PLACE: Incoming.DRAINING,
                Event.DROPPED: Incoming.NONE,
                Event.CLOSED: Incoming.NONE,
            },
            Incoming.RECEIVING: {
                Event.RECEIVED: Incoming.STAGED,
                Event.FAILED: Incoming.NONE,
                Event.DROPPED: Incoming.DROPPING,
                Event.CLOSED: Incoming.DROPPING,
            },
            Incoming.DROPPING: {
                Event.FAILED: Incoming.NONE,
                Event.DROPPED: Incoming.DROPPING,
                Event.CLOSED: Incoming.DROPPING,
            },
            Incoming.GATHERING: {
                Event.ANNOUNCED_CHUNK: Incoming.GATHERING,
                Event.COMMIT: Incoming.COMMITTING,
                Event.FAILED: Incoming.NONE,
                Event.DROPPED: Incoming.NONE,
                Event.CLOSED: Incoming.NONE,
            },
            Incoming.STAGED: {
                Event.COMMIT: Incoming.COMMITTING,
                Event.DROPPED: Incoming.NONE,
                Event.CLOSED: Incoming.NONE,
            },
            # From here on the update ends by itself: it can be neither dropped nor left by its learner.
            Incoming.COMMITTING: {
                Event.LOADED: Incoming.NONE,
                Event.KEPT: Incoming.NONE,
                Event.SPOILT: Incoming.NONE,
                Event.CLOSED: Incoming.COMMITTING,
            },
            Incoming.DRAINING: {
                Event.WRITE: Incoming.WRITING,
                Event.KEPT: Incoming.NONE,
                Event.DROPPED: Incoming.DRAINING,
                Event.CLOSED: Incoming.DRAINING,
            },
            Incoming.WRITING: {
                Event.LOADED: Incoming.NONE,
                Event.KEPT: Incoming.NONE,
                Event.SPOILT: Incoming.NONE,
                Event.DROPPED: Incoming.WRITING,
                Event.CLOSED: Incoming.WRITING,
            },
        },
    }
)
"""Machine -> state -> event -> next state."""

_SEEN_BY = {
    event: tuple(machine for machine, rows in TRANSITIONS.items() if any(event in row for row in rows.values()))
    for event in Event
}
_NAMES_KEPT = 8
PAUSED = frozenset({Incoming.COMMITTING, Incoming.DRAINING, Incoming.WRITING})
"""States in which no response is begun."""


class CommunicatorRefused(SyncError):
    """A second learner asked for a communicator, or it was opened twice, or after weights had been announced.

    ``code``: ``communicator-missing``, ``communicator-already-open`` or ``client-already-attached``.
    """

    code = "communicator-missing"


class UpdateRefused(SyncError):
    """An update came during another one, with a version that is not newer, or was committed before it was staged.

    ``code``: ``update-in-progress``, ``version-not-newer``, ``nothing-staged``, ``announcement-unknown``,
    ``sync-dropped`` or ``weights-broken``.
    """

    code = "update-refused"


@dataclass(frozen=True, slots=True, kw_only=True)
class Attached:
    """Who is attached, and how."""

    client: str
    transport: str
    world_size: int


@dataclass(frozen=True, slots=True, kw_only=True)
class Staged:
    """Weights that every worker holds beside the served ones."""

    sync_id: str
    version: int
    digests: tuple[str, ...]
    merged_digests: dict[str, str]
    receive_s: float
    keep: bool
    """As in the announcement."""


def dropped(key: str) -> UpdateRefused:
    """What to say when an update was dropped before it had arrived."""
    return UpdateRefused("it was dropped while it ran", key=key, remedy="Sync again.", code="sync-dropped")


class UpdateState:
    """The four machines of one server, and what belongs to their states."""

    def __init__(self, *, weights_set: bool) -> None:
        self.group, self.hold, self.incoming = Group.CLOSED, Hold.FREE, Incoming.NONE
        self.served = Served.SERVING if weights_set else Served.NOT_SET
        self.policy_version = 0
        """Of the served weights."""
        self.version_names: dict[int, str] = {}
        """What a learner called policy versions: the served one, and those that a response may still be of."""
        self.attached: Attached | None = None
        """The learner of an open group."""
        self.staged: Staged | None = None
        self.chunk_names: set[str] = set()
        """Tensors announced in chunks."""
        self.chunk_merge: MergePlan | None = None
        """How what was announced in chunks is merged; None: it is no adapter."""
        self.resumed = asyncio.Event()
        """Set while responses may begin."""
        self.resumed.set()

    @property
    def word(self) -> str:
        """The state as ``/health/`` names it."""
        if self.incoming is Incoming.WRITING:
            return "update-in-progress"
        return "updating" if self.incoming in PAUSED else str(self.served.value)

    def expects(self, event: Event) -> bool:
        """Whether all machines that see the event have a transition for it."""
        return all(event in TRANSITIONS[machine][self._state_of(machine)] for machine in _SEEN_BY[event])

    def check(self, event: Event) -> None:
        """Raise unless the event is expected. Errors: ``UpdateRefused``; ``RuntimeError``, which is a fault of ours."""
        if self.expects(event):
            return
        if event in (Event.ANNOUNCED, Event.ANNOUNCED_CHUNK, Event.ANNOUNCED_IN_PLACE):
            problem = "an update is staged" if self.incoming is Incoming.STAGED else "an update is on its way"
            remedy = "Commit or drop it first."
            raise UpdateRefused(problem, key="sync_id", remedy=remedy, code="update-in-progress")
        if event is Event.COMMIT:
            raise UpdateRefused("nothing is staged", key="sync_id", remedy="Sync again.", code="nothing-staged")
        if event is Event.RECEIVED:
            raise dropped("sync_id")
        raise RuntimeError(f"{event.name} in {self.group}, {self.served}, {self.incoming}")

    def fire(self, event: Event) -> None:
        """Move all machines that see the event. Errors: as ``check``."""
        self.check(event)
        moves = {machine: TRANSITIONS[machine][self._state_of(machine)][event] for machine in _SEEN_BY[event]}
        for state in moves.values():
            match state:
                case Group():
                    self.group = state
                case Hold():
                    self.hold = state
                case Served():
                    self.served = state
                case Incoming():
                    self.incoming = state
        if self.group is Group.CLOSED:
            self.attached = None
        if self.incoming is Incoming.NONE:
            self.staged, self.chunk_names, self.chunk_merge = None, set(), None
        if self.incoming in PAUSED or self.hold is Hold.HELD:
            self.resumed.clear()
        else:
            self.resumed.set()

    def open(self, attached: Attached) -> None:
        """``OPENED`` by this learner. Errors: ``CommunicatorRefused``."""
        self.check_free(attached.client)
        self.fire(Event.OPENED)
        self.attached = attached

    def receive(self, staged: Staged) -> None:
        """``RECEIVED``. Errors: ``UpdateRefused``, where it was dropped meanwhile."""
        self.fire(Event.RECEIVED)
        self.staged = staged

    def gather(self, names: Iterable[str], merge: MergePlan | None = None) -> None:
        """The workers are ready for an announced chunk. Errors: ``UpdateRefused``, where it was dropped meanwhile."""
        if self.incoming is not Incoming.GATHERING:
            raise dropped("sync")
        self.chunk_names.update(names)
        self.chunk_merge = merge or self.chunk_merge

    def serve(self, version: int) -> None:
        """``LOADED``: what generates from now on is this version."""
        self.fire(Event.LOADED)
        self.policy_version = version

    def name_version(self, name: str) -> None:
        """Call the served version so."""
        kept = range(self.policy_version - _NAMES_KEPT + 1, self.policy_version)
        self.version_names = {old: self.version_names[old] for old in kept if old in self.version_names}
        self.version_names[self.policy_version] = name

    def name_of(self, version: int) -> str:
        """The learner's name of a version; its number, where it gave none."""
        return self.version_names.get(version, str(version))

    def check_free(self, client: str) -> None:
        """Errors: ``CommunicatorRefused``."""
        if self.attached is None:
            return
        if self.attached.client == client:
            problem, code = "this learner has a communicator", "communicator-already-open"
            raise CommunicatorRefused(problem, key="client", remedy="Close it first.", code=code)
        problem = f"{self.attached.client or 'a swift or trl trainer'} is attached"
        remedy = "Wait until it leaves; if it is gone for good, close its communicator with force."
        raise CommunicatorRefused(problem, key="client", remedy=remedy, code="client-already-attached")

    def check_attached(self, client: str) -> Attached:
        """Errors: ``CommunicatorRefused``."""
        if self.attached is None:
            raise CommunicatorRefused("no communicator is open", key="client", remedy="Open one first.")
        if self.attached.client != client:
            self.check_free(client)
        return self.attached

    def check_newer(self, version: int) -> None:
        """Errors: ``UpdateRefused``."""
        if version <= self.policy_version:
            problem = f"is {version}, served is {self.policy_version}"
            remedy = "Continue from the highest version of all servers."
            raise UpdateRefused(problem, key="version", remedy=remedy, code="version-not-newer")

    def check_served(self) -> None:
        """Raise unless responses can be generated now, or as soon as a pause ends.

        Errors: ``Refusal`` with ``weights-not-set``, ``update-in-progress`` or ``weights-broken``.
        """
        if self.incoming is Incoming.WRITING:
            problem = "weights are being written in place of those that were served"
            raise Refusal(
                problem, code="update-in-progress", key="weights", remedy="Try again when the update is committed."
            )
        if self.incoming in PAUSED:
            return
        if self.served is Served.NOT_SET:
            problem = "the server was started with placeholder weights and got no others yet"
            raise Refusal(problem, code="weights-not-set", key="weights", remedy="Sync first.")
        if self.served is Served.BROKEN:
            problem = "an update failed while it was being loaded"
            raise Refusal(problem, code="weights-broken", key="weights", remedy="Run a full sync.")

    def _state_of(self, machine: type[Enum]) -> State:
        states: dict[type[Enum], State] = {Group: self.group, Hold: self.hold, Served: self.served}
        return states.get(machine, self.incoming)
