"""``swift rollout`` and ``swift rlhf`` on a machine without GPUs; not one line of theirs is changed.

The server's check of its arguments counts one device where there is none. The learner reaches the server over gloo in
place of NCCL, and finds in ``torch.cpu`` what it calls of a device's module. Its template for Qwen3-VL counts pictures
by the id that Qwen's own vocabulary has for them; a small model's is read from its ``config.json``.
"""

import json
import sys
from contextlib import nullcontext
from pathlib import Path


def serve():
    """``swift rollout``."""
    from swift.arguments import deploy_args

    deploy_args.get_device_count = lambda: 1
    from swift.pipelines import rollout_main

    rollout_main()


def learn():
    """``swift rlhf``, one process; vLLM loads plugins in its own processes only."""
    import torch
    from rollmatch_cpu import stand_in_for_nccl

    stand_in_for_nccl()
    torch.cpu.device = nullcontext
    from swift.pipelines import rlhf_main
    from swift.template.templates.qwen import Qwen3VLTemplate

    model = sys.argv[sys.argv.index("--model") + 1]
    Qwen3VLTemplate.image_token_id = json.loads((Path(model) / "config.json").read_text())["image_token_id"]
    rlhf_main()


if __name__ == "__main__":
    command = {"rollout": serve, "rlhf": learn}[sys.argv.pop(1)]
    sys.exit(command())
