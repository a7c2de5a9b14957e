"""Sections about rollout servers: addresses (our keys, ms-swift's keys) and what ``rollmatch serve`` starts."""

import ipaddress
from collections.abc import Callable
from typing import Annotated, Any, Literal
from urllib.parse import urlsplit

from pydantic import AfterValidator, BeforeValidator, Field
from pydantic_core import PydanticCustomError

from rollmatch.config.limits import LimitsConfig
from rollmatch.config.section import Count, Listed, Positive, PositiveShare, Section, Text, Weight

LAST_PORT = 65535


def _check_url(value: str) -> str:
    try:
        parts = urlsplit(value)
        fine = parts.scheme in ("http", "https") and bool(parts.hostname) and parts.port != 0
    except ValueError:  # a port that is no number, a bracket that is not closed
        fine = False
    if fine and parts.path.rstrip("/").endswith("/v1"):
        shown = value.rstrip("/").removesuffix("/v1")
        raise PydanticCustomError("base_url_of_openai", "Input should be {shown}, without /v1", {"shown": shown})
    if not fine or parts.query or parts.fragment or value != value.strip():
        raise PydanticCustomError("base_url_invalid", "Input should be a URL such as http://127.0.0.1:8000")
    return value


def _one_or_several(kind: type, many: str) -> Callable[[Any], Any]:
    """A value or a list of values, so that an error names the key and not a member of a union."""

    def check(value: Any) -> Any:
        items = value if isinstance(value, list | tuple) else [value]
        if value is None:
            return None
        if any(type(item) is not kind for item in items):
            raise PydanticCustomError("one_or_several", "Input should be {many}", {"many": many})
        return as_some(value)

    return check


def _check_urls(value: str | tuple[str, ...] | None) -> str | tuple[str, ...] | None:
    for url in (value,) if isinstance(value, str) else value or ():
        _check_url(url)
    return value


def _check_ports(value: int | tuple[int, ...] | None) -> int | tuple[int, ...] | None:
    for port in (value,) if isinstance(value, int) else value or ():
        if not 0 < port <= LAST_PORT:
            raise PydanticCustomError("out_of_range", "Input should be a port, 1 to 65535")
    return value


def as_some(value: Any) -> Any:
    """A list as a tuple. An empty one is rejected here: pydantic does not count items that are wrong themselves."""
    if value == []:
        raise PydanticCustomError("too_short", "List should have at least 1 item")
    return tuple(value) if isinstance(value, list) else value


BaseUrl = Annotated[str, AfterValidator(_check_url)]
"""An http or https URL with a host; routes are appended to it."""
Port = Annotated[int, Field(ge=1, le=LAST_PORT)]
GroupPorts = Annotated[
    int | tuple[int, ...],
    BeforeValidator(_one_or_several(int, "a port or a list of ports"), json_schema_input_type=int | list[int]),
    AfterValidator(_check_ports),
]
"""One port to count on from, or one for each server."""
BaseUrls = Annotated[
    str | tuple[str, ...],
    BeforeValidator(_one_or_several(str, "a URL or a list of URLs"), json_schema_input_type=str | list[str]),
    AfterValidator(_check_urls),
]


def base_url_of(host: str, port: int) -> str:
    """The URL of a server by its host and port; an IPv6 address gets brackets.

    >>> base_url_of("127.0.0.1", 8080), base_url_of("::1", 8080)
    ('http://127.0.0.1:8080', 'http://[::1]:8080')
    """
    return f"http://[{host}]:{port}" if ":" in host else f"http://{host}:{port}"


def _check_host(value: str) -> str:
    try:
        fine = value == value.strip() and urlsplit(base_url_of(value, 1)).hostname == value.lower()
    except ValueError:  # a colon in what is no IPv6 address
        fine = False
    if not fine:
        raise PydanticCustomError("host_invalid", "Input should be a name or an address, such as 127.0.0.1")
    return value


Host = Annotated[str, AfterValidator(_check_host)]


