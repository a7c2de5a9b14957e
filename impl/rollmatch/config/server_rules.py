"""Rules on how rollout servers are named and how weights reach them."""

from collections import Counter
from collections.abc import Iterator, Sequence
from urllib.parse import urlsplit

from rollmatch.config import effective
from rollmatch.config.connection import FIRST_GROUP_PORT, LAST_PORT, ServerConfig, is_loopback
from rollmatch.config.findings import ROLLOUT_MATCHING
from rollmatch.config.rollout_matching import VllmConfig
from rollmatch.config.schema import Rule, RunConfig
from rollmatch.config.secrets import without_secrets
from rollmatch.config.servers import (
    ServerAddress,
    is_named_in_rlhf,
    pair_servers,
    server_key,
    server_section,
    uses_servers,
)
from rollmatch.config.servers_file import SERVERS_FILE
from rollmatch.errors import ConfigError

VLLM = f"{ROLLOUT_MATCHING}.vllm"
SERVER = f"{VLLM}.server"
STAGE, TENSOR_PARALLEL = f"{VLLM}.sync.stage", "custom.extra.rollout_server.vllm_tensor_parallel_size"
ON_COMMAND_LINES = tuple(
    f"custom.extra.{name}"
    for name in ("rollout_server.vllm_engine_kwargs", "swift.rollout_options", "swift.rlhf_options")
)
LORA_ON_SERVER = "custom.extra.rollout_server.vllm_enable_lora"
_FORMS = "Name servers (a list of base_url and group_port), or base_url with group_port, or servers_file."


def _vllm(config: RunConfig) -> VllmConfig:
    return config.custom.extra.rollout_matching.vllm


def _form(config: RunConfig) -> Iterator[ConfigError]:
    server = _vllm(config).server
    has_pair = server.base_url is not None or server.group_port is not None
    num_forms = has_pair + (server.servers is not None) + (server.servers_file is not None)
    if num_forms > 1:
        problem = "holds more than one of: servers; base_url or group_port; servers_file"
        yield ConfigError(problem, code="connection-form-ambiguous", key=SERVER, remedy="Keep one of these forms.")
    if not num_forms and _vllm(config).mode == "server":
        yield ConfigError(
            "vllm.mode is server, but no server is named", code="connection-form-missing", key=SERVER, remedy=_FORMS
        )


def _pair(config: RunConfig) -> Iterator[ConfigError]:
    server = _vllm(config).server
    if server.servers is not None:
        return
    urls, ports = server.base_url, server.group_port
    if urls is None and ports is not None:
        yield ConfigError(
            "group_port is set, this key is not", code="missing-key", key=f"{SERVER}.base_url", remedy=_FORMS
        )
    if urls is not None and ports is None:
        yield ConfigError(
            "base_url is set, this key is not", code="missing-key", key=f"{SERVER}.group_port", remedy=_FORMS
        )
    if isinstance(urls, str) and isinstance(ports, tuple):
        problem = "must be one port for one base_url, but is a list"
        yield ConfigError(
            problem, code="wrong-type", key=f"{SERVER}.group_port", remedy="Write one number, or make base_url a list."
        )
    if isinstance(urls, tuple):
        yield from check_group_ports(urls, ports, key=f"{SERVER}.group_port", urls_key="base_url")


def check_group_ports(
    servers: tuple[str, ...], ports: int | tuple[int, ...] | None, *, key: str, urls_key: str
) -> Iterator[ConfigError]:
    """One port per server, or a first port with enough ports after it."""
    if isinstance(ports, tuple) and len(servers) != len(ports):
        problem = f"{urls_key} names {len(servers)} servers, this key {len(ports)} ports"
        yield ConfigError(
            problem,
            code="pairing-length-mismatch",
            key=key,
            remedy="Give each server one port, or one port to count on from.",
        )
    if isinstance(ports, int) and ports + len(servers) - 1 > LAST_PORT:
        problem = f"{ports} counted on over {len(servers)} servers passes the last port"
        yield ConfigError(problem, code="out-of-range", key=key, remedy="Choose a lower port.")


def _distinct(config: RunConfig) -> Iterator[ConfigError]:
    if not _is_elsewhere(config):
        server = _vllm(config).server
        yield from _check_distinct(server, pair_servers(server))


def _is_elsewhere(config: RunConfig) -> bool:
    """Whether the section holds no list, or one that another rule refuses."""
    return _vllm(config).server.servers_file is not None or bool([*_pair(config), *_form(config)])


def _check_enough(server: ServerConfig, addresses: Sequence[ServerAddress]) -> Iterator[ConfigError]:
    if server.min_servers is not None and server.min_servers > len(addresses):
        problem = f"is {server.min_servers}, and {len(addresses)} servers are named"
        remedy = "Lower it, or name more servers."
        yield ConfigError(problem, code="out-of-range", key=f"{SERVER}.min_servers", remedy=remedy)


