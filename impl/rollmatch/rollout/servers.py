"""Rollouts by vLLM servers of their own: requests in contiguous chunks, one call per server, all at the same time.

Every learner rank requests its own rollouts; only rank 0 sends weights, through the sender it was given.
"""

from collections.abc import Callable, Collection, Iterable, Sequence
from concurrent.futures import FIRST_EXCEPTION, Future, ThreadPoolExecutor, wait

from torch import Tensor

from rollmatch.dialects.prompt import CallLog, Reply, SamplingRules
from rollmatch.dialects.sender import WeightSender
from rollmatch.dialects.session import RolloutServer
from rollmatch.errors import RollmatchError, RolloutError
from rollmatch.journal import Journal
from rollmatch.model.template import Template
from rollmatch.ranks import Ranks
from rollmatch.records import Rollout, RolloutRequest
from rollmatch.rollout.backend import Decoding, RolloutBackend, check_answers, make_rollout
from rollmatch.rollout.members import ServerLost, ServerMembers
from rollmatch.rollout.retry import ServerRestarted, is_transient_in_sync
from rollmatch.rollout.server_calls import ServerCalls
from rollmatch.rollout.work_items import Chunk
from rollmatch.weights.named_weights import Adapter, ListedWeights
from rollmatch.weights.plan import OutgoingWeights

MAX_CALLS = 1024
"""Calls at the same time; a thread begins only where no other is free."""


