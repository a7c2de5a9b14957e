"""What a server is started with. Made by ``launch.rollout_server`` from the config."""

from dataclasses import dataclass, field
from typing import Any

KEY_VARIABLE = "ROLLMATCH_API_KEY"
"""Environment variable that holds the bearer key; a command line can be read by everybody."""


@dataclass(frozen=True, slots=True, kw_only=True)
class ServerSettings:
    """Plain values; survives JSON."""

    model: str
    """Model directory."""
    dtype: str
    max_model_len: int
    host: str = "127.0.0.1"
    port: int = 8000
    tensor_parallel_size: int = 1
    data_parallel_size: int = 1
    load_format: str = "auto"
    """``dummy``: the first sync brings the weights."""
    api_key: str | None = None
    image_roots: tuple[str, ...] = ()
    """Directories below which image paths may lie."""
    drain_s: float = 5.0
    """Seconds that running requests get to finish before a commit; the rest is generated anew after it."""
    gpus: tuple[str, ...] = ()
    """Devices of all replicas in order; empty on a CPU."""
    engine_arguments: dict[str, Any] = field(default_factory=dict)
    """Further vLLM engine arguments, by vLLM's names."""

    @property
    def world_size(self) -> int:
        """Workers that receive weights."""
        return self.tensor_parallel_size * self.data_parallel_size