def _check_distinct(server: ServerConfig, addresses: Sequence[ServerAddress]) -> Iterator[ConfigError]:
    urls = Counter(address.base_url for address in addresses)
    ports = Counter((address.group_host, address.group_port) for address in addresses)
    port_key = f"{SERVER}.{_given_key(server, 'group_port')}"
    if twice := [url for url, count in urls.items() if count > 1]:
        problem, key = f"{twice[0]} is named {urls[twice[0]]} times", f"{SERVER}.{_given_key(server, 'base_url')}"
        yield ConfigError(problem, code="server-named-twice", key=key, remedy="Name each server once.")
    elif shared := [place for place, count in ports.items() if count > 1]:
        problem = f"{ports[shared[0]]} servers of {shared[0][0]} have port {shared[0][1]}"
        remedy = "Give each server of one machine a port of its own."
        yield ConfigError(problem, code="group-port-shared", key=port_key, remedy=remedy)
    elif both := [one for one in addresses if (one.group_host, one.group_port) == _place_of(one.base_url)]:
        problem = f"is {both[0].group_port}, where {both[0].base_url} answers HTTP"
        remedy = f"Name another free port of that machine, such as {FIRST_GROUP_PORT}."
        yield ConfigError(problem, code="group-port-shared", key=port_key, remedy=remedy)


def _place_of(url: str) -> tuple[str | None, int | None]:
    parts = urlsplit(url)
    return parts.hostname, parts.port


def _one_network(config: RunConfig) -> Iterator[ConfigError]:
    """Servers of several machines join one group, at the host of the first that takes part."""
    if not _is_elsewhere(config):
        server = _vllm(config).server
        yield from check_group_hosts(pair_servers(server), key=f"{SERVER}.{_given_key(server, 'base_url')}")


def read_servers(server: ServerConfig) -> tuple[ServerAddress, ...]:
    """The servers that a section names now, its ``servers_file`` read and checked as the other forms are.

    Errors: ``servers-file-invalid``, ``out-of-range``, ``server-named-twice``, ``group-port-shared``,
    ``group-host-loopback``.
    """
    addresses = pair_servers(server)
    key = f"{SERVER}.{_given_key(server, 'base_url')}"
    of_section = (*_check_enough(server, addresses), *_check_distinct(server, addresses))
    for error in (*of_section, *check_group_hosts(addresses, key=key)):
        raise error
    return addresses


def check_group_hosts(addresses: Sequence[ServerAddress], *, key: str) -> Iterator[ConfigError]:
    """Either all group hosts are loopback, or none is."""
    near = [one for one in addresses if is_loopback(one.group_host)]
    if near and len(near) < len(addresses):
        problem = f"names {near[0].base_url}, which servers on other machines take for themselves"
        remedy = "Name it by an address that the others reach, or set group_host in servers."
        yield ConfigError(problem, code="group-host-loopback", key=key, remedy=remedy)


def _given_key(server: ServerConfig, name: str) -> str:
    """The key that the user wrote."""
    if server.servers_file is not None:
        return "servers_file"
    return name if server.servers is None else "servers"


def _elastic(config: RunConfig) -> Iterator[ConfigError]:
    """What a list that changes does not go with."""
    rules = config.custom.extra.rollout_matching
    if rules.vllm.server.servers_file is None:
        return
    if rules.vllm.carries_adapter:
        problem = f"is set, but sync.mode is {rules.vllm.sync.mode}: a server that joins needs all weights"
        yield ConfigError(problem, code="servers-file-with-adapter", key=SERVERS_FILE, remedy="Set sync.mode to full.")


def _adapter(config: RunConfig) -> Iterator[ConfigError]:
    vllm = _vllm(config)
    if vllm.sync.mode == "adapter" and not vllm.enable_lora:
        problem, remedy = "is adapter, but vllm.enable_lora is false", "Set enable_lora to true, or sync.mode to full."
        yield ConfigError(problem, code="adapter-needs-enable-lora", key=f"{VLLM}.sync.mode", remedy=remedy)


def _staging(config: RunConfig) -> Iterator[ConfigError]:
    problem = "" if uses_servers(config) else "rollouts come from no server"
    if _vllm(config).carries_adapter:
        problem = "adapters are merged into what is served"
    elif config.custom.extra.rollout_server.vllm_tensor_parallel_size > 1:
        problem = "GPUs that hold parts of a model take weights in place"
    if _vllm(config).sync.stage and problem:
        yield ConfigError(f"is true, but {problem}", code="cannot-stage", key=STAGE, remedy="Set it to false.")


