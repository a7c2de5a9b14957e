"""What vLLM calls in each of its processes where rollmatch is installed. It must be quick, and never fail."""

import os

NAME = "rollmatch_gloo"
RL_ROUTES = "VLLM_SERVER_DEV_MODE"
"""Set to 1 where a server offers the routes that update weights."""


def register() -> None:
    """Make the weight transfer backend ``rollmatch_gloo`` known; where it is of use, mend what a learner needs."""
    try:
        from vllm.distributed.weight_transfer.factory import WeightTransferEngineFactory
    except ImportError:  # a vLLM without weight transfer
        return
    if os.environ.get(RL_ROUTES) == "1":
        from rollmatch.weights.worker.loading import keep_weights_loadable
        from rollmatch.weights.worker.partial_prompts import draw_for_whole_prompts

        keep_weights_loadable()
        draw_for_whole_prompts()
    if NAME not in WeightTransferEngineFactory._registry:
        WeightTransferEngineFactory.register_engine(NAME, "rollmatch.weights.worker.stock_engine", "GlooEngine")
