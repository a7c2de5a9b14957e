"""What every trial would import anyway, imported once; trials fork from here."""

import gc
import sys
from pathlib import Path

PRELOADED = ("numpy", "scipy.optimize", "scipy.special", "pydantic", "hypothesis", "PIL.Image", "pycocotools.mask")
HEAVY = (
    *("torch", "torch.distributed", "torch.utils.checkpoint", "peft", "accelerate", "rich.console", "jinja2", "yaml"),
    *("transformers.trainer", "transformers.trainer_callback", "transformers.integrations.sdpa_attention"),
    *("transformers.models.auto.processing_auto", "transformers.models.qwen3_vl.modeling_qwen3_vl"),
    *("transformers.models.qwen3_vl.processing_qwen3_vl", "transformers.models.qwen3.modeling_qwen3"),
    *("transformers.generation.utils", "transformers.models.qwen2.tokenization_qwen2"),
    *("requests", "fastapi", "fastapi.testclient", "uvicorn", "prometheus_client", "msgspec", "xxhash", "anyio"),
    *("_pytest.helpconfig", "_pytest.junitxml", "_pytest.skipping", "_pytest.faulthandler", "_pytest.pastebin"),
    *("_pytest.unittest", "_pytest.warnings", "_pytest.setupplan", "_pytest.threadexception", "tomllib._parser"),
    *("PIL.PngImagePlugin", "torch.utils.serialization.config", "transformers.tokenization_mistral_common"),
)
PROCESSOR = Path(__file__).parents[3] / "fixtures/models/digits"
"""Loading one makes transformers look through all its models."""


def preload(*, heavy: bool = True) -> None:
    """Nothing of the implementation; ``heavy`` is what takes seconds."""
    for name in (*PRELOADED, *(HEAVY if heavy else ())):
        __import__(name)
    if heavy:
        sys.modules["transformers.models.auto.processing_auto"].AutoProcessor.from_pretrained(PROCESSOR)
    gc.freeze()
