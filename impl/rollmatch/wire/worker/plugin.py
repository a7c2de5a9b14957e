"""What vLLM calls in each of its processes where rollmatch is installed. It must be quick, and never fail."""

NAME = "rollmatch_gloo"


def register() -> None:
    """Make ``--weight-transfer-config '{"backend": "rollmatch_gloo"}'`` known; nothing is loaded before it is used."""
    try:
        from vllm.distributed.weight_transfer.factory import WeightTransferEngineFactory
    except ImportError:  # a vLLM without weight transfer
        return
    if NAME not in WeightTransferEngineFactory._registry:
        WeightTransferEngineFactory.register_engine(NAME, "rollmatch.wire.worker.stock_engine", "GlooEngine")
