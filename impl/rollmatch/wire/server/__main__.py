"""``python -m rollmatch.wire.server SETTINGS``: the settings as JSON; the bearer key by the environment."""

import json
import logging
import os
import sys
from dataclasses import replace
from typing import Any

from rollmatch.errors import RollmatchError
from rollmatch.wire.server.port import bind_http
from rollmatch.wire.server.settings import KEY_VARIABLE, ServerSettings

if __name__ == "__main__":
    # Some of vLLM's lines come before it reads the variable itself.
    logging.getLogger("vllm").setLevel(os.environ.get("VLLM_LOGGING_LEVEL", "INFO"))
    fields: dict[str, Any] = json.loads(sys.argv[1])
    told: dict[str, Any] = {name: tuple(value) if isinstance(value, list) else value for name, value in fields.items()}
    settings = replace(ServerSettings(**told), api_key=os.environ.get(KEY_VARIABLE) or None)
    try:
        listener = bind_http(settings.host, settings.port)  # a busy port is told before vLLM's seconds of loading
        from rollmatch.wire.server.serving import serve

        serve(settings, listener)
    except RollmatchError as error:
        sys.exit(str(error))