class VllmServerBackend(RolloutBackend):
    """Connected rollout servers that somebody else started; ``sender`` is rank 0's, None on other ranks."""

    takes_adapters = True
    members: ServerMembers

    def __init__(
        self,
        servers: Sequence[RolloutServer],
        template: Template,
        ranks: Ranks,
        *,
        sender: WeightSender | None,
        journal: Journal | None = None,
    ) -> None:
        self.members = ServerMembers(servers, ranks)
        self.template = template
        self.ranks = ranks
        self.sender = sender
        self.remake_sender: Callable[[Sequence[int]], WeightSender] | None = None
        """A sender for the servers of these indices; needed where a run continues without some."""
        self.journal = journal
        self.calls = ServerCalls(self.members, template, journal)
        self._sent_to = self.members.present
        self._pool = ThreadPoolExecutor(MAX_CALLS, thread_name_prefix="rollout-server")
        self._has_synced = False
        self.policy_version = self.members.read_version()
        """The highest that a server holds from an earlier learner, until the first push."""

    @property
    def servers(self) -> tuple[RolloutServer, ...]:
        """All that took part at any time."""
        return self.members.servers

    def push(self, weights: Iterable[tuple[str, Tensor]], *, version: int) -> None:
        """Send all weights to all present servers; a rank without sender only helps to assemble sharded weights.

        Errors: those of the sender.
        """
        is_sharded = getattr(weights, "is_sharded", True)
        passing = iter(weights) if is_sharded else weights
        self.members.instances, self.calls.newest_version = None, version
        try:
            if self.sender:
                sent: Iterable[tuple[str, Tensor]] | OutgoingWeights = passing
                if isinstance(weights, ListedWeights) and (specs := weights.specs()) is not None:
                    gather_in = weights.gather_in if is_sharded else None
                    sent = OutgoingWeights(specs=tuple(specs), weights=passing, gather_in=gather_in)
                self._sender_for_present().send(sent, version=version)
        finally:
            if is_sharded:
                for _ in passing:  # other ranks wait inside the same collectives, also when sending has failed
                    pass
        self._note_taken(version)

    def push_adapter(self, adapter: Adapter, *, version: int) -> None:
        """Send an adapter, to be merged there. One rank only."""
        self.members.instances, self.calls.newest_version = None, version
        try:
            if self.sender:
                self._sender_for_present().send_adapter(adapter, version=version)
        except RollmatchError:
            self.policy_version = max(self.policy_version, self.members.read_version())  # some may have committed
            raise
        self._note_taken(version)

    def is_current(self) -> bool:
        """Whether the servers are those that got the weights: one that was started again has lost them."""
        return self.members.are_current()

    def may_push_again(self, error: RollmatchError) -> bool:
        """Whether a push that failed with ``error`` may succeed now, after waiting for servers that are gone."""
        budget_s = self.calls.rules.retry_budget_s
        if not budget_s or not is_transient_in_sync(error):
            return False
        self.calls.announce_sync(error, budget_s)
        return self.members.wait_until_well(budget_s)

    def generate(self, requests: Sequence[RolloutRequest], decoding: Decoding) -> list[Rollout]:
        """As the contract. Errors also: those of ``RolloutServer.infer``, ``policy-version-mismatch``."""
        self._check_synced()
        sampling = self._sampling(requests, decoding)
        chunks, replies = self.members.cut(len(requests)), list[Reply]()
        answered: dict[Chunk, list[Reply]] = {}
        while chunks:
            calls = self._call_all(chunks, requests, sampling, decoding)
            moved = list[Chunk]()
            for chunk, call in zip(chunks, calls, strict=True):
                try:
                    answered[chunk] = call.result()
                except ServerLost:
                    moved += self.members.cut(chunk.num_requests, start=chunk.start)
            chunks = moved
        for chunk in sorted(answered, key=lambda each: each.start):
            replies += answered[chunk]
        return self._make_rollouts(requests, replies, decoding)

    def _call_all(
        self, chunks: Sequence[Chunk], requests: Sequence[RolloutRequest], sampling: SamplingRules, decoding: Decoding
    ) -> list[Future[list[Reply]]]:
        """One call per chunk, at the same time; all have ended, or one has failed for good."""
        logs, version = [CallLog() for _ in chunks], self.policy_version
        calls = [
            self._pool.submit(self.calls.ask, chunk, chunk.of(requests), sampling, log=log, version=version)
            for chunk, log in zip(chunks, logs, strict=True)
        ]
        left = set(calls)
        while left:
            ended, left = wait(left, return_when=FIRST_EXCEPTION)
            errors = [error for call in ended if (error := call.exception()) is not None]
            if any(not isinstance(error, ServerRestarted | ServerLost) for error in errors):
                break  # else the others are waited for: after a restart comes a sync, which no call may be under way in
        self._write_down(chunks, logs, decoding)
        for call in calls if left else ():
            if call.done() and not isinstance(call.exception(), ServerLost):
                call.result()  # the first failure in the order of servers; the others' answers are of no use then
        return calls

    @property
    def num_servers(self) -> int:
        """At least 1."""
        return len(self.servers)

    @property
    def lost(self) -> frozenset[int]:
        """Servers that take no calls: those that were lost, and those that have left."""
        return frozenset(range(self.num_servers)).difference(self.members.present)

    def generate_on(
        self, server_index: int, requests: Sequence[RolloutRequest], decoding: Decoding, *, start: int
    ) -> list[Rollout]:
        """One server, one call, from any thread; ``start`` is the first request's place, for messages."""
        self._check_synced()
        sampling = self._sampling(requests, decoding)
        log = CallLog()
        chunk = Chunk(server_index, start, start + len(requests))
        replies = self.calls.ask(chunk, requests, sampling, log=log, version=self.policy_version)
        self._write_down([chunk], [log], decoding)
        return self._make_rollouts(requests, replies, decoding)

    def open_turns(self, num_episodes: int, decoding: Decoding) -> "ServerTurns":
        """As the contract: each turn is a call of its own, so that a server's batch stays full."""
        return ServerTurns(self, num_episodes, decoding)

    def close(self) -> None:
        """Leave the group; the servers stay."""
        if self.sender:
            self.sender.close()
        self._pool.shutdown(wait=False, cancel_futures=True)

    def _write_down(self, chunks: Sequence[Chunk], logs: Sequence[CallLog], decoding: Decoding) -> None:
        """An event per server that was called, with every retry and split of the call."""
        for chunk, log in zip(chunks, logs, strict=True):
            if self.journal is not None:
                url = self.servers[chunk.server_index].base_url
                self.journal.write("called", server=url, decoding=decoding.as_dict(), **log.as_dict())

    def _check_synced(self) -> None:
        is_begun = self.calls.keep and self._has_synced  # a call that was begun just before a sync
        if self.members.instances is None and not is_begun:
            raise RolloutError(
                "the servers have not been given the learner's weights",
                code="rollout-before-sync",
                key="policy_version",
            )

    def _sender_for_present(self) -> WeightSender:
        """The sender, made again if other servers take part than before; without its group where a member is gone."""
        assert self.sender is not None
        if self.members.restarted:
            self.sender.close()
        present = self.members.present
        if present != self._sent_to:
            assert self.remake_sender is not None, "a server is lost only where a sender can be made without it"
            self.sender.close()
            self.sender, self._sent_to = self.remake_sender(present), present
        return self.sender

    def _note_taken(self, version: int) -> None:
        """A sync has ended: its version, and the processes that took it.

        A rank without sender may be here before the sender's has committed, and a stock server is named by what was
        committed: the fence gives such a rank what the sender's has read.
        """
        instances = self.sender.instances if self.sender else None
        known = None if instances is None else dict(zip(self.members.present, instances, strict=True))
        self.members.instances = self.members.read_instances() if known is None else known
        self.members.restarted.clear()
        self.policy_version, self._has_synced = version, True

    def _sampling(self, requests: Sequence[RolloutRequest], decoding: Decoding) -> SamplingRules:
        limits = [request.limit(decoding.max_new_tokens) for request in requests]
        return SamplingRules(
            max_tokens=max(limits, default=decoding.max_new_tokens),
            **decoding.values(),
            stop_token_ids=tuple(sorted(self.template.vocabulary.stop_ids)),
            stop_texts=self.template.vocabulary.stop_texts,
            banned_token_ids=self.template.banned_ids,
            logprobs=decoding.logprobs,
        )

    def _make_rollouts(
        self, requests: Sequence[RolloutRequest], replies: Sequence[Reply], decoding: Decoding
    ) -> list[Rollout]:
        limits = [request.limit(decoding.max_new_tokens) for request in requests]
        rollouts = [self._make_rollout(*three) for three in zip(requests, replies, limits, strict=True)]
        check_answers(requests, rollouts)
        return rollouts

    def _make_rollout(self, request: RolloutRequest, reply: Reply, max_new_tokens: int) -> Rollout:
        return make_rollout(
            request,
            reply.prompt_token_ids,
            reply.response_token_ids[:max_new_tokens],
            reply.logprobs,
            stop_ids=self.template.vocabulary.stop_ids,
            version=self.policy_version,
            runs=reply.policy_versions,
        )


class ServerTurns:
    """Turns of episodes by servers. An episode stays on its server while this takes part."""

    def __init__(self, backend: VllmServerBackend, num_episodes: int, decoding: Decoding) -> None:
        self._backend, self._decoding = backend, decoding
        chunks = backend.members.cut(num_episodes)
        self._servers = [chunk.server_index for chunk in chunks for _ in range(chunk.num_requests)]

    def drive(self, episodes: Collection[Future[None]]) -> None:
        """Nothing: each turn is a call in its episode's thread."""

    def write(self, place: int, request: RolloutRequest) -> Rollout:
        """As ``WriteTurn``. Errors: those of ``generate_on``, but for ``ServerLost``."""
        while True:
            try:
                return self._backend.generate_on(self._servers[place], [request], self._decoding, start=place)[0]
            except ServerLost:
                present = self._backend.members.present
                self._servers[place] = present[place % len(present)]
