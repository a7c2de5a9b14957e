"""TRL's tests of its own client, run against our client and our server instead: a plugin of pytest.

In a checkout of TRL 1.9 or 1.10, with an environment that has it and this repository on ``PYTHONPATH``:

    python -m pytest -m "" -p conformance.judge.servers.trl_client_tests tests/test_vllm_client_server.py

``VLLMClient`` is rollmatch's, ``trl vllm-serve`` starts ``rollmatch vllm-serve``, and the models are random ones, made
here: nothing is downloaded. On a machine without GPUs the conditions that ask for some are lifted.
"""

import os
import sys
import tempfile
from pathlib import Path

import pytest
import torch

FOLDER = Path(tempfile.mkdtemp(prefix="trl-client-"))
TEXT, VISION = FOLDER / "qwen3", FOLDER / "qwen3_vl"
TOOLS = "{% if tools %}<|im_start|>system\n{% for t in tools %}{{ t | tojson }}\n{% endfor %}<|im_end|>\n{% endif %}"
COMMAND = """#!/bin/sh
[ "$1" = vllm-serve ] || exit 2
shift
exec {python} -m rollmatch vllm-serve "$@"
"""


def pytest_configure() -> None:
    import trl.generation.vllm_client
    from transformers import testing_utils

    from rollmatch import VLLMClient

    trl.generation.vllm_client.VLLMClient = VLLMClient
    if not torch.cuda.is_available():
        testing_utils.backend_device_count = lambda _: 2
        torch.cpu.device_count = lambda: 3
    command = FOLDER / "trl"
    command.write_text(COMMAND.format(python=sys.executable))
    command.chmod(0o755)
    os.environ["PATH"] = f"{FOLDER}{os.pathsep}{os.environ['PATH']}"


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    from conformance.doubles.checkpoints import make_checkpoint

    for name, directory in (("qwen3", TEXT), ("qwen3_vl", VISION)):
        make_checkpoint(name, directory)
    template = TEXT / "chat_template.jinja"
    template.write_text(TOOLS + template.read_text())
    for item in items:
        kind = getattr(item, "cls", None)
        if kind is not None and hasattr(kind, "model_id"):
            kind.model_id = str(VISION if "VLM" in kind.__name__ else TEXT)
