"""``rollmatch judge --transport nccl``: updates of real servers on a GPU."""

import json
import sys

import pytest

from conformance.doubles.digits import CONFIG, MODEL
from conformance.doubles.division import VLLM, typed
from conformance.doubles.instance import free_port
from conformance.doubles.started import finish, started
from conformance.gpu.peers import ENGINE, STOCK_OPTIONS, TRL, VLLM_SERVE, server_overrides, spelled
from conformance.gpu.places import place

CHECKS = (
    "a-group-opens-again",
    "same-weights-same-responses",
    "new-weights-are-served",
    "old-weights-come-back",
    "every-tensor-is-updated",
)
TOLERANCE = "0.03"
"""vLLM and transformers differ by 0.011 here, in float32 on one H100."""
LIMITS = ENGINE | {"max-model-len": "1024", "model": str(MODEL)}
STOCK = {name: value for name, value in LIMITS.items() if name not in ("enforce-eager", "model")}
EAGER = (f"{VLLM}.enforce_eager=true", f"{VLLM}.kv_cache_memory_mib=1024")
COMMANDS = {
    "trl": lambda port: [*TRL, *spelled(LIMITS | {"port": port}, "_")],
    "vllm": lambda port: [
        *(*VLLM_SERVE, str(MODEL), *STOCK_OPTIONS, "--enforce-eager"),
        *spelled(STOCK | {"port": port}),
    ],
    "ours": lambda port: typed("serve", CONFIG, "0", (*EAGER, *server_overrides([port], [free_port()]))),
}


@pytest.mark.gpu(1)
@pytest.mark.parametrize(
    ("server", "dialects"), [("trl", ["trl"]), ("vllm", ["vllm"]), ("ours", ["swift", "trl", "native"])]
)
def test_updates_over_nccl_are_judged(tmp_path, server, dialects):
    """Our own dialect takes gloo on a GPU, too."""
    port = free_port()
    verdicts = {}
    with started(COMMANDS[server](str(port)), tmp_path / "server.txt", **place(0), VLLM_SERVER_DEV_MODE="1") as running:
        running.wait_healthy(f"http://127.0.0.1:{port}")
        for dialect in dialects:
            path = tmp_path / f"{dialect}.json"
            words = [f"http://127.0.0.1:{port}", "--dialect", dialect, "--model", str(MODEL), "--tolerance", TOLERANCE]
            words += ["--transport", "gloo" if dialect == "native" else "nccl", "--json", str(path)]
            words += [word for check in CHECKS for word in ("--check", check)]
            code, output = finish(
                [sys.executable, "-m", "conformance.judge.servers.command", *words],
                tmp_path / f"{dialect}.txt",
                **place(1),
            )
            verdicts[dialect] = {each["id"]: each["verdict"] for each in json.loads(path.read_text())["checks"]}
            assert code == 0, output[-4000:] + running.output()[-2000:]
    passed = {f"servers/{check}": "pass" for check in CHECKS}
    assert verdicts == dict.fromkeys(dialects, passed)
