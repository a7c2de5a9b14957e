"""Rollouts by vLLM servers of their own: requests in contiguous chunks, one call per server, all at the same time.

Every learner rank asks for its own rollouts; only rank 0 sends weights, through the sender it was given.
"""

from collections.abc import Iterable, Sequence
from concurrent.futures import FIRST_EXCEPTION, ThreadPoolExecutor, wait
from pathlib import Path
from typing import Any, Protocol

from rollmatch.dialects.calls import BackgroundCall
from rollmatch.dialects.http import CallTimeout, ServerRefused, TransportFailed
from rollmatch.dialects.prompt import CallLog, Prompt, Reply, SamplingRules
from rollmatch.dialects.session import HEALTH_TIMEOUT_S, RolloutServer
from rollmatch.dialects.watch import ServerDied
from rollmatch.errors import RollmatchError, RolloutError
from rollmatch.journal import Journal
from rollmatch.model.template import Template
from rollmatch.model.vocabulary import trim_stop
from rollmatch.ranks import Ranks
from rollmatch.records import Rollout, RolloutRequest
from rollmatch.rollout.backend import Decoding, RolloutBeforeSync, check_answers, kept_logprobs
from rollmatch.rollout.retry import CallRules, ServerRestarted, call_with_retries
from rollmatch.rollout.work_items import Chunk, cut_chunks

CHAT_DIALECTS = ("swift", "vllm")


class PrefixNotSpoken(RolloutError):
    """Continuations need a server that accepts prompts as token ids."""

    code = "prefix-not-spoken"


class PolicyVersionMismatch(RolloutError):
    """A rollout is written by the weights that the learner sent last."""

    code = "policy-version-mismatch"


class WeightSender(Protocol):
    """Carries weights to all servers as one version, or fails as a whole. Made in ``sync``."""

    @property
    def instances(self) -> tuple[str, ...] | None:
        """What each server that took the last sync calls itself since its start; None where a sync does not tell."""

    def send(self, weights: Iterable[tuple[str, Any]], *, version: int) -> None:
        """All weights, committed as ``version`` by every server."""

    def send_adapter(self, adapter: Any, *, version: int) -> None:
        """The same for an adapter that the servers merge themselves."""

    def close(self) -> None:
        """Leave the group."""


def check_prefixes(server: RolloutServer, requests: Sequence[RolloutRequest]) -> None:
    """Raise ``PrefixNotSpoken`` for a response to be gone on from where the server applies the chat template itself."""
    if server.dialect.name in CHAT_DIALECTS and any(request.prefix_token_ids for request in requests):
        raise PrefixNotSpoken(
            f"{server.base_url} speaks {server.dialect.name}, which takes chats and not ids",
            key=server.base_url,
            remedy="Serve with rollmatch serve, or trl vllm-serve.",
        )


