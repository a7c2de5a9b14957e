"""The section ``rlhf``: where the rollout server of GRPO is, by ms-swift's names."""

from typing import Annotated, Any, Literal
from urllib.parse import urlsplit

from pydantic import AfterValidator, BeforeValidator, Field
from pydantic_core import PydanticCustomError

from rollmatch.config.connection import GroupPorts, Port, as_some
from rollmatch.config.section import Positive, Section

FIRST_GROUP_PORT = 51216
"""TRL's own, too; the guides that say 22222 pass it on the command line."""


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


def _listed(item: Any) -> Any:
    """A list with at least one item, as a tuple."""
    return BeforeValidator(as_some, json_schema_input_type=Annotated[list[item], Field(min_length=1)])


Host = Annotated[str, AfterValidator(_check_host)]


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
    vllm_server_timeout: Positive = 240.0
    """Time to wait for the servers to become healthy, and for the weight-sync group to open. Unit: seconds."""
    vllm_server_group_port: GroupPorts = FIRST_GROUP_PORT
    """Port of the weight-sync group: first port (the next servers count up) or one per server. Unit: port."""
