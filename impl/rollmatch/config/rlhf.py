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
    """Where the rollout server of GRPO is; its own settings stand in custom.extra.rollout_server."""

    rlhf_type: Literal["grpo"] = "grpo"
    """As ms-swift names it; custom.trainer_variant says what is trained for."""
    use_vllm: bool = False
    """true takes rollouts as vllm_mode says, false as custom.extra.rollout_matching says."""
    vllm_mode: Literal["server", "colocate"] | None = None
    """server asks a rollout server that is already running, colocate runs the engine on the learner's own devices."""
    vllm_server_host: Annotated[tuple[Host, ...], _listed(str)] | None = None
    """Names or addresses of the servers' machines, one server on each."""
    vllm_server_port: Annotated[tuple[Port, ...], _listed(Port)] | None = None
    """HTTP ports, one for each host."""
    vllm_server_timeout: Positive = 240.0
    """Seconds to wait for the servers' health and for the group that carries weights."""
    vllm_server_group_port: GroupPorts = FIRST_GROUP_PORT
    """Port at which the group that carries weights meets: the first server's (the next ones count on), or a list."""