class VllmServerBackend:
    """Connected rollout servers that somebody else started; ``sender`` is rank 0's, None on other ranks."""

    def __init__(
        self,
        servers: Sequence[RolloutServer],
        template: Template,
        ranks: Ranks,
        *,
        sender: WeightSender | None,
        journal: Journal | None = None,
    ) -> None:
        self.servers = tuple(servers)
        self.template = template
        self.ranks = ranks
        self.sender = sender
        self.journal = journal
        self.call_rules = CallRules()
        self._pool = ThreadPoolExecutor(len(self.servers), thread_name_prefix="rollout-server")
        self._instances: tuple[str, ...] | None = None
        self.policy_version = self._read_version()
        """The highest that a server holds from an earlier learner, until the first push."""

    def push(self, weights: Iterable[tuple[str, Any]], *, version: int) -> None:
        """Send all weights to all servers; a rank without sender only takes part in putting sharded weights together.

        Errors: those of the sender.
        """
        passing = iter(weights)
        self._instances = None
        try:
            if self.sender:
                self.sender.send(passing, version=version)
        finally:
            if getattr(weights, "is_sharded", True):
                for _ in passing:  # other ranks wait inside the same collectives, also when sending has failed
                    pass
        self.policy_version, self._instances = version, self._took_instances()

    def push_adapter(self, adapter: Any, *, version: int) -> None:
        """Send an adapter, to be merged there. One rank only."""
        self._instances = None
        try:
            if self.sender:
                self.sender.send_adapter(adapter, version=version)
        except RollmatchError:
            self.policy_version = max(self.policy_version, self._read_version())  # some server may have committed
            raise
        self.policy_version, self._instances = version, self._took_instances()

    def is_current(self) -> bool:
        """Whether the servers are those that got the weights: one that was started again has lost them."""
        try:
            return self._instances is not None and self._instances == self._read_instances()
        except (TransportFailed, CallTimeout, ServerRefused):
            return False

    def generate(self, requests: Sequence[RolloutRequest], decoding: Decoding) -> list[Rollout]:
        """As the contract. Errors also: those of ``RolloutServer.infer``, ``PolicyVersionMismatch``."""
        if self._instances is None:
            raise RolloutBeforeSync("the servers have not been given the learner's weights", key="policy_version")
        sampling = self._sampling(requests, decoding)
        chunks = cut_chunks(len(requests), len(self.servers))
        logs = [CallLog() for _ in chunks]
        pairs = zip(chunks, logs, strict=True)
        calls = [self._pool.submit(self._ask, chunk, requests, sampling, log) for chunk, log in pairs]
        ended, _ = wait(calls, return_when=FIRST_EXCEPTION)
        if any(isinstance(call.exception(), ServerRestarted) for call in ended):
            wait(calls)  # a sync comes next, which no call may be under way in
        self._write_down(chunks, logs, decoding)
        for call in calls:
            if call.done():
                call.result()  # the first failure in the order of servers; the others' answers are of no use then
        replies = [reply for call in calls for reply in call.result()]
        return self._make_rollouts(requests, replies, decoding)

    @property
    def num_servers(self) -> int:
        """At least 1."""
        return len(self.servers)

    def generate_on(
        self, server_index: int, requests: Sequence[RolloutRequest], decoding: Decoding, *, start: int
    ) -> list[Rollout]:
        """One server, one call, from any thread; ``start`` is the first request's place, for messages."""
        if self._instances is None:
            raise RolloutBeforeSync("the servers have not been given the learner's weights", key="policy_version")
        sampling = self._sampling(requests, decoding)
        log = CallLog()
        chunk = Chunk(server_index, start, start + len(requests))
        replies = self._ask_server(chunk, requests, sampling, log)
        self._write_down([chunk], [log], decoding)
        return self._make_rollouts(requests, replies, decoding)

    def rest(self) -> None:
        """Nothing to give: the servers have devices of their own."""

    def close(self) -> None:
        """Leave the group; the servers stay."""
        if self.sender:
            self.sender.close()
        self._pool.shutdown(wait=False, cancel_futures=True)

    def _write_down(self, chunks: Sequence[Chunk], logs: Sequence[CallLog], decoding: Decoding) -> None:
        """An event per server that was asked, with every retry and split of the call."""
        for chunk, log in zip(chunks, logs, strict=True):
            if self.journal is not None:
                url = self.servers[chunk.server_index].base_url
                self.journal.write("called", server=url, decoding=decoding.as_dict(), **log.as_dict())

    def _ask(
        self, chunk: Chunk, requests: Sequence[RolloutRequest], sampling: SamplingRules, log: CallLog
    ) -> list[Reply]:
        return self._ask_server(chunk, chunk.of(requests), sampling, log)

    def _ask_server(
        self, chunk: Chunk, requests: Sequence[RolloutRequest], sampling: SamplingRules, log: CallLog
    ) -> list[Reply]:
        """The chunk's ``requests``, repeated while the server is busy or gone for a while.

        Errors also: ``ServerRestarted``, ``ReplyOutOfRange``.
        """
        server = self.servers[chunk.server_index]
        check_prefixes(server, requests)
        prompts = [self._make_prompt(request) for request in requests]

        def call() -> list[Reply]:
            replies = server.infer(prompts, sampling, start=chunk.start, log=log)
            log.note_replies(replies)
            for reply in replies:
                self._check_version(server, reply)
                self.call_rules.check(reply, server.base_url, max_tokens=sampling.max_tokens)
            return replies

        def failed(error: RolloutError) -> None:
            place = error.item - chunk.start if isinstance(error, ServerRefused) and error.item is not None else -1
            if 0 <= place < len(requests):
                error.remedy = f"It is the sample {requests[place].sample.origin}. {error.remedy}".strip()
            if not isinstance(error, ServerDied):  # which would not answer, perhaps only after a long wait
                self._check_instance(chunk.server_index, error)

        def repeating(error: RolloutError) -> None:
            self._check_instance(chunk.server_index, error)  # it may be back, without its weights
            log.num_retries += 1

        budget_s = self.call_rules.retry_budget_s
        return call_with_retries(call, budget_s=budget_s, failed=failed, repeating=repeating)

    def _check_instance(self, server_index: int, error: RolloutError) -> None:
        """Raise ``ServerRestarted`` if a call failed because its server lost the weights; a silent one is not known."""
        server, known = self.servers[server_index], self._instances
        try:
            instance = server.instance()
        except (TransportFailed, CallTimeout, ServerRefused):
            return
        if known is not None and instance != known[server_index]:
            raise ServerRestarted(
                f"{server.base_url} was restarted during a call: {error.problem}",
                key=server.base_url,
                remedy="Resume the run; the first sync gives the server its weights.",
            ) from error

    def _check_version(self, server: RolloutServer, reply: Reply) -> None:
        """Only the native dialect counts as we do."""
        if server.dialect.name == "native" and reply.policy_version != self.policy_version:
            raise PolicyVersionMismatch(
                f"{server.base_url} wrote with version {reply.policy_version}, the learner sent {self.policy_version}",
                key=server.base_url,
                remedy="It was started again, or another learner writes to it; resume the run with servers of its own.",
            )

    def _make_prompt(self, request: RolloutRequest) -> Prompt:
        return Prompt(
            request_id=request.request_id,
            prompt_token_ids=request.token_ids,
            messages=tuple(self.template.messages(request.sample)),
            images=tuple(Path(path).read_bytes() for path in request.sample.images),
            seed=request.seed,
            max_tokens=request.max_new_tokens,
        )

    def _sampling(self, requests: Sequence[RolloutRequest], decoding: Decoding) -> SamplingRules:
        limits = [request.limit(decoding.max_new_tokens) for request in requests]
        return SamplingRules(
            max_tokens=max(limits, default=decoding.max_new_tokens),
            temperature=decoding.temperature,
            top_p=decoding.top_p,
            top_k=decoding.top_k,
            repetition_penalty=decoding.repetition_penalty,
            stop_token_ids=(self.template.vocabulary.stop_id,),
            stop_texts=(self.template.vocabulary.stop_token,),
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
        stop_id = self.template.vocabulary.stop_id
        response = reply.response_token_ids[:max_new_tokens]
        is_cut = len(response) < len(reply.response_token_ids) and response[-1] != stop_id
        finish_reason, trimmed = "length" if is_cut else reply.finish_reason, trim_stop(response, {stop_id})
        return Rollout(
            request_id=request.request_id,
            prompt_token_ids=reply.prompt_token_ids,
            response_token_ids=trimmed,
            finish_reason=finish_reason,
            policy_version=self.policy_version,
            response_logprobs=kept_logprobs(reply.logprobs, trimmed, finish_reason=finish_reason),
        )

    def _read_version(self) -> int:
        """The highest policy version of any server; 0 where a dialect tells none."""
        return max(int(s.health(timeout_s=HEALTH_TIMEOUT_S).get("policy_version", 0)) for s in self.servers)

    def _took_instances(self) -> tuple[str, ...]:
        """Of the servers that took a sync which has just ended."""
        told = self.sender.instances if self.sender else None
        return self._read_instances() if told is None else told

    def _read_instances(self) -> tuple[str, ...]:
        """What each server calls itself since its start; empty where a dialect has no such name."""
        return tuple(call.result() for call in [BackgroundCall(server.instance) for server in self.servers])
