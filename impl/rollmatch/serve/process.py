"""``python -m rollmatch.serve.process SETTINGS``: the settings as JSON; the bearer key by the environment."""

import logging
import os
import sys
import tempfile
import traceback
from types import TracebackType

from rollmatch.errors import RollmatchError
from rollmatch.serve.shutdown import Shutdown, kill_children
from rollmatch.server.port import bind_http
from rollmatch.server.settings import KEY_VARIABLE, check_exposure, settings_from_json
from rollmatch.startup import DiscreetText, lasting, leave, loading, open_closed_streams


def run(settings_json: str) -> int:
    """Serve until a signal; the exit code, which is 128 + the signal."""
    settings = settings_from_json(settings_json, api_key=os.environ.get(KEY_VARIABLE) or None)
    directory = tempfile.TemporaryDirectory(prefix="rollmatch-", ignore_cleanup_errors=True)
    try:
        with directory as sockets, Shutdown(directory.cleanup) as shutdown:
            check_exposure(settings)
            listener = bind_http(settings.host, settings.port)  # a busy port fails before vLLM's seconds of loading
            os.environ.setdefault("VLLM_RPC_BASE_PATH", sockets)  # vLLM leaves its sockets behind
            with loading():
                from rollmatch.serve.serving import serve
            serve(settings, listener, shutdown)
    except RollmatchError as error:
        print(error, file=sys.stderr)
        return 1
    return shutdown.exit_code or 0


def end_at_once(kind: type[BaseException], error: BaseException, trace: TracebackType | None) -> None:
    """End after an error that nobody expects: vLLM's threads would keep a process that serves nobody."""
    traceback.print_exception(kind, error, trace)
    kill_children()
    os._exit(1)


if __name__ == "__main__":
    open_closed_streams()
    sys.stdout, sys.stderr = lasting(sys.stdout, kind=DiscreetText), lasting(sys.stderr, kind=DiscreetText)
    # Some of vLLM's lines come before it reads the variable itself.
    logging.getLogger("vllm").setLevel(os.environ.get("VLLM_LOGGING_LEVEL", "INFO"))
    sys.excepthook = end_at_once
    exit_code = run(sys.argv[1])
    kill_children()  # Python's exit would wait for an engine that nobody has closed
    leave(exit_code)