def _lora(config: RunConfig) -> Iterator[ConfigError]:
    if config.custom.extra.rollout_server.vllm_enable_lora:
        remedy = "Set it to false, or leave it out: adapters reach the server merged."
        yield ConfigError("is true", code="lora-on-rollout-server", key=LORA_ON_SERVER, remedy=remedy)


_NAMES = tuple(f"{SERVER}.{name}" for name in ("servers", "base_url", "group_port", "servers_file"))


def _command_lines(config: RunConfig) -> Iterator[ConfigError]:
    """Options that become words of a command, which every user of the machine can read while it runs."""
    extra = config.custom.extra
    given = (extra.rollout_server.vllm_engine_kwargs, extra.swift.rollout_options, extra.swift.rlhf_options)
    for section, options in zip(ON_COMMAND_LINES, given, strict=True):
        hidden = without_secrets(options)
        for name in options:
            if hidden[name] != options[name]:
                problem = "is a secret, and would stand in the list of processes"
                remedy = "Remove it, and log in by `hf auth login`, or set HF_TOKEN or what else the program reads."
                yield ConfigError(problem, code="secret-on-command-line", key=f"{section}.{name}", remedy=remedy)


SERVER_RULES: tuple[Rule, ...] = (
    Rule(reads=ON_COMMAND_LINES, check=_command_lines),
    Rule(reads=(f"{VLLM}.mode", *_NAMES), check=_form),
    Rule(reads=_NAMES, check=_pair),
    Rule(reads=(f"{VLLM}.mode", *_NAMES), check=_distinct),
    Rule(reads=(f"{VLLM}.mode", *_NAMES), check=_one_network),
    Rule(reads=(SERVERS_FILE, f"{VLLM}.sync.mode", f"{VLLM}.enable_lora"), check=_elastic),
    Rule(reads=(f"{VLLM}.sync.mode", f"{VLLM}.enable_lora"), check=_adapter),
    Rule(reads=(STAGE, TENSOR_PARALLEL, f"{VLLM}.sync.mode", f"{VLLM}.enable_lora"), check=_staging),
    Rule(reads=(LORA_ON_SERVER,), check=_lora),
)


HOST, PORT, URL, GROUP_PORT = (f"rlhf.vllm_server_{name}" for name in ("host", "port", "base_url", "group_port"))
ENGINE_LENGTH = "custom.extra.rollout_server.vllm_max_model_len"


def _mode(config: RunConfig) -> Iterator[ConfigError]:
    rlhf = config.rlhf
    if rlhf.use_vllm and rlhf.vllm_mode is None:
        yield ConfigError(
            "use_vllm is true, this key is not set",
            code="missing-key",
            key="rlhf.vllm_mode",
            remedy="Set server or colocate.",
        )
    if rlhf.vllm_mode is not None and not rlhf.use_vllm:
        problem, remedy = f"is {rlhf.vllm_mode}, but use_vllm is false", "Set use_vllm to true, or remove vllm_mode."
        yield ConfigError(problem, code="vllm-mode-unused", key="rlhf.vllm_mode", remedy=remedy)


def _variant(config: RunConfig) -> Iterator[ConfigError]:
    if config.rlhf.use_vllm and not config.custom.learns_from_completions:
        remedy = f"Name servers in {ROLLOUT_MATCHING}.vllm.server, or set custom.trainer_variant to grpo."
        yield ConfigError(
            "is true, but custom.trainer_variant is not grpo", code="rlhf-not-read", key="rlhf.use_vllm", remedy=remedy
        )


def _named(config: RunConfig) -> Iterator[ConfigError]:
    pair = (HOST, config.rlhf.vllm_server_host), (PORT, config.rlhf.vllm_server_port)
    has_url = config.rlhf.vllm_server_base_url is not None
    if has_url and any(value is not None for _, value in pair):
        problem, remedy = "is set, and vllm_server_host or vllm_server_port is, too", "Keep one of the two forms."
        yield ConfigError(problem, code="connection-form-ambiguous", key=URL, remedy=remedy)
    for key, value in () if has_url else pair:
        if value is None and is_named_in_rlhf(config):
            problem = "vllm_mode is server, this key is not set"
            yield ConfigError(
                problem,
                code="missing-key",
                key=key,
                remedy="Name the server by a list of one host and one of one port.",
            )


