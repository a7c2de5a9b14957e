"""What a server process is started with. Made by ``launch.rollout_server`` from the configuration."""

from dataclasses import dataclass, field, replace

from pydantic import TypeAdapter

from rollmatch.config.connection import is_loopback
from rollmatch.config.limits import LimitsConfig
from rollmatch.errors import LaunchError

KEY_VARIABLE = "ROLLMATCH_API_KEY"
"""Environment variable that holds the bearer key; a command line can be read by everybody."""
UNKEPT = ("scheduler_cls", "kv_transfer_config")
"""Arguments of vLLM with which responses under way cannot be kept: another scheduler than ours does not count what each
version wrote, and keys and values that come from elsewhere cannot be computed again."""


@dataclass(frozen=True, slots=True, kw_only=True)
class ServerSettings:
    """Plain values; ``to_json`` leaves out the key."""

    model: str
    """Model directory."""
    dtype: str
    stop_token: str | None = None
    """Ends a turn of the model; None: the model says."""
    max_model_len: int
    port: int
    host: str = "127.0.0.1"
    tensor_parallel_size: int = 1
    data_parallel_size: int = 1
    load_format: str = "auto"
    """``dummy``: the first sync brings the weights."""
    api_key: str | None = field(default=None, repr=False)
    allow_no_key: bool = False
    """Listen beyond loopback without a key."""
    allowed_hosts: tuple[str, ...] = ()
    """Names by which a server without a key may be called, beside loopback ones."""
    limits: LimitsConfig = field(default_factory=LimitsConfig)
    image_roots: tuple[str, ...] = ()
    """Directories below which image paths may lie."""
    allowed_media_domains: tuple[str, ...] = ()
    """Hosts from which images are fetched by URL; no other is asked."""
    drain_s: float = 5.0
    """Seconds that running requests get to finish before a commit; the rest is generated again after it."""
    gpus: tuple[str, ...] = ()
    """Devices of all replicas in order; empty on a CPU."""
    served_model_names: tuple[str, ...] = ()
    """Names of the model on the OpenAI routes, beside its directory."""
    tool_call_parser: str | None = None
    """vLLM's parser for tool calls on the OpenAI routes; None: responses call no tools."""
    reasoning_parser: str | None = None
    """vLLM's parser for reasoning on the OpenAI routes."""
    enable_lora: bool = False
    """Whether trainers of ms-swift are answered that they may send adapters alone; the server merges them."""
    engine_arguments: dict[str, object] = field(default_factory=dict)
    """Further vLLM engine arguments, by vLLM's names."""

    @property
    def world_size(self) -> int:
        """Workers that receive weights."""
        return self.tensor_parallel_size * self.data_parallel_size

    @property
    def may_keep(self) -> bool:
        """Whether a sync may keep responses that are under way."""
        return not any(self.engine_arguments.get(name) for name in UNKEPT)

    def to_json(self) -> str:
        """All but the key."""
        return TypeAdapter(ServerSettings).dump_json(self, exclude={"api_key"}).decode()


def settings_from_json(text: str, *, api_key: str | None) -> ServerSettings:
    """The settings that ``to_json`` wrote, with the key."""
    return replace(TypeAdapter(ServerSettings).validate_json(text), api_key=api_key)


def check_exposure(settings: ServerSettings) -> None:
    """Raise ``open-without-key`` where a server without a key would listen on more than loopback."""
    if is_loopback(settings.host) or settings.api_key or settings.allow_no_key:
        return
    remedy = (
        f"Set the environment variable {KEY_VARIABLE} for server and learner, or allow it: "
        "custom.extra.rollout_server.allow_no_key: true, or --allow-no-key of vllm-serve."
    )
    raise LaunchError(
        f"everybody who reaches {settings.host} could use it", code="open-without-key", key="host", remedy=remedy
    )
