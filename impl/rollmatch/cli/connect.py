"""From the configuration to connected rollout servers."""

import os
from collections.abc import Sequence
from pathlib import Path

from torch import nn
from transformers import PreTrainedModel

from rollmatch.config import RunConfig
from rollmatch.config.connection import ServerConfig
from rollmatch.config.servers import ServerAddress, pair_servers, server_section
from rollmatch.dialects.logprobs import QUESTION, check_logprobs
from rollmatch.dialects.native.group import Rendezvous, resolve
from rollmatch.dialects.session import ClientSettings, RolloutServer, connect_all
from rollmatch.dialects.watch import WatchRules
from rollmatch.errors import ConfigError
from rollmatch.journal import Journal
from rollmatch.model.checkpoint import checkpoint_tensors
from rollmatch.model.policy import unwrap
from rollmatch.model.template import Template
from rollmatch.ranks import Ranks
from rollmatch.rollout.backend import Decoding, RolloutBackend
from rollmatch.rollout.retry import CallRules
from rollmatch.rollout.server_calls import CHAT_DIALECTS
from rollmatch.rollout.vllm_server import VllmServerBackend
from rollmatch.rollout.weight_sender import WeightSender, make_sender
from rollmatch.server.settings import KEY_VARIABLE
from rollmatch.weights.named_weights import named_weights
from rollmatch.weights.plan import spec_of

BROADCAST_TIMEOUT_S = 20.0
"""Longest single broadcast; bounds how long a server that hangs can hold the learner."""


def connect_servers(
    config: RunConfig,
    template: Template,
    *,
    ranks: Ranks,
    journal: Journal | None = None,
    model: nn.Module | None = None,
) -> VllmServerBackend:
    """The backend of ``vllm.mode: server``; every rank connects, only rank 0 will send weights.

    Errors: ``ServerUnreachable``, ``DialectUnknown``, ``DialectsMixed``, ``WeightsNotTaken``.
    """
    section = server_section(config)
    addresses = pair_servers(section)
    settings = _client_settings(section)
    servers = [RolloutServer(address.base_url, settings) for address in addresses]
    connect_all(servers)
    if config.overlong == "truncate_left":
        _check_truncation(servers)

    def sender_for(indices: Sequence[int]) -> WeightSender:
        """A common group meets at the first of these servers."""
        rendezvous = [_rendezvous(config, addresses[index]) for index in indices]
        return make_sender([servers[index] for index in indices], rendezvous)

    sender = sender_for(range(len(servers))) if ranks.is_primary else None
    backend = VllmServerBackend(servers, template, ranks, sender=sender, journal=journal)
    if sender is not None and model is not None:
        _compare(sender, model, journal)
    backend.remake_sender = sender_for
    backend.members.min_servers = section.min_servers or len(servers)
    backend.call_rules = CallRules(retry_budget_s=section.retry_budget_s, num_ids=_num_ids(model))
    return backend


def _client_settings(section: ServerConfig) -> ClientSettings:
    limit = section.infer_timeout_s
    return ClientSettings(
        timeout_s=section.timeout_s,
        infer_timeout_s=limit if limit is not None and limit > 0 else None,
        api_key=os.environ.get(KEY_VARIABLE) or None,
        watch=WatchRules(silence_s=section.health_timeout_s, stall_s=section.stall_timeout_s),
    )


def _rendezvous(config: RunConfig, address: ServerAddress) -> Rendezvous:
    section = server_section(config)
    return Rendezvous(
        host=resolve(address.group_host),
        port=address.group_port,
        client=str(Path(config.training.output_dir).resolve()),
        timeout_s=min(BROADCAST_TIMEOUT_S, section.timeout_s),
        join_timeout_s=section.timeout_s,
    )


def _compare(sender: WeightSender, model: nn.Module, journal: Journal | None) -> None:
    """Compare the policy's tensors with those of the servers. Errors: ``TensorMismatch``."""
    if named_weights(model).is_sharded:
        return
    specs = [spec_of(*pair) for pair in checkpoint_tensors(model)]
    is_compared = sender.check(specs)
    if journal is not None:
        journal.write("tensors", number=len(specs), are_compared_with_servers=is_compared)


def _check_truncation(servers: Sequence[RolloutServer]) -> None:
    """A server that applies the chat template itself would see the whole prompt. Errors: ``prompt-not-truncated``."""
    for server in servers:
        if server.dialect.name in CHAT_DIALECTS:
            problem = f"is truncate_left, but {server.base_url} speaks {server.dialect.name}: chats, not ids"
            remedy = "Set it to skip, or serve with rollmatch serve or trl vllm-serve."
            raise ConfigError(problem, code="prompt-not-truncated", key="overlong", remedy=remedy)


def _num_ids(model: nn.Module | None) -> int | None:
    """Rows of the input embeddings, padding included; None where there are none."""
    policy = None if model is None else unwrap(model)
    return len(policy.get_input_embeddings().weight) if isinstance(policy, PreTrainedModel) else None


def try_out(backend: RolloutBackend, decoding: Decoding) -> None:
    """Check on rank 0 that servers return the log-probabilities that ``decoding`` needs.

    Errors: ``LogprobsOfAnotherDistribution``.
    """
    if not isinstance(backend, VllmServerBackend) or not (decoding.logprobs and decoding.is_shaped):
        return
    if backend.ranks.is_primary:
        for server in backend.servers:
            check_logprobs(server, prompt_token_ids=backend.template.vocabulary.encode(QUESTION))
