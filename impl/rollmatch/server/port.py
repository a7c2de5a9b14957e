"""The configured port of a server; no other is tried."""

import socket

from rollmatch.errors import LaunchError


def bind_http(host: str, port: int) -> socket.socket:
    """The server's socket, bound but not yet listening: callers are refused until the engines are up.

    Errors: ``port-in-use``.
    """
    listener = socket.socket(socket.AF_INET6 if ":" in host else socket.AF_INET, socket.SOCK_STREAM)
    listener.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
    try:
        listener.bind((host, port))
    except OSError as error:
        listener.close()
        raise LaunchError(
            f"cannot listen at {host}:{port}: {error.strerror or error}",
            code="port-in-use",
            key=f"port {port}",
            remedy="Stop what listens there, or configure another port.",
        ) from error
    return listener
