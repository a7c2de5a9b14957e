"""``python -m rollmatch.wire.server SETTINGS``: the settings as JSON; the bearer key by the environment."""

import json
import logging
import os
import sys
from dataclasses import replace
from typing import Any

from rollmatch.errors import RollmatchError
from rollmatch.wire.server.settings import KEY_VARIABLE, ServerSettings

if __name__ == "__main__":
    # Some of vLLM's lines come before it reads the variable itself.
    logging.getLogger("vllm").setLevel(os.environ.get("VLLM_LOGGING_LEVEL", "INFO"))
    from rollmatch.wire.server.serving import serve

    fields: dict[str, Any] = json.loads(sys.argv[1])
    told: dict[str, Any] = {name: tuple(value) if isinstance(value, list) else value for name, value in fields.items()}
    try:
        serve(replace(ServerSettings(**told), api_key=os.environ.get(KEY_VARIABLE) or None))
    except RollmatchError as error:
        sys.exit(str(error))
