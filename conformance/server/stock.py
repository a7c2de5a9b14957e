"""A stock ``vllm serve`` on this machine, with our weight transfer engine as the plug-in that an installation has."""

import json
import os
import subprocess
import sys
import time
from contextlib import contextmanager
from pathlib import Path

import requests

from conformance.processes import start
from conformance.rollout.digits import MODEL, ROOT
from conformance.server.instance import END_TIMEOUT_S, ENVIRONMENT, START_TIMEOUT_S, free_port
from rollmatch.weights.worker.plugin import NAME

PLUGGED = ROOT / "conformance/servers/plugged"
ENTRY_POINT = f"[vllm.general_plugins]\n{NAME} = rollmatch.weights.worker.plugin:register\n"


def plugin_path(directory):
    """A folder with the entry point, for an installation that is older than it."""
    about = Path(directory) / "rollmatch_plugin-0.dist-info"
    about.mkdir(exist_ok=True)
    (about / "METADATA").write_text("Metadata-Version: 2.1\nName: rollmatch-plugin\nVersion: 0\n")
    (about / "entry_points.txt").write_text(ENTRY_POINT)
    return str(directory)


@contextmanager
def stock_server(directory, *flags):
    """URL of a running one."""
    port = free_port()
    command = [sys.executable, "-m", "vllm.entrypoints.openai.api_server"]
    told = {
        "model": MODEL, "served-model-name": "digits", "host": "127.0.0.1", "port": port, "dtype": "float32",
        "max-model-len": 512, "max-num-seqs": 16, "kv-cache-memory-bytes": 128 << 20,
        "limit-mm-per-prompt": json.dumps({"image": 1, "video": 0}),
        "weight-transfer-config": json.dumps({"backend": NAME}),
    }  # fmt: skip
    command += [word for name, value in told.items() for word in (f"--{name}", str(value))]
    plugins = {"VLLM_PLUGINS": f"{NAME},fork_engines"}  # as vLLM does by itself on GPUs
    plugins["PYTHONPATH"] = os.pathsep.join([plugin_path(directory), str(PLUGGED), os.environ.get("PYTHONPATH", "")])
    environment = os.environ | ENVIRONMENT | {"VLLM_SERVER_DEV_MODE": "1"} | plugins
    log = Path(directory) / "log"
    process = start([*command, "--enforce-eager", *flags], log, environment=environment)
    try:
        _wait_ready(process, f"http://127.0.0.1:{port}", log)
        yield f"http://127.0.0.1:{port}"
    finally:
        process.terminate()
        try:
            process.wait(timeout=END_TIMEOUT_S)
        except subprocess.TimeoutExpired:
            process.kill()


def _wait_ready(process, url, log):
    deadline = time.monotonic() + START_TIMEOUT_S
    while True:
        assert process.poll() is None, log.read_text(errors="replace")[-3000:]
        assert time.monotonic() < deadline, log.read_text(errors="replace")[-3000:]
        try:
            if requests.get(f"{url}/health", timeout=5).status_code == 200:
                return
        except requests.ConnectionError:
            time.sleep(0.2)
