"""Generate calls of a learner rank: one chunk to one server, repeated, checked and written down."""

import logging
import time
from collections.abc import Callable, Sequence
from functools import cache

from rollmatch.data.image import sent_bytes
from rollmatch.dialects.http import ServerRefused, TransportFailed
from rollmatch.dialects.prompt import CallLog, Prompt, Reply, SamplingRules
from rollmatch.dialects.session import RolloutServer, ServerUnreachable
from rollmatch.dialects.watch import ServerDied
from rollmatch.errors import RollmatchError, RolloutError
from rollmatch.journal import Journal
from rollmatch.model.template import Template
from rollmatch.records import RolloutRequest, rounded
from rollmatch.rollout.members import POLL_S, ServerLost, ServerMembers
from rollmatch.rollout.retry import CallRules, Pause, ServerRestarted, call_with_retries
from rollmatch.rollout.work_items import Chunk

LOG = logging.getLogger("rollmatch.rollout")
OUT_OF_REACH = (TransportFailed, ServerUnreachable, ServerDied)
"""Failures of a call whose server may have been started again since."""


def check_spoken(server: RolloutServer, requests: Sequence[RolloutRequest], template: Template) -> None:
    """What a server that applies the chat template itself cannot be sent: what its template would write otherwise.

    Errors: ``prefix-not-spoken``, ``tools-not-spoken``, ``prompt-not-spoken``.
    """
    takes = server.dialect.takes_chats
    requests = [one for one in requests if takes == "always" or (takes == "with images" and one.sample.images)]
    problem = f"{server.base_url} speaks {server.dialect.name}, which accepts chats and not ids"
    remedy = "Serve with rollmatch serve, or trl vllm-serve."
    if any(request.prefix_token_ids for request in requests):
        raise RolloutError(problem, code="prefix-not-spoken", key=server.base_url, remedy=remedy)
    if any(request.sample.tools for request in requests):
        raise RolloutError(problem, code="tools-not-spoken", key=server.base_url, remedy=remedy)
    for request in requests:
        if not template.is_plain_chat(request.sample) or (takes == "always" and template.options.chat):
            why = f"{problem}: its chat template would write another prompt for {request.sample.origin}"
            raise RolloutError(why, code="prompt-not-spoken", key=server.base_url, remedy=remedy)


class _Pauses:
    """Time between two attempts of a call; a pause for a server that is gone ends when it is well again."""

    def __init__(self, is_well: Callable[[], bool]) -> None:
        self.is_well = is_well
        self.is_gone = False

    def monotonic(self) -> float:
        """As ``WaitClock``."""
        return time.monotonic()

    def sleep(self, seconds: float, /) -> None:
        """As ``WaitClock``."""
        deadline = time.monotonic() + seconds
        while (left_s := deadline - time.monotonic()) > 0:
            time.sleep(min(left_s, POLL_S))
            if self.is_gone and self.is_well():
                return