class ServerEntry(Section):
    """One rollout server."""

    base_url: BaseUrl
    """URL prefix of all its routes, such as http://127.0.0.1:8000."""
    group_port: Port
    """Port of the weight-sync group (torch.distributed rendezvous). Unit: port."""
    group_host: Host | None = None
    """Name or address of the server's machine at which the weight-sync group opens; null is the host of base_url. Set
    it where base_url names a proxy, or weights take another interface than HTTP."""


class ServerConfig(Section):
    """Addresses of the rollout servers: servers, or base_url with group_port, or servers_file."""

    servers: (
        Annotated[
            tuple[ServerEntry, ...],
            BeforeValidator(as_some, json_schema_input_type=Annotated[list[ServerEntry], Field(min_length=1)]),
        ]
        | None
    ) = None
    """List of servers, each a mapping of base_url and group_port."""
    servers_file: Text | None = None
    """YAML or JSON file with such a list, read again before each sync: servers join and leave the running job. Relative
    paths start at the working directory."""
    base_url: BaseUrls | None = None
    """URL prefix of the server, or a list of URLs."""
    group_port: GroupPorts | None = None
    """Port of the weight-sync group: first port (the next servers count up) or one per server. Unit: port."""
    timeout_s: Positive = 240.0
    """Time to wait for the servers to become healthy, and for the weight-sync group to open. Unit: seconds."""
    infer_timeout_s: float | None = None
    """Timeout of one generation call; null or a value up to 0 means no timeout, and a dead server is still detected
    through /health/. Unit: seconds."""
    health_timeout_s: Positive = 8.0
    """Time without an answer from /health/ after which a server that is generating counts as dead. A server that
    refuses connections counts as dead after two looks. Unit: seconds."""
    stall_timeout_s: Positive | None = 300.0
    """Time without a new token of any response of a generation call, on a healthy rollmatch serve, after which the call
    counts as lost and is repeated; null means no limit. Other servers do not report tokens: set infer_timeout_s. A
    reply that has begun must end within it, of any server. Unit: seconds."""
    retry_budget_s: Annotated[float, Field(ge=0)] = 60.0
    """How long a generation call or a sync is repeated, with increasing pauses, after its first failure (a dead or
    stalled server, a broken connection, HTTP status 429 or 503); 0 means no repetition. Unit: seconds."""
    min_servers: Count | None = None
    """Fewest servers with which the run continues. The share of a server that stays dead for retry_budget_s moves to
    the others; it is used again from the first sync at which it is healthy. null needs all servers. Unit: servers."""


FIRST_GROUP_PORT = 51216
"""TRL's default, too."""


def is_loopback(host: str) -> bool:
    """Whether a host is this machine by name or address.

    >>> [is_loopback(host) for host in ("localhost", "127.0.0.2", "::1", "10.0.0.1", "example.org")]
    [True, True, True, False, False]
    """
    try:
        return ipaddress.ip_address(host).is_loopback
    except ValueError:
        return host.lower() == "localhost"


def listens_at(host: str, address: str) -> bool:
    """Whether a server that listens at ``host`` is reached at ``address``; of a name nothing is known, so it may be.

    >>> pairs = ("0.0.0.0", "10.0.0.1"), ("::", "10.0.0.1"), ("10.0.0.2", "10.0.0.1"), ("10.0.0.1", "node1")
    >>> [listens_at(*pair) for pair in pairs]
    [True, False, False, True]
    """
    try:
        listening, called = ipaddress.ip_address(host), ipaddress.ip_address(address)
    except ValueError:
        return True
    return listening == called or (listening.is_unspecified and listening.version == called.version)


def _listed(item: Any) -> Any:
    """A list with at least one item, as a tuple."""
    return BeforeValidator(as_some, json_schema_input_type=Annotated[list[item], Field(min_length=1)])