def _pairs(config: RunConfig) -> Iterator[ConfigError]:
    hosts, ports, group_ports = (
        config.rlhf.vllm_server_host,
        config.rlhf.vllm_server_port,
        config.rlhf.vllm_server_group_port,
    )
    if isinstance(urls := config.rlhf.vllm_server_base_url, tuple):
        yield from check_group_ports(urls, group_ports, key=GROUP_PORT, urls_key="vllm_server_base_url")
        if twice := [url for url, count in Counter(url.rstrip("/") for url in urls).items() if count > 1]:
            problem, remedy = f"{twice[0]} is named more than once", "Name each server once."
            yield ConfigError(problem, code="server-named-twice", key=URL, remedy=remedy)
    if hosts is None or ports is None:
        return
    if len(hosts) != len(ports):
        problem = f"names {len(ports)} ports, vllm_server_host {len(hosts)} hosts"
        yield ConfigError(problem, code="pairing-length-mismatch", key=PORT, remedy="Give each host one port.")
    elif twice := [host for host, count in Counter(hosts).items() if count > 1]:
        remedy = "One server on a machine: let data parallel sizes use its GPUs."
        yield ConfigError(f"names {twice[0]} more than once", code="out-of-range", key=HOST, remedy=remedy)
    yield from check_group_ports(hosts, group_ports, key=GROUP_PORT, urls_key="vllm_server_host")


def _hosts(config: RunConfig) -> Iterator[ConfigError]:
    if is_named_in_rlhf(config) and not [*_named(config), *_pairs(config)]:
        yield from check_group_hosts(pair_servers(server_section(config)), key=server_key(config))


def _enough(config: RunConfig) -> Iterator[ConfigError]:
    """``min_servers`` counts the servers that the run uses, whichever section names them."""
    is_known = not ([*_named(config), *_pairs(config)] if is_named_in_rlhf(config) else _is_elsewhere(config))
    if is_known:
        section = server_section(config)
        yield from _check_enough(section, pair_servers(section))


def _one_place(config: RunConfig) -> Iterator[ConfigError]:
    if not config.rlhf.use_vllm:
        return
    rules = config.custom.extra.rollout_matching
    server = rules.vllm.server
    named = server.servers or server.base_url or server.group_port or server.servers_file
    other = {
        f"{ROLLOUT_MATCHING}.rollout_backend": rules.rollout_backend == "hf",
        f"{ROLLOUT_MATCHING}.vllm.mode": rules.vllm.mode == "server" and config.rlhf.vllm_mode == "colocate",
        f"{ROLLOUT_MATCHING}.vllm.server": is_named_in_rlhf(config) and named is not None,
    }
    for key, contradicts in other.items():
        if contradicts:
            problem = f"rlhf.use_vllm is true with vllm_mode {config.rlhf.vllm_mode}, and this key contradicts it"
            yield ConfigError(problem, code="connection-form-ambiguous", key=key, remedy="Remove one of the two.")


def _engine_length(config: RunConfig) -> Iterator[ConfigError]:
    value, is_grpo = config.custom.extra.rollout_server.vllm_max_model_len, config.custom.trainer_variant == "grpo"
    longest = config.global_max_length if is_grpo else effective.max_model_len(config)
    name = "global_max_length" if longest == config.global_max_length else "rollout_matching.vllm.max_model_len"
    if value is not None and value < longest:
        problem = f"must be at least {name} {longest}, but is {value}"
        remedy = f"Raise it, leave it out, or lower {name}."
        yield ConfigError(problem, code="engine-shorter-than-segment", key=ENGINE_LENGTH, remedy=remedy)


def _merged(config: RunConfig) -> Iterator[ConfigError]:
    vllm = config.custom.extra.rollout_matching.vllm
    if is_named_in_rlhf(config) and vllm.carries_adapter:
        problem = f"{vllm.sync.mode} means adapter here, and GRPO sends merged weights"
        yield ConfigError(
            problem, code="adapter-sync-in-grpo", key=f"{ROLLOUT_MATCHING}.vllm.sync.mode", remedy="Set it to full."
        )


_MODE, _SERVER = ("rlhf.use_vllm", "rlhf.vllm_mode"), f"{ROLLOUT_MATCHING}.vllm"
_PLACES = (f"{ROLLOUT_MATCHING}.rollout_backend", f"{_SERVER}.mode", f"{_SERVER}.server")
RLHF_RULES: tuple[Rule, ...] = (
    Rule(reads=_MODE, check=_mode),
    Rule(reads=("rlhf.use_vllm", "custom.trainer_variant"), check=_variant),
    Rule(reads=(*_MODE, HOST, PORT, URL), check=_named),
    Rule(reads=(HOST, PORT, URL, GROUP_PORT), check=_pairs),
    Rule(reads=(*_MODE, HOST, PORT, URL, GROUP_PORT), check=_hosts),
    Rule(reads=(*_MODE, HOST, PORT, URL, GROUP_PORT, *_NAMES, f"{SERVER}.min_servers"), check=_enough),
    Rule(reads=(*_MODE, *_PLACES), check=_one_place),
    Rule(
        reads=("custom.trainer_variant", "global_max_length", f"{_SERVER}.max_model_len", ENGINE_LENGTH),
        check=_engine_length,
    ),
    Rule(reads=(*_MODE, f"{_SERVER}.sync.mode", f"{_SERVER}.enable_lora"), check=_merged),
)
