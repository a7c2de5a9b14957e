"""From the configuration to connected rollout servers."""

import os
from collections.abc import Sequence
from pathlib import Path

from torch import nn
from transformers import PreTrainedModel

from rollmatch.config import RunConfig
from rollmatch.config.connection import ServerConfig
from rollmatch.config.server_rules import read_servers
from rollmatch.config.servers import ServerAddress, pair_servers, server_section
from rollmatch.dialects.calls import run_all
from rollmatch.dialects.logprobs import QUESTION, check_logprobs
from rollmatch.dialects.native.group import Rendezvous, read_identity, resolve
from rollmatch.dialects.sender import WeightSender
from rollmatch.dialects.session import ClientSettings, RolloutServer
from rollmatch.dialects.swift.sender import takes_adapters
from rollmatch.dialects.watch import WatchRules
from rollmatch.errors import ConfigError
from rollmatch.journal import Journal
from rollmatch.model.checkpoint import checkpoint_tensors
from rollmatch.model.policy import unwrap
from rollmatch.model.sharding import meta_of
from rollmatch.model.template import Template
from rollmatch.ranks import Ranks
from rollmatch.rollout.adapter_proof import check_parts, prove_adapters
from rollmatch.rollout.backend import Decoding, RolloutBackend
from rollmatch.rollout.members import ServerMembers
from rollmatch.rollout.retry import CallRules
from rollmatch.rollout.servers import VllmServerBackend
from rollmatch.rollout.weight_sender import make_sender
from rollmatch.run.joining import Admission, check_dialects, make_roster
from rollmatch.server.settings import KEY_VARIABLE
from rollmatch.weights.named_weights import named_weights
from rollmatch.weights.plan import Spec, spec_of

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

    Errors: ``ServerUnreachable``, ``dialect-unknown``, ``dialects-mixed``, ``weights-not-taken``, those of the file.
    """
    section = server_section(config)
    addresses = ranks.gather(read_servers(section))[0] if section.servers_file else pair_servers(section)
    settings = _client_settings(section)
    servers = [RolloutServer(address.base_url, settings) for address in addresses]
    run_all(server.connect for server in servers)
    _check_dialects_of(config, servers)
    places = dict(zip(servers, addresses))

    def sender_to(chosen: Sequence[RolloutServer]) -> WeightSender:
        """A common group opens at the first of these servers."""
        stage = config.custom.extra.rollout_matching.vllm.sync.stage
        rendezvous = [_rendezvous(config, places[server]) for server in chosen]
        return make_sender(chosen, rendezvous, stage=stage, keep=keeps_responses(config))

    sender = sender_to(servers) if ranks.is_primary else None
    backend = VllmServerBackend(servers, template, ranks, sender=sender, journal=journal)
    specs = None if sender is None or model is None else _specs_of(model)
    if sender is not None and specs is not None:
        _compare(sender, specs, journal)
    backend.remake_sender = lambda indices: sender_to([backend.servers[index] for index in indices])
    backend.calls.keep = keeps_responses(config)
    backend.members.min_servers = section.min_servers or len(servers)
    backend.calls.rules = CallRules(retry_budget_s=section.retry_budget_s, num_ids=_num_ids(model))
    if section.servers_file is not None:
        admission = Admission(
            config=config, settings=settings, members=backend.members, places=places, sender_to=sender_to, specs=specs
        )
        backend.members.roster = make_roster(admission, addresses, ranks, journal)
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


def _specs_of(model: nn.Module) -> list[Spec] | None:
    """The policy's tensors; None where each rank holds parts of them."""
    return None if named_weights(model).is_sharded else [spec_of(*pair) for pair in checkpoint_tensors(model)]


def _compare(sender: WeightSender, specs: Sequence[Spec], journal: Journal | None) -> None:
    """Compare the policy's tensors with those of the servers. Errors: ``TensorMismatch``."""
    is_compared = sender.check(specs)
    if journal is not None:
        journal.write("tensors", number=len(specs), are_compared_with_servers=is_compared)


def _check_dialects_of(config: RunConfig, servers: Sequence[RolloutServer]) -> None:
    if config.overlong == "truncate_left":
        _check_truncation(servers)
    if server_section(config).servers_file is not None:
        check_dialects(servers)


def _check_truncation(servers: Sequence[RolloutServer]) -> None:
    """A server that applies the chat template itself would see the whole prompt. Errors: ``prompt-not-truncated``."""
    for server in servers:
        if server.dialect.takes_chats != "never":
            problem = f"is truncate_left, but {server.base_url} speaks {server.dialect.name}: chats, not ids"
            remedy = "Set it to skip, or serve with rollmatch serve or trl vllm-serve."
            raise ConfigError(problem, code="prompt-not-truncated", key="overlong", remedy=remedy)


def _num_ids(model: nn.Module | None) -> int | None:
    """Rows of the input embeddings, padding included; None where there are none."""
    policy = None if model is None else unwrap(model)
    return len(meta_of(policy.get_input_embeddings().weight)) if isinstance(policy, PreTrainedModel) else None


def try_out_adapters(backend: RolloutBackend, model: nn.Module) -> None:
    """Show on rank 0 that servers of the swift dialect apply an adapter that is sent alone, where they take one.

    A colocated engine applies adapters of the language model only.
    Errors: ``adapter-not-applied``, those of the sender.
    """
    if not isinstance(backend, VllmServerBackend):
        check_parts(model)
    elif all(map(takes_adapters, backend.servers)):
        prove_adapters(backend, model)


def try_out(backend: RolloutBackend, decoding: Decoding) -> None:
    """Check on rank 0 that servers return the log-probabilities that ``decoding`` needs.

    Errors: ``logprobs-of-another-distribution``.
    """
    if not isinstance(backend, VllmServerBackend) or not (decoding.logprobs and decoding.is_shaped):
        return
    if backend.ranks.is_primary:
        for server in backend.servers:
            check_logprobs(server, prompt_token_ids=backend.template.vocabulary.encode(QUESTION))


def keeps_responses(config: RunConfig) -> bool:
    """Whether weights change within responses."""
    return config.custom.extra.rollout_matching.vllm.sync.in_flight == "keep"


def check_versions_known(members: ServerMembers | None, in_flight: str) -> None:
    """What a sync may do with what is under way. Errors: ``in-flight-without-versions``."""
    for server in () if members is None else members.servers:
        if server.dialect.name != "native":
            problem = f"is {in_flight}, but {server.base_url} speaks {server.dialect.name} and names no policy version"
        elif in_flight == "keep" and not read_identity(server).keep:
            problem = f"is {in_flight}, but {server.base_url} cannot name the versions within a response"
        else:
            continue
        raise ConfigError(
            problem,
            code="in-flight-without-versions",
            key="custom.extra.rollout_matching.vllm.sync.in_flight",
            remedy="Serve with rollmatch serve, or set it to wait.",
        )
