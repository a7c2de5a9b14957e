"""What a rollout server says of itself, held against what is about to be trained."""

import ipaddress
from collections.abc import Mapping, Sequence
from typing import Any
from urllib.parse import urlsplit

from rollmatch.config import RunConfig
from rollmatch.dialects.http import ServerRefused
from rollmatch.dialects.session import RolloutServer
from rollmatch.errors import LaunchError
from rollmatch.server.identity import load_model_identity


class GpusOverlap(LaunchError):
    """No GPU of a machine is used by a server and a learner both."""

    code = "gpus-overlap"


class ServedModelDiffers(LaunchError):
    """A server holds the tensors of the model that is trained."""

    code = "served-model-differs"


def check_gpus(base_url: str, health: Mapping[str, Any], gpus: Sequence[str]) -> None:
    """Raise ``GpusOverlap`` where a server on this machine, by its health, works on one of the learner's ``gpus``."""
    theirs = health.get("gpus") or ()
    shared = [gpu for gpu in gpus if gpu in theirs]
    if shared and is_loopback(base_url):
        raise GpusOverlap(
            f"{base_url} works on {', '.join(theirs)}, the learner was given {', '.join(gpus)}",
            key="--gpus",
            remedy=f"Name other GPUs than {', '.join(shared)} for one of them.",
        )


def check_model(server: RolloutServer, config: RunConfig) -> None:
    """Raise ``ServedModelDiffers`` where a server that tells its tensors has others than ``model.model``."""
    told = _identity(server)
    digest = told.get("model_digest")
    if digest is None:
        return
    model = load_model_identity(config.model.model, dtype=config.model.torch_dtype)
    if digest != model.digest:
        raise ServedModelDiffers(
            f"{server.base_url} serves {told.get('model')}, with tensors of other names, shapes or types",
            key="model.model",
            remedy="Serve and train with the same YAML.",
        )


def is_loopback(url: str) -> bool:
    """Whether a URL leads to this machine by its own address.

    >>> [is_loopback(f"http://{host}:8000") for host in ("127.0.0.1", "localhost", "[::1]", "10.0.0.7", "node1")]
    [True, True, True, False, False]
    """
    host = urlsplit(url).hostname or ""
    try:
        return ipaddress.ip_address(host).is_loopback
    except ValueError:
        return host == "localhost"


def _identity(server: RolloutServer) -> dict[str, Any]:
    """Empty where a server has no such route."""
    try:
        told = server.get("/native/identity")
    except ServerRefused as refusal:
        if refusal.status == 404:
            return {}
        raise
    return told if isinstance(told, dict) else {}
