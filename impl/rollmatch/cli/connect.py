"""From the configuration to connected rollout servers."""

import os
from pathlib import Path

from torch import nn
from transformers import PreTrainedModel

from rollmatch.config import RunConfig
from rollmatch.config.servers import pair_servers, server_section
from rollmatch.dialects.logprobs import QUESTION, check_logprobs
from rollmatch.dialects.native.group import Rendezvous, resolve
from rollmatch.dialects.session import ClientSettings, RolloutServer, connect_all
from rollmatch.dialects.watch import WatchRules
from rollmatch.journal import Journal
from rollmatch.model.policy import unwrap
from rollmatch.model.template import Template
from rollmatch.ranks import Ranks
from rollmatch.rollout.backend import Decoding, RolloutBackend
from rollmatch.rollout.retry import CallRules
from rollmatch.rollout.vllm_server import VllmServerBackend
from rollmatch.rollout.weight_sender import make_sender
from rollmatch.server.settings import KEY_VARIABLE

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
    limit = section.infer_timeout_s
    settings = ClientSettings(
        timeout_s=section.timeout_s,
        infer_timeout_s=limit if limit is not None and limit > 0 else None,
        api_key=os.environ.get(KEY_VARIABLE) or None,
        watch=WatchRules(silence_s=section.health_timeout_s),
    )
    servers = [RolloutServer(address.base_url, settings) for address in addresses]
    connect_all(servers)
    rendezvous = Rendezvous(
        host=resolve(addresses[0].host),
        port=addresses[0].group_port,
        client=str(Path(config.training.output_dir).resolve()),
        timeout_s=min(BROADCAST_TIMEOUT_S, section.timeout_s),
        join_timeout_s=section.timeout_s,
    )
    ports = [address.group_port for address in addresses]
    sender = make_sender(servers, ports, rendezvous) if ranks.is_primary else None
    backend = VllmServerBackend(servers, template, ranks, sender=sender, journal=journal)
    backend.call_rules = CallRules(retry_budget_s=section.retry_budget_s, num_ids=_num_ids(model))
    return backend


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
