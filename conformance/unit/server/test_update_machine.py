"""The update's state machine beside a model of flags that knows no table: any events in any order."""

from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, rule

from rollmatch.server.failures import Refusal
from rollmatch.server.update import TRANSITIONS, Attached, Event, Incoming, Served, UpdateRefused, UpdateState


class PlainModel:
    """What may happen to an update, in flags."""

    def __init__(self, weights_set):
        self.is_open, self.is_held, self.has_weights = False, False, weights_set
        self.on_its_way, self.is_whole, self.is_chunks = False, False, False
        self.is_dropped, self.is_pausing, self.is_writing = False, False, False

    def takes(self, event):
        ends_by_itself = self.is_pausing or self.is_writing
        return {
            Event.OPENED: not self.is_open,
            Event.CLOSED: True,
            Event.HELD: True,
            Event.RELEASED: True,
            Event.ANNOUNCED: not self.on_its_way,
            Event.ANNOUNCED_IN_PLACE: not self.on_its_way,
            Event.ANNOUNCED_CHUNK: not self.on_its_way or (self.is_chunks and not ends_by_itself),
            Event.RECEIVED: self.on_its_way
            and not (self.is_whole or self.is_chunks or self.is_dropped or ends_by_itself),
            Event.FAILED: self.on_its_way and not self.is_whole and not ends_by_itself,
            Event.DROPPED: not self.is_pausing or self.in_place,
            Event.COMMIT: self.on_its_way and (self.is_whole or self.is_chunks) and not ends_by_itself,
            Event.WRITE: self.is_pausing and self.in_place and not self.is_writing,
            Event.LOADED: self.is_writing or (self.is_pausing and not self.in_place),
            Event.SPOILT: self.is_writing or (self.is_pausing and not self.in_place),
            Event.KEPT: self.is_pausing,
        }[event]

    in_place = False

    def happen(self, event):
        if event is Event.OPENED:
            self.is_open = True
        if event in (Event.ANNOUNCED, Event.ANNOUNCED_CHUNK, Event.ANNOUNCED_IN_PLACE):
            self.on_its_way, self.is_chunks = True, event is Event.ANNOUNCED_CHUNK
            self.in_place = self.is_pausing = event is Event.ANNOUNCED_IN_PLACE
        if event is Event.RECEIVED:
            self.is_whole = True
        if event is Event.COMMIT:
            self.is_pausing = True
        if event is Event.WRITE:
            self.is_writing = True
        if event in (Event.LOADED, Event.SPOILT):
            self.has_weights = event is Event.LOADED or None
        if event is Event.CLOSED:
            self.is_open = False
        if event in (Event.HELD, Event.RELEASED, Event.CLOSED):
            self.is_held = event is Event.HELD
        leaves = event in (Event.CLOSED, Event.DROPPED) and not self.is_pausing
        if leaves and self.on_its_way and not (self.is_whole or self.is_chunks):
            self.is_dropped = True  # the workers end it
        elif leaves or event in (Event.FAILED, Event.LOADED, Event.SPOILT, Event.KEPT):
            self.on_its_way = self.is_whole = self.is_chunks = False
            self.is_dropped = self.is_pausing = self.is_writing = self.in_place = False

    @property
    def word(self):
        if self.is_writing:
            return "update-in-progress"
        if self.is_pausing:
            return "updating"
        return {True: "serving", False: "weights-not-set", None: "weights-broken"}[self.has_weights]


class UpdateMachine(RuleBasedStateMachine):
    """Any events in any order: the table and the flags accept the same and say the same."""

    @initialize(weights_set=st.booleans())
    def begin(self, weights_set):
        self.update, self.plain = UpdateState(weights_set=weights_set), PlainModel(weights_set)

    @rule(event=st.sampled_from(Event))
    def fire(self, event):
        states = self.update.group, self.update.served, self.update.incoming
        assert self.update.expects(event) == self.plain.takes(event), (event, states)
        try:
            if event is Event.OPENED and self.plain.takes(event):
                self.update.open(Attached(client="me", transport="gloo", world_size=2))
            elif event is Event.LOADED:
                self.update.serve(self.update.policy_version + 1)
            else:
                self.update.fire(event)
        except (UpdateRefused, RuntimeError):
            assert not self.plain.takes(event)
            assert states == (self.update.group, self.update.served, self.update.incoming)
        else:
            assert self.plain.takes(event)
            self.plain.happen(event)

    @rule(names=st.sets(st.sampled_from("abc"), min_size=1))
    def gather(self, names):
        if self.update.incoming is Incoming.GATHERING:
            self.update.gather(names)

    @invariant()
    def agree(self):
        update, plain = self.update, self.plain
        assert (update.word, update.attached is not None) == (plain.word, plain.is_open)
        assert update.resumed.is_set() == (not (plain.is_pausing or plain.is_held))
        assert (update.incoming is Incoming.NONE) == (not plain.on_its_way)
        if not plain.on_its_way:
            assert (update.staged, update.chunk_names, update.chunk_merge) == (None, set(), None)
        try:
            update.check_served()
            code = None
        except Refusal as refusal:
            code = refusal.code
        assert code == (None if plain.word in ("serving", "updating") else plain.word)


UpdateMachine.TestCase.settings = settings(max_examples=150, stateful_step_count=30, deadline=None)
TestUpdateMachine = UpdateMachine.TestCase


def test_every_state_is_reached_and_every_machine_has_all_its_states():
    for machine, rows in TRANSITIONS.items():
        assert set(rows) == set(machine)
        reached = {next(iter(machine)), Served.SERVING} & set(machine)
        while new := {after for state in reached for after in rows[state].values()} - reached:
            reached |= new
        assert reached == set(machine)
