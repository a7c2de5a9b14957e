"""``swift`` as a command on a machine without GPUs: it counts a device where there is none, and meets over gloo."""

import os

from conformance.outside_tools import swift_python
from conformance.rollout.digits import ROOT

PLUGGED = ROOT / "conformance/servers/plugged"


def put_on_the_path(folder, monkeypatch) -> None:
    """For this test; a learner keeps the ``PYTHONPATH`` that it was started with, for our rewards."""
    command = folder / "bin" / "swift"
    command.parent.mkdir()
    command.write_text(
        "#!/bin/sh\nunset VLLM_ENABLE_V1_MULTIPROCESSING\n"  # vLLM's plug-ins come first in workers of their own
        f'export PYTHONPATH="{PLUGGED}${{PYTHONPATH:+:$PYTHONPATH}}" VLLM_PLUGINS=gloo_for_nccl\n'
        f'exec "{swift_python()}" "{PLUGGED}/swift_on_a_cpu.py" "$@"\n'
    )
    command.chmod(0o755)
    monkeypatch.setenv("PATH", f"{command.parent}{os.pathsep}{os.environ['PATH']}")
