"""What every trial would import anyway, imported once; trials fork from here."""

import gc
import inspect
import sys
from importlib.machinery import SourceFileLoader
from types import CodeType
from typing import Any

from conformance.harness.faults.rests import FOLDERS, ROOT

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
PROCESSOR = ROOT / "fixtures/models/digits"


def preload(*, heavy: bool = True) -> None:
    """Nothing of the implementation; ``heavy`` is what takes seconds."""
    for name in (*PRELOADED, *(HEAVY if heavy else ())):
        __import__(name)
    if heavy:
        look_through_models()
        if sys.dont_write_bytecode:
            _keep_code()
    inspect.getmodule(compile("", "nowhere", "exec"))  # looks at every module that it does not know yet; pydantic asks
    gc.freeze()


def look_through_models() -> None:
    """Transformers does, and loads some, when it makes its first processor."""
    sys.modules["transformers.models.auto.processing_auto"].AutoProcessor.from_pretrained(PROCESSOR)


def _keep_code() -> None:
    """Where no file may keep what our sources compile to, memory does: a changed source is compiled all the same."""
    loader, kept = SourceFileLoader("", ""), dict[tuple[str, bytes], CodeType]()
    usual = SourceFileLoader.source_to_code
    for folder in FOLDERS:
        for path in (ROOT / folder).rglob("*.py"):
            source = path.read_bytes()
            kept[str(path), source] = loader.source_to_code(source, str(path))

    def source_to_code(self: SourceFileLoader, data: Any, path: Any, *, _optimize: int = -1) -> CodeType:
        code = kept.get((path, data)) if isinstance(data, bytes) and isinstance(path, str) else None
        return code or usual(self, data, path, _optimize=_optimize)

    SourceFileLoader.source_to_code = source_to_code  # type: ignore[method-assign]
