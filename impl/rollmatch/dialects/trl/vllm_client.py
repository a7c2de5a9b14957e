"""A rollout server of the trl dialect for other trainers: request completions, send new weights.

Usable alone, without the rest of the ring; the names are those that TRL's and verifiers' trainers know. Every training
process may have one and generate; only one of them, the main process, opens the communicator and sends weights.

    client = VLLMClient("http://localhost:8000", group_port=51216)
    completions = client.generate(["What is 2 + 2?"], n=4, max_tokens=32)
    client.init_communicator(device="cuda:0")
    client.update_model_params(model)        # sends every weight, then empties the server's prefix cache
    client.close_communicator()
"""

import atexit
from collections.abc import Iterable, Mapping, Sequence
from urllib.parse import urlsplit

import torch
from torch import Tensor, nn

from rollmatch.config.connection import FIRST_GROUP_PORT, base_url_of
from rollmatch.dialects.http import JSON, ReplyMalformed
from rollmatch.dialects.native.group import Rendezvous, resolve
from rollmatch.dialects.reply import entries_of, field_of, ids_of
from rollmatch.dialects.session import ClientSettings, RolloutServer
from rollmatch.dialects.trl.client import ROUTE, TrlDialect
from rollmatch.dialects.trl.sender import join, send_named
from rollmatch.dialects.watch import WatchRules, watched
from rollmatch.errors import SyncError
from rollmatch.weights.named_weights import named_weights
from rollmatch.weights.nccl import device_of
from rollmatch.weights.plan import spec_of
from rollmatch.weights.stateless import StatelessGroup

_TRANSFER_TIMEOUT_S = 30.0


class CommunicatorNotOpen(SyncError):
    """Weights are sent by the process that has opened the communicator."""

    code = "communicator-not-open"


class VLLMClient:
    """One server, as one training process sees it."""

    def __init__(
        self,
        base_url: str | None = None,
        host: str = "127.0.0.1",
        server_port: int = 8000,
        group_port: int = FIRST_GROUP_PORT,
        connection_timeout: float = 60.0,
    ) -> None:
        """Wait for the server's health, ``connection_timeout`` seconds at most. Errors: ``ServerUnreachable``.

        ``base_url``, where it is given, stands for host and port.
        The timeout is for connecting and for joining the communicator; the duration of a generate call is not limited,
        a server that dies meanwhile is noticed within seconds.
        """
        settings = ClientSettings(timeout_s=connection_timeout, watch=WatchRules(silence_s=None))
        self.server = RolloutServer(base_url or base_url_of(host, server_port), settings)
        host = urlsplit(base_url).hostname or host if base_url else host
        self.server.connect()
        self.server.dialect = TrlDialect(self.server.base_url)
        self.base_url = self.server.base_url
        self.group_port, self.connection_timeout = group_port, connection_timeout
        self._rendezvous = Rendezvous(
            host=resolve(host),
            port=group_port,
            client="vllm-client",
            timeout_s=_TRANSFER_TIMEOUT_S,
            join_timeout_s=connection_timeout,
        )
        self._group: StatelessGroup | None = None

    def generate(
        self, prompts: Sequence[str] | Sequence[Sequence[int]], *, n: int = 1, max_tokens: int = 16, **sampling: object
    ) -> list[list[int]]:
        """``n`` completions of each prompt, as ids, one prompt after the other.

        ``sampling``: temperature, top_p, top_k, min_p, repetition_penalty, and what goes into ``generation_kwargs``
        (seed, stop_token_ids, ...). Errors: ``ServerRefused`` with the status, ``ServerDied``, ``ReplyMalformed``,
        ``ReplyCountMismatch``; nothing is ever taken for an empty completion.
        """
        body = make_body(prompts, n=n, max_tokens=max_tokens, sampling=sampling)

        def call() -> object:
            return self.server.http.post(self.server.path_of(ROUTE), body, timeout_s=None, content_type=JSON).body

        reply = watched(call, self.server.http, self.server.path_of("/health"), self.server.watch)
        rows = field_of(reply, "completion_ids")
        if rows is None:
            raise ReplyMalformed(f"the answer of {self.base_url} has no completion_ids", key=self.base_url)
        entries = entries_of(rows, base_url=self.base_url, num_requests=len(prompts) * n)
        return [
            list(ids_of(row, name="completion_ids", place=place, base_url=self.base_url))
            for place, row in enumerate(entries)
        ]

    def init_communicator(self, device: torch.device | str | int | None = None) -> None:
        """Join the server's workers as the last rank of their group, by NCCL from a GPU and by gloo from a CPU.

        ``device``: where the weights are; None: this process's GPU, or the CPU where there is none. Errors: the
        server's, ``CommunicatorTimeout``, also where one side has a GPU and the other has none.
        """
        self.close_communicator()
        self._group = join(self.server, self._rendezvous, _with_index(device))
        atexit.register(self.close_communicator)

    def update_named_param(self, name: str, weights: Tensor) -> None:
        """Announce one tensor, then broadcast it. Errors: ``CommunicatorNotOpen``, ``TransferFailed``, the server's."""
        if self._group is None:
            remedy = "Call init_communicator() first, in the main process only."
            raise CommunicatorNotOpen("no communicator is open", key=self.base_url, remedy=remedy)
        send_named(self.server, self._group, spec_of(name, weights), weights)

    def update_model_params(self, model: nn.Module | Mapping[str, Tensor]) -> None:
        """All weights of a model (adapters merged, shards gathered) or of a state dict; then the caches are emptied."""
        named: Iterable[tuple[str, Tensor]] = model.items() if isinstance(model, Mapping) else named_weights(model)
        with torch.no_grad():
            for name, weights in named:
                self.update_named_param(name, weights)
        self.server.empty_caches()

    def reset_prefix_cache(self) -> None:
        """Forget what was computed with older weights."""
        self.server.control("/reset_prefix_cache")

    def close_communicator(self) -> None:
        """Leave the group, if this process is in one."""
        group, self._group = self._group, None
        if group is not None:
            atexit.unregister(self.close_communicator)
            self.server.control("/close_communicator")
            group.close()


def _with_index(device: torch.device | str | int | None) -> torch.device:
    """A device with its index: NCCL wants to know which GPU "cuda" is."""
    found = device_of(()) if device is None else torch.device(device)
    if found.type == "cuda" and found.index is None:
        return torch.device("cuda", torch.cuda.current_device())
    return found


_IN_THE_BODY = ("temperature", "top_p", "top_k", "min_p", "repetition_penalty")


def make_body(
    prompts: Sequence[str] | Sequence[Sequence[int]], *, n: int, max_tokens: int, sampling: Mapping[str, object]
) -> dict[str, object]:
    """The body of a generate call; values that the dialect has no field for go into ``generation_kwargs``.

    >>> make_body(["a"], n=2, max_tokens=4, sampling={"top_p": 0.9, "seed": 7})["generation_kwargs"]
    {'seed': 7}
    """
    further = {name: value for name, value in sampling.items() if name not in _IN_THE_BODY}
    fields = {name: value for name, value in sampling.items() if name in _IN_THE_BODY}
    listed = [prompt if isinstance(prompt, str) else list(prompt) for prompt in prompts]
    return {
        "prompts": listed,
        "n": n,
        "max_tokens": max_tokens,
        "logprobs": None,
        "generation_kwargs": further,
    } | fields
