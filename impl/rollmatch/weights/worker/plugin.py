"""What vLLM calls in each of its processes where rollmatch is installed. It must be quick, and never fail."""

import os

NAME = "rollmatch_gloo"
RL_ROUTES = "VLLM_SERVER_DEV_MODE"
"""Set to 1 where a server offers the routes that update weights."""


def register() -> None:
    """Make the weight transfer backend ``rollmatch_gloo`` known, and weights loadable where it is of use."""
    try:
        from vllm.distributed.weight_transfer.factory import WeightTransferEngineFactory
    except ImportError:  # a vLLM without weight transfer
        return
    if os.environ.get(RL_ROUTES) == "1":
        from rollmatch.weights.worker.loading import keep_weights_loadable

        keep_weights_loadable()
    if NAME not in WeightTransferEngineFactory._registry:
        WeightTransferEngineFactory.register_engine(NAME, "rollmatch.weights.worker.stock_engine", "GlooEngine")
