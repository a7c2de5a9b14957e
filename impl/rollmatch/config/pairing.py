"""Which rollout server has which group port."""

from dataclasses import dataclass
from urllib.parse import urlsplit

from rollmatch.config.connection import ServerConfig


@dataclass(frozen=True, slots=True, kw_only=True)
class ServerAddress:
    """One rollout server, in the order of the configuration."""

    base_url: str
    """Without a slash at its end."""
    group_port: int

    @property
    def host(self) -> str:
        """Its machine's name or address."""
        return urlsplit(self.base_url).hostname or ""


def pair_servers(server: ServerConfig) -> tuple[ServerAddress, ...]:
    """Both forms of the section as one list; one port for a list of URLs counts on.

    >>> pair_servers(ServerConfig(base_url=("http://a:8000/", "http://b:8000"), group_port=51216))[1]
    ServerAddress(base_url='http://b:8000', group_port=51217)
    """
    if server.servers is not None:
        pairs = [(entry.base_url, entry.group_port) for entry in server.servers]
    else:
        urls = (server.base_url,) if isinstance(server.base_url, str) else server.base_url or ()
        told = server.group_port
        first = told if isinstance(told, int) else 0
        ports = told if isinstance(told, tuple) else tuple(first + place for place in range(len(urls)))
        pairs = list(zip(urls, ports, strict=True))
    return tuple(ServerAddress(base_url=url.rstrip("/"), group_port=port) for url, port in pairs)
