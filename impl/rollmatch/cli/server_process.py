"""``python -m rollmatch.cli.server_process SETTINGS``: the settings as JSON; the bearer key by the environment."""

import json
import logging
import os
import sys
from dataclasses import replace
from typing import Any

from rollmatch.errors import RollmatchError
from rollmatch.server.port import bind_http
from rollmatch.server.settings import KEY_VARIABLE, ServerSettings
from rollmatch.startup import leave, loading


def run(told: str) -> int:
    """Serve until a signal; the exit code."""
    fields: dict[str, Any] = {name: _tuple(value) for name, value in json.loads(told).items()}
    settings = replace(ServerSettings(**fields), api_key=os.environ.get(KEY_VARIABLE) or None)
    try:
        listener = bind_http(settings.host, settings.port)  # a busy port is told before vLLM's seconds of loading
        with loading():
            from rollmatch.cli.serving import serve
        serve(settings, listener)
    except RollmatchError as error:
        print(error, file=sys.stderr)
        return 1
    except SystemExit as ended:  # by a signal
        return int(ended.code or 0)
    return 0


def _tuple(value: Any) -> Any:
    return tuple(value) if isinstance(value, list) else value


if __name__ == "__main__":
    # Some of vLLM's lines come before it reads the variable itself.
    logging.getLogger("vllm").setLevel(os.environ.get("VLLM_LOGGING_LEVEL", "INFO"))
    leave(run(sys.argv[1]))