class ServerCalls:
    """How this rank calls its servers. Methods may run in several threads."""

    def __init__(self, members: ServerMembers, template: Template, journal: Journal | None) -> None:
        self.members, self.template, self.journal = members, template, journal
        self.rules = CallRules()
        self.keep = False
        """Whether a sync may come within a response."""
        self.newest_version = 0
        """Of the weights that were sent last, or are on their way."""

    def ask(
        self, chunk: Chunk, requests: Sequence[RolloutRequest], sampling: SamplingRules, *, log: CallLog, version: int
    ) -> list[Reply]:
        """Replies to the chunk's ``requests`` by the weights of ``version``, and of newer ones with ``keep``, in order.

        Errors also: ``ServerRestarted``, ``ServerLost``, ``reply-out-of-range``, ``response-cut-short``,
        ``policy-version-mismatch``.
        """
        server = self.members.servers[chunk.server_index]
        if self.members.has_left(chunk.server_index):  # between two turns of an episode
            problem, remedy = "has left the list of servers", "Its share moves to the others."
            raise ServerLost(problem, key=server.base_url, remedy=remedy)
        check_spoken(server, requests, self.template)
        prompts = self._make_prompts(requests)
        pauses = _Pauses(lambda: self.members.is_well(chunk.server_index))

        def call() -> list[Reply]:
            replies = server.infer(prompts, sampling, start=chunk.start, log=log)
            log.note_replies(replies)
            for prompt, reply in zip(prompts, replies, strict=True):
                _check_versions(server, reply, version, self.newest_version if self.keep else version)
                self.rules.check(reply, server.base_url, max_tokens=sampling.max_tokens)
                _check_uncut(server, reply, sampling.max_tokens if prompt.max_tokens is None else prompt.max_tokens)
            return replies

        def failed(error: RolloutError, pause: Pause | None) -> None:
            _name_sample(error, chunk, requests)
            pauses.is_gone = isinstance(error, ServerDied)
            if not pauses.is_gone:  # a dead server would not answer, perhaps only after a long wait
                self._check_instance(chunk.server_index, error)
            if pause is not None:
                self._announce(server, error, pause)

        def repeating(error: RolloutError) -> None:
            self._check_instance(chunk.server_index, error, is_back=True)  # perhaps without its weights
            log.num_retries += 1

        try:
            budget_s = self.rules.retry_budget_s
            return call_with_retries(call, budget_s=budget_s, failed=failed, repeating=repeating, clock=pauses)
        except (ServerDied, ServerUnreachable) as error:
            if self.members.leave_out(chunk.server_index):
                raise self._lost(server, error) from error
            raise

    def _check_instance(self, server_index: int, error: RolloutError, *, is_back: bool = False) -> None:
        """Raise ``ServerRestarted`` if a call failed because its server lost the weights; a silent one is not known.

        A server without a name for itself that was out of reach and ``is_back`` counts as started again.
        """
        instance, known = self.members.instance_of(server_index), (self.members.instances or {}).get(server_index)
        if instance is None or known is None:
            return
        if is_back and not instance and isinstance(error, OUT_OF_REACH):
            self.members.restarted.add(server_index)
        elif instance == known:
            return
        url = self.members.servers[server_index].base_url
        raise ServerRestarted(
            f"{url} was restarted during a call: {error.problem}",
            key=url,
            remedy="Resume the run; the first sync gives the server its weights.",
        ) from error

    def announce_sync(self, error: RollmatchError, left_s: float) -> None:
        """Say that a sync is repeated as soon as the servers are well."""
        if self.journal is not None:
            self.journal.write("retrying", purpose="sync", code=error.code, problem=error.problem, left_s=left_s)
        text = "sync failed, waiting for servers for %.0f s at most (vllm.server.retry_budget_s): %s"
        LOG.warning(text, left_s, error.problem)

    def _announce(self, server: RolloutServer, error: RolloutError, pause: Pause) -> None:
        """Say at once that a call is repeated, and for how long."""
        numbers = {"attempt": pause.attempt, "wait_s": rounded(pause.wait_s), "left_s": rounded(pause.left_s)}
        if self.journal is not None:
            self.journal.write("retrying", server=server.base_url, code=error.code, problem=error.problem, **numbers)
        LOG.warning(
            "%s: attempt %d in %.2g s, for %.0f s at most (vllm.server.retry_budget_s)",
            error.problem,
            pause.attempt,
            pause.wait_s,
            pause.left_s,
        )

    def _lost(self, server: RolloutServer, error: RolloutError) -> ServerLost:
        present = len(self.members.present)
        if self.journal is not None:
            self.journal.write("server_lost", server=server.base_url, code=error.code, num_present=present)
        LOG.warning("%s: its share moves to the %d other servers", error.problem, present)
        return ServerLost(error.problem, key=server.base_url, remedy="Restart it; a later sync readmits it.")

    def _make_prompts(self, requests: Sequence[RolloutRequest]) -> list[Prompt]:
        """Each image file is read once: the requests of a group share it. Errors: ``ImageUnreadable``."""
        read = cache(sent_bytes)
        return [
            Prompt(
                request_id=request.request_id,
                prompt_token_ids=request.token_ids,
                messages=tuple(self.template.messages(request.sample)),
                images=tuple(read(path) for path in request.sample.images),
                seed=request.seed,
                max_tokens=request.max_new_tokens,
                template_values=self.template.options.chat,
            )
            for request in requests
        ]


def _name_sample(error: RolloutError, chunk: Chunk, requests: Sequence[RolloutRequest]) -> None:
    """Say in the remedy which sample was refused, where the server named its place in the call."""
    place = error.item - chunk.start if isinstance(error, ServerRefused) and error.item is not None else -1
    if 0 <= place < len(requests):
        error.remedy = f"It is the sample {requests[place].sample.origin}. {error.remedy}".strip()


def _check_versions(server: RolloutServer, reply: Reply, oldest: int, newest: int) -> None:
    """Only the native dialect counts as we do."""
    if server.dialect.name != "native":
        return
    found = [version for version, _ in reply.policy_versions]
    wrong = next((version for version in found if not oldest <= version <= newest), None)
    if wrong is not None:
        raise RolloutError(
            f"{server.base_url} wrote with version {wrong}, the learner sent {newest}",
            code="policy-version-mismatch",
            key=server.base_url,
            remedy="It was started again, or another learner writes to it; resume the run with servers of its own.",
        )


def _check_uncut(server: RolloutServer, reply: Reply, max_tokens: int) -> None:
    """Raise ``response-cut-short`` for a response that a limit of the server ended before ``max_tokens`` were written.

    TRL's servers do not say why a response ended: there it is one without a stop token.
    """
    num, num_prompt = len(reply.response_token_ids), len(reply.prompt_token_ids)
    if reply.finish_reason != "length" or num >= max_tokens:
        return
    held = server.max_model_len()
    problem = f"{server.base_url} cut a response of {num} tokens where {max_tokens} were requested"
    longer = f"Serve with a max_model_len of at least {num_prompt + max_tokens}."
    default = (
        "Start the server without max_new_tokens in its generation config (vllm serve: --override-generation-config, "
        f"--generation-config), or set max_new_tokens of this run to {num}."
    )
    if held is None:
        problem += f"; its prompt has {num_prompt} tokens, and the server does not state how many it holds"
        remedy = f"{default} If it holds {num_prompt + num} tokens: {longer}"
    elif num_prompt + num < held:
        problem, remedy = f"{problem}; prompt and response have {num_prompt + num} of {held} tokens", default
    else:
        problem, remedy = f"{problem}; its prompt has {num_prompt} tokens, and the server holds {held}", longer
    raise RolloutError(problem, code="response-cut-short", key=server.base_url, remedy=remedy)