class RlhfConfig(Section):
    """Rollout servers by ms-swift's key names (not for rollout_matching_sft). Server settings are in
    custom.extra.rollout_server."""

    rlhf_type: Literal["grpo"] = "grpo"
    """ms-swift's name of the method. custom.trainer_variant selects what runs."""
    use_vllm: bool = False
    """true generates as vllm_mode says; false as custom.extra.rollout_matching says."""
    vllm_mode: Literal["server", "colocate"] | None = None
    """server uses rollout servers that are already running; colocate runs the engine on the learner's devices."""
    vllm_server_host: Annotated[tuple[Host, ...], _listed(str)] | None = None
    """Host names or addresses, one server per host."""
    vllm_server_port: Annotated[tuple[Port, ...], _listed(Port)] | None = None
    """HTTP port of each host. Unit: port."""
    vllm_server_base_url: BaseUrls | None = None
    """URL prefix of the server, or a list of URLs, in place of hosts and ports."""
    vllm_server_timeout: Positive = 240.0
    """Time to wait for the servers to become healthy, and for the weight-sync group to open. Unit: seconds."""
    vllm_server_group_port: GroupPorts = FIRST_GROUP_PORT
    """Port of the weight-sync group: first port (the next servers count up) or one per server. Unit: port."""


class RolloutServerConfig(Section):
    """What rollmatch serve starts, by ms-swift's key names where it has them."""

    engine: Literal["rollmatch", "swift"] = "rollmatch"
    """rollmatch starts this package's server; swift starts ms-swift's swift rollout."""
    host: Text = "127.0.0.1"
    """Listen address. The port is the port of the server's base_url."""
    vllm_tensor_parallel_size: Count = 1
    """GPUs per engine. Unit: GPUs."""
    vllm_data_parallel_size: Count | None = None
    """Engines (replicas); null is GPUs / vllm_tensor_parallel_size. Unit: engines."""
    vllm_gpu_memory_utilization: PositiveShare | None = None
    """Share of a GPU's memory for the engine; null is 0.9, or 0.6 with trainer_variant: grpo. Unit: share."""
    vllm_max_model_len: Count | None = None
    """Longest request (prompt and response); null uses rollout_matching.vllm.max_model_len, with grpo
    global_max_length. Unit: tokens."""
    vllm_enable_lora: bool = False
    """Must be false: adapters are merged before or on arrival."""
    vllm_enable_prefix_caching: bool | None = None
    """Reuse the KV cache of equal prompt prefixes; null uses rollout_matching.vllm.enable_prefix_caching."""
    vllm_disable_custom_all_reduce: bool | None = None
    """Use NCCL instead of vLLM's own all-reduce between the GPUs of an engine; null uses
    rollout_matching.vllm.disable_custom_all_reduce."""
    vllm_engine_kwargs: dict[str, Any] = Field(default_factory=dict)
    """Further vLLM engine arguments, by vLLM's names."""
    served_model_names: Listed[Text] = ()
    """Names of the model on the OpenAI routes, beside model.model and its directory."""
    tool_call_parser: Text | None = None
    """vLLM's parser of tool calls on the OpenAI routes (hermes, llama3_json, ...); null: none are parsed."""
    reasoning_parser: Text | None = None
    """vLLM's parser (qwen3, deepseek_r1, ...) that separates reasoning from answers on the OpenAI routes."""
    image_roots: Listed[Text] = ()
    """Directories from which requests may name image files by path. Empty: requests must contain the image."""
    allowed_media_domains: Listed[Text] = ()
    """Hosts (vLLM's --allowed-media-domains) from which the server fetches images by http and https URL, without
    redirects. Empty: none is fetched, and a URL is refused."""
    allow_no_key: bool = False
    """Listen on an address other than loopback without a bearer key (environment variable ROLLMATCH_API_KEY)."""
    allowed_hosts: Listed[Text] = ()
    """Further host names by which a server without a key may be called; addresses and loopback names always may."""
    limits: LimitsConfig = LimitsConfig()
    """What one call and one connection may cost."""
    drain_s: Weight = 5.0
    """Time for running requests to finish before a sync; unfinished ones are generated again with the new weights.
    Unit: seconds."""
