"""A server that is healthy from some time on, and a configuration that names it."""

import time

from conformance.doubles.digits import load_digits
from conformance.doubles.http_server import answering


def serving(world_size=3, *, after_s=0.0, key=""):
    """A server that is healthy from some time on."""
    healthy_at = time.monotonic() + after_s

    def answer(name, _):
        reply = {"world_size": world_size} if "world" in name else {"status": "ok"}
        return (200 if time.monotonic() >= healthy_at else 503), reply

    return answering(answer, key=key)


def config_for(url, *overrides):
    vllm = "custom.extra.rollout_matching.vllm"
    return load_digits(
        f"{vllm}.mode=server", f"{vllm}.server.base_url={url}", f"{vllm}.server.group_port=51216", *overrides
    )
